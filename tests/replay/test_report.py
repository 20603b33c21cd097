"""A replayed step is the recorded one to the last digit, and under a change it is what a run with that change would do."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leadline.errors import ConfigError
from leadline.replay.changes import Change, asked_change, usual_changes
from leadline.replay.record import read_step
from leadline.replay.report import EXACT, Line, as_recorded, compare, replay, restoring
from leadline.replay.step import Replayed, replay_step
from tests.replay.runs import LOST, trained

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "a reference": {"objective": {"beta": 0.1, "kl_estimator": "k2"}},
    "an entropy bonus": {"objective": {"entropy_bonus": 0.01}},
    "a sequence loss and geometric weights": {"objective": {"loss": "gspo", "importance_action": "geometric_mask"}},
    "two minibatches twice": {"optimizer": {"minibatches": 2, "epochs_per_batch": 2}},
    "small micro-batches": {"optimizer": {"tokens_per_micro": 32}},
    "high-entropy tokens": {"objective": {"entropy_quantile": 0.5}},
    "an adapter": {"model": {"lora_rank": 2}, "objective": {"beta": 0.1}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "stale groups": {"rollout": {"max_staleness": 1}, "run": {"steps": 4}},
    "processed sampling": {"sampling": {"temperature": 0.8, "top_k": 40, "repetition_penalty": 1.1}},
    "truncated completions masked": {
        "objective": {"mask_truncated": True},
        "sampling": {"stop_token_ids": list(range(4, 70))},
    },
}


@pytest.mark.parametrize("sections", RUNS.values(), ids=RUNS)
def test_what_a_real_run_recorded_is_replayed_to_the_last_digit(sections: dict[str, Any], tmp_path: Path) -> None:
    report = replay(trained(tmp_path / "run", **sections), None, Change({"objective.clip_high": 0.3}))
    assert report.update is not None and report.update.compared > report.tokens.compared > 40
    assert report.tokens.differences == {}
    assert report.update.differences == {}
    assert report.agrees
    if report.record.config.optimizer.optimizer_steps == 1:
        norm = report.record.seen[0].outcome.grad_norm
        assert report.recorded.weight_norm == pytest.approx(norm, rel=1e-2 if "bfloat16" in str(sections) else 1e-4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run on policy, with all its checkpoints."""
    return trained(tmp_path_factory.mktemp("plain") / "run")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without the weights before its last step."""
    return trained(tmp_path_factory.mktemp("bare") / "run", run={"checkpoint_every": 0})


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose correction takes the signal."""
    return trained(tmp_path_factory.mktemp("lost") / "run", **LOST)


def lines(run: Path) -> dict[str, Line]:
    return {str(line.change): line for line in replay(run, None, None).lines}


def test_the_reached_mass_is_the_pull_at_the_tokens(lost: Path) -> None:
    report = replay(lost, None, None)
    for line in [report.recorded, *report.lines]:
        assert line.replayed is not None
        signed = line.replayed.pulls[0].logprobs
        advantages = report.record.batch(report.record.config).token_advantages()
        assert bool((signed * advantages <= 0).all())  # the loss falls where a good token becomes likelier
        pull = signed.abs().double().sum()
        assert float(pull) == pytest.approx(line.replayed.metrics["ledger/reached_mass"], rel=1e-4, abs=1e-9)


def test_a_signal_that_the_correction_took_is_restored_by_one_that_truncates(lost: Path) -> None:
    report = replay(lost, None, None)
    assert report.recorded.reached < 0.1
    best = restoring(report)
    assert best is not None and best.reached > 0.5
    assert best.change.settings == {"objective.importance_action": "token_truncate"}
    assert best.weight_norm is not None and best.weight_norm > (report.recorded.weight_norm or 0)


def reaching(share: float, **settings: Any) -> Line:
    return Line(Change(settings), Replayed({"ledger/reached_share": share}, {}))


@pytest.mark.parametrize(
    ("before", "after", "chosen"),
    [
        (0.0, {"token_truncate": 0.9, "off": 1.0}, "token_truncate"),
        (0.0, {"token_truncate": 0.4, "off": 1.0}, "off"),
        (0.0, {"token_mask": 0.7, "sequence_truncate": 0.9, "off": 1.0}, "sequence_truncate"),
        (0.0, {"token_truncate": 0.97, "token_mask": 1.0}, "token_truncate"),
        (0.6, {"token_truncate": 1.0}, None),
        (0.4, {"token_truncate": 0.55}, None),
        (math.nan, {"token_truncate": math.nan}, None),
    ],
)
def test_a_correction_that_restores_the_signal_is_preferred_to_none_at_all(
    before: float, after: dict[str, float], chosen: str | None
) -> None:
    report: Any = SimpleNamespace(
        recorded=reaching(before),
        lines=[reaching(share, **{"objective.importance_action": action}) for action, share in after.items()],
    )
    best = restoring(report)
    assert (best.change.settings["objective.importance_action"] if best else None) == chosen


def test_on_policy_no_correction_makes_a_difference_and_none_is_asked_for(plain: Path) -> None:
    report = replay(plain, None, None)
    assert restoring(report) is None
    assert all(as_recorded(line, report) for line in report.lines)
    assert {"sequence_mask", "no correction"} <= {str(line.change) for line in report.lines}


def test_every_correction_gives_what_a_run_with_it_would_measure(lost: Path) -> None:
    """The other way round: the step made anew with the changed settings from the weights that made it."""
    from leadline.replay.weights import find_weights, policy_before

    record = read_step(lost, None)
    weights = find_weights(record)
    assert not isinstance(weights, str)
    replayed = lines(lost)
    for action in ("token_truncate", "off"):
        change = Change({"objective.importance_action": action})
        config = change.config(record.config)
        update = policy_before(record, weights, config).update(record.batch(config))
        line = replayed[str(change)]
        assert line.replayed is not None
        assert compare(update.metrics, line.replayed.metrics, EXACT).differences == {}
        assert line.weight_norm == pytest.approx(update.metrics["optimizer/grad_norm"], rel=1e-4)


def test_without_the_weights_all_but_their_gradient_is_replayed(bare: Path) -> None:
    report = replay(bare, 2, None)
    assert isinstance(report.weights, str) and "the weights before step 2 are gone" in report.weights
    assert report.update is None and report.agrees
    assert all(line.weight_norm is None and line.replayed is not None for line in report.lines)


def test_the_first_step_needs_no_checkpoint(bare: Path) -> None:
    report = replay(bare, 1, Change({"objective.clip_high": 0.3}))
    assert report.update is not None and report.update.differences == {}


def test_full_precision_asks_the_policy_again(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", model={"dtype": "bfloat16"})
    assert Change({"model.dtype": "float32"}) in usual_changes(read_step(run, 2).config)
    report = replay(run, 2, Change({"model.dtype": "float32"}))
    [line] = report.lines
    assert line.replayed is not None and report.recorded.replayed is not None
    before, after = (r.metrics["importance/log_ratio_abs_mean"] for r in (report.recorded.replayed, line.replayed))
    assert after != before


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["objective.beta=0.1"], "there are no logprobs of a reference, and the weights before step 2 are gone"),
        (["model.dtype=bfloat16"], "it asks the policy again, and the weights before step 2 are gone"),
    ],
)
def test_what_was_not_recorded_and_cannot_be_asked_is_said(overrides: list[str], reason: str, bare: Path) -> None:
    [line] = replay(bare, 2, asked_change(overrides)).lines
    assert line.replayed is None and line.error.startswith(reason)
    assert math.isnan(line.reached)


def test_a_reference_that_was_not_there_is_asked_where_the_weights_are(plain: Path) -> None:
    [line] = replay(plain, 2, asked_change(["objective.beta=0.1"])).lines
    assert line.replayed is not None
    assert line.replayed.metrics["kl/k3"] > 0


def test_a_change_that_contradicts_another_setting_is_an_error(plain: Path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.clip_low is 2"):
        replay(plain, None, asked_change(["objective.clip_low=2.0"]))


def test_a_record_that_was_tampered_with_does_not_agree(lost: Path) -> None:
    record = read_step(lost, None)
    again = replay_step(record.batch(record.config), record.config, record.seen, as_recorded=True).metrics
    other = compare({**record.row, "ledger/sampled_mass": record.row["ledger/sampled_mass"] * 1.01}, again, EXACT)
    assert list(other.differences) == ["ledger/sampled_mass"] and not other.holds
    assert other.worst == "ledger/sampled_mass"


def test_a_discarded_step_is_replayed_as_discarded(tmp_path: Path) -> None:
    """A logprob that is NaN stays NaN: no change to the loss restores it."""
    from safetensors.torch import load_file, save_file

    run = trained(tmp_path / "run", run={"steps": 1})
    path = run / "blackbox/step_000001.safetensors"
    tensors = load_file(path)
    tensors["seen_logprobs"][0] = torch.nan
    save_file(tensors, path)
    record = read_step(run, 1)
    metrics = replay_step(record.batch(record.config), record.config, record.seen).metrics
    assert metrics["ledger/discarded_share"] > 0.9 and metrics["ledger/reached_mass"] == 0
