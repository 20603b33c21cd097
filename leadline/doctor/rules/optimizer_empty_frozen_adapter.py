from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.signals import (
    GRAD,
    KL,
)
from leadline.doctor.view import View


class OptimizerEmptyFrozenAdapter(Rule):
    """The optimizer holds no trainable parameter, so every curve is alive and no weight moves.

    ## Symptom
    Loss, reward and even a gradient norm above 0 are logged, yet the weights' hash does not change, the KL stays at its
    first value and the reward has no trend.

    ## Cause
    The adapter was frozen when the optimizer was built (a reference adapter in inference mode, `is_trainable=False`), and
    required gradients only later.

    ## Fix
    Load the adapter with `is_trainable=True`, build the optimizer afterwards, and assert that its parameter count is above 0
    and that a hash of the adapter changes after a step.

    ## References
    huggingface/trl issue 6700 (0 optimizer parameters, adapter bit-identical after 100 steps). Counts and hashes are exact.
    """

    id = "LL408"
    name = "optimizer-empty-frozen-adapter"
    severity = "error"
    explains = ("reference-not-frozen", "learning-rate-too-low-for-lora", "no-update-grad-and-kl-exactly-zero")
    confirm = "Print the number of optimizer parameters, and hash the adapter before and after a step."
    sick = (
        RunLog([{"step": 1, "optimizer_params": 0, "adapter_md5_changed": 0}]),
        RunLog.from_columns({"optimizer/update_norm": [0.0] * 3, "optimizer/grad_norm": [0.4] * 3}),
        RunLog.from_columns(
            {"kl/k3": [0.0] * 30, "optimizer/grad_norm": [0.4] * 30, "reward/mean": [0.3] * 30},
            {"model": {"lora_rank": 8}},
        ),
    )
    healthy = (
        RunLog([{"step": 1, "optimizer_params": 12, "adapter_md5_changed": 1}]),
        RunLog.from_columns({"optimizer/update_norm": [1e-5] * 3, "optimizer/grad_norm": [0.4] * 3}),
        RunLog.from_columns(
            {"kl/k3": [1e-5 * i for i in range(30)], "optimizer/grad_norm": [0.4] * 30}, {"model": {"lora_rank": 8}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        note = "{name} is 0: there is nothing that the optimizer could move."
        found = probe.zero(
            run, r"(optimizer|trainable).*param|param.*(optimizer|trainable)|n(um)? trainable", note, "proof"
        )
        note = "{name} is 0 after training: the weights are bit-identical."
        for item in probe.zero(
            run, r"(adapter|weights?|lora|hash|md5|sha).*(chang|differ|moved|updated)", note, "proof"
        ):
            clips = any(isinstance(v, int | float) and v <= 0 for _, v in run.raw(r"max_grad_norm|clip_grad|grad_clip"))
            found += [] if clips else [item]
        moved, grad = run["optimizer/update_norm"].finite, run.first_of(*GRAD).finite
        if len(moved) and moved.high == 0 and grad.median > 1e-6 and run["optimizer/learning_rate"].high != 0:
            found.append(
                run.fact(
                    moved,
                    0.0,
                    0.0,
                    f"The weights changed by {{value}} with a gradient norm of {number(grad.median)}.",
                    "proof",
                )
            )
        kl = run.first_of(*KL).finite
        if uses_lora(run) and len(kl) >= TREND and kl.high == kl.low and grad.median > 1e-6:
            note = f"The KL is {{value}} in all {len(kl)} rows with a gradient norm of {number(grad.median)}: no weight moves."
            found.append(run.fact(kl, kl.last, 0.0, note, since=int(kl.steps[0])))
        return found

    def lint(self, run: View) -> list[Evidence]:
        if any(value is False for _, value in run.raw(r"is_trainable")):
            return [
                Evidence("is_trainable", 0, 0.0, 1.0, "is_trainable is False: the adapter is loaded frozen.", "weak")
            ]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        kl, moved = run.first_of(*KL).finite, run["optimizer/update_norm"].finite
        if len(moved) and moved.median > 0:
            return [run.fact(moved, moved.median, 0.0, "The weights change by {value} of their norm per step.")]
        if len(kl) >= 5 and kl.late > 3 * max(kl.early, 1e-7):
            return [run.fact(kl, kl.late, 0.0, "The KL grows (to {value}), so the weights move.")]
        return []
