from leadline.doctor.rule import PERSISTENT, Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, above


class TruncationRateHighUnresolved(Rule):
    """More than half of the completions run into the token limit.

    ## Symptom
    `rollout/truncated_fraction` is above 0.5 and `rollout/length_max` equals `sampling.max_tokens`. The reward is often
    at its minimum, because the answer comes last.

    ## Cause
    The limit is too small for the task; or the policy does not end its completions: a base model without the end
    token, a chat template that the model was not trained on, or a reward that pays for length.

    ## Fix
    Look at truncated completions in `rollouts/`. If they were still on their way to an answer, raise
    `sampling.max_tokens`. If the answer was there and the text went on, give `sampling.stop` or
    `sampling.stop_token_ids`, or check the chat template. If length grew during the run, set
    `objective.overlong_buffer`.

    ## References
    verl issue 7412, huggingface/trl issue 5697. Yu et al. 2025, DAPO (arXiv 2503.14476), overlong shaping. The limit
    of 0.5 over three steps is leadline's choice.
    """

    id = "LL201"
    name = "truncation-rate-high-unresolved"
    severity = "warning"
    needs = ("rollout/truncated_fraction",)
    sick = (RunLog.from_columns({"rollout/truncated_fraction": [0.4, 0.6, 0.9, 1.0]}),)
    healthy = (RunLog.from_columns({"rollout/truncated_fraction": [0.6, 0.55, 0.5, 0.4, 0.7, 0.1]}),)
    limit = 0.5

    def examine(self, run: RunLog) -> list[Evidence]:
        name = "rollout/truncated_fraction"
        return [
            Evidence(
                name,
                streak.last,
                streak.value,
                self.limit,
                f"{percent(streak.value)} of the completions were cut off by the token limit {when(streak)}.",
            )
            for streak in run.streaks(name, above(self.limit), PERSISTENT)
        ]
