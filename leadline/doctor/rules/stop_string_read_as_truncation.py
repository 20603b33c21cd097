from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    has_signal,
)
from leadline.doctor.view import View


class StopStringReadAsTruncation(Rule):
    """Completions that end with a stop string are counted as truncated.

    ## Symptom
    The truncated share is about 1 all run long, rewards are healthy, every completion parses, and stop strings are set.

    ## Cause
    The trainer counts a completion as ended only if its last token is an EOS it knows. A stop string or stop token is a
    normal end that it does not recognise.

    ## Fix
    Ignore the metric, or make the end a real token (`sampling.stop_token_ids` with an EOS of the tokenizer). Leave
    `objective.mask_truncated` off.

    ## References
    Measured on TRL 1.16 with `stop`: share 1.0; with truncation masking no parameter changed. The public zero-loss run (Madison) shows the same. A
    share above 0.9 with stop strings and healthy rewards: leadline's choice.
    """

    id = "LL214"
    name = "stop-string-read-as-truncation"
    severity = "warning"
    needs = ("rollout/truncated_fraction",)
    explains = ("truncation-rate-high-unresolved", "clipped-ratio-metric-wrong")
    sick = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [1.0] * 3, "reward/std": [0.4] * 3},
            {"raw": {"generation_kwargs": {"stop": ["</a>"]}}},
        ),
    )
    healthy = (
        RunLog.from_columns({"rollout/truncated_fraction": [1.0] * 3, "reward/std": [0.4] * 3}),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.1] * 3, "reward/std": [0.4] * 3}, {"raw": {"stop": ["</a>"]}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        stops = [value for _, value in run.raw(r"(^|[._])stop(_strings|_token_ids)?$") if value]
        if not stops and not run.setting("sampling.stop"):
            return []
        if run.framework == "leadline" and run.has("rollout/finish_length_fraction"):
            return []  # leadline's own share comes from the engine's finish reasons
        if not len(has_signal(run)):
            return []
        note = "{percent} count as truncated {when}, with stop strings set and rewards that vary."
        return run.lasting("rollout/truncated_fraction", lambda v: v > 0.9, 0.9, note)

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return run.worded(
            "Do not set `objective.mask_truncated`: every completion would be masked and the update be exactly 0."
        )
