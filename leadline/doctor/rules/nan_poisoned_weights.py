import math

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog


class NanPoisonedWeights(Rule):
    """A loss or gradient was not finite.

    ## Symptom
    `optimizer/grad_norm` is NaN or infinite, or `optimizer/discarded_steps` is above 0. In a trainer without a guard
    the weights are NaN from then on and completions become one repeated token.

    ## Cause
    Overflow in float16, an exploding ratio or KL on a token that one side finds impossible, a reward that is not a
    finite number, a division by a tiny std, or a bug in a custom loss. leadline discards such a step before the
    optimizer runs: the weights are as they were.

    ## Fix
    One discarded step in a long run does no harm. If it happens again, look at the rollouts that were kept in
    `blackbox/` for that step; train in bfloat16 or float32 rather than float16, and lower `optimizer.learning_rate`
    or `objective.importance_high` if ratio or KL rose just before.

    ## References
    modelscope/ms-swift issues 3136 and 3930, unslothai/unsloth-zoo pull 600. Not a threshold: a number is finite or not.
    """

    id = "LL402"
    name = "nan-poisoned-weights"
    severity = "error"
    needs = ("optimizer/grad_norm",)
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

    def examine(self, run: RunLog) -> list[Evidence]:
        discarded = dict(run.series("optimizer/discarded_steps"))
        found = [
            Evidence(
                "optimizer/discarded_steps",
                step,
                count,
                0.0,
                f"{count:.0f} optimizer step{'s' if count > 1 else ''} of step {step} had a loss or gradient that is "
                "not finite, and did not touch the weights.",
            )
            for step, count in discarded.items()
            if count > 0
        ]
        found += [
            Evidence("optimizer/grad_norm", step, value, math.inf, f"The gradient norm was {value} at step {step}.")
            for step, value in run.series("optimizer/grad_norm")
            if not math.isfinite(value) and step not in discarded
        ]
        return sorted(found, key=lambda item: item.step)
