from collections.abc import Sequence

from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    is_moe,
    token_truncation,
)
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class MoeRoutingMismatch(Rule):
    """Engine and trainer route tokens to different experts.

    ## Symptom
    A mixture of experts with logprob differences several times those of dense models from step 1 on, growing; collapse
    after hundreds of steps.

    ## Cause
    Small numeric differences flip the choice of experts: about a tenth of the routers choose differently, and most tokens
    meet at least one of them.

    ## Fix
    Replay the engine's routing in the trainer (router replay, weights included), and mask by the geometric mean over the
    completion meanwhile ({token} at least).

    ## References
    R3 (arXiv 2510.11370); radixark/miles issue 2722 (0.369 to 0.139 nats with replayed expert ids). Dense bf16 shows 0.011 to 0.013;
    three to ten times that is usual for experts, so 0.1 is an error and 0.03 a possibility.
    """

    id = "LL316"
    name = "moe-routing-mismatch"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "train-infer-mismatch-collapse")
    confirm = "Replay the engine's expert choices in the trainer: does the gap halve?"
    sick = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.3, 0.32, 0.37]}, {"model": {"name": "Qwen3-30B-A3B"}}),
        RunLog(
            [{"step": 1, "logprob_diff_moe": 0.37, "logprob_diff_dense": 0.012}], {"model": {"name": "Qwen3-30B-A3B"}}
        ),
    )
    healthy = (
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.02] * 3}, {"model": {"name": "Qwen3-30B-A3B"}}),
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.3] * 3}, {"model": {"name": "Qwen3-8B"}}),
    )

    def examine(self, run: View) -> list[Evidence]:
        if not is_moe(run):
            return []
        gap = run.first_of(*GAP).finite
        found = []
        if len(gap) and gap.median > 0.03:
            note = "Engine and trainer differ by {value} nats per token in a mixture of experts."
            found.append(
                run.fact(gap, gap.median, 0.03, note, "strong" if gap.median > 0.1 else "weak", int(gap.steps[0]))
            )
        for name, limit in (("importance/kl_k3", 0.01), ("importance/mult_prob_error", 1.1)):
            series = run[name].finite
            if len(series) and series.median > limit:
                found.append(run.fact(series, series.median, limit, f"{name} is {{value}} in a mixture of experts."))
        return found + probe.above(
            run,
            r"(logp|log p|logprob|kl|mismatch).*(diff|gap|moe|kl|error)|router|expert",
            0.03,
            "{name} is {value} in a mixture of experts.",
        )

    def forbids(self, run: View) -> list[Evidence]:
        model = run.setting("model.name")
        if model and not is_moe(run):
            return [run.chosen("model.name", 0, "{value} is not known as a mixture of experts.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        return super().fix(run, evidence).format(token=token_truncation(run))
