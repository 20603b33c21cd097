from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class BehaviourWeightMissing(Rule):
    """A decoupled loss is on, but the weight of the behaviour policy is left out.

    ## Symptom
    Asynchronous training with a decoupled objective that behaves like an uncorrected one.

    ## Cause
    The decoupled loss needs pi_proximal / mu as a factor; with no rejection sampling set, AReaL leaves it out of the loss.

    ## Fix
    Set `rejection_sampling` (or switch `use_decoupled_loss` off and recompute no proximal logprobs).

    ## References
    AReaL's source at 4aef98d (functional.py). A setting, so no threshold.
    """

    id = "LL325"
    name = "behaviour-weight-missing"
    severity = "warning"
    sick = (RunLog([], {"raw": {"actor": {"use_decoupled_loss": True, "rejection_sampling": None}}}),)
    healthy = (RunLog([], {"raw": {"actor": {"use_decoupled_loss": False, "rejection_sampling": None}}}),)

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        on = any(value is True for _, value in run.raw(r"use_decoupled_loss"))
        off = any(value in (None, "none", "") for _, value in run.raw(r"rejection_sampling"))
        if on and off:
            return [
                Evidence(
                    "use_decoupled_loss", 0, 1.0, 0.0, "The decoupled loss is on and rejection_sampling is not set."
                )
            ]
        return []
