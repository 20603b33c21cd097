import math
from collections.abc import Sequence

import numpy as np

from leadline.doctor import rollouts
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
)
from leadline.doctor.view import View


class NanPoisonedWeights(Rule):
    """A loss or gradient was not finite.

    ## Symptom
    The gradient norm (and KL) is NaN or infinite; a trainer that goes on has poisoned its weights: from then on the reward
    is at its minimum and every completion is one repeated token. The logged loss may still read 0.0.

    ## Cause
    Overflow in half precision, a ratio or KL that exploded, a NaN reward or logprob, or a division by 0 tokens. Some trainers
    replace a NaN loss by the running mean before they log it, so the curve stays clean. leadline discards such a step before
    it reaches the weights.

    ## Fix
    {advice} Look at what rose just before: KL or ratio (lower `optimizer.learning_rate` or `objective.importance_high`), an
    advantage or reward, or nothing (precision: train in bfloat16 or float32).

    ## References
    modelscope/ms-swift issues 3136 and 3930, unslothai/unsloth-zoo pull 600, PrimeIntellect-ai/prime-rl issue 2084; measured on TRL 1.16 (loss 0.0,
    all weights NaN). Not a threshold: a number is finite or not.
    """

    id = "LL402"
    name = "nan-poisoned-weights"
    severity = "error"
    needs = (GRAD,)
    explains = (
        "dead-update",
        "no-update-grad-and-kl-exactly-zero",
        "reward-parse-mismatch",
        "zero-reward-variance-within-group",
        "truncation-rate-high-unresolved",
    )
    sick = (
        RunLog.from_columns({"optimizer/grad_norm": [0.4, math.nan, 0.5], "optimizer/discarded_steps": [0, 1, 0]}),
        RunLog.from_columns({"optimizer/grad_norm": [0.4, math.inf]}),
        RunLog.from_columns({"optimizer/grad_norm": [math.nan, math.nan]}),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [0.4, 0.0, 31.0], "optimizer/discarded_steps": [0, 0, 0]}),
        # no optimizer step was taken, so there is no gradient norm; nothing was discarded
        RunLog.from_columns({"optimizer/grad_norm": [0.4, math.nan], "optimizer/discarded_steps": [0, 0]}),
    )

    def examine(self, run: View) -> list[Evidence]:
        discarded = run["optimizer/discarded_steps"]
        found = []
        bad = discarded.where(discarded.values > 0).tail(100)
        for step, count in zip(bad.steps.tolist(), bad.values.tolist(), strict=True):
            plural = "s" if count > 1 else ""
            note = f"{count:.0f} optimizer step{plural} of step {step} had a loss or gradient that is not finite"
            note += ", and did not touch the weights."
            found.append(Evidence("optimizer/discarded_steps", step, count, 0.0, note))
        grad = run.first_of(*GRAD)
        grad = grad.where(~np.isin(grad.steps, discarded.steps))
        for item in run.events(
            grad, lambda v: ~np.isfinite(v), math.inf, "The gradient norm was {value} {when}.", "proof"
        ):
            found.append(item)
        loss = run["loss"]
        hidden = loss.where(np.isin(loss.steps, grad.steps[~np.isfinite(grad.values)]) & np.isfinite(loss.values))
        if len(hidden) and found:
            note = "The logged loss reads {value} there: a NaN loss was replaced before logging."
            found.append(run.fact(hidden, hidden.last, 0.0, note))
        return sorted(found, key=lambda item: item.step)

    def measure(self, run: View) -> list[Evidence]:
        note = "{percent} of {count} dumped completions are one character over and over."
        return rollouts.share(run, rollouts.one_character, 0.8, note)

    def forbids(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD)
        if len(grad) and np.isfinite(grad.values).all() and not run["optimizer/discarded_steps"].high > 0:
            return [run.fact(grad, grad.last, math.inf, f"All {len(grad)} gradient norms are finite (last {{value}}).")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        first = min(item.onset for item in evidence)
        advice = f"Go back to a checkpoint from before step {first}: later weights are lost."
        if run.has("optimizer/discarded_steps"):
            advice = "The weights are intact; one discarded step in a long run does no harm, and the rollouts are in `blackbox/`."
        return super().fix(run, evidence).format(advice=advice)
