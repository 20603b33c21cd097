from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class EngineStartsWithOtherWeights(Rule):
    """At the start (or after a resume) the engine does not have the trainer's weights yet.

    ## Symptom
    The first rows show a mismatch many times larger than all later ones.

    ## Cause
    After a resume the engine starts from the base checkpoint and gets the trained weights only with the first sync.

    ## Fix
    Push the weights before the first rollout. Discard the first batches after a resume until then.

    ## References
    THUDM/slime issue 1695. Five times the later median and above 0.05 nats: leadline's choice.
    """

    id = "LL320"
    name = "engine-starts-with-other-weights"
    severity = "warning"
    needs = (GAP,)
    sick = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.6, 0.5, 0.012, 0.013, 0.011, 0.012, 0.012, 0.012]}),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.013, 0.012, 0.012, 0.013, 0.011, 0.012, 0.012, 0.012]}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite
        if run.live or len(gap) < 6:
            return []
        rest = gap.tail(len(gap) - 3).median
        if gap.first < 0.05 or gap.first < 5 * rest:
            return []
        first = int(gap.steps[0])
        note = f"Engine and trainer differed by {number(gap.first)} nats at step {first} and by {number(rest)} later."
        return [Evidence(gap.name, first, gap.first, 5 * rest, note)]
