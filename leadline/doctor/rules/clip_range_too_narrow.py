from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    inner_updates,
)
from leadline.doctor.signals import (
    CLIP,
)
from leadline.doctor.view import View


class ClipRangeTooNarrow(Rule):
    """The clip range is so narrow that almost every token is clipped.

    ## Symptom
    The clip fraction is above 0.4 step after step while KL and gradient norm are small: the policy hardly moves.

    ## Cause
    An epsilon of 0.01 and less (a typo, or one meant for sequence ratios) cuts nearly every ratio after the first inner
    update.

    ## Fix
    Set `objective.clip_low` (and `objective.clip_high`) to 0.2; 3e-4 suits sequence-level ratios (GSPO) only.

    ## References
    Common Pitfalls in RL Post-Training, "clip range too narrow". Yu et al. 2025 use 0.2 and 0.28, GSPO (arXiv 2507.18071) 3e-4 at the sequence level. 0.4 over three
    steps is leadline's choice.
    """

    id = "LL428"
    name = "clip-range-too-narrow"
    severity = "error"
    sick = (
        RunLog.from_columns(
            {"policy/clip_fraction": [0.6, 0.7, 0.65], "kl/k3": [1e-4] * 3}, {"objective": {"clip_low": 0.0002}}
        ),
        RunLog([], {"objective": {"clip_low": 0.001}}),
    )
    healthy = (
        RunLog.from_columns({"policy/clip_fraction": [0.05, 0.02, 0.1]}, {"objective": {"clip_low": 0.2}}),
        RunLog([], {"objective": {"clip_low": 0.0003, "loss": "gspo"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        epsilon = run.number("objective.clip_low")
        note = "{percent} of the tokens were clipped {when}"
        note += f" with a clip of {epsilon:g}." if epsilon == epsilon else "."
        narrow = epsilon < 0.05
        return run.lasting(run.first_of(*CLIP), lambda v: v > 0.4, 0.4, note, strength="proof" if narrow else "strong")

    def lint(self, run: View) -> list[Evidence]:
        sequence = run.setting("objective.loss") == "gspo" or run.says(
            r"gspo|importance_sampling_level\W*= sequence|geo_mean|gmpo"
        )
        if not run.number("objective.clip_low") < 0.02 or sequence:
            return []
        inner = inner_updates(run)
        return [
            run.chosen(
                "objective.clip_low",
                0.02,
                "{option} is {value}: nearly every ratio will be clipped.",
                "weak" if inner == 1 else "strong",
            )
        ]

    def forbids(self, run: View) -> list[Evidence]:
        clip = run.first_of(*CLIP).finite
        if len(clip) and clip.high < 0.3:
            return [run.fact(clip, clip.high, 0.4, "At most {percent} of the tokens are clipped.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        if run.number("objective.clip_low") >= 0.1:
            return run.worded(
                "The clip is wide enough: lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`, so that the policy moves less within a batch."
            )
        return super().fix(run, evidence)
