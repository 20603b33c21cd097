from collections.abc import Sequence

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, percent, when
from leadline.doctor.run_log import RunLog, Streak, below
from leadline.metrics import LEDGER_STAGES

IMPORTANCE = (
    'Set `objective.importance_level = "token"` and `importance_action = "truncate"`; then find why engine and trainer '
    "disagree: engine dtype, processed logprobs."
)
ADVICE = {
    "failed": "Read the `error` column of `rollouts/*.parquet` and mend the reward or the engine.",
    "no_signal": "Groups have equal rewards: change the data's difficulty or the reward.",
    "stale": "Lower `rollout.max_staleness`.",
    "truncated": "Raise `sampling.max_tokens`, or set `objective.mask_truncated = false`.",
    "unscored": 'Make the engine report a logprob for each token, or set `objective.on_unscored = "on_policy"`.',
    "low_entropy": "Lower `objective.entropy_quantile`.",
    "importance_masked": IMPORTANCE,
    "importance_shrunk": IMPORTANCE,
    "clipped": "Lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`, or widen `objective.clip_low` and "
    "`clip_high`.",
    "ratio_drift": "Lower `optimizer.learning_rate` or `optimizer.epochs_per_batch`.",
    "discarded": "Look at the rollouts in `blackbox/`: loss or gradient was not finite.",
}
"""What to change for each stage at which the signal can end."""


class DeadUpdate(Rule):
    """Advantages exist, and none of them reaches the gradient.

    ## Symptom
    The loss is exactly 0 and the gradient dead, step after step, while rewards vary. `ledger/reached_share` is below
    0.01 although `ledger/sampled_mass` is positive. A loss near 0 alone is no symptom: on policy, the loss of centred
    advantages is 0 by construction and its gradient is not.

    ## Cause
    One stage between the advantages and the gradient took the signal; the ledger names it.

    ## Fix
    Turn to the stage that the finding names: the largest `ledger/STAGE_share`. `importance_masked` and
    `importance_shrunk`: use token-level truncation and find why engine and trainer disagree. `truncated`: raise
    `sampling.max_tokens`. `clipped` and `ratio_drift`: lower the learning rate. `failed`: mend the reward.

    ## References
    huggingface/trl issue 3452 (a healthy loss of 0) and issue 5814 (one that nearly died). The ledger is an identity: the mass
    that reached equals the absolute gradient of the loss with respect to the token logprobs. The limit of 0.01 over
    three steps is leadline's choice.
    """

    id = "LL403"
    name = "dead-update"
    severity = "error"
    needs = ("ledger/sampled_mass", "ledger/reached_share")
    sick = (
        RunLog.from_columns(
            {
                "loss": [0.0] * 3,
                "optimizer/grad_norm": [0.0] * 3,
                "ledger/sampled_mass": [0.8] * 3,
                "ledger/importance_masked_share": [1.0] * 3,
                "ledger/clipped_share": [0.0] * 3,
                "ledger/reached_share": [0.0] * 3,
            }
        ),
    )
    healthy = (
        RunLog.from_columns(  # on policy: the loss is 0, the gradient is not
            {
                "loss": [1e-9, 0.0, -1e-9],
                "optimizer/grad_norm": [0.8] * 3,
                "ledger/sampled_mass": [0.8] * 3,
                "ledger/reached_share": [0.97] * 3,
            }
        ),
        RunLog.from_columns({"ledger/sampled_mass": [0.0] * 3, "ledger/reached_share": [0.0] * 3}),
    )
    limit = 0.01

    def examine(self, run: RunLog) -> list[Evidence]:
        streaks = run.streaks("ledger/reached_share", below(self.limit), PERSISTENT)
        mass = dict(run.series("ledger/sampled_mass"))
        return [self._evidence(run, streak) for streak in streaks if mass.get(streak.last, 0.0) > 0]

    def fix(self, run: RunLog, evidence: Sequence[Evidence]) -> str:
        stage = _largest_stage(run, evidence[0].step)
        return ADVICE[stage] if stage else super().fix(run, evidence)

    def _evidence(self, run: RunLog, streak: Streak) -> Evidence:
        note = f"{percent(streak.value)} of the signal reached the gradient {when(streak)}."
        stage = _largest_stage(run, streak.last)
        if stage:
            share = dict(run.series(f"ledger/{stage}_share"))[streak.last]
            note += f" {percent(share)} of it ended at {stage.replace('_', ' ')}."
        return Evidence("ledger/reached_share", streak.last, streak.value, self.limit, note)


def _largest_stage(run: RunLog, step: int) -> str | None:
    shares = {stage: dict(run.series(f"ledger/{stage}_share")).get(step, 0.0) for stage in LEDGER_STAGES[:-1]}
    largest = max(shares, key=lambda stage: shares[stage])
    return largest if shares[largest] > 0 else None
