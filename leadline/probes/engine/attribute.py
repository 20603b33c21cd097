"""From drawn tokens and the policy to a cause: cheap hypotheses first, other forward passes only if none settles it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from leadline.probes.engine.causes import Hypothesis, by_alignment, by_scale
from leadline.probes.engine.drawn import Drawn
from leadline.probes.engine.fingerprints import Mark, marks
from leadline.probes.engine.gap import Gap, measure_gap
from leadline.probes.engine.judge import FLOAT32_FLOOR, Fit, Rounding, Verdict, fit, judge, ranked, settled
from leadline.probes.engine.readings import Reading, calibration, readings
from leadline.probes.engine.scoring import rows_of, score, score_and_keep
from leadline.probes.engine.variants import (
    Holding,
    Variant,
    by_adapter,
    by_architecture,
    by_prompt,
    by_rounding,
    by_weights,
    in_dtype,
)
from leadline.settings.rollout import Sampling

TRIED_TOKENS = 192
"""A hypothesis that needs a forward pass of its own is judged on so many tokens."""
ROUNDING_TOKENS = 128
HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class PolicyModel:
    """The model that trains, in float32, and what is known about it."""

    model: Any
    tokenizer: Any
    sampling: Sampling
    dtypes: tuple[str, ...] = ("float32",)
    """What trainer and engine are known to compute in."""
    others: tuple[Holding, ...] = ()
    """Weights that the engine may hold instead."""
    base: Mapping[str, Tensor] | None = None
    """Where an adapter is merged into the model: the weights below it."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    """Weights that could not be loaded, and why."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """What the probe found."""

    gap: Gap
    trained: Gap | None
    """The gap to the policy in the dtype of training, where that is not float32."""
    rounding: Rounding
    fits: tuple[Fit, ...]
    """Best first."""
    verdict: Verdict
    marks: tuple[Mark, ...]
    not_checked: tuple[str, ...]
    youngest: float | None = None
    """Mean |Delta| of the tokens that the youngest weights drew, where ages are known and differ."""


def attribute(drawn: Drawn, policy: PolicyModel) -> Attribution:
    """The cause of the gap between the engine's logprobs and the policy's on the same tokens."""
    trainer, entropies, kept = score_and_keep(drawn, rows_of(policy.model), policy.sampling)
    gap = measure_gap(drawn.engine, trainer, drawn.owner, drawn.positions, entropies)
    rounding = _rounding(drawn, policy, trainer, gap)
    fits: list[Fit] = []
    failed: list[str] = []
    if gap.mean_abs > FLOAT32_FLOOR:
        found = readings(policy.sampling, kept, policy.generation_config)
        fits = _cheap(drawn, policy, trainer, entropies, found)
        if not settled(fits, rounding):  # not even where the gap is no larger than rounding: it may hide a fault
            also = [reading for reading in found if not reading.fitted]
            more, failed = _costly(drawn, policy, trainer, rounding, also)
            fits += more
    return Attribution(
        gap,
        _in_training_dtype(drawn, policy, entropies),
        rounding,
        tuple(ranked(fits)),
        judge(gap, fits, rounding, experts=has_experts(policy.model)),
        tuple(marks(gap, drawn, trainer)),
        (*_not_checked(policy), *failed),
    )


def has_experts(model: Any) -> bool:
    """Whether it is a mixture of experts."""
    return any(".experts." in name or name.endswith(".experts") for name, _ in model.named_modules())


def _rounding(drawn: Drawn, policy: PolicyModel, trainer: Tensor, gap: Gap) -> Rounding:
    """What half precision would do here; not measured where the gap is below float32's own floor."""
    accepted = next((name for name in HALF if name in policy.dtypes), "float32")
    if gap.mean_abs <= FLOAT32_FLOOR:
        return Rounding({}, accepted)
    part = drawn.first(ROUNDING_TOKENS)
    sizes = {}
    for name, dtype in HALF.items():
        [rounded] = score(part, rows_of(in_dtype(policy.model, dtype)), [policy.sampling])
        sizes[name] = float((rounded - trainer[: len(rounded)]).abs().nanmean())
    return Rounding(sizes, accepted)


def _cheap(
    drawn: Drawn, policy: PolicyModel, trainer: Tensor, entropies: Tensor, found: Sequence[Reading]
) -> list[Fit]:
    """Whatever needs no more than the policy's own logits."""
    predicted = score(drawn, rows_of(policy.model), [reading.sampling for reading in found])
    hypotheses = [
        *by_alignment(trainer, drawn.owner),
        *by_scale(drawn.engine, trainer),
        *(
            Hypothesis(reading.cause, reading.detail, values, reading.fitted)
            for reading, values in zip(found, predicted, strict=True)
        ),
    ]
    fits = _fits(hypotheses, drawn, trainer)
    return _by_what_was_drawn(fits, drawn, policy, trainer, entropies)


def _by_what_was_drawn(
    fits: list[Fit], drawn: Drawn, policy: PolicyModel, trainer: Tensor, entropies: Tensor
) -> list[Fit]:
    """Raw logprobs and another temperature give the same numbers. The tokens themselves tell: they follow what was drawn
    from, whose mean log p is minus its entropy. Where they were drawn as asked, a temperature that was fitted to the
    reported numbers is no cause, and where they were not, raw is none."""
    asked = policy.sampling
    best = ranked(fits)[0]
    if best.cause not in ("temperature", "raw_logprobs") or asked.temperature in (0, 1):
        return fits
    plain, plain_entropies, _ = score_and_keep(
        drawn, rows_of(policy.model), asked.model_copy(update={"temperature": 1.0})
    )
    drawn_as_asked = calibration(trainer, entropies) <= calibration(plain, plain_entropies)
    wrong = "temperature" if drawn_as_asked else "raw_logprobs"
    return [one for one in fits if one.cause != wrong or one.left < 0.5 * best.left]


def _costly(
    drawn: Drawn, policy: PolicyModel, trainer: Tensor, rounding: Rounding, also: Sequence[Reading]
) -> tuple[list[Fit], list[str]]:
    """Whatever needs a forward pass of its own, one kind after the other until one settles it; then two causes at once.

    The fits, and what could not be tried.
    """
    part = drawn.first(TRIED_TOKENS)
    trainer = trainer[: len(part.engine)]
    fits: list[Fit] = []
    pairs: list[Fit] = []
    failed: list[str] = []
    for variants in _kinds(policy, part):
        for variant in variants:
            try:
                single, *both = _hypotheses(part, policy.sampling, variant, also)
            except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
                failed.append(f"{variant.detail}: {' '.join(str(error).split())[:120]}")
                continue
            fits += _fits([single], part, trainer)
            pairs += _fits(both, part, trainer)
        if settled(fits, rounding):
            return fits, failed
    return fits + pairs, failed


def _hypotheses(drawn: Drawn, asked: Sampling, variant: Variant, also: Sequence[Reading]) -> list[Hypothesis]:
    """The variant alone, and with each of the readings besides."""
    first, *rest = score(drawn, variant.make(), [asked, *(reading.sampling for reading in also)])
    return [
        Hypothesis(variant.cause, variant.detail, first),
        *(
            Hypothesis(variant.cause, f"{variant.detail}; {reading.detail}", values, second=reading.cause)
            for reading, values in zip(also, rest, strict=True)
        ),
    ]


def _fits(hypotheses: Sequence[Hypothesis], drawn: Drawn, trainer: Tensor) -> list[Fit]:
    return [one for hypothesis in hypotheses if (one := fit(hypothesis, drawn.engine, trainer))]


def _kinds(policy: PolicyModel, drawn: Drawn) -> Iterator[Iterator[Variant]]:
    model = policy.model
    yield by_prompt(model, policy.tokenizer, drawn.prompts)
    yield by_adapter(model, policy.base)
    yield by_weights(model, policy.others)
    yield by_architecture(model)
    yield by_rounding(model)


def _in_training_dtype(drawn: Drawn, policy: PolicyModel, entropies: Tensor) -> Gap | None:
    """The gap as training sees it, where it does not score in float32."""
    if policy.dtypes[0] == "float32":
        return None
    model = in_dtype(policy.model, HALF[policy.dtypes[0]])
    [scored] = score(drawn, rows_of(model), [policy.sampling])
    return measure_gap(drawn.engine, scored, drawn.owner, drawn.positions, entropies)


def _not_checked(policy: PolicyModel) -> Iterator[str]:
    yield from policy.unread
    if not policy.others:
        yield (
            "stale weights, a stale head, stale experts and a stale prefix cache: name weights that the engine may hold "
            "with --older DIR"
        )
    if policy.base is None:
        yield "an adapter that is missing or applied twice: give it with --adapter DIR, and the model below it"
    if policy.sampling.max_tokens < 512:
        yield f"what shows only beyond {policy.sampling.max_tokens} tokens of completion: raise --tokens"


def without_model(drawn: Drawn) -> Attribution:
    """What the two columns of numbers tell by themselves: fewer causes, and most only by their marks."""
    assert drawn.trainer is not None
    trainer = drawn.trainer
    gap = measure_gap(drawn.engine, trainer, drawn.owner, drawn.positions, drawn.entropies)
    hypotheses = [*by_alignment(trainer, drawn.owner), *by_scale(drawn.engine, trainer)]
    fits = _fits(hypotheses, drawn, trainer)
    found = tuple(marks(gap, drawn, trainer))
    verdict = judge(gap, fits, Rounding(), experts=False)
    if verdict.cause == "unexplained" and found:
        verdict = replace(verdict, cause=found[0].cause, detail=found[0].reason, explained=torch.nan)
    not_checked = ("every cause that shows only in the policy's logits: give --model, and a source with token ids",)
    youngest = _youngest(drawn, trainer)
    return Attribution(gap, None, Rounding(), tuple(ranked(fits)), verdict, found, not_checked, youngest)


def _youngest(drawn: Drawn, trainer: Tensor) -> float | None:
    if drawn.ages is None:
        return None
    size, known = (trainer - drawn.engine).abs(), drawn.ages.isfinite()
    low, high = drawn.ages[known].min(), drawn.ages[known].max()
    return float(size[drawn.ages == low].nanmean()) if low < high else None
