"""Containers: packed, binary, half-written, in directories."""

import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import polars
import pytest
from safetensors.numpy import save_file

from leadline.doctor.readers import read_runs
from leadline.doctor.run_log import RunLog
from leadline.doctor.table import State
from leadline.errors import LogError

ROWS = [
    {"step": step, "loss": 0.1 * step, "grad_norm": 0.5, "learning_rate": 1e-6, "reward": 0.25 * step, "kl": 0.01}
    for step in (1, 2, 3)
]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def one(path: Path) -> RunLog:
    (run,) = read_runs([path])
    return run


def rewards(run: RunLog) -> list[tuple[int, float]]:
    return [(step, round(value, 6)) for step, value in run.series("reward/mean")]


REWARDS = [(1, 0.25), (2, 0.5), (3, 0.75)]


@pytest.mark.parametrize("form", ["jsonl", "json", "state", "columns", "csv", "tsv", "python", "utf16"])
def test_one_log_is_the_same_in_every_form_and_packed(form: str, tmp_path: Path) -> None:
    names = list(ROWS[0])
    text = {
        "jsonl": JSONL,
        "json": json.dumps(ROWS, indent=1),
        "state": json.dumps({"log_history": ROWS, "global_step": 3}),
        "columns": json.dumps({name: [row[name] for row in ROWS] for name in names}),
        "csv": "\n".join([",".join(names), *(",".join(str(row[name]) for name in names) for row in ROWS)]),
        "tsv": "\n".join(["\t".join(names), *("\t".join(str(row[name]) for name in names) for row in ROWS)]),
        "python": "\n".join(repr(row) for row in ROWS),
        "utf16": "\n".join(repr(row) for row in ROWS),
    }[form]
    data = text.encode("utf-16" if form == "utf16" else "utf-8")
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    assert rewards(one(plain)) == REWARDS
    assert one(plain).framework == "trl"
    if form != "utf16":
        assert rewards(one(packed)) == REWARDS


def test_parquet_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    polars.DataFrame(ROWS).write_parquet(path)
    assert rewards(one(path)) == REWARDS


def test_completions_of_trl_give_what_no_metric_says(tmp_path: Path) -> None:
    path = tmp_path / "completions_00007.parquet"
    frame = polars.DataFrame(
        {
            "step": [7] * 4,
            "prompt": ["a", "a", "b", "b"],
            "completion": ["x", "y", "!!!!", "!!!!"],
            "accuracy": [1.0, 0.0, None, None],
            "advantage": [0.7, -0.7, 0.0, 0.0],
        }
    )
    frame.write_parquet(path)
    run = one(path)
    assert run.framework == "trl"
    assert run.series("rollout/zero_signal_fraction") == [(7, 0.5)]
    assert run.series("reward/accuracy/none_fraction") == [(7, 0.5)]
    assert [sample["completion"] for sample in run.samples] == ["x", "y", "!!!!", "!!!!"]


def event(step: int, tag: str, value: float) -> bytes:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    scalar = field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)
    data = b"\x09" + struct.pack("<d", 1.7e9) + b"\x10" + bytes([step]) + field(5, field(1, scalar))
    return struct.pack("<Q", len(data)) + b"\0" * 4 + data + b"\0" * 4


def test_tensorboard_events_are_read_without_tensorboard_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "anything"
    events = [event(s, f"train/{t}", s / 4) for s in (1, 2, 3) for t in ("reward", "kl", "grad_norm")]
    path.write_bytes(b"".join(events)[:-5])
    run = one(path)
    assert rewards(run) == REWARDS
    assert run.series("optimizer/grad_norm") == [(1, 0.25), (2, 0.5)]
    assert run.notes == ("The last event is half-written and was left out.",)


def test_tensorboards_own_writer_is_understood(tmp_path: Path) -> None:
    writer_module = pytest.importorskip("torch.utils.tensorboard")
    writer = writer_module.SummaryWriter(str(tmp_path))
    for row in ROWS:
        writer.add_scalar("train/reward", row["reward"], row["step"])
        writer.add_scalar("train/kl", float("nan"), row["step"], new_style=True)
    writer.close()
    run = one(tmp_path)
    assert rewards(run) == REWARDS
    assert run.state("kl/k3") is State.NON_FINITE


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def message(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def test_a_wandb_run_file_is_read_without_wandb(tmp_path: Path) -> None:
    def item(key: str, value: Any) -> bytes:
        return message(1, message(1, key.encode()) + message(16, json.dumps(value).encode()))

    def framed(data: bytes) -> bytes:
        return b"\0" * 4 + struct.pack("<H", len(data)) + b"\x01" + data

    config = framed(message(5, item("beta", {"value": 0.04})))
    history = [framed(message(2, b"".join(item(f"train/{k}", v) for k, v in row.items()))) for row in ROWS]
    path = tmp_path / "run-abc.wandb"
    path.write_bytes(b":W&B\xbe\xe1\x00" + config + b"".join(history))
    run = one(path)
    assert [value for _, value in rewards(run)] == [value for _, value in REWARDS]
    assert run.setting("objective.beta") == 0.04


def test_a_directory_is_one_run_with_its_settings(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(JSONL)
    (tmp_path / "config.json").write_text('{"framework": "open-r1 (trl)", "beta": 0.04, "num_generations": 8}')
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "trainer_state.json").write_text(json.dumps({"log_history": ROWS}))
    run = one(tmp_path)
    assert rewards(run) == REWARDS and run.notes == ()
    assert (run.setting("objective.beta"), run.setting("rollout.group_size")) == (0.04, 8)


def test_directories_of_runs_are_several_runs(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(JSONL)
    (tmp_path / "config.yaml").write_text("beta: 0.5\nnum_generations: 4\n")
    runs = read_runs([tmp_path])
    assert [Path(run.source).name for run in runs] == ["first", "second"]
    assert [run.setting("objective.beta") for run in runs] == [0.5, 0.5]


def test_mlflows_directories_are_read(tmp_path: Path) -> None:
    run_dir = tmp_path / "0" / "abc"
    (run_dir / "metrics" / "train").mkdir(parents=True)
    (run_dir / "params").mkdir()
    (run_dir / "meta.yaml").write_text("run_id: abc\n")
    for name in ("reward", "loss", "kl"):
        lines = "".join(f"1700000000000 {row[name]} {row['step']}\n" for row in ROWS)
        (run_dir / "metrics" / "train" / name).write_text(lines)
    (run_dir / "params" / "num_generations").write_text("8")
    run = one(tmp_path)
    assert rewards(run) == REWARDS
    assert run.setting("raw.num_generations") == 8


def test_a_half_written_state_gives_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 3, "log_history": ROWS}, indent=1)[:-120])
    run = one(path)
    assert rewards(run)[:2] == REWARDS[:2]
    assert "ends in the middle" in run.notes[0]


def test_standard_input_is_read_like_a_file() -> None:
    (run,) = read_runs([io.StringIO(JSONL)])
    assert rewards(run) == REWARDS


@pytest.mark.parametrize("data", [b"", b"hello world\n", b"\0\1\2" * 50, b"{}", b"[]"])
def test_what_holds_no_run_is_an_error_in_words(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(LogError, match="PATH is"):
        read_runs([path])


def test_a_path_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be read"):
        read_runs([tmp_path / "nothing"])


def test_a_framework_can_be_forced_and_must_exist(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text('{"step": 1, "loss/mean": 0.5, "reward/mean": 0.1}\n')
    (run,) = read_runs([path], framework="prime-rl")
    assert run.framework == "prime_rl"
    with pytest.raises(LogError, match="no framework of that name"):
        read_runs([path], framework="cobol")


def test_a_black_box_of_leadline_is_read_without_torch(tmp_path: Path) -> None:
    tensors = {
        "rollout_logprobs": np.array([-1.0, -2.0, -0.5, -9.0], np.float32),
        "seen_tokens": np.array([0, 1, 2], np.int64),
        "seen_old_logprobs": np.array([-1.1, -1.9, -0.5], np.float32),
        "completion_of_token": np.array([0, 0, 1, 1], np.int64),
        "rewards": np.array([1.0, np.nan], np.float32),
    }
    (tmp_path / "blackbox").mkdir()
    save_file(tensors, tmp_path / "blackbox" / "step_000012.safetensors")
    save_file({"weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    run = one(tmp_path)
    assert run.framework == "leadline"
    assert run.series("importance/log_ratio_abs_mean") == [(12, pytest.approx(0.2 / 3, abs=1e-6))]
    assert run.series("importance/tokens") == [(12, 3.0)]
    assert run.series("reward/mean") == [(12, 1.0)]


def test_a_long_state_is_read_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "trainer_state.json"
    rows = [{**ROWS[0], "step": step, "note": "x" * 300} for step in range(1, 45_001)]
    path.write_text(json.dumps({"best_metric": None, "log_history": rows, "max_steps": 5}))
    run = one(path)
    assert len(run.rows) == 45_000 and run.framework == "trl"


@pytest.mark.parametrize(
    "name", ["preflight.json", "profile.json", "environment.json", "findings.jsonl", "stalls.jsonl"]
)
def test_what_a_run_of_ours_says_of_itself_is_neither_a_setting_nor_a_row(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"optimizer": {"learning_rate": 1e-6}}))
    (tmp_path / "metrics.jsonl").write_text(JSONL)
    before = one(tmp_path)
    (tmp_path / name).write_text(json.dumps({"checks": [{"check": "reasoning", "note": "<think>"}]}))
    assert one(tmp_path).config == before.config
    assert rewards(one(tmp_path)) == rewards(before)
