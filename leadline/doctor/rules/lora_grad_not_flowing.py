from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.signals import (
    GRAD,
    SPREAD,
    ZERO_SIGNAL,
    dead_gradient,
    has_signal,
)
from leadline.doctor.view import View


class LoraGradNotFlowing(Rule):
    """Activation recomputation cuts the graph, so the adapter gets no gradient.

    ## Symptom
    The gradient norm is exactly 0 in every row with LoRA, rewards vary, KL is 0; activation recomputation (or offload) is
    on, with one pipeline stage.

    ## Cause
    With a frozen base the embedding's output does not require a gradient, so a re-entrant checkpoint never runs its
    backward, and no adapter gradient is formed. More pipeline stages hide it.

    ## Fix
    Let the inputs require gradients (`enable_input_require_grads`), use non-re-entrant checkpointing, or switch
    `model.gradient_checkpointing` off.

    ## References
    verl issue 4514, NovaSky-AI/SkyRL pull 2041. A gradient norm of exactly 0 with both settings on; one row is enough.
    """

    id = "LL407"
    name = "lora-grad-not-flowing"
    severity = "error"
    needs = (GRAD,)
    explains = ("no-update-grad-and-kl-exactly-zero", "reference-not-frozen", "learning-rate-too-low-for-lora")
    sick = (
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0] * 3, "reward/std": [0.4] * 3},
            {"model": {"lora_rank": 16, "gradient_checkpointing": True}},
        ),
        RunLog.from_columns({"optimizer/grad_norm": [0.0]}, {"raw": {"lora": True, "activation_recompute": True}}),
    )
    healthy = (
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.3] * 3}, {"model": {"lora_rank": 16, "gradient_checkpointing": True}}
        ),
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0] * 3, "reward/std": [0.4] * 3},
            {"model": {"lora_rank": 0, "gradient_checkpointing": True}},
        ),
    )

    def _recomputes(self, run: View) -> str | None:
        if run.setting("model.gradient_checkpointing") is True:
            return f"{run.option('model.gradient_checkpointing')} = True"
        return run.says(r"recompute(?!.*(none|null|logp))|gradient_checkpointing|activation_checkpoint")

    def examine(self, run: View) -> list[Evidence]:
        recomputed, dead = self._recomputes(run), dead_gradient(run)
        grad = run.first_of(*GRAD).finite
        if not recomputed or not uses_lora(run) or not len(dead) or len(dead) < len(grad):
            return []
        signal_lost = len(has_signal(run)) > 0 or not run.has(*SPREAD, *ZERO_SIGNAL)
        if not signal_lost:
            return []
        note = f"The gradient norm is exactly {{value}} in every row, with LoRA and {recomputed}."
        return [run.fact(dead, 0.0, 0.0, note, "strong", int(dead.steps[0]))]

    def lint(self, run: View) -> list[Evidence]:
        stages = [v for _, v in run.raw(r"^(raw\.)?pp$|pipeline") if isinstance(v, int)]
        full = self._recomputes(run)
        if not run.rows and uses_lora(run) and full and stages == [1]:
            return [Evidence("recompute", 0, 1.0, 0.0, f"LoRA with one pipeline stage and {full}.", "weak")]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD).finite
        if len(grad) and grad.high > 1e-6:
            return [run.fact(grad, grad.high, 0.0, "The gradient norm reaches {value}: the adapter has a gradient.")]
        if run.number("model.lora_rank") == 0:
            return [run.chosen("model.lora_rank", 1, "{option} is {value}: there is no adapter.")]
        return []
