from leadline.doctor import measurements as probe
from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class StaleDerivedWeightCache(Rule):
    """The engine caches a quantity derived from a parameter and does not renew it when weights change.

    ## Symptom
    A huge mismatch from the first refit on although every parameter was delivered and compares equal; models with special
    layers (state space, rotary, fused or quantised weights).

    ## Cause
    A derived tensor (a discretised state matrix, a rotary table, a fused weight) is computed once, at graph capture, and
    only invalidated by a call that the engine never makes.

    ## Fix
    Recompute derived tensors after each refit, or capture the graph anew; compare logits, not only parameters.

    ## References
    NVIDIA/Megatron-LM pull 6723 (Mamba), sgl-project and vLLM reload defects. 0.3 nats or a multiplicative error of 1.5 in a model with
    such layers: leadline's choice.
    """

    id = "LL314"
    name = "stale-derived-weight-cache"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "moe-routing-mismatch")
    confirm = "After a refit compare parameters (equal?) and logits of one prompt (different?)."
    sick = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.02, 0.9, 0.8, 0.9]}, {"model": {"name": "Nemotron-Nano-9B-v2"}}
        ),
        RunLog([{"step": 1, "token_mult_prob_error_max": 1e12}], {"model": {"name": "jamba-mini"}}),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.02, 0.03, 0.02]}, {"model": {"name": "Nemotron-Nano-9B-v2"}}
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.02, 0.9, 0.8, 0.9]}, {"model": {"name": "Qwen2.5-7B"}}
        ),
    )
    special = r"mamba|\bssm\b|jamba|nemotron.?(h|nano|3)|qwen3.?next|falcon.?h|granite.?4|rwkv|hybrid|lightning|zamba|bamba|hymba"

    def examine(self, run: View) -> list[Evidence]:
        model = run.says(self.special)
        if model is None:
            return []
        later = run.first_of(*GAP).finite.where(run.first_of(*GAP).finite.values > 0.3)
        found = (
            [
                run.fact(
                    later,
                    later.median,
                    0.3,
                    f"Engine and trainer differ by {{value}} nats ({model}).",
                    since=int(later.steps[0]),
                )
            ]
            if len(later)
            else []
        )
        for name in ("importance/mult_prob_error", "importance/sequence_mult_prob_error_max", "importance/kl_k3"):
            series = run[name].finite
            if len(series) and series.high > (1.5 if "mult" in name else 0.1):
                found.append(run.fact(series, series.high, 1.5, f"{name} reached {{value}} ({model})."))
        return found + probe.above(
            run, r"(prob|logprob|kl).*(error|diff|gap)", 0.3, "{name} is {value} " + f"({model})."
        )
