import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    is_async,
    uses_server_engine,
)
from leadline.doctor.signals import (
    GAP_GROWTH,
)
from leadline.doctor.view import View


class SamplingLogprobsOverwritten(Rule):
    """The engine's logprobs were replaced by the trainer's own, so the mismatch cannot be seen or corrected.

    ## Symptom
    The importance ratio is exactly 1 and the mismatch exactly 0, step after step, although engine and trainer are two
    programs, or rollouts are stale. Too good to be true is the sign: real engines show a noise floor.

    ## Cause
    The sampler's logprobs were recomputed on the current weights, or missing ones were filled in with the trainer's. The
    loss is then on-policy by declaration.

    ## Fix
    Keep what the engine reported at sampling time in a field of its own and compute the ratio from it. Missing logprobs
    must stay missing.

    ## References
    GMISWE/tinker-cloud pull 66, torchforge issue 571, OpenPipe/ART issue 467. Exactly 0 in three rows or more; engines with
    batch-invariant kernels can reach it honestly.
    """

    id = "LL306"
    name = "sampling-logprobs-overwritten"
    severity = "error"
    needs = ((*GAP_GROWTH, "importance/ratio_mean", "importance/weight_mean", "importance/policy_ratio_mean"),)
    sick = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.0] * 3}, {"engine": {"kind": "vllm"}}),
        RunLog.from_columns({"importance/ratio_mean": [1.0] * 4, "staleness/max": [2.0] * 4}),
    )
    healthy = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.012] * 3}, {"engine": {"kind": "vllm"}}),
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.0] * 3}, {"engine": {"kind": "hf"}}),
        RunLog.from_columns({"importance/ratio_mean": [1.0, 1.0001, 0.9999, 1.0], "staleness/max": [2.0] * 4}),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not self._two_programs(run):
            return []
        stale = is_async(run)
        gap = run.first_of(*GAP_GROWTH).finite
        ratio = run.first_of("importance/ratio_mean", "importance/policy_ratio_mean", "importance/weight_mean").finite
        if len(gap) >= PERSISTENT and gap.high == gap.low == 0:
            note = "{value} difference between engine and trainer in every row: nothing measured is that clean."
            return [run.fact(gap, 0.0, 0.0, note, "proof" if stale else "strong", int(gap.steps[0]))]
        if len(ratio) >= PERSISTENT and ratio.high == ratio.low == 1 and (stale or not len(gap)):
            note = "The importance ratio is exactly {value} in every row, with " + (
                "stale rollouts." if stale else "two engines."
            )
            return [run.fact(ratio, 1.0, 1.0, note, "strong" if stale else "weak", int(ratio.steps[0]))]
        return []

    def measure(self, run: View) -> list[Evidence]:
        if not self._two_programs(run):
            return []
        for name, series in run.measured(r"ratio.*(deviat|error|diff|minus 1)"):
            if len(series.finite) and 0 <= series.high < 0.005:
                note = f"{name} is {{value}}, below the noise floor of any two engines (0.005 to 0.02)."
                return [run.fact(series, series.high, 0.005, note, "weak")]
        return []

    @staticmethod
    def _two_programs(run: View) -> bool:
        honest = run.says(r"batch.?invariant|true.?on.?policy|deterministic")
        return is_async(run) or (uses_server_engine(run) and honest is None)

    def forbids(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP_GROWTH).finite
        if len(gap) and np.any(gap.values != 0):
            return [run.fact(gap, gap.median, 0.0, "Engine and trainer differ by {value}, as two programs do.")]
        return []
