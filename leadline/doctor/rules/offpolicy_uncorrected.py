from collections.abc import Sequence

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    inner_updates,
    token_truncation,
)
from leadline.doctor.signals import (
    GAP_GROWTH,
    reward_falls,
)
from leadline.doctor.view import View


class OffpolicyUncorrected(Rule):
    """Stale rollouts are trained without a correction, or with weights that nothing bounds.

    ## Symptom
    Rollouts lag behind; the mismatch grows several times over, completions run to the limit or entropy drops, and the reward
    falls. The effective sample size can stay at 0.99.

    ## Cause
    Old samples get a gradient that the current policy would not, and each step widens the gap.

    ## Fix
    Truncate the weights per token ({token}), lower `rollout.max_staleness`, or update fewer times per batch
    (`optimizer.epochs_per_batch`).

    ## References
    marin-community/marin issue 8955, thinking-machines-lab/tinker-cookbook pull 822 (KL 30 times larger at a staleness of 3). Growth by 3
    over 20 rows is leadline's choice.
    """

    id = "LL307"
    name = "offpolicy-uncorrected"
    severity = "error"
    explains = (
        "rollout-logprob-mismatch",
        "truncation-rate-high-unresolved",
        "entropy-collapse",
        "staleness-at-its-bound",
        "kl-drift-reward-collapse",
    )
    confirm = "Run the same with a staleness of 0: if it is stable, staleness is the cause."
    sick = (
        RunLog.from_columns(
            {
                "staleness/mean": [2.0] * 30,
                "importance/kl_k3": [0.001 * 1.2**i for i in range(30)],
                "reward/mean": [0.5 - 0.01 * i for i in range(30)],
            }
        ),
        RunLog([], {"rollout": {"max_staleness": 4}, "objective": {"importance_action": "off"}}),
    )
    healthy = (
        RunLog.from_columns(
            {
                "staleness/mean": [2.0] * 30,
                "importance/kl_k3": [0.002] * 30,
                "reward/mean": [0.3 + 0.01 * i for i in range(30)],
            }
        ),
        RunLog([], {"rollout": {"max_staleness": 4}, "objective": {"importance_action": "truncate"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        stale = run.first_of("staleness/mean", "staleness/max").finite
        if len(stale) < TREND:
            return self._from_measurements(run)
        found: list[Evidence] = []
        gap = run.first_of(*GAP_GROWTH).finite
        if gap.is_trend and gap.early > 0 and gap.late > 3 * gap.early and gap.rises(1e-4):
            note = (
                f"{gap.name} rose from {number(gap.early)} to {{value}} with rollouts {number(stale.median)} steps old."
            )
            found.append(run.fact(gap, gap.late, 3 * gap.early, note, "strong", int(gap.steps[0])))
        cut = run["rollout/truncated_fraction"].finite
        if len(cut) >= TREND and cut.late > 0.8 and cut.rises(0.4) and reward_falls(run):
            found.append(
                run.fact(cut, cut.late, 0.8, "Completions run to the limit ({value}) and the reward falls.", "weak")
            )
        return found if reward_falls(run) or self.lint(run) else []

    def lint(self, run: View) -> list[Evidence]:
        found = []
        if run.number("rollout.max_staleness") > 0 and run.setting("objective.importance_action") == "off":
            found.append(
                run.chosen("rollout.max_staleness", 0, "{option} is {value} and no importance weight corrects for it.")
            )
        if (
            inner_updates(run) >= 8
            and not run.number("objective.clip_low") > 0
            and run.says(r"no.?clip|importance_sampling")
        ):
            found.append(run.chosen("optimizer.epochs_per_batch", 8, "{option} is {value} without a clip."))
        return found

    def against(self, run: View) -> list[Evidence]:
        stale = run.first_of("staleness/mean", "staleness/max").finite
        if len(stale) and stale.median < 0.5:
            return [run.fact(stale, stale.median, 1.0, "Rollouts are only {value} steps old.", "weak")]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        stale = run.first_of("staleness/max", "staleness/mean").finite
        if len(stale) and stale.high == 0 and not inner_updates(run) > 1:
            return [run.fact(stale, 0.0, 0.0, "Nothing is stale: the age is {value} in every row.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        return super().fix(run, evidence).format(token=token_truncation(run))

    @staticmethod
    def _from_measurements(run: View) -> list[Evidence]:
        stale = run.first_of("staleness/mean", "staleness/max").finite
        old = probe.above(
            run, r"(stale|\bage\b|lag|off ?policy|behind)(?!.*(ratio|kl))", 0.5, "{name} is {value}.", "weak"
        )
        if len(stale) and stale.high > 0.5:
            old.append(run.fact(stale, stale.high, 0.5, "Rollouts are up to {value} steps old.", "weak"))
        signs = probe.above(run, r"\bkl\b.*(growth|factor|times)", 3, "{name} is {value}.")
        cut = run["rollout/truncated_fraction"].finite
        if len(cut) and len(cut) < TREND and cut.high > 0.8 and cut.low < 0.5:
            signs.append(run.fact(cut, cut.high, 0.8, "The truncated share goes up to {value}.", "strong"))
        return [*old, *signs] if old and signs else []
