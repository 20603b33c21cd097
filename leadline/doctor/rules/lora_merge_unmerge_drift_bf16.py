from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.view import View


class LoraMergeUnmergeDriftBf16(Rule):
    """Merging and unmerging the adapter in bf16 at each sync slowly changes the base weights.

    ## Symptom
    The gap between engine and trainer grows slowly with the number of syncs; the base model, evaluated with the adapter
    off, gets worse. An engine restart does not help.

    ## Cause
    W + BA - BA is not W in bf16: rounding errors add up with each cycle.

    ## Fix
    Keep a copy of the base and restore it after each sync, merge in float32, or sync the adapter alone.

    ## References
    huggingface/trl issue 6688 (drift of 28 % of the mean weight after 100 cycles in bf16, 2e-7 in float32), NVIDIA-NeMo/RL issue 3696.
    """

    id = "LL311"
    name = "lora-merge-unmerge-drift-bf16"
    severity = "error"
    explains = ("rollout-lora-not-applied",)
    confirm = "Hash the base weights before and after a sync."
    sick = (
        RunLog(
            [{"step": 1, "cycles": 1, "max_abs_drift": 0.0002}, {"step": 2, "cycles": 100, "max_abs_drift": 0.006}],
            {"model": {"dtype": "bfloat16", "lora_rank": 8}},
        ),
        RunLog([], {"model": {"dtype": "bfloat16", "lora_rank": 8}, "raw": {"sync": "merge_adapter/unmerge_adapter"}}),
    )
    healthy = (
        RunLog([], {"model": {"dtype": "float32", "lora_rank": 8}, "raw": {"sync": "merge_adapter/unmerge_adapter"}}),
        RunLog([], {"model": {"dtype": "bfloat16", "lora_rank": 8}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not uses_lora(run):
            return []
        return probe.grows(run, r"drift|weights? (changed|diff)", 2)

    def lint(self, run: View) -> list[Evidence]:
        said = run.says(
            r"unmerge|merge_adapter|merge.*(every|each|sync)|lora[._]?merge\W*= (true|1)|merge_lora\W*= (true|1)"
        )
        half = run.setting("model.dtype") in ("bfloat16", "bf16") or run.says(r"\bbf16\b(\W*= (true|1))?|bfloat16")
        if said and half and uses_lora(run):
            return [Evidence("lora merge", 0, 1.0, 0.0, f"A LoRA is merged and unmerged in bf16 ({said}).", "weak")]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        if run.setting("model.dtype") in ("float32", "fp32"):
            return [run.chosen("model.dtype", 0, "{option} is {value}, in which merging is exact to 1e-7.")]
        return []
