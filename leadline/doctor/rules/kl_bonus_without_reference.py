from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class KlBonusWithoutReference(Rule):
    """A KL coefficient acts without a reference model and rewards unlikely tokens.

    ## Symptom
    Entropy rises for no reason; the reward contains a KL term although no reference is loaded.

    ## Cause
    Without a reference its logprobs are zeros, and the term becomes -coefficient x log pi: a bonus for tokens that the policy
    finds unlikely (AReaL's default coefficient is 0.1).

    ## Fix
    Set the coefficient to 0 (AReaL: `kl_ctl: 0`), or load a reference.

    ## References
    AReaL's source at 4aef98d (trainer/ppo/actor.py). A setting; the default matters because it is not 0.
    """

    id = "LL432"
    name = "kl-bonus-without-reference"
    severity = "error"
    explains = ("entropy-explosion",)
    sick = (RunLog([], {"raw": {"kl_ctl": 0.1, "ref": None}}),)
    healthy = (
        RunLog([], {"raw": {"kl_ctl": 0.0, "ref": None}}),
        RunLog([], {"raw": {"kl_ctl": 0.1, "ref": {"path": "base"}}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        coefficient = [(n, float(v)) for n, v in run.raw(r"kl_ctl$") if isinstance(v, int | float) and v > 0]
        reference = [v for n, v in run.raw(r"(^|[._])ref([._]|$)|reference") if v not in (None, "", "none", False)]
        if not coefficient or reference:
            return []
        name, value = coefficient[0]
        return [Evidence(name, 0, value, 0.0, f"{name} is {value:g} and no reference model is configured.")]
