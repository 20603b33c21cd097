import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    filters_support,
)
from leadline.doctor.view import View


class NegativeKlSamplingMismatch(Rule):
    """The KL estimate is systematically negative: samples do not come from the distribution that is scored.

    ## Symptom
    The KL (k1) is below 0 from the first steps on and stays there.

    ## Cause
    A KL cannot be negative; its k1 estimate is one only if tokens are drawn from the policy. top_k, top_p, a minimum length,
    a temperature that is not replayed, or padding on the wrong side break that, and training then rewards being far away.

    ## Fix
    Sample from the plain distribution: `sampling.top_p` 1, `sampling.top_k` 0, no minimum length, temperature as in the
    trainer. k3 cannot be negative, but it does not cure the mismatch.

    ## References
    huggingface/trl issues 235, 256 and 417, hiyouga/LLaMA-Factory issue 664. Below -0.05 in most rows: noise of small batches has both signs.
    """

    id = "LL413"
    name = "negative-kl-sampling-mismatch"
    severity = "error"
    needs = (("kl/k1", "kl/reference", "kl/sequence_sum"),)
    confirm = "Set top_k, top_p and every minimum length off: does the KL return to 0?"
    sick = (RunLog.from_columns({"kl/k1": [-0.3, -0.5, -0.8]}),)
    healthy = (RunLog.from_columns({"kl/k1": [0.01, -0.02, 0.03]}), RunLog.from_columns({"kl/k1": [0.3, -0.2, 0.1]}))
    limit = -0.05

    def examine(self, run: View) -> list[Evidence]:
        kl = run.first_of("kl/k1", "kl/reference", "kl/sequence_sum").finite
        if not len(kl) or np.mean(kl.values < self.limit) < 0.8:
            return []
        kind: Strength = (
            "strong"
            if len(kl) >= PERSISTENT or filters_support(run) or run.says(r"min_(new_)?(tokens|length)")
            else "weak"
        )
        return [
            run.fact(
                kl, kl.median, 0.0, "The KL is {value} on average: a KL cannot be negative.", kind, int(kl.steps[0])
            )
        ]

    def forbids(self, run: View) -> list[Evidence]:
        kl = run["kl/k3"].finite
        return [run.fact(kl, kl.median, 0.0, "The KL (k3) is {value}.")] if len(kl) and kl.low >= 0 else []
