import numpy as np

from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    cap,
    has_signal,
    share_with,
)
from leadline.doctor.view import View


class TruncationRateHighUnresolved(Rule):
    """More than half of the completions run into the token limit.

    ## Symptom
    `rollout/truncated_fraction` is above 0.5, or the longest completion equals `sampling.max_tokens` and the mean is 40 %
    of it or more.

    ## Cause
    The limit is too small for the task; or the policy does not end its completions: a base model without the end
    token, a chat template that the model was not trained on, or a reward that pays for length.

    ## Fix
    Read truncated completions. If they were still on their way to an answer, raise `sampling.max_tokens`. If the answer
    was there and the text went on, give `sampling.stop` or `sampling.stop_token_ids`, or check the chat template. If
    length grew during the run, set `objective.overlong_buffer`.

    ## References
    verl issue 7412, huggingface/trl issue 5697. Yu et al. 2025, DAPO (arXiv 2503.14476), overlong shaping. The limit of
    0.5 over three steps is leadline's choice.
    """

    id = "LL201"
    name = "truncation-rate-high-unresolved"
    severity = "warning"
    needs = (("rollout/truncated_fraction", "rollout/length_max"),)
    sick = (
        RunLog.from_columns({"rollout/truncated_fraction": [0.4, 0.6, 0.9, 1.0]}),
        RunLog.from_columns(
            {"rollout/length_mean": [1267.0], "rollout/length_max": [3072.0]}, {"sampling": {"max_tokens": 3072}}
        ),
    )
    healthy = (
        RunLog.from_columns({"rollout/truncated_fraction": [0.6, 0.55, 0.5, 0.4, 0.7, 0.1]}),
        RunLog.from_columns(
            {"rollout/length_mean": [600.0], "rollout/length_max": [3072.0]}, {"sampling": {"max_tokens": 3072}}
        ),
    )
    limit = 0.5

    def examine(self, run: View) -> list[Evidence]:
        name = "rollout/truncated_fraction"
        if run.has(name):
            # a reward that varies although everything is cut off may be meant that way, e.g. one about length
            whole = run[name].finite.median > 0.95 and share_with(has_signal(run), run[name]) > 0.5
            note = "{percent} of the completions were cut off by the token limit {when}."
            return run.lasting(name, lambda v: v > self.limit, self.limit, note, strength="weak" if whole else "strong")
        steps, mean, longest = paired(run["rollout/length_mean"], run["rollout/length_max"])
        limit = cap(run)
        if not len(steps) or not np.isfinite(limit) or np.median(longest) < limit or np.median(mean) < 0.4 * limit:
            return []
        note = f"The longest completion is {{value}} tokens, the limit, and the mean {number(float(np.median(mean)))}."
        return [run.fact(run["rollout/length_max"], float(np.median(longest)), limit, note, "weak")]
