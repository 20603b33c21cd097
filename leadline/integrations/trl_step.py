"""One optimizer step of TRL, measured: ledger, metrics, and the step at token level."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.integrations.trl_loss import LossSettings, gains, off_policy, shares
from leadline.ledger import Ledger, Pass, account_unforwarded
from leadline.objective.losses import entropy_threshold, high_entropy_mask
from leadline.objective.segments import segment_mean, segment_sum
from leadline.policy.step_loss import TokenRecord
from leadline.policy.update_metrics import importance_metrics, policy_metrics

REWARD, LENGTH, GROUP = "leadline_reward", "leadline_length", "leadline_group"
"""What the callback adds to TRL's tensors of a completion, so that TRL shuffles and splits it like its own."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One micro-batch: what went into the loss, and what the model said."""

    inputs: Mapping[str, Tensor]
    logprobs: Float[Tensor, "completion position"]
    entropies: Float[Tensor, "completion position"]


@dataclass(frozen=True, slots=True)
class Flat:
    """The sampled tokens of some completions, one after another. On the CPU."""

    token_ids: Int[Tensor, " token"]
    completion_of_token: Int[Tensor, " token"]
    rollout_logprobs: Float[Tensor, " token"]
    """NaN = unscored."""
    loss_mask: Bool[Tensor, " token"]
    advantages: Float[Tensor, " completion"]
    rewards: Float[Tensor, " completion"]
    group_of_completion: Int[Tensor, " completion"]
    shares: Float[Tensor, " token"]
    """Of the loss, had the token been in the loss mask."""
    record: TokenRecord
    """Of the loss tokens."""

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """The same tokens and completions, counted through."""
        tokens = [0, *torch.tensor([len(part.token_ids) for part in parts]).cumsum(0).tolist()]
        completions = [0, *torch.tensor([len(part.advantages) for part in parts]).cumsum(0).tolist()]
        records = [
            TokenRecord(
                **{f.name: getattr(part.record, f.name) for f in fields(TokenRecord) if f.name != "tokens"},
                tokens=part.record.tokens + offset,
            )
            for part, offset in zip(parts, tokens[:-1], strict=True)
        ]
        owners = [part.completion_of_token + offset for part, offset in zip(parts, completions[:-1], strict=True)]
        plain = {"record", "completion_of_token"}
        return cls(
            **{f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls) if f.name not in plain},
            completion_of_token=torch.cat(owners),
            record=TokenRecord.concatenate(records),
        )


def flatten(seen: Seen, settings: LossSettings, accumulation: int) -> Flat:
    """The sampled tokens of a micro-batch: what TRL's loss did with each. Tokens of tools and padding are left out."""
    inputs = seen.inputs
    trained = inputs["completion_mask"].bool()
    place = torch.arange(trained.size(1), device=trained.device)
    sampled = place < inputs[LENGTH].unsqueeze(1)
    if "tool_mask" in inputs:
        tool = inputs["tool_mask"].bool()
        trained = trained & tool
        sampled = sampled & (tool | ~tool.any(1, keepdim=True))  # a truncated completion's mask was blanked as a whole
    owner, position = sampled.nonzero(as_tuple=True)
    ids = inputs["completion_ids"]

    def taken(name: str) -> Tensor:
        values = inputs.get(name)
        if values is None:
            return torch.full(owner.shape, math.nan)
        return values.detach().expand(ids.shape)[owner, position].float().cpu()

    everywhere = {
        "logprobs": seen.logprobs[owner, position].float().cpu(),
        "entropies": seen.entropies[owner, position].float().cpu(),
        "rollout_logprobs": taken("sampling_per_token_logps"),
        "ref_logprobs": taken("ref_per_token_logps"),
    }
    everywhere["old_logprobs"] = (
        taken("old_per_token_logps") if inputs.get("old_per_token_logps") is not None else everywhere["logprobs"]
    )
    ratio = inputs.get("importance_sampling_ratio")
    everywhere["weights"] = torch.ones(owner.shape) if ratio is None else taken("importance_sampling_ratio")
    owner, advantages = owner.cpu(), inputs["advantages"].detach().float().cpu()
    loss_mask = trained.cpu()[owner, position.cpu()]
    count = len(advantages)
    share = shares(
        settings,
        torch.ones_like(loss_mask),
        owner,
        count,
        segment_sum(loss_mask.float(), owner, count).long(),
        float(inputs["num_items_in_batch"]),
        accumulation,
    )
    return Flat(
        token_ids=ids[owner.to(ids.device), position].cpu(),
        completion_of_token=owner,
        rollout_logprobs=everywhere["rollout_logprobs"],
        loss_mask=loss_mask,
        advantages=advantages,
        rewards=inputs[REWARD].float().cpu(),
        group_of_completion=inputs[GROUP].cpu(),
        shares=share,
        record=_record(settings, everywhere, advantages, owner, loss_mask, share),
    )


def _record(
    settings: LossSettings,
    values: Mapping[str, Float[Tensor, " token"]],
    advantages: Float[Tensor, " completion"],
    owner: Int[Tensor, " token"],
    loss_mask: Bool[Tensor, " token"],
    share: Float[Tensor, " token"],
) -> TokenRecord:
    """What happened to the tokens of the loss mask."""
    tokens = loss_mask.nonzero().flatten()
    here = {name: value[tokens] for name, value in values.items()}
    owner, count = owner[tokens], len(advantages)
    everything = torch.ones_like(tokens, dtype=torch.bool)
    advantage = advantages[owner]
    log_ratio = here["old_logprobs"] - here["rollout_logprobs"]
    logprobs, old, weights = here["logprobs"], here["old_logprobs"], here["weights"]
    gain, clipped = gains(settings, logprobs, old, advantage, owner, count, weights)
    asked = not values["rollout_logprobs"].isnan().all()
    sampled_from = torch.where(here["rollout_logprobs"].isnan(), logprobs, here["rollout_logprobs"]) if asked else old
    dropped = off_policy(settings, logprobs, sampled_from, advantage, owner, count)
    if settings.loss_type == "vespo":
        weights = torch.ones_like(weights)  # it is inside the gain
    threshold = -math.inf
    if settings.kept_entropy < 1.0:
        threshold = float(entropy_threshold(here["entropies"], everything, 1 - settings.kept_entropy))
    return TokenRecord(
        tokens=tokens,
        logprobs=logprobs,
        old_logprobs=old,
        ref_logprobs=here["ref_logprobs"],
        entropies=here["entropies"],
        log_ratio=log_ratio,
        weights=torch.where(dropped, 0.0, weights),
        masked=(weights == 0) | dropped,
        truncated=_truncated(settings, log_ratio, owner, count, weights),
        clipped=clipped,
        gain=gain,
        trained=high_entropy_mask(here["entropies"], everything, threshold),
        shares=share[tokens],
    )


def _truncated(
    settings: LossSettings,
    log_ratio: Float[Tensor, " token"],
    owner: Int[Tensor, " token"],
    count: int,
    weights: Float[Tensor, " token"],
) -> Bool[Tensor, " token"]:
    """Where the weight as applied is neither 0 nor the ratio itself: a bound replaced it."""
    if not settings.importance_on:
        return torch.zeros_like(owner, dtype=torch.bool)
    log_weight = log_ratio.nan_to_num(nan=0.0)
    if settings.importance_level == "sequence":
        log_weight = segment_sum(log_weight, owner, count)[owner]
    return (weights > 0) & ~torch.isclose(log_weight.exp(), weights, rtol=1e-2)


def measure(step: Flat, settings: LossSettings, *, discarded: bool, first: bool) -> dict[str, float]:
    """Canonical metrics of an optimizer step of this process; `first`: the weights are those that the batch was scored with."""
    count = len(step.advantages)
    record = step.record
    row = account(step, discarded=discarded).metrics() | {"policy/tokens": 0.0, "policy/entropy": math.nan}
    if len(record.tokens):
        row |= importance_metrics(record, step.completion_of_token[record.tokens], count)
        row |= {
            name: value
            for name, value in policy_metrics([record], settings.beta).items()
            if first or not name.startswith("policy/first_")
        }
    advantages = step.advantages[step.rewards.isfinite()]
    if len(advantages):
        row |= {
            "advantage/abs_mean": float(advantages.abs().mean()),
            "advantage/max": float(advantages.max()),
            "advantage/min": float(advantages.min()),
        }
    if settings.importance_on:
        row["rollout/unscored_fraction"] = float(step.rollout_logprobs.isnan().float().mean())
    return row


def account(step: Flat, *, discarded: bool) -> Ledger:
    """The ledger of an optimizer step: each sampled token at one stage, see `leadline.ledger`."""
    ledger = Ledger(len(step.advantages))
    record, owner = step.record, step.completion_of_token
    lost_at = _lost_at(step)
    with_signal = torch.tensor([lost is None or lost == "truncated" for lost in lost_at])[owner]
    seen = step.loss_mask & with_signal
    mass = step.advantages.abs()[owner] * step.shares
    account_unforwarded(ledger, lost_at, owner, torch.where(mass.isfinite(), mass, 0.0), seen)
    here = seen[record.tokens]
    ledger.add_pass(
        Pass(
            completion_of_token=owner[record.tokens[here]],
            mass=mass[record.tokens[here]],
            kept=record.trained[here],
            weights=record.weights[here],
            masked=record.masked[here],
            gain=record.gain[here],
            discarded=discarded,
        ),
        share=1.0,
    )
    return ledger


def _lost_at(step: Flat) -> list[str | None]:
    """By completion, the stage before the loss at which it ended; None for one that the loss saw."""
    in_loss = segment_sum(step.loss_mask.float(), step.completion_of_token, len(step.advantages)) > 0
    columns = (step.rewards.isfinite(), step.advantages != 0, in_loss)
    return [
        "failed" if not scored else "no_signal" if not signal else None if loss else "truncated"
        for scored, signal, loss in zip(*(column.tolist() for column in columns), strict=True)
    ]


def blackbox(step: Flat) -> dict[str, Tensor]:
    """The step at token level, in the names of leadline's own black boxes. `seen_...` = one entry per loss token."""
    left_out = {"record", "shares"}
    if step.rollout_logprobs.isnan().all():
        left_out.add("rollout_logprobs")  # nobody asked the sampler, which is no fault
    plain = {f.name: getattr(step, f.name) for f in fields(Flat) if f.name not in left_out}
    return plain | {f"seen_{f.name}": getattr(step.record, f.name) for f in fields(TokenRecord)}


def packed_blackbox(parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Of the asynchronous trainer's packed batches, each (sampler's logprobs, advantages) of the trained tokens."""
    names = ("sampled_logprobs", "token_advantages")
    return {
        name: torch.cat([part[i].detach().float().cpu().flatten() for part in parts]) for i, name in enumerate(names)
    }


def packed_metrics(parts: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Metrics of the same; empty if nothing is trained."""
    logprobs, advantages = packed_blackbox(parts).values()
    if not len(advantages):
        return {}
    return {
        "rollout/unscored_fraction": float(logprobs.isnan().float().mean()),
        "advantage/abs_mean": float(advantages.abs().mean()),
        "advantage/max": float(advantages.max()),
        "advantage/min": float(advantages.min()),
    }


def reward_metrics(
    rewards: Float[Tensor, " completion"], advantages: Float[Tensor, " completion"], group_size: int
) -> dict[str, float]:
    """Of a whole generation batch: what TRL does not log. `rewards`: all processes'; `advantages`: this one's."""
    row = {
        "rollout/unrewarded_fraction": float(rewards.isnan().float().mean()),
        "rollout/failed_fraction": float(rewards.isinf().float().mean()),
    }
    scored = rewards[~rewards.isnan()]
    if len(scored):
        row |= {"reward/max": float(scored.max()), "reward/min": float(scored.min())}
    if len(advantages) % group_size == 0:
        row["rollout/zero_signal_fraction"] = float((advantages.view(-1, group_size) == 0).all(1).float().mean())
    group = torch.arange(len(rewards)) // group_size
    finite = rewards.isfinite()
    groups = len(rewards) // group_size
    mean = segment_mean(rewards, group, groups, finite)
    square = segment_mean((rewards - mean[group]).square(), group, groups, finite)
    whole = segment_sum(finite.float(), group, groups) > 1
    if whole.any():
        row["reward/group_std"] = float(square[whole].sqrt().mean())
    return row
