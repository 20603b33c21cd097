import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    KL,
)
from leadline.doctor.view import View


class PaddingSideWrong(Rule):
    """Padding on the wrong side changes what policy or reference see.

    ## Symptom
    The KL is not 0 before the first update and depends on how much padding a batch has; it vanishes with batches of one.

    ## Cause
    Left padding with positions counted from the left, or a mask that does not match the side; encoder-decoder models mix both.

    ## Fix
    Pad prompts on the left and completions on the right, pass the attention mask and position ids to both models, or do not
    pad at all.

    ## References
    huggingface/trl issue 235 (T5: the real defect was the padding side). A KL above 0.01 at the first row with padding in play.
    """

    id = "LL414"
    name = "padding-side-wrong"
    severity = "error"
    explains = ("negative-kl-sampling-mismatch", "reference-model-mismatch")
    confirm = "Compute the first KL with a batch of one."
    sick = (
        RunLog.from_columns({"kl/k3": [0.2, 0.25, 0.3]}, {"raw": {"padding_side": "right"}}),
        RunLog([{"step": 1, "kl_batch_1": 0.0, "kl_batch_8_padded": 0.3}]),
    )
    healthy = (
        RunLog.from_columns({"kl/k3": [0.0, 0.01, 0.02]}, {"raw": {"padding_side": "right"}}),
        RunLog.from_columns({"kl/k3": [0.2, 0.25, 0.3]}, {"raw": {"padding_side": "left"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = probe.above(
            run,
            r"(kl|diff|error|gap).*pad|pad.*(kl|diff|error|gap)",
            0.01,
            "{name} is {value}: padding changes the result.",
        )
        kl = run.first_of(*KL).finite
        for name, size in run.measured(r"batch|padd|pad (len|tokens|amount)"):
            steps, amount, drift = paired(size, kl)
            alone, padded = np.abs(drift[amount <= 1]), np.abs(drift[amount > 1])
            if (
                len(steps) > 1
                and len(alone)
                and len(padded)
                and alone.max() < 0.1 * padded.max()
                and padded.max() > 0.01
            ):
                note = f"The KL is {number(float(alone.max()))} at a {name} of 1 or less and {number(float(padded.max()))} above."
                found.append(run.fact(size, float(amount.max()), 1.0, note))
        said = run.says(r"padding.?side\W*= right|right.?pad|pad.*(wrong|mixed|mismatch)|encoder.?decoder|\bt5\b")
        if said and len(kl) and abs(kl.first) > 0.01:
            found.append(run.fact(kl, kl.first, 0.0, f"The KL is {{value}} at the first row ({said})."))
        return found

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(r"padding_side\W*= right")
        if said and not run.has(*KL):
            return [Evidence("padding_side", 0, 1.0, 0.0, f"Prompts are padded on the right ({said}).", "weak")]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        kl = run.first_of(*KL).finite
        if len(kl) and abs(kl.first) < 1e-3 and run.first_of(*KL).step > 0 and not np.ptp(kl.values) > 10:
            return [run.fact(kl, kl.first, 0.0, "The KL starts at {value}: both models see the same.")]
        return []
