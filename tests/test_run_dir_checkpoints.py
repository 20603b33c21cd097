"""Checkpoints stay whole, whatever the disk does and whenever the process is killed."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from leadline.run_dir import RunDir, read_metrics
from tests.run_dirs import config, names, write_weights


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config())


def test_the_last_checkpoints_stay(run: RunDir) -> None:
    assert run.latest_checkpoint() is None
    for step in (9, 10, 1_000_000):
        run.save_checkpoint(step, write_weights)
    assert names(run.checkpoints) == ["step_000010", "step_1000000"]
    assert run.latest_checkpoint() == (1_000_000, run.checkpoints / "step_1000000")


def test_a_checkpoint_of_the_same_step_is_not_written_twice(run: RunDir) -> None:
    run.save_checkpoint(1, write_weights)

    def unwanted(folder: Path) -> None:
        raise AssertionError

    run.save_checkpoint(1, unwanted)


def test_any_other_failure_of_the_callback_passes_through_and_leaves_no_trace(run: RunDir) -> None:
    def broken(folder: Path) -> None:
        write_weights(folder)
        raise TypeError("a bug")

    with pytest.raises(TypeError, match="a bug"):
        run.save_checkpoint(1, broken)
    assert names(run.checkpoints) == []


REFUSED_BY_THE_DISK = """
import resource, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from leadline.errors import RunDirError
from leadline.run_dir import RunDir
from tests.test_run_dir import group, write_weights

run = RunDir.open(Path(sys.argv[1]))
run.save_checkpoint(20, write_weights)
run.write_metrics({"step": 20})
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
weights = {"w": torch.zeros(5000)}

def write_text(folder):
    (folder / "a").write_bytes(bytes(9999))

def write_safetensors(folder):
    save_file(weights, folder / "model.safetensors")

def write_torch(folder):
    torch.save(weights, folder / "optimizer.pt")

refused = 0
for act in (
    lambda: run.save_checkpoint(40, write_text),
    lambda: run.save_checkpoint(40, write_safetensors),
    lambda: run.save_checkpoint(40, write_torch),
    lambda: run.write_blackbox(40, weights, {}),
    lambda: run.write_rollouts(40, [group()] * 500, [float(i) for i in range(1000)], ["reached"] * 1000),
    lambda: run.write_metrics({"step": 40, "x" * 3000: 1.0}),
):
    try:
        act()
    except RunDirError as error:
        assert "cannot be written" in str(error) and "last whole checkpoint is step 20" in str(error), error
        refused += 1
print(refused)
"""


def test_a_disk_that_refuses_leaves_what_was_whole(run: RunDir) -> None:
    """A file size limit makes the operating system refuse, in the ways in which each library reports it."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED_BY_THE_DISK, str(run.path)],
        capture_output=True, text=True, cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert done.stdout.strip() == "6", done.stderr
    assert names(run.checkpoints) == ["step_000020"]
    assert names(run.blackbox) == names(run.rollouts) == []
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [20]
    again = RunDir.resume(run.path)
    again.write_metrics({"step": 21})
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [20, 21]


SAVES_FOR_EVER = """
import sys
from pathlib import Path
from leadline.run_dir import RunDir

run = RunDir.resume(Path(sys.argv[1]))
latest = run.latest_checkpoint()
step = latest[0] if latest else 0
print("ready", flush=True)

def write(folder):
    for name in ("model", "optimizer", "position"):
        (folder / name).write_text(str(step) * 20000)

while True:
    step += 1
    run.write_metrics({"step": step})
    run.save_checkpoint(step, write)
"""


def test_a_kill_at_any_instant_leaves_the_last_checkpoint_whole(run: RunDir) -> None:
    before = 0
    for round in range(6):
        process = subprocess.Popen([sys.executable, "-c", SAVES_FOR_EVER, str(run.path)], stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        time.sleep(0.05 + 0.017 * round)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()

        resumed = RunDir.resume(run.path)
        latest = resumed.latest_checkpoint()
        assert latest and latest[0] >= before
        step, folder = latest
        assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
            ("model", "optimizer", "position"), str(step) * 20000
        )
        assert [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")] == []
        assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == list(range(1, step + 1))
        before = step
    assert before > 6, "the loop was killed before it did anything"
