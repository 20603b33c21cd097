import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series, paired
from leadline.doctor.signals import (
    cap,
)
from leadline.doctor.view import View


class ClippedRatioMetricWrong(Rule):
    """The truncated share contradicts the lengths: the metric is wrong, the training may be fine.

    ## Symptom
    The share is exactly 0 while completions fill the context window, or never 0 although nothing reaches the limit.

    ## Cause
    The metric compares with the padded width of the batch (the longest sample always counts as cut off) or with the
    response limit although the context window ended the completion; or a stop string is taken for no end at all.

    ## Fix
    Trust finish reasons and lengths, not this metric. Set `sampling.max_tokens` so that prompt and completion fit into
    the context together.

    ## References
    verl issues 7817 and 7823; AReaL's no_eos_ratios has the first defect by construction. The contradiction itself is the limit.
    """

    id = "LL208"
    name = "clipped-ratio-metric-wrong"
    severity = "warning"
    confirm = "Count the finish reasons that the engine reports."
    sick = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.0] * 3, "rollout/total_length_max": [8.0] * 3},
            {"raw": {"max_model_len": 8}},
        ),
        RunLog(
            [{"step": 1, "prompt_len": 2, "response_len": 6, "max_model_len": 8, "rollout/truncated_fraction": 0.0}]
        ),
        RunLog.from_columns(
            {
                "rollout/truncated_fraction": [1 / 64] * 6,
                "rollout/length_max": [500.0, 620.0, 444.0, 700.0, 650.0, 500.0],
            },
            {"sampling": {"max_tokens": 1024}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.0] * 6, "rollout/length_max": [500.0] * 6},
            {"sampling": {"max_tokens": 1024}},
        ),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [0.02] * 6, "rollout/length_max": [1024.0] * 6},
            {"sampling": {"max_tokens": 1024}},
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        cut, limit = run["rollout/truncated_fraction"].finite, cap(run)
        found = []
        if len(cut) and cut.high == 0:
            found += self._full_window(run, cut)
        steps, share, longest = paired(cut, run["rollout/length_max"])
        steps, share, longest = steps[share > 0], share[share > 0], longest[share > 0]  # the others show nothing
        short = longest < 0.95 * limit  # nowhere, if the limit is not known
        if len(steps) >= PERSISTENT and short.mean() > 0.8 and np.median(share) < 0.3:
            note = f"{{percent}} count as truncated though the longest completion is {number(float(longest.max()))} of {number(limit)}."
            found.append(run.fact(cut, float(np.median(share)), 0.0, note, since=int(steps[0])))
        return found

    def lint(self, run: View) -> list[Evidence]:
        if run.framework == "verl" and run.says(r"use_v1\W*= (true|1)") and not run.has("rollout/truncated_fraction"):
            return [
                Evidence("trainer.use_v1", 0, 1.0, 0.0, "The V1 trainer's clip ratio uses the padded width.", "weak")
            ]
        return []

    def _full_window(self, run: View, cut: Series) -> list[Evidence]:
        window = next(
            (float(v) for _, v in run.raw(r"max_model_len|context_length|max_position") if isinstance(v, int | float)),
            np.nan,
        )
        window = next((s.last for _, s in run.measured(r"max model len|context len")), window)
        total = run["rollout/total_length_max"].finite
        if len(total) and total.high >= window:
            note = "The truncated share is 0 though prompt and completion reach {value} tokens, the context window."
            return [run.fact(total, total.high, window, note)]
        parts = {
            word: next((s.finite for _, s in run.measured(rf"^{word} len")), None) for word in ("prompt", "response")
        }
        if parts["prompt"] is None or parts["response"] is None:
            return []
        steps, prompt, response = paired(parts["prompt"], parts["response"])
        if len(steps) and np.all(prompt + response >= window):
            note = f"The truncated share is {{value}} though prompt and response add up to {number(window)}, the context window."
            return [run.fact(cut, 0.0, 0.0, note)]
        return []
