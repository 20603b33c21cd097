import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from leadline.doctor import watch as module
from leadline.doctor.follow import GrowingInput
from leadline.doctor.watch import FIRST_ROWS, LAST_ROWS, Watch, watch

HEALTHY = {
    "loss": 1e-3,
    "reward/mean": 0.5,
    "reward/group_std": 0.3,
    "rollout/zero_signal_fraction": 0.1,
    "rollout/truncated_fraction": 0.02,
    "optimizer/grad_norm": 0.4,
    "optimizer/learning_rate": 1e-6,
    "importance/ratio_mean": 1.0,
    "policy/entropy": 0.8,
    "kl/k3": 1e-3,
    "ledger/sampled_mass": 0.8,
    "ledger/reached_share": 0.95,
}
DEAD = {
    **HEALTHY,
    "loss": 0.0,
    "optimizer/grad_norm": 0.0,
    "ledger/importance_masked_share": 1.0,
    "ledger/reached_share": 0.0,
}


def write(path: Path, steps: range, row: Mapping[str, float], mode: str = "a") -> None:
    with path.open(mode) as file:
        for step in steps:
            file.write(json.dumps({"step": step, **row}) + "\n")


def errors(changes: list[module.Change]) -> list[str]:
    return [f"{change.kind} {change.finding.severity}" for change in changes if change.finding.severity == "error"]


def test_it_speaks_when_a_fault_appears_and_not_again(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    write(log, range(1, 31), HEALTHY)
    watched = Watch(tmp_path)
    assert watched.look() == []
    assert watched.look() == []
    write(log, range(31, 41), DEAD)
    assert "appeared error" in errors(watched.look())
    assert watched.look() == []
    write(log, range(41, 51), DEAD)
    assert errors(watched.look()) == []


def test_a_fault_is_over_when_it_has_not_held_for_a_while(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    write(log, range(1, 11), DEAD)
    watched = Watch(log)
    assert errors(watched.look())
    write(log, range(1, 2000), HEALTHY, "w")  # started anew: the old rows are gone
    assert any(change.kind == "over" for change in watched.look())


def test_rows_kept_do_not_grow_with_the_log(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    watched = Watch(log)
    for start in range(1, 4001, 1000):
        write(log, range(start, start + 1000), HEALTHY)
        watched.look()
    assert watched.run
    steps = watched.run.table.steps.tolist()
    assert len(steps) == FIRST_ROWS + LAST_ROWS
    assert steps[:2] == [1, 2]
    assert steps[-1] == 4000


def test_a_resumed_run_replaces_the_steps_that_it_counts_again(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    write(log, range(1, 21), HEALTHY)
    watched = Watch(log)
    watched.look()
    write(log, range(16, 26), HEALTHY)
    watched.look()
    assert watched.run
    assert watched.run.table.steps.tolist() == list(range(1, 26))


def test_a_key_that_comes_later_is_missing_before(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    write(log, range(1, 6), HEALTHY)
    watched = Watch(log)
    watched.look()
    write(log, range(6, 11), {**HEALTHY, "eval/reward_mean": 0.5})
    watched.look()
    assert watched.run
    assert [step for step, _ in watched.run.series("eval/reward_mean")] == [6, 7, 8, 9, 10]


def test_a_document_that_is_written_again_is_read_again(tmp_path: Path) -> None:
    state = tmp_path / "trainer_state.json"
    state.write_text('{"log_history": [{"step": 1, "loss": 0.1, "reward": 0.5, "grad_norm": 0.3}], "global_st')
    watched = Watch(tmp_path)
    watched.look()  # half-written: whatever it makes of it, it does not break
    rows = [{"step": step, "loss": 0.1, "reward": 0.5, "reward_std": 0.3, "grad_norm": 0.3} for step in range(1, 8)]
    state.write_text(json.dumps({"global_step": 7, "log_history": rows}, indent=2))
    watched.look()
    assert watched.run
    assert (watched.run.framework, watched.run.table.steps[-1]) == ("trl", 7)


def test_of_a_directory_the_log_with_the_most_quantities_is_followed(tmp_path: Path) -> None:
    write(tmp_path / "events.jsonl", range(1, 50), {"loss": 1.0})
    write(tmp_path / "metrics.jsonl", range(1, 6), HEALTHY)
    (tmp_path / "notes.txt").write_text("nothing to see\n")
    watched = Watch(tmp_path)
    watched.look()
    assert watched.run
    assert watched.run.table.steps[-1] == 5


def test_the_command_gets_the_report_once_and_its_failure_is_said(tmp_path: Path) -> None:
    log, got = tmp_path / "metrics.jsonl", tmp_path / "got.json"
    write(log, range(1, 31), HEALTHY)
    looks = iter([lambda: write(log, range(31, 41), DEAD), lambda: None])

    def wait(seconds: float) -> None:
        step = next(looks, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    paper = io.StringIO()
    watch(log, on_fault=f"cat >> {got}; exit 3", console=Console(file=paper, width=100), wait=wait)
    report = json.loads(got.read_text())
    assert report["verdict"] == "fault"
    said = paper.getvalue()
    assert said.startswith("Following leadline, at step 30. Nothing wrong so far.\n")
    assert "step 40: ✗" in said
    assert said.count("ended with exit code 3") == 1


def test_a_pipe_is_followed_to_its_end() -> None:
    out, into = os.pipe()
    os.write(into, "".join(json.dumps({"step": step, **DEAD}) + "\n" for step in range(1, 6)).encode())
    os.close(into)
    seen = watch(GrowingInput(out), console=Console(file=io.StringIO()))
    assert seen.report
    assert seen.report.verdict == "fault"
    os.close(out)


def test_nothing_is_said_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    watched = Watch(tmp_path / "later.jsonl")
    assert watched.look() == []
    write(tmp_path / "later.jsonl", range(1, 11), DEAD)
    assert errors(watched.look())
