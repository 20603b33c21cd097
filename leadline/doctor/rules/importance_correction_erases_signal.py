from leadline.doctor.rule import PERSISTENT, Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, Streak, above


class ImportanceCorrectionErasesSignal(Rule):
    """The importance correction takes most of the learning signal.

    ## Symptom
    Rewards vary, advantages are nonzero, and loss and gradient are zero or tiny. The ledger's largest stage is
    `importance_masked` or `importance_shrunk`.

    ## Cause
    Engine and trainer disagree about the probability of the sampled tokens, and the correction does what it is set to
    do. At the sequence level the ratios of all tokens multiply: 0.3 nats a token over 150 tokens is a weight of 1e-20,
    so a mask drops every completion and a truncation shrinks each to nothing.

    ## Fix
    Set `objective.importance_level = "token"` and `objective.importance_action = "truncate"`: the update is then biased
    but bounded, and it exists. Then remove the cause of the disagreement: compare the engine's dtype with `model.dtype`,
    and make the engine report processed logprobs (after temperature, top_p and penalties).

    ## References
    Liu, Li et al. 2025, "When speed kills stability": bias of token weights against variance of sequence weights.
    huggingface/trl issues 4159 and 5814. The limit of half the signal over three steps is leadline's choice.
    """

    id = "LL302"
    name = "importance-correction-erases-signal"
    severity = "error"
    needs = ("ledger/importance_masked_share", "ledger/importance_shrunk_share")
    sick = (
        RunLog.from_columns(
            {"ledger/importance_masked_share": [1.0, 1.0, 1.0], "ledger/importance_shrunk_share": [0.0, 0.0, 0.0]}
        ),
        RunLog.from_columns(
            {"ledger/importance_masked_share": [0.0, 0.0, 0.0], "ledger/importance_shrunk_share": [0.99, 1.0, 1.0]}
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"ledger/importance_masked_share": [0.1, 0.02, 1.0], "ledger/importance_shrunk_share": [0.01, 0.0, 0.0]}
        ),
    )
    limit = 0.5

    def examine(self, run: RunLog) -> list[Evidence]:
        deeds = {"masked": "masked (weight set to 0)", "shrunk": "shrunk away"}
        found = [
            self._evidence(f"ledger/importance_{stage}_share", deed, streak)
            for stage, deed in deeds.items()
            for streak in run.streaks(f"ledger/importance_{stage}_share", above(self.limit), PERSISTENT)
        ]
        return sorted(found, key=lambda item: item.step)

    def _evidence(self, metric: str, deed: str, streak: Streak) -> Evidence:
        note = f"{percent(streak.value)} of the signal was {deed} by the importance weights {when(streak)}."
        return Evidence(metric, streak.last, streak.value, self.limit, note)
