from leadline.doctor.rule import PERSISTENT, Evidence, Rule, when
from leadline.doctor.run_log import RunLog, below


class NoUpdateGradAndKlExactlyZero(Rule):
    """There are advantages, the loss uses them, and the weights get no gradient.

    ## Symptom
    `optimizer/grad_norm` is 0 (below 1e-9) while `advantage/abs_mean` is not, and the ledger, where there is one, says
    that the signal reached the loss. The KL to the reference stays exactly 0.

    ## Cause
    The gradient is lost between the loss and the weights: all parameters are frozen, an adapter is not attached or its
    output is detached, gradient checkpointing cuts the graph because no input needs a gradient, or the logprobs were
    computed without gradient.

    ## Fix
    Check that some parameters have `requires_grad`; with `model.lora_rank` above 0, that `model.lora_targets` names
    modules that exist; and try `model.gradient_checkpointing = false`.

    ## References
    modelscope/ms-swift issues 5571 and 5890, verl issue 4514, NovaSky-AI/SkyRL pull 2041. 1e-9 is far below
    the gradient norms that working runs report; the limit is leadline's choice.
    """

    id = "LL404"
    name = "no-update-grad-and-kl-exactly-zero"
    severity = "error"
    needs = ("optimizer/grad_norm", "advantage/abs_mean")
    sick = (
        RunLog.from_columns({"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3}),
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3, "ledger/reached_share": [1.0] * 3}
        ),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [0.3, 0.0, 0.2], "advantage/abs_mean": [0.7, 0.6, 0.7]}),
        RunLog.from_columns({"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.0] * 3}),
        RunLog.from_columns(  # the signal ended before the loss: another fault
            {"optimizer/grad_norm": [0.0] * 3, "advantage/abs_mean": [0.7] * 3, "ledger/reached_share": [0.0] * 3}
        ),
    )
    limit = 1e-9
    signal = 1e-3
    reached = 0.01

    def examine(self, run: RunLog) -> list[Evidence]:
        advantages = dict(run.series("advantage/abs_mean"))
        reached = dict(run.series("ledger/reached_share"))
        return [
            Evidence(
                "optimizer/grad_norm",
                streak.last,
                streak.value,
                self.limit,
                f"The gradient norm was {streak.value:.3g} {when(streak)}, with a mean |advantage| of "
                f"{advantages[streak.last]:.2g}.",
            )
            for streak in run.streaks("optimizer/grad_norm", below(self.limit), PERSISTENT)
            if advantages.get(streak.last, 0.0) > self.signal and reached.get(streak.last, 1.0) > self.reached
        ]
