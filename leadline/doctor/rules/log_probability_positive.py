from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class LogProbabilityPositive(Rule):
    """A mean log-probability is above 0, which no distribution allows.

    ## Symptom
    A logged mean of logprobs is positive.

    ## Cause
    A sign error in log space (log-softmax reversed, a negated loss logged as a logprob), a wrong axis of `gather`, or logits
    taken for logprobs.

    ## Fix
    Compare with `log_softmax(logits).gather(-1, token)` on two tokens by hand; assert that logprobs are at most 0.

    ## References
    Common Pitfalls in RL Post-Training, "sign errors in log-space" and "incorrect gathering". The bound 0 is exact, up to 1e-6 for rounding. A wrong axis
    that gives negative numbers shows only against a second implementation.
    """

    id = "LL434"
    name = "log-probability-positive"
    severity = "error"
    needs = (("policy/logprob_mean", "policy/old_logprob_mean", "kl/ref_logprob_mean"),)
    explains = ("negative-kl-sampling-mismatch",)
    sick = (RunLog.from_columns({"policy/logprob_mean": [0.4, 0.5, 0.4]}),)
    healthy = (RunLog.from_columns({"policy/logprob_mean": [-0.4, -0.5, -0.4]}),)

    def examine(self, run: View) -> list[Evidence]:
        names = ("policy/logprob_mean", "policy/old_logprob_mean", "kl/ref_logprob_mean")
        found = []
        for name in names:
            note = f"{name} was {{value}} {{when}}: a log-probability is at most 0."
            found += run.events(name, lambda v: v > 1e-6, 0.0, note, "proof")
        return sorted(found, key=lambda item: item.step)
