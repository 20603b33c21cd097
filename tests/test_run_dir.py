import json
import math
import subprocess
import sys
import time
from pathlib import Path

import polars
import pytest
import torch
from safetensors.torch import load_file

from leadline.errors import RunDirError
from leadline.run_dir import MAX_KEPT, RunDir, read_findings, read_metrics
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.run_dirs import config, finding, names, write_weights


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", config())


# --- opening


def test_a_new_run_says_what_it_was_started_with(run: RunDir) -> None:
    assert RunDir.open(run.path).config == run.config
    versions = json.loads((run.path / "environment.json").read_text())["versions"]
    assert versions["torch"].startswith(torch.__version__.split("+")[0])
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_directory_that_holds_a_run_is_not_written_over(run: RunDir) -> None:
    with pytest.raises(RunDirError, match=r"already holds a run.*--resume.*--set run\.dir="):
        RunDir.create(run.path, config())


def test_a_directory_with_metrics_but_no_config_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(RunDirError, match="already holds a run"):
        RunDir.create(tmp_path, config())


@pytest.mark.parametrize("content", [None, "{", '{"model": {}}'])
def test_a_directory_without_a_usable_config_cannot_be_resumed(tmp_path: Path, content: str | None) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(RunDirError, match=r"no config\.json of a run can be read"):
        RunDir.resume(tmp_path)


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(RunDirError, match="cannot be written"):
        RunDir.create(tmp_path / "run", config())


# --- metrics and findings


def test_missing_and_nan_stay_apart_and_each_line_is_valid_json(run: RunDir) -> None:
    run.write_metrics({"step": 1, "loss": math.nan, "kl/k3": math.inf, "reward/min": -math.inf, "reward/max": 1.5})
    run.write_metrics({"step": 2})

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse)["step"] for line in lines] == [1, 2]
    first, second = read_metrics(run.path / "metrics.jsonl")
    assert math.isnan(first["loss"])
    assert (first["kl/k3"], first["reward/min"], first["reward/max"]) == (math.inf, -math.inf, 1.5)
    assert second == {"step": 2}


def test_metrics_need_a_step(run: RunDir) -> None:
    with pytest.raises(AssertionError, match="without step"):
        run.write_metrics({"loss": 0.1})


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_last_line_cut_anywhere_is_left_out_and_gone_after_a_resume(run: RunDir, cut: int) -> None:
    for step in (1, 2):
        run.write_metrics({"step": step, "reward/mean": math.nan})
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-cut])
    lost_only_the_line_break = cut == 1
    assert [row["step"] for row in read_metrics(file)] == ([1, 2] if lost_only_the_line_break else [1])

    RunDir.open(run.path).rewind(2)
    run.write_metrics({"step": 3})
    assert [row["step"] for row in read_metrics(file)] == ([1, 2, 3] if lost_only_the_line_break else [1, 3])


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(run: RunDir) -> None:
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(RunDirError, match="Line 2"):
        read_metrics(run.path / "metrics.jsonl")


def test_metrics_that_do_not_exist_are_an_error(run: RunDir) -> None:
    with pytest.raises(RunDirError, match="No such file"):
        read_metrics(run.path / "metrics.jsonl")


def test_findings_come_back_as_they_were(run: RunDir) -> None:
    assert read_findings(run.path / "findings.jsonl") == []
    run.write_finding(finding(4))
    assert read_findings(run.path / "findings.jsonl") == [finding(4)]


# --- rollouts


def group() -> Group:
    scored = Completion((7, 8, 2), (-1.0, math.nan, -2.0), (3, 3, 4), FinishReason.EOS)
    empty = Completion((), (), (), FinishReason.ABORT)
    return Group(
        Prompt(5, "2 + 3?", (1, 2)),
        (
            Rollout(scored, "fünf", {"exact_match": 1.0, "short": None}, 1.0),
            Rollout(empty, "", {}, math.nan, "engine aborted"),
        ),
    )


def test_a_rollouts_file_has_a_row_per_rollout(run: RunDir) -> None:
    run.write_rollouts(12, [group()], [0.5, math.nan], ["reached", "failed"])
    table = polars.read_parquet(run.rollouts / "step_000012.parquet")
    first, second = table.to_dicts()
    assert first == {
        "step": 12,
        "prompt_index": 5,
        "prompt": "2 + 3?",
        "completion": "fünf",
        "prompt_token_ids": [1, 2],
        "token_ids": [7, 8, 2],
        "finish_reason": "eos",
        "reward": 1.0,
        "reward/exact_match": 1.0,
        "reward/short": None,
        "advantage": 0.5,
        "policy_version_min": 3,
        "policy_version_max": 4,
        "mean_logprob": -1.5,
        "unscored_tokens": 1,
        "fate": "reached",
        "replayed": False,
        "error": None,
    }
    assert math.isnan(second["reward"]) and math.isnan(second["advantage"])
    assert (second["policy_version_min"], second["mean_logprob"], second["token_ids"]) == (None, None, [])
    assert (second["finish_reason"], second["error"]) == ("abort", "engine aborted")


def test_a_stall_is_a_line_with_its_step_and_what_was_said(run: RunDir) -> None:
    run.write_stall(3, "Nothing has moved.")
    run.write_stall(3, "The run moves again.")
    rows = [json.loads(line) for line in (run.path / "stalls.jsonl").read_text().splitlines()]
    assert [(row["step"], row["said"]) for row in rows] == [(3, "Nothing has moved."), (3, "The run moves again.")]
    assert abs(rows[0]["time"] - time.time()) < 60


def test_a_fate_or_advantage_too_few_is_an_error(run: RunDir) -> None:
    with pytest.raises(ValueError, match="zip"):
        run.write_rollouts(1, [group()], [0.5], ["reached"])


def test_rollouts_are_written_as_often_as_set(tmp_path: Path) -> None:
    for every, expected in ((0, []), (3, ["step_000003.parquet", "step_000006.parquet"])):
        run = RunDir.create(tmp_path / str(every), config(rollouts_every=every))
        for step in range(1, 8):
            run.write_rollouts(step, [group()], [0.0, 0.0], ["reached", "failed"])
        assert names(run.rollouts) == expected


# --- black box


def test_a_black_box_holds_tensors_and_facts(run: RunDir) -> None:
    base = torch.arange(6.0)
    run.write_blackbox(
        3,
        {"logprobs": base[:4], "old_logprobs": base[2:], "loss_mask": torch.tensor([True, False])},
        {"loss": math.nan, "temperature": 0.7},
    )
    tensors = load_file(run.blackbox / "step_000003.safetensors")
    assert torch.equal(tensors["logprobs"], base[:4]) and torch.equal(tensors["old_logprobs"], base[2:])
    assert tensors["loss_mask"].dtype == torch.bool
    sidecar = json.loads((run.blackbox / "step_000003.json").read_text())
    assert sidecar["info"] == {"loss": "NaN", "temperature": 0.7}


def boxes(run: RunDir) -> list[int]:
    steps = [int(path.stem[5:]) for path in run.blackbox.glob("*.safetensors")]
    assert sorted(steps) == sorted(int(path.stem[5:]) for path in run.blackbox.glob("*.json"))
    return sorted(steps)


def test_only_the_last_black_boxes_stay_but_discarded_steps_are_kept(run: RunDir) -> None:
    for step in range(1, 9):
        run.write_blackbox(step, {"a": torch.zeros(1)}, {}, keep=step in (2, 4))
    assert boxes(run) == [2, 4, 6, 7, 8]


def test_kept_black_boxes_are_bounded_and_the_first_ones_stay(run: RunDir) -> None:
    for step in range(1, MAX_KEPT + 10):
        run.write_blackbox(step, {"a": torch.zeros(1)}, {}, keep=True)
    assert boxes(run) == [*range(1, MAX_KEPT + 1), *range(MAX_KEPT + 7, MAX_KEPT + 10)]


def test_without_black_boxes_only_discarded_steps_are_written(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, config(blackbox_steps=0))
    run.write_blackbox(1, {"a": torch.zeros(1)}, {})
    run.write_blackbox(2, {"a": torch.zeros(1)}, {}, keep=True)
    run.write_blackbox(3, {"a": torch.zeros(1)}, {})
    assert boxes(run) == [2]


# --- resuming


def test_a_resume_drops_all_that_came_after_the_checkpoint(run: RunDir) -> None:
    for step in range(1, 6):
        run.write_metrics({"step": step, "loss": math.nan})
        run.write_finding(finding(step))
        run.write_rollouts(step, [group()], [0.0, 0.0], ["reached", "failed"])
        run.write_blackbox(step, {"a": torch.zeros(1)}, {}, keep=True)
        if step == 3:
            run.save_checkpoint(step, write_weights)
    again = RunDir.resume(run.path)
    assert again.latest_checkpoint() == (3, run.checkpoints / "step_000003")
    rows = read_metrics(run.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and math.isnan(rows[0]["loss"])
    assert [item.step for item in read_findings(run.path / "findings.jsonl")] == [1, 2, 3]
    assert names(run.rollouts) == [f"step_00000{step}.parquet" for step in (1, 2, 3)]
    assert boxes(run) == [1, 2, 3]


def test_a_run_killed_before_its_first_checkpoint_starts_over(run: RunDir) -> None:
    run.write_metrics({"step": 0, "eval/reward_mean": 0.1})
    run.write_metrics({"step": 1})
    again = RunDir.resume(run.path)
    assert again.latest_checkpoint() is None
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [0]


def test_a_rewind_past_a_checkpoint_drops_it_too(run: RunDir) -> None:
    run.save_checkpoint(2, write_weights)
    run.save_checkpoint(4, write_weights)
    run.rewind(3)
    assert names(run.checkpoints) == ["step_000002"]


def test_opening_to_read_touches_nothing(run: RunDir) -> None:
    run.write_metrics({"step": 7})
    leftover = run.checkpoints / ".step_000008.partial"
    leftover.mkdir()
    RunDir.open(run.path)
    assert leftover.exists()
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [7]
    RunDir.resume(run.path)
    assert not leftover.exists()


def test_a_kill_while_rows_are_dropped_leaves_the_old_rows(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        run.write_metrics({"step": step})

    def killed(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", killed)
        run.rewind(1)
    assert [row["step"] for row in read_metrics(run.path / "metrics.jsonl")] == [1, 2]


def test_the_module_imports_neither_torch_nor_polars() -> None:
    code = "import leadline.run_dir, sys; print([m for m in ('torch', 'polars', 'safetensors') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
