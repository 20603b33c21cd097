from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class EmptyCompletions(Rule):
    """Empty completions are in the batch, with a reward.

    ## Symptom
    The shortest completion has 0 or 1 tokens again and again.

    ## Cause
    A failed generation was stored as an empty text with a reward of 0, which biases the baseline of its group; or the
    model ends at once because the prompt already ends a turn.

    ## Fix
    Treat a failed generation as a failed rollout without a reward. If the model ends at once, check the end of the
    rendered prompt (`model.chat_template_kwargs`).

    ## References
    NVIDIA-NeMo/RL issues 3470 and 3589, verl issues 6476 and 6310. Half of the rows: leadline's choice.
    """

    id = "LL216"
    name = "empty-completions"
    severity = "warning"
    needs = ("rollout/length_min",)
    sick = (RunLog.from_columns({"rollout/length_min": [0.0, 0.0, 0.0, 40.0]}),)
    healthy = (RunLog.from_columns({"rollout/length_min": [12.0, 0.0, 30.0, 40.0]}),)

    def examine(self, run: View) -> list[Evidence]:
        shortest, ended = run["rollout/length_min"].finite, run["rollout/length_max"].finite
        empty = shortest.where(shortest.values <= 0)
        if len(empty) < max(2, 0.5 * len(shortest)) or (len(ended) and ended.high <= 1):
            return []
        note = f"The shortest completion had {{value}} tokens in {len(empty)} of {len(shortest)} rows."
        return [run.fact(empty, empty.last, 1.0, note, since=int(empty.steps[0]))]
