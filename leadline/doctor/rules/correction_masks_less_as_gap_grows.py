from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP_GROWTH,
)
from leadline.doctor.view import View


class CorrectionMasksLessAsGapGrows(Rule):
    """The correction removes fewer tokens while engine and trainer drift apart.

    ## Symptom
    The masked or truncated share falls while the mismatch rises: the monitor looks better as the run gets worse.

    ## Cause
    A fixed region of ratios misses drift that spreads over many tokens.

    ## Fix
    Judge by the mismatch itself (`importance/log_ratio_abs_mean`, k3), not by the share; tighten the bounds
    (`objective.importance_high`, `objective.importance_low`) and find the cause of the gap.

    ## References
    Follow-up to IcePop on adaptive masking regions (2026). Opposite moves by half over 20 rows: leadline's choice.
    """

    id = "LL321"
    name = "correction-masks-less-as-gap-grows"
    severity = "warning"
    needs = (
        ("importance/masked_fraction", "importance/truncated_fraction", "importance/out_of_bounds_fraction"),
        GAP_GROWTH,
    )
    sick = (
        RunLog.from_columns(
            {
                "importance/masked_fraction": [0.1 - 0.003 * i for i in range(30)],
                "importance/kl_k3": [0.002 + 0.0005 * i for i in range(30)],
            }
        ),
    )
    healthy = (RunLog.from_columns({"importance/masked_fraction": [0.02] * 30, "importance/kl_k3": [0.002] * 30}),)

    def examine(self, run: View) -> list[Evidence]:
        share = run.first_of(
            "importance/masked_fraction", "importance/truncated_fraction", "importance/out_of_bounds_fraction"
        ).finite
        gap = run.first_of(*GAP_GROWTH).finite
        if (
            len(share) < TREND
            or len(gap) < TREND
            or not share.falls(0.5 * share.early)
            or not gap.rises(0.5 * abs(gap.early))
        ):
            return []
        if share.early < 1e-3:
            return []
        note = f"{gap.name} rose from {number(gap.early)} to {{value}} while {share.name} fell to {number(share.late)}."
        return [run.fact(gap, gap.late, gap.early, note, since=int(gap.steps[0]))]
