"""What one `policy.update` did, as canonical metrics: a mean is over tokens, a max is a max, a min is a min."""

import math
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leadline.config import Config
from leadline.ledger import Ledger, Pass, account_unforwarded
from leadline.metrics import LEDGER_STAGES
from leadline.objective.importance import effective_sample_size
from leadline.objective.kl import kl_divergence
from leadline.objective.losses import token_shares
from leadline.objective.segments import segment_sum
from leadline.policy.batch import Batch
from leadline.policy.optimizer import Outcome
from leadline.policy.step_loss import Terms, TokenRecord

Metrics = dict[str, float]

OLDEST_AGE = 8
"""Tokens of this and every higher age are counted together, so that the names are few."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One optimizer step of an update; no record and no outcome if no completion of its groups had a gradient."""

    terms: Terms
    record: TokenRecord | None
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class Update:
    """What one `policy.update` did."""

    metrics: Metrics
    fates: list[str]
    """By completion: the ledger stage where most of its mass ended."""
    blackbox: dict[str, Tensor]
    """The step at token level."""
    discarded: bool
    """Whether an optimizer step was discarded."""


def summarize(
    batch: Batch, steps: Sequence[OptimizerStep], config: Config, rate: float, timings: Mapping[str, float]
) -> Update:
    """Metrics, ledger and black box of an update's optimizer steps."""
    records = [s.record for s in steps if s.record is not None]
    outcomes = [s.outcome for s in steps if s.outcome is not None]
    ledger = account(batch, steps, config)
    metrics = (
        _loss_metrics(steps)
        | _optimizer_metrics(outcomes, rate)
        | _batch_metrics(batch)
        | ledger.metrics()
        | {f"time/{stage}_s": seconds for stage, seconds in timings.items()}
        | {"memory/peak_bytes": peak_memory()}
    )
    if records:
        first_epoch = [s.record for s in steps[: config.optimizer.minibatches] if s.record is not None]
        record = TokenRecord.concatenate(first_epoch)
        owner = batch.completion_of_token[record.tokens]
        metrics |= importance_metrics(record, owner, batch.num_completions)
        if max(config.rollout.max_staleness, config.rollout.replay_max_staleness) > 0:
            metrics |= age_metrics(record, batch.staleness[record.tokens])
        metrics |= policy_metrics(records, config.objective.beta)
    metrics["throughput/trained_tokens_per_s"] = metrics.get("policy/tokens", 0.0) / max(1e-9, sum(timings.values()))
    discarded = any(outcome.discarded for outcome in outcomes)
    return Update(metrics, ledger.fates(), _blackbox(batch, steps), discarded)


def account(batch: Batch, steps: Sequence[OptimizerStep], config: Config) -> Ledger:
    """The ledger of an update: each token at one stage, see `ledger.py`."""
    replayed = torch.tensor([int(group) in batch.replayed for group in batch.group_of_completion], dtype=torch.bool)
    ledger = Ledger(batch.num_completions, replayed=replayed if config.rollout.replay_max_staleness else None)
    with_signal = torch.tensor([lost is None for lost in batch.lost_at])[batch.completion_of_token]
    forwarded = torch.zeros(batch.num_completions, dtype=torch.bool)
    forwarded[list(batch.forwarded)] = True
    seen = batch.loss_mask & with_signal & forwarded[batch.completion_of_token]
    account_unforwarded(ledger, batch.lost_at, batch.completion_of_token, _untrained_mass(batch, config), seen)
    advantages = batch.token_advantages().abs()
    for step in steps:
        if step.record is None or step.outcome is None:
            continue
        here = seen[step.record.tokens]
        tokens = step.record.tokens[here]
        trained = step.record.trained[here]
        ledger.add_pass(
            Pass(
                completion_of_token=batch.completion_of_token[tokens],
                mass=advantages[tokens] * step.record.shares[here] / config.optimizer.minibatches,
                kept=trained,
                weights=step.record.weights[here],
                masked=step.record.masked[here],
                gain=step.record.gain[here],
                discarded=step.outcome.discarded,
            ),
            share=1 / config.optimizer.epochs_per_batch,
        )
    accounted = sum(ledger.tokens.values())
    assert math.isclose(accounted, len(batch.token_ids), abs_tol=1e-6), f"{accounted} of {len(batch.token_ids)} tokens"
    return ledger


def _untrained_mass(batch: Batch, config: Config) -> Float[Tensor, " token"]:
    """|advantage| x the share a token would have had, had nothing kept it out of the loss."""
    everything = torch.ones_like(batch.loss_mask)
    shares = token_shares(
        config.objective.resolved_aggregation,
        everything,
        batch.completion_of_token,
        batch.num_completions,
        num_loss_tokens=max(1, int(batch.loss_mask.sum())),
        num_loss_completions=max(1, batch.num_loss_completions),
        max_tokens=config.sampling.max_tokens,
    )
    return batch.token_advantages().abs() * shares


def _loss_metrics(steps: Sequence[OptimizerStep]) -> Metrics:
    count = max(1, len(steps))
    terms = sum((s.terms for s in steps), Terms())
    return {
        "loss": terms.total / count,
        "loss/policy": terms.policy / count,
        "loss/kl": terms.kl / count,
        "loss/entropy": terms.entropy / count,
    }


def _optimizer_metrics(outcomes: Sequence[Outcome], rate: float) -> Metrics:
    """Norms are the largest of the update's optimizer steps, NaN if one was discarded, 0 if there was no gradient."""
    return {
        "optimizer/grad_norm": _largest([math.nan if o.discarded else o.grad_norm for o in outcomes]),
        "optimizer/grad_norm_clipped": _largest([o.grad_norm_clipped for o in outcomes]),
        "optimizer/update_norm": _largest([o.update_norm for o in outcomes]),
        "optimizer/learning_rate": rate,
        "optimizer/steps": sum(o.taken for o in outcomes),
        "optimizer/discarded_steps": sum(o.discarded for o in outcomes),
    }


def _largest(values: Sequence[float]) -> float:
    if any(math.isnan(v) for v in values):
        return math.nan
    return max(values, default=0.0)


def _batch_metrics(batch: Batch) -> Metrics:
    scored = batch.rewards.isfinite()
    advantages = batch.advantages[scored]
    trained = batch.staleness[batch.loss_mask].float()
    metrics = {"rollout/unscored_fraction": _mean(batch.rollout_logprobs.isnan().float())}
    if len(advantages):
        metrics |= {
            "advantage/abs_mean": float(advantages.abs().mean()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
        }
    if len(trained):
        metrics |= {"staleness/mean": float(trained.mean()), "staleness/max": float(trained.max())}
    return metrics


def importance_metrics(record: TokenRecord, completion_of_token: Int[Tensor, " seen"], num_completions: int) -> Metrics:
    """pi_old / mu of the scored tokens of one epoch, before any truncation or mask, whatever the correction.

    `completion_of_token` belongs to the tokens of the record.
    """
    scored = ~record.log_ratio.isnan()
    log_ratio = record.log_ratio[scored].double()
    if not len(log_ratio):
        return {"importance/tokens": 0.0}
    ratio = log_ratio.clamp(-60, 60).exp()
    owner = completion_of_token[scored]
    sums = segment_sum(log_ratio, owner, num_completions)
    sequence = sums[torch.bincount(owner, minlength=num_completions) > 0].clamp(-60, 60).exp()
    return {
        "importance/tokens": float(len(ratio)),
        "importance/ratio_mean": float(ratio.mean()),
        "importance/ratio_min": float(ratio.min()),
        "importance/ratio_max": float(ratio.max()),
        "importance/ratio_std": float(ratio.std(correction=0)),
        "importance/sequence_ratio_mean": float(sequence.mean()),
        "importance/sequence_ratio_min": float(sequence.min()),
        "importance/sequence_ratio_max": float(sequence.max()),
        "importance/log_ratio_mean": float(log_ratio.mean()),
        "importance/log_ratio_abs_mean": float(log_ratio.abs().mean()),
        "importance/log_ratio_abs_max": float(log_ratio.abs().max()),
        "importance/kl_k1": float(-log_ratio.mean()),
        "importance/kl_k3": _mean(kl_divergence(torch.zeros_like(log_ratio), log_ratio, "k3")),
        "importance/ess": float(effective_sample_size(ratio)),
        "importance/masked_fraction": _mean(record.masked[scored].float()),
        "importance/truncated_fraction": _mean(record.truncated[scored].float()),
        "importance/weight_mean": _mean(record.weights[scored]),
    }


def age_metrics(record: TokenRecord, ages: Int[Tensor, " seen"]) -> Metrics:
    """pi_old / mu of the scored tokens of one epoch by their age, that is their staleness; the oldest ages together."""
    metrics: Metrics = {}
    scored = ~record.log_ratio.isnan()
    for age in range(OLDEST_AGE + 1):
        here = scored & (ages == age if age < OLDEST_AGE else ages >= age)
        log_ratio = record.log_ratio[here].double()
        if len(log_ratio):
            name = f"staleness/age_{age}" + ("_or_more" if age == OLDEST_AGE else "")
            metrics |= {
                f"{name}/tokens": float(len(log_ratio)),
                f"{name}/log_ratio_abs_mean": float(log_ratio.abs().mean()),
                f"{name}/ess": float(effective_sample_size(log_ratio.clamp(-60, 60).exp())),
                f"{name}/weight_mean": _mean(record.weights[here]),
            }
    return metrics


def policy_metrics(records: Sequence[TokenRecord], beta: float) -> Metrics:
    """pi_theta / pi_old over the trained tokens of all optimizer steps, of the first, where it must be 1, and the last."""
    every, first = TokenRecord.concatenate(records), records[0]
    trained, ratio = every.trained, _policy_ratio(every)
    last_ratio = _policy_ratio(records[-1])
    metrics = {
        "policy/tokens": float(trained.sum()),
        "policy/entropy": _mean(every.entropies),
        "policy/clip_fraction": _mean(every.clipped[trained].float()),
        "policy/kl_old": _mean(_kl_old(every)[trained]),
        "policy/first_kl_old": _mean(_kl_old(first)[first.trained]),
        "policy/first_clip_fraction": _mean(first.clipped[first.trained].float()),
    }
    if len(ratio):
        metrics |= {
            "policy/ratio_mean": _mean(last_ratio),
            "policy/ratio_min": float(ratio.min()),
            "policy/ratio_max": float(ratio.max()),
        }
    if len(first_ratio := _policy_ratio(first)):
        metrics["policy/first_ratio_error"] = float((first_ratio - 1).abs().max())
    if beta > 0:
        for estimator in ("k1", "k3"):
            kl = kl_divergence(every.logprobs, every.ref_logprobs, estimator)
            metrics[f"kl/{estimator}"] = _mean(kl[trained])
    return metrics


def _policy_ratio(record: TokenRecord) -> Float[Tensor, " trained"]:
    return (record.logprobs - record.old_logprobs)[record.trained].clamp(-20, 20).exp()


def _kl_old(record: TokenRecord) -> Float[Tensor, " token"]:
    """KL(old || policy) of tokens drawn from old: k3 with r = policy / old."""
    return kl_divergence(record.old_logprobs, record.logprobs, "k3")


def _blackbox(batch: Batch, steps: Sequence[OptimizerStep]) -> dict[str, Tensor]:
    """The step at token level. Tensors named `seen_...` have one entry per forwarded token and optimizer step.

    `lost_at` is by completion the place in LEDGER_STAGES, or -1; `step_...` are by optimizer step with a gradient.
    """
    tensors = {
        "token_ids": batch.token_ids,
        "completion_of_token": batch.completion_of_token,
        "rollout_logprobs": batch.rollout_logprobs,
        "staleness": batch.staleness,
        "loss_mask": batch.loss_mask,
        "group_of_completion": batch.group_of_completion,
        "rewards": batch.rewards,
        "advantages": batch.advantages,
        "lost_at": torch.tensor([-1 if lost is None else LEDGER_STAGES.index(lost) for lost in batch.lost_at]),
        "prompt_ids": torch.cat(batch.prompt_ids),
        "group_of_prompt_token": torch.repeat_interleave(
            torch.arange(batch.num_groups), torch.tensor([len(p) for p in batch.prompt_ids])
        ),
    }
    taken = [(place, s.record, s.outcome) for place, s in enumerate(steps) if s.record and s.outcome]
    if taken:
        every = TokenRecord.concatenate([record for _, record, _ in taken])
        tensors |= {f"seen_{name}": getattr(every, name) for name in TokenRecord.__dataclass_fields__}
        places = torch.tensor([place for place, _, _ in taken])
        lengths = torch.tensor([len(record.tokens) for _, record, _ in taken])
        tensors["seen_optimizer_step"] = torch.repeat_interleave(places, lengths)
        tensors["step_optimizer_step"] = places
        for name in Outcome.__dataclass_fields__:
            values = [float(getattr(outcome, name)) for _, _, outcome in taken]
            tensors[f"step_{name}"] = torch.tensor(values, dtype=torch.float64)
    return tensors


def _mean(values: Tensor) -> float:
    """NaN for no values: nothing measured is not zero."""
    return float(values.double().mean()) if len(values) else math.nan


def peak_memory() -> float:
    """Bytes: the accelerator's peak allocation, or the process's peak resident set."""
    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated())
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(kibibytes if sys.platform == "darwin" else kibibytes * 1024)
