from leadline.doctor.rule import PERSISTENT, Evidence, Rule, Strength
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    KL,
)
from leadline.doctor.view import View


class ReferenceModelMismatch(Rule):
    """The reference is not the model that training started from.

    ## Symptom
    The KL is large (0.1 and more) at the first row, before any update, and stays offset.

    ## Cause
    The reference is the base instead of the fine-tuned start, lacks an adapter, has another dtype or template, or a resumed
    run compares with a reference that was never updated.

    ## Fix
    Load policy and reference from the same checkpoint (with the SFT adapter merged), and check that the first KL is 0.

    ## References
    Field record: offsets of padding or dtype are tiny, those of an SFT adapter 0.1 and up. 0.05 at the first row is leadline's limit.
    """

    id = "LL417"
    name = "reference-model-mismatch"
    severity = "error"
    needs = ((*KL, "kl/sequence_sum"),)
    confirm = "Compute the KL of the untrained policy: it must be 0."
    sick = (RunLog.from_columns({"kl/k3": [0.4, 0.41, 0.43, 0.42]}),)
    healthy = (
        RunLog.from_columns({"kl/k3": [1e-4, 0.1, 0.4, 0.5]}),
        RunLog([{"step": 400 + i, "kl/k3": 0.4} for i in range(4)]),
    )

    def examine(self, run: View) -> list[Evidence]:
        kl = run.first_of(*KL, "kl/sequence_sum").finite
        summed = kl.name == "kl/sequence_sum"  # over a completion, so the same offset is a hundred times as large
        if not len(kl) or kl.steps[0] > 5 or not (2.0 if summed else 0.05) < abs(kl.first) < (5000 if summed else 50):
            return []
        if len(kl) == 1 and run.last_step <= 1 and kl.first < 0.1:
            return []  # a single row need not be the first of its run
        constant = len(kl) < PERSISTENT or kl.head(5).low > 0.5 * kl.first
        if not constant or kl.head(3).high > 5 * kl.first:
            return []
        kind: Strength = "strong" if kl.steps[0] <= 1 and len(kl) >= PERSISTENT else "weak"
        note = f"The KL to the reference is {{value}} at step {int(kl.steps[0])} already, before the policy could move."
        return [run.fact(kl, kl.first, 0.0, note, kind, int(kl.steps[0]))]

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"ref\w*.*(without|lacks|not).*(adapter|sft)|ref\w*\W*= .*(different|other|wrong|raw base)")
        return [Evidence("reference", 0, 1.0, 0.0, f"The reference is another model ({said}).", "weak")] if said else []

    def forbids(self, run: View) -> list[Evidence]:
        kl = run.first_of(*KL).finite
        if len(kl) and abs(kl.first) < 0.01:
            return [run.fact(kl, kl.first, 0.05, "The KL starts at {value}: policy and reference agree.")]
        return []
