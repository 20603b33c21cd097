from leadline.doctor.rule import PERSISTENT, Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, above


class AllCompletionsMasked(Rule):
    """Every completion that carries a signal is masked because it was truncated.

    ## Symptom
    The loss is exactly 0 while rewards vary; `ledger/truncated_share` is close to 1.

    ## Cause
    `objective.mask_truncated` is on and the completions run into `sampling.max_tokens`, so nothing is left to train.

    ## Fix
    Raise `sampling.max_tokens`, or end completions earlier with `sampling.stop`. Setting
    `objective.mask_truncated = false` trains the truncated ones too.

    ## References
    Known from TRL (`mask_truncated_completions`) and ms-swift (`overlong_filter`), where it shows as a loss and a
    gradient norm of exactly 0. The limit of 0.95 over three steps is leadline's choice.
    """

    id = "LL203"
    name = "all-completions-masked"
    severity = "error"
    needs = ("ledger/truncated_share",)
    sick = (RunLog.from_columns({"ledger/truncated_share": [0.8, 1.0, 0.97, 1.0]}),)
    healthy = (RunLog.from_columns({"ledger/truncated_share": [0.0, 1.0, 0.9, 1.0, 0.3]}),)
    limit = 0.95

    def examine(self, run: RunLog) -> list[Evidence]:
        name = "ledger/truncated_share"
        return [
            Evidence(
                name,
                streak.last,
                streak.value,
                self.limit,
                f"{percent(streak.value)} of the signal was in truncated completions, which are masked, {when(streak)}.",
            )
            for streak in run.streaks(name, above(self.limit), PERSISTENT)
        ]
