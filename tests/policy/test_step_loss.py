import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.config import Config
from leadline.policy.batch import build_batch, minibatches
from leadline.policy.step_loss import Before, Scores, Terms, TokenRecord, loss_shares, step_loss
from tests import reference
from tests.builders import NAN, group, groups, scored, settings

LOSSES = ("grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "reinforce")
AGGREGATIONS = ("token_mean", "sequence_mean", "constant", "minibatch_token_mean")


def noise(count: int, seed: int, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(count, generator=torch.Generator().manual_seed(seed))


class Case:
    """Four groups (one reward equal to its group's mean, one rollout failed) with made-up log-probabilities."""

    def __init__(self, config: Config) -> None:
        self.config = config
        drawn = [*groups()[:3], group((0.0, 0.5, 1.0, NAN), (4, 6, 3, 2), seed=4)]
        count = sum(len(r.completion.token_ids) for g in drawn for r in g.rollouts)
        self.logprobs = -1.5 + noise(count, 1)
        self.old = self.logprobs + noise(count, 2)
        self.ref = self.logprobs + noise(count, 3)
        rollout = self.old + noise(count, 4)
        rollout[::7] = NAN
        self.batch = build_batch(scored(drawn, rollout), config, 0)
        self.entropies = 1 + noise(count, 5).abs()

    def run(
        self, parts: Sequence[Sequence[int]] | None = None, threshold: float = -math.inf
    ) -> tuple[float, Tensor, Terms, TokenRecord]:
        """(loss, d loss / d logprob of every token of the batch, terms, record), summed over parts of the batch."""
        leaf = self.logprobs.clone().requires_grad_()
        before = Before(self.old, self.ref, threshold)
        [minibatch] = minibatches(self.batch, 1)
        shares = loss_shares(self.batch, minibatch, self.config)
        loss, terms, records = 0.0, Terms(), []
        for completions in parts or [self.batch.forwarded]:
            tokens = self.batch.tokens_of(completions)
            scores = Scores(leaf[tokens], self.entropies[tokens])
            part, part_terms, record = step_loss(self.config.objective, self.batch, completions, scores, before, shares)
            part.backward()
            loss, terms = loss + float(part.detach()), terms + part_terms
            records.append(record)
        assert leaf.grad is not None
        return loss, leaf.grad, terms, TokenRecord.concatenate(records)

    def expected(self) -> tuple[float, list[float]]:
        objective = self.config.objective
        batch = {
            "rewards": self.batch.rewards.double().tolist(),
            "group_of_completion": self.batch.group_of_completion.tolist(),
            "completion_of_token": self.batch.completion_of_token.tolist(),
            "loss_mask": self.batch.loss_mask.tolist(),
            "logprobs": self.logprobs.double().tolist(),
            "old_logprobs": self.old.double().tolist(),
            "rollout_logprobs": self.batch.rollout_logprobs.double().tolist(),
            "ref_logprobs": self.ref.double().tolist(),
            "max_tokens": self.config.sampling.max_tokens,
        }
        plain = {
            "loss": objective.loss,
            "scaling": objective.advantage_scaling,
            "aggregation": objective.resolved_aggregation,
            "importance": {
                "level": objective.importance_level,
                "action": objective.importance_action,
                "low": objective.importance_low,
                "high": objective.importance_high,
                "veto": objective.importance_veto,
            },
            "clip": {
                "clip_low": objective.clip_low,
                "clip_high": objective.clip_low if objective.clip_high is None else objective.clip_high,
                "clip_delta": objective.clip_delta,
            },
            "beta": objective.beta,
            "estimator": objective.kl_estimator,
        }
        return reference.whole_loss(batch, plain)


@pytest.mark.parametrize(
    "objective",
    [
        *({"loss": loss} for loss in LOSSES),
        *({"aggregation": aggregation} for aggregation in AGGREGATIONS),
        *(
            {"importance_level": level, "importance_action": action, "importance_low": 0.8, "importance_high": 1.3}
            for level in ("token", "sequence", "geometric")
            for action in ("truncate", "mask", "off")
        ),
        *({"beta": 0.2, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3")),
        {"clip_high": 0.5, "clip_delta": 1.6},
        {"importance_veto": 0.6},
        {"on_unscored": "drop", "loss": "gspo"},
        {"on_unscored": "drop", "loss": "grpo", "beta": 0.1},
        {"advantage_scaling": "none", "loss": "dr_grpo"},
    ],
    ids=str,
)
def test_loss_and_gradient_equal_the_slow_reference(objective: dict[str, Any]) -> None:
    case = Case(settings(objective=objective))
    loss, gradient, terms, _ = case.run()
    expected_loss, expected_gradient = case.expected()
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert terms.total == pytest.approx(loss, abs=1e-6)
    assert torch.allclose(gradient.double(), torch.tensor(expected_gradient, dtype=torch.float64), rtol=0, atol=1e-6)
    assert float(gradient.abs().sum()) > 0.05


@pytest.mark.parametrize(("loss", "aggregation"), list(itertools.product(LOSSES, AGGREGATIONS)))
def test_how_completions_are_split_never_changes_the_loss(loss: str, aggregation: str) -> None:
    case = Case(
        settings(objective={"loss": loss, "aggregation": aggregation, "beta": 0.1, "importance_level": "geometric"})
    )
    whole, gradient, _, _ = case.run()
    for parts in ([[c] for c in case.batch.forwarded], [case.batch.forwarded[:4], case.batch.forwarded[4:]]):
        split, split_gradient, _, _ = case.run(parts)
        assert split == pytest.approx(whole, abs=1e-6)
        assert torch.allclose(split_gradient, gradient, rtol=0, atol=1e-7)


@pytest.mark.parametrize("loss", LOSSES)
def test_groups_without_signal_change_only_the_denominators(loss: str) -> None:
    config = settings(objective={"loss": loss})
    drawn, barren = groups(), group((1.0, 1.0), (5, 8), seed=9)
    gradients = []
    for made in (build_batch(drawn, config, 0), build_batch([*drawn, barren], config, 0)):
        [minibatch] = minibatches(made, 1)
        shares = loss_shares(made, minibatch, config)
        assert minibatch.forwarded == tuple(range(12))
        tokens = made.tokens_of(made.forwarded)
        leaf = (-1.5 + noise(len(tokens), 1)).requires_grad_()
        old = torch.full((len(made.token_ids),), NAN)
        old[tokens] = leaf.detach() + noise(len(tokens), 2)
        scores = Scores(leaf, torch.ones(len(tokens)))
        step_loss(config.objective, made, made.forwarded, scores, Before(old), shares)[0].backward()
        gradients.append(leaf.grad)
    if config.objective.resolved_aggregation in ("token_mean", "minibatch_token_mean"):
        scale = 63 / (63 + 5 + 8)  # tokens
    else:
        scale = 12 / (12 + 2)  # completions
    assert torch.allclose(gradients[1], gradients[0] * scale, rtol=1e-5, atol=1e-8)


def test_minibatches_keep_the_scale_of_a_gradient() -> None:
    # Every optimizer step of n has n times the share, so the mean over them is the whole step.
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        whole, halves = (settings(objective={"aggregation": aggregation}, optimizer={"minibatches": n}) for n in (1, 2))
        made = build_batch(groups(), whole, 0)
        [only] = minibatches(made, 1)
        for half in minibatches(made, 2):
            assert torch.allclose(loss_shares(made, half, halves), 2 * loss_shares(made, only, whole))


def test_bnpo_counts_the_tokens_of_its_own_minibatch() -> None:
    config = settings(objective={"loss": "bnpo"}, optimizer={"minibatches": 2})
    made = build_batch(groups(), config, 0)
    for half in minibatches(made, 2):
        tokens = made.tokens_of(half.forwarded)
        assert float(loss_shares(made, half, config)[tokens].sum()) == pytest.approx(1.0)


def test_token_mean_shares_of_a_step_add_up_to_one() -> None:
    config = settings()
    made = build_batch(groups(), config, 0)
    [only] = minibatches(made, 1)
    assert float(loss_shares(made, only, config).sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_below_the_entropy_threshold_have_no_gradient(loss: str) -> None:
    case = Case(settings(objective={"loss": loss, "entropy_quantile": 0.5}))
    threshold = float(case.entropies.median())
    _, gradient, _, record = case.run(threshold=threshold)
    low = case.entropies < threshold
    assert gradient[low].eq(0).all()
    assert torch.equal(record.trained, case.batch.loss_mask[record.tokens] & ~low[record.tokens])
    with_signal = case.batch.loss_mask & (case.batch.token_advantages() != 0)
    assert gradient[with_signal & ~low].ne(0).sum() >= 5


def test_an_unknown_entropy_does_not_hide_a_token() -> None:
    case = Case(settings())
    case.entropies[3] = NAN
    _, _, _, record = case.run()
    assert record.trained[record.tokens == 3].all()


def test_entropy_carries_a_gradient_only_with_a_bonus() -> None:
    for bonus in (0.0, 0.3):
        case = Case(settings(objective={"entropy_bonus": bonus}))
        case.entropies = case.entropies.requires_grad_()
        _, _, terms, _ = case.run()
        if bonus == 0:
            assert case.entropies.grad is None
            assert terms.entropy == 0
        else:
            assert case.entropies.grad is not None
            count = int(case.batch.loss_mask.sum())
            assert torch.allclose(case.entropies.grad[case.batch.loss_mask], torch.tensor(-bonus / count))
            assert terms.entropy == pytest.approx(
                -bonus * float(case.entropies.detach()[case.batch.loss_mask].mean()), rel=1e-5
            )


def test_one_optimizer_step_takes_its_own_logprobs_as_the_old_ones() -> None:
    case = Case(settings())
    [only] = minibatches(case.batch, 1)
    shares = loss_shares(case.batch, only, case.config)
    tokens = case.batch.tokens_of(case.batch.forwarded)
    scores = Scores(case.logprobs[tokens].requires_grad_(), case.entropies[tokens])
    _, _, record = step_loss(case.config.objective, case.batch, case.batch.forwarded, scores, Before(), shares)
    assert torch.equal(record.old_logprobs, record.logprobs)
    assert record.ref_logprobs.isnan().all()
    assert not record.clipped.any()


def test_an_unscored_token_weighs_exactly_one_and_is_recorded_as_unscored() -> None:
    case = Case(settings())
    _, _, _, record = case.run()
    unscored = case.batch.rollout_logprobs[record.tokens].isnan()
    assert unscored.sum() >= 5
    assert record.weights[unscored].eq(1).all()
    assert torch.equal(record.log_ratio.isnan(), unscored)


def test_the_record_is_of_the_forwarded_tokens_and_has_no_gradient() -> None:
    case = Case(settings())
    _, _, _, record = case.run([[c] for c in case.batch.forwarded])
    assert torch.equal(record.tokens, case.batch.tokens_of(case.batch.forwarded))
    for name in TokenRecord.__dataclass_fields__:
        tensor = getattr(record, name)
        assert len(tensor) == len(record.tokens)
        assert not tensor.requires_grad


def test_terms_add_up() -> None:
    assert (Terms(1.0, 2.0, 3.0) + Terms(0.5, 0.25, 0.125)) == Terms(1.5, 2.25, 3.125)
    assert Terms(1.0, 2.0, 3.0).total == 6.0
