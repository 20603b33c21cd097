import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    GRAD,
    cap,
)
from leadline.doctor.view import View


class EosFillMaskError(Rule):
    """Padding is filled with the end token and then counted and trained as text.

    ## Symptom
    Shortest, mean and longest completion of a batch are equal and below the limit, in every row; the loss is exactly 0
    with a gradient norm above 0.

    ## Cause
    After the first EOS, positions were filled with EOS instead of the pad id, and the mask only excludes the pad id: every
    row counts as full length. Equal lengths make the mean loss exactly zero and fake EOS tokens are trained.

    ## Fix
    Build the completion mask from the position of the first EOS (inclusive), never from token ids, and keep pad and EOS
    apart.

    ## References
    bingreeky/MemGen pull 33. Real batches always have a spread of lengths; three rows without one are no chance.
    """

    id = "LL206"
    name = "eos-fill-mask-error"
    severity = "error"
    needs = ("rollout/length_min", "rollout/length_max")
    explains = ("truncation-rate-high-unresolved",)
    sick = (
        RunLog.from_columns(
            {"rollout/length_min": [163.0, 240.0, 188.0], "rollout/length_max": [163.0, 240.0, 188.0]},
            {"sampling": {"max_tokens": 512}},
        ),
    )
    healthy = (
        RunLog.from_columns({"rollout/length_min": [78.0, 209.0, 50.0], "rollout/length_max": [246.0, 592.0, 163.0]}),
        RunLog.from_columns(
            {"rollout/length_min": [512.0] * 3, "rollout/length_max": [512.0] * 3}, {"sampling": {"max_tokens": 512}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        steps, shortest, longest = paired(run["rollout/length_min"], run["rollout/length_max"])
        limit, cut = cap(run), run["rollout/truncated_fraction"].finite
        equal = (shortest == longest) & (longest > 1)
        if np.isfinite(limit):
            equal &= longest < 0.99 * limit
        elif len(cut) and cut.median > 0.5:
            return []
        elif len(np.unique(longest)) < 2:
            return []  # always the same length: likelier an unknown limit
        if not len(steps) or equal.mean() < 0.8 or len(steps) < PERSISTENT:
            return []
        note = "Shortest and longest completion are both {value} tokens, and so in nearly every row."
        found = [run.fact(run["rollout/length_max"], float(longest[-1]), limit, note, since=int(steps[0]))]
        loss = run["loss"].finite
        if len(loss) and loss.high == loss.low == 0 and run.first_of(*GRAD).median > 1e-6:
            found.append(run.fact(loss, 0.0, 0.0, "The loss is exactly {value} with a gradient above 0."))
        return found

    def forbids(self, run: View) -> list[Evidence]:
        steps, shortest, longest = paired(run["rollout/length_min"], run["rollout/length_max"])
        if len(steps) and np.median(longest - shortest) > 1:
            spread = float(np.median(longest - shortest))
            return [
                run.fact(run["rollout/length_max"], spread, 0.0, "Lengths within a batch differ by {value} tokens.")
            ]
        return []
