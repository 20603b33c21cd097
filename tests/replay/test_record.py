"""What a black box holds is the batch that was trained on."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from leadline.errors import RunDirError
from leadline.policy.batch import Batch
from leadline.replay.record import read_step, recorded_steps
from tests.replay.runs import trained
from tests.sft.runs import tuned


def same_batch(one: Batch, other: Batch) -> bool:
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(Batch)]
    return all(_same(a, b) for a, b in pairs)


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one.nan_to_num(-7.0), other.nan_to_num(-7.0))
    if isinstance(one, tuple) and isinstance(other, tuple) and one and isinstance(one[0], torch.Tensor):
        return all(_same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def test_the_batch_of_a_run_with_refills_masks_and_stale_groups_is_read_back_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import leadline.train as loop

    batches: list[Batch] = []
    build = loop.build_batch

    def spy(*args: object, **kwargs: object) -> Batch:
        batches.append(build(*args, **kwargs))  # type: ignore[arg-type]
        return batches[-1]

    monkeypatch.setattr(loop, "build_batch", spy)
    run = trained(
        tmp_path / "run",
        reward="count",
        rollout={"refill": 6, "max_staleness": 1, "group_size": 2},
        sampling={"max_tokens": 2, "stop_token_ids": list(range(4, 130))},
        objective={"mask_truncated": True},
        run={"steps": 3},
    )
    assert recorded_steps(run) == [1, 2, 3]
    replaced = []
    for step, batch in enumerate(batches, 1):
        record = read_step(run, step)
        assert same_batch(record.batch(record.config), batch)
        replaced.append(record.replaced)
    assert any(replaced), "no group was replaced: the test is of nothing"


def test_settings_are_those_of_the_step_not_of_a_later_resume(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", run={"steps": 1})
    values = json.loads((run / "config.json").read_text())
    values["objective"]["clip_low"] = 0.1
    (run / "config.json").write_text(json.dumps(values))
    assert read_step(run, 1).config.objective.clip_low == 0.2


def test_without_a_black_box_there_is_nothing_to_replay(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", run={"steps": 1, "blackbox_steps": 0})
    with pytest.raises(RunDirError, match="it keeps no black box"):
        read_step(run, None)


def test_a_damaged_black_box_is_an_error_that_names_it(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", run={"steps": 1})
    path = run / "blackbox/step_000001.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(RunDirError, match=r"its black box '.*step_000001\.safetensors' cannot be read"):
        read_step(run, 1)


def test_a_fine_tuning_run_has_nothing_that_could_be_otherwise(tmp_path: Path) -> None:
    tuned(tmp_path / "run", run={"steps": 1})
    with pytest.raises(RunDirError, match="it is a fine-tuning run"):
        read_step(tmp_path / "run", None)
