import asyncio
import errno
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars
import pytest
import torch
from polars.testing import assert_frame_equal
from rich.console import Console
from safetensors.torch import load_file

from leadline import session as sessions
from leadline.config import Config, parse_config
from leadline.errors import (
    ConfigError,
    DataError,
    EngineError,
    LeadlineError,
    ModelError,
    NoSignalError,
    RewardError,
    RunDirError,
    TrainingError,
)
from leadline.run_dir import RunDir, read_evaluations, read_findings, read_metrics
from leadline.screen import Screen
from leadline.session import Session, open_session
from tests.builders import same, snapshot

served = {"calls": 0, "limit": math.inf}


def limited(completion_ids: Sequence[int]) -> float:
    """A reward whose server goes away after `served["limit"]` calls."""
    served["calls"] += 1
    if served["calls"] > served["limit"]:
        raise ConnectionError("the judge is away")
    return float(sum(completion_ids))


def constant(completion: str) -> float:
    return 1.0


def config(**sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"source": "reasoning_gym:chain_sum", "size": 24},
        "rewards": [{"name": "tests.loops:token_sum"}],
        "sampling": {"max_tokens": 6},
        "rollout": {"group_size": 3, "groups_per_step": 2},
        "optimizer": {"learning_rate": 1e-3},
        "eval": {"prompts": 3},
        "run": {"steps": 4, "checkpoint_every": 2},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, dict) else section
    return parse_config(values)


def opened(config: Config, path: Path, *, resume: bool = False, **more: Any) -> Session:
    screen = Screen(config, console=Console(file=io.StringIO(), width=200))
    return open_session(config, path, resume=resume, **{"stopping": lambda: False, "screen": screen, **more})


def run(session: Session) -> None:
    asyncio.run(session.run())


def printed(session: Session) -> str:
    file = session.screen.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def steps(path: Path) -> list[int]:
    return [int(row["step"]) for row in read_metrics(path / "metrics.jsonl")]


def evaluated(path: Path) -> list[int]:
    return [step for step, _, _, _ in read_evaluations(path / "evaluations.jsonl")]


def checkpoints(path: Path) -> list[str]:
    return sorted(p.name for p in (path / "checkpoints").iterdir())


def break_gradients(session: Session, from_version: int) -> None:
    """From this version on the gradient of the output layer is NaN."""
    policy = session.policy
    weight: torch.Tensor = policy.model.lm_head.weight  # type: ignore[union-attr, assignment]
    weight.register_hook(lambda grad: grad * math.nan if policy.version >= from_version else grad)


# A whole run ----------------------------------------------------------------------------------------------------------


def test_a_run_leaves_its_metrics_evaluations_rollouts_and_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(eval={"prompts": 3, "every": 3}), path)
    run(session)
    assert session.finished
    assert steps(path) == [1, 2, 3, 4]
    assert evaluated(path) == [0, 3, 4]
    assert checkpoints(path) == ["step_000002", "step_000004"]
    assert len(list((path / "rollouts").glob("*.parquet"))) == 4
    place = json.loads((path / "checkpoints/step_000002/position.json").read_text())
    assert place == {"position": 4, "ahead": [], "replay": []}
    first, _, last = (rewards for _, rewards, _, _ in read_evaluations(path / "evaluations.jsonl"))
    found = session.improvement()
    assert found is not None
    assert found.reward.mean == pytest.approx(sum(b - a for a, b in zip(first, last, strict=True)) / 3)


def test_what_it_shows_are_its_steps_and_its_evaluations(tmp_path: Path) -> None:
    session = opened(config(run={"steps": 1}), tmp_path / "run")
    run(session)
    shown = [line.split("  ")[:2] for line in printed(session).splitlines() if line.startswith("step")]
    assert [line[0] for line in shown] == ["step 0/1", "step 1/1", "step 1/1"]
    assert shown[0][1].startswith("held-out ") and shown[1][1].startswith("reward ")


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path: Path) -> None:
    session = opened(config(eval={"prompts": 0}, run={"steps": 1}), tmp_path / "run")
    run(session)
    assert session.improvement() is None
    assert session.finished and not (tmp_path / "run/evaluations.jsonl").exists()


def test_a_checkpoint_is_a_model_that_transformers_loads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    session = opened(config(run={"steps": 2}), tmp_path / "run")
    run(session)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "run/checkpoints/step_000002/model")
    assert same(snapshot(session.policy.model), snapshot(loaded))


def test_asked_to_stop_it_leaves_a_checkpoint_and_no_last_evaluation(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"checkpoint_every": 0}), path, stopping=lambda: bool(steps_so_far(path) >= 3))
    run(session)
    assert not session.finished
    assert (steps(path), evaluated(path), checkpoints(path)) == ([1, 2, 3], [0], ["step_000003"])
    again = opened(config(run={"checkpoint_every": 0}), path, resume=True)
    run(again)
    assert again.finished
    assert (steps(path), evaluated(path)) == ([1, 2, 3, 4], [0, 4])


def steps_so_far(path: Path) -> int:
    return len(steps(path)) if (path / "metrics.jsonl").exists() else 0


def test_a_finding_is_written_once_when_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = config(rewards=[{"name": "tests.test_session:constant"}], rollout={"max_steps_without_signal": 9})
    run(opened(settings, path))
    rules = [finding.rule for finding in read_findings(path / "findings.jsonl")]
    assert rules and len(rules) == len(set(rules))


def test_a_run_that_replays_and_was_stopped_half_way_goes_on_to_the_last_digit(tmp_path: Path) -> None:
    """What the buffer holds is in the checkpoint."""
    settings = config(
        rewards=[{"name": "tests.loop.test_replay_buffer:sometimes"}],
        rollout={"group_size": 4, "groups_per_step": 3, "replay_max_staleness": 3, "max_steps_without_signal": 9},
        run={"steps": 6, "checkpoint_every": 0},
    )
    whole, path = tmp_path / "whole", tmp_path / "run"
    run(opened(settings, whole))
    run(opened(settings, path, stopping=lambda: bool(steps_so_far(path) >= 3)))
    assert json.loads((path / "checkpoints/step_000003/position.json").read_text())["replay"]
    run(opened(settings, path, resume=True))
    for step in range(1, 7):
        one, other = (polars.read_parquet(p / f"rollouts/step_{step:06d}.parquet") for p in (whole, path))
        assert_frame_equal(one, other, check_exact=True)
    assert sum(row["rollout/replayed_groups"] for row in read_metrics(path / "metrics.jsonl")[3:]) > 0
    one, other = (p / "checkpoints/step_000006/model/model.safetensors" for p in (whole, path))
    assert one.read_bytes() == other.read_bytes()


# What is refused before anything is written ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "error", "message"),
    [
        ({"engine": {"kind": "scripted"}}, ConfigError, "engine.kind is 'scripted', but"),
        ({"rewards": [{"name": "exact_mach"}]}, RewardError, "no such built-in.*Did you mean exact_match"),
        ({"rewards": [{"name": "length"}]}, DataError, "The reward 'length' needs target, but the dataset's columns"),
        ({"rewards": [{"name": "length", "params": {"goal": 3}}]}, ConfigError, "rewards.params of 'length'"),
        ({"model": {"name": "no/such/model"}}, ModelError, "model.name is 'no/such/model', but"),
        ({"data": {"source": "missing.jsonl"}}, DataError, "The source is 'missing.jsonl', but"),
        ({"data": {"source": "reasoning_gym:chain_sun"}}, DataError, "no such task.*chain_sum"),
        ({"sampling": {"max_tokens": 2048}}, ConfigError, "sampling.max_tokens is 2048, but the model's context"),
        ({"run": {"trackers": ["trackio"]}}, ConfigError, "run.trackers is 'trackio', but its package"),
    ],
)
def test_a_run_that_cannot_start_leaves_no_directory(
    sections: dict[str, Any], error: type[LeadlineError], message: str, tmp_path: Path
) -> None:
    if sections.get("run") and _installed("trackio"):
        pytest.skip("the tracker is installed here")
    with pytest.raises(error, match=message):
        opened(config(**sections), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def test_a_directory_that_holds_a_run_is_refused_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunDir.create(tmp_path / "run", config())
    monkeypatch.setattr(sessions, "load_model", lambda *_: pytest.fail("a model was loaded for nothing"))
    with pytest.raises(RunDirError, match="already holds a run"):
        opened(config(), tmp_path / "run")
    with pytest.raises(RunDirError, match=r"no config\.json of a run can be read"):
        opened(config(), tmp_path / "other", resume=True)


def test_an_engine_that_loads_the_model_itself_cannot_know_new_tokens(tmp_path: Path) -> None:
    servers = {"kind": "vllm", "urls": ["http://127.0.0.1:1"]}
    with pytest.raises(
        ConfigError, match=r"model.add_special_tokens is .*, which 'tiny' lacks, but engine.kind is 'vllm'"
    ):
        opened(config(model={"add_special_tokens": ["<a>"]}, engine=servers), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# Resuming with other settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"run": {"seed": 1}}, "run.seed"),
        ({"data": {"size": 25}}, "data.size"),
        ({"model": {"lora_rank": 4}}, "model.lora_rank"),
        ({"eval": {"prompts": 4}}, "eval.prompts"),
        ({"rewards": [{"name": "tests.loops:count"}]}, "rewards"),
    ],
)
def test_a_resumed_run_keeps_what_its_record_depends_on(sections: dict[str, Any], name: str, tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", config())
    with pytest.raises(ConfigError, match=f"^{name} is .*, but the run in this directory was started with"):
        opened(config(**sections), tmp_path / "run", resume=True)


def test_a_resumed_run_may_be_longer_and_keep_more_and_says_so_in_its_config(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(opened(config(), path))
    longer = config(run={"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 4}, optimizer={"learning_rate": 1e-4})
    run(opened(longer, path, resume=True))
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert evaluated(path) == [0, 4, 6]
    assert checkpoints(path) == ["step_000002", "step_000004", "step_000005", "step_000006"]
    assert RunDir.open(path).config == longer


def test_the_screen_of_a_resumed_run_shows_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(opened(config(), path))
    view = opened(config(run={"steps": 6}), path, resume=True).screen.view
    assert view.step == 4 and len(view.curve) == 4 and len(view.held_out) == 2


# Trouble on the way ---------------------------------------------------------------------------------------------------


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    session = opened(config(), path)
    save = torch.save

    def full(state: Any, target: Any) -> None:
        if state["version"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(state, target)

    monkeypatch.setattr(torch, "save", full)
    message = (
        r"run\.dir is .*, but checkpoints/step_000004 cannot be written there \(.*No space left on device\)\. The run "
        r"stops here; the last whole checkpoint is step 2\. Free space .*--resume\."
    )
    with pytest.raises(RunDirError, match=message):
        run(session)
    assert checkpoints(path) == ["step_000002"]
    assert not list(path.rglob("*.partial"))
    monkeypatch.undo()
    run(opened(config(), path, resume=True))
    assert steps(path) == [1, 2, 3, 4]


def test_too_many_discarded_steps_stop_the_run_with_a_checkpoint_of_the_last_sound_weights(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"steps": 9, "checkpoint_every": 2, "keep_checkpoints": 9}), path)
    break_gradients(session, from_version=2)
    with pytest.raises(TrainingError, match="max_discarded_steps is 3"):
        run(session)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert checkpoints(path) == ["step_000002", "step_000004", "step_000005"]
    sound, last = (load_file(path / f"checkpoints/step_00000{n}/model/model.safetensors") for n in (2, 5))
    assert same(sound, last) and all(bool(w.isfinite().all()) for w in last.values())
    assert len(list((path / "blackbox").glob("*.json"))) >= 3


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    path = tmp_path / "run"
    session = opened(config(run={"checkpoint_every": 1}), path)
    update = session.policy.update

    def overflowing(batch: Any) -> Any:
        result = update(batch)
        if session.policy.version == 2:
            session.policy.model.lm_head.weight.data[0, 0] = math.inf  # type: ignore[union-attr, index]
        return result

    session.policy.update = overflowing  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="not finite at version 2"):
        run(session)
    assert checkpoints(path) == ["step_000001"]


def test_a_judge_that_goes_away_stops_the_run_with_a_checkpoint_and_the_run_can_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    settings = config(
        rewards=[{"name": "tests.test_session:limited"}], run={"checkpoint_every": 0, "skip_checks": ["rewards"]}
    )
    from tests.test_session import served  # the module that the reward is imported from

    monkeypatch.setitem(served, "calls", 0)
    monkeypatch.setitem(served, "limit", 3 + 3 * 6)  # one evaluation, three steps
    with pytest.raises(RewardError, match=r"6 of 6 rollouts of this step failed; the first: .*the judge is away"):
        run(opened(settings, path))
    assert (steps(path), checkpoints(path)) == ([1, 2, 3], ["step_000003"])
    monkeypatch.setitem(served, "limit", math.inf)
    run(opened(settings, path, resume=True))
    assert steps(path) == [1, 2, 3, 4]


def test_a_step_whose_weights_no_engine_could_load_is_kept_and_not_trained_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    settings = config(run={"checkpoint_every": 0}, eval={"prompts": 3, "every": 2})
    session = opened(settings, path)
    load = session.engine.load_weights

    async def refused(weights: Any, version: int) -> None:
        if version == 2:
            raise EngineError("no server answers")
        await load(weights, version)

    session.engine.load_weights = refused  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="no server answers"):
        run(session)
    assert (steps(path), evaluated(path), checkpoints(path)) == ([1, 2], [0], ["step_000002"])
    run(opened(settings, path, resume=True))
    assert (steps(path), evaluated(path)) == ([1, 2, 3, 4], [0, 2, 4])
    indices = [index for step in range(1, 5) for index in trained(path, step)]
    assert indices == list(range(8))


def trained(path: Path, step: int) -> list[int]:
    """The prompts of a step, by their place in the stream."""
    rows = polars.read_parquet(path / f"rollouts/step_{step:06d}.parquet")
    return list(dict.fromkeys(rows["prompt_index"].to_list()))


def test_a_run_without_any_signal_stops_and_names_the_rewards(tmp_path: Path) -> None:
    settings = config(rewards=[{"name": "tests.test_session:constant"}], rollout={"max_steps_without_signal": 2})
    with pytest.raises(NoSignalError, match=r"as many steps in a row had no group .* \(the last: \[1\.0\]\)"):
        run(opened(settings, tmp_path / "run"))
    assert checkpoints(tmp_path / "run") == ["step_000001"]


def test_a_reward_of_the_wrong_shape_stops_the_run_at_once(tmp_path: Path) -> None:
    settings = config(rewards=[{"name": "tests.test_session:two"}])
    with pytest.raises(RewardError, match="The reward 'two' returned list of 2 numbers, but it scores one completion"):
        run(opened(settings, tmp_path / "run"))


def two(completion: str) -> list[float]:
    return [1.0, 0.0]
