from leadline.doctor import measurements as probe
from leadline.doctor.rule import PERSISTENT, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.signals import (
    GAP_GROWTH,
)
from leadline.doctor.view import View


class LoraDoubleApplied(Rule):
    """The adapter is applied twice in the engine.

    ## Symptom
    After a resume (or an eviction) the first batch is fine and all later ones are malformed; the gap between engine and
    trainer jumps.

    ## Cause
    The first sync loads base and adapter merged, and later syncs add the adapter again; or alpha is applied twice.

    ## Fix
    After a resume, load the plain base into the engine before syncing the adapter, or merge always and never serve the
    adapter as well.

    ## References
    modelscope/ms-swift issue 8233, NovaSky-AI/SkyRL issue 2250. A resume with an adapter served by the engine, and a jump at the second
    batch.
    """

    id = "LL310"
    name = "lora-double-applied"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "rollout-weights-corrupted-on-sync")
    confirm = "Compare engine and trainer on one prompt after the first and after the second sync."
    sick = (
        RunLog(
            [{"batch": 1, "step": 1, "extract_failed_pct": 0}, {"batch": 2, "step": 2, "extract_failed_pct": 100}],
            {"raw": {"vllm_enable_lora": True, "resume_from_checkpoint": True}},
        ),
    )
    healthy = (
        RunLog([{"step": 1}], {"raw": {"vllm_enable_lora": True, "resume_from_checkpoint": None}}),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.02] * 6},
            {"raw": {"vllm_enable_lora": True, "resume_from_checkpoint": True}},
        ),
    )

    def _resumed(self, run: View) -> bool:
        return uses_lora(run) and run.says(r"resum") is not None

    def examine(self, run: View) -> list[Evidence]:
        if not self._resumed(run):
            return []
        gap = run.first_of(*GAP_GROWTH).finite
        found = probe.grows(run, r"(fail|malform|garbl|invalid|error|corrupt).*", 3)
        if len(gap) >= PERSISTENT and gap.late > 5 * gap.first and gap.late > 0.05:
            found.append(
                run.fact(
                    gap,
                    gap.late,
                    gap.first,
                    "After the resume the gap rose at once, to {value}.",
                    since=int(gap.steps[0]),
                )
            )
        return found

    def lint(self, run: View) -> list[Evidence]:
        if self._resumed(run) and run.says(r"enable_lora\W*= (true|1)") and not run.has(*GAP_GROWTH):
            return [Evidence("resume", 0, 1.0, 0.0, "A resumed run serves the adapter in the engine.", "weak")]
        return []
