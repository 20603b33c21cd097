import numpy as np

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    KL,
    SPREAD,
    ZERO_SIGNAL,
    has_signal,
)
from leadline.doctor.view import View


class NoUpdateGradAndKlExactlyZero(Rule):
    """There are advantages, the loss uses them, and the weights get no gradient.

    ## Symptom
    The gradient norm is 0 (below 1e-9) in every row while rewards vary within groups and the learning rate is above 0, and
    the ledger, where there is one, says that the signal reached the loss. The KL to the reference stays exactly 0.

    ## Cause
    The gradient is lost between the loss and the weights: all parameters are frozen, an adapter is not attached or its
    output is detached, gradient checkpointing cuts the graph because no input needs a gradient, the loss passes through
    numbers (`.item()`), or gradients are lost among machines.

    ## Fix
    Check that some parameters have `requires_grad`; with `model.lora_rank` above 0, that `model.lora_targets` names
    modules that exist; try `model.gradient_checkpointing` off, and one machine with one process.

    ## References
    modelscope/ms-swift issues 5571 and 5890, verl issue 4514, NovaSky-AI/SkyRL pull 2041. 1e-9 is far below
    the gradient norms that working runs report; the limit is leadline's choice.
    """

    id = "LL404"
    name = "no-update-grad-and-kl-exactly-zero"
    severity = "error"
    needs = (GRAD, ("advantage/abs_mean", *ZERO_SIGNAL, *SPREAD, "advantage/max", *KL))
    confirm = "Hash the trainable weights before and after a step, and count the parameters with a gradient."
    sick = (
        RunLog.from_columns({"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3}),
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3, "ledger/reached_share": [1.0] * 3}
        ),
        RunLog.from_columns({"optimizer/grad_norm": [0.0] * 2, "kl/k3": [0.0] * 2, "reward/std": [0.2] * 2}),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [0.3, 0.0, 0.2], "advantage/abs_mean": [0.7, 0.6, 0.7]}),
        RunLog.from_columns({"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.0] * 3}),
        RunLog.from_columns(  # the signal ended before the loss: another fault
            {"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3, "ledger/reached_share": [0.0] * 3}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        alive, reached = has_signal(run), run["ledger/reached_share"].finite
        grad = run.first_of(*GRAD).finite
        grad = grad.where(np.isin(grad.steps, alive.steps) & ~np.isin(grad.steps, reached.steps[reached.values < 0.01]))
        kl = run.first_of(*KL).finite
        frozen = len(kl) > 1 and kl.high == kl.low == 0
        note = "The gradient norm was {value} {when}, with rewards that vary."
        found = run.lasting(grad, lambda v: v < 1e-9, 1e-9, note)
        if found and frozen:
            note = "The KL is exactly {value} in every row: the policy is still the reference."
            found.append(run.fact(kl, 0.0, 0.0, note, "proof"))
        return found

    def forbids(self, run: View) -> list[Evidence]:
        grad = run.first_of(*GRAD).finite
        if len(grad) and grad.median > 1e-6:
            return [run.fact(grad, grad.median, 1e-9, "The gradient norm is typically {value}.")]
        kl = run.first_of(*KL).finite
        if len(kl) > 1 and np.ptp(kl.values) > 1e-6 and kl.late > kl.early:
            return [run.fact(kl, kl.late, 0.0, "The KL moves (to {value}), so the weights do.")]
        return []
