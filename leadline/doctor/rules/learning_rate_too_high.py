from leadline.doctor.rule import Evidence, Rule, when
from leadline.doctor.run_log import RunLog, above


class LearningRateTooHigh(Rule):
    """The policy leaves the reference within its first steps.

    ## Symptom
    `kl/k3` is above 1 nat per token in the first ten steps; completions degenerate and held-out reward falls.

    ## Cause
    The learning rate is of the size used for supervised fine-tuning. A policy gradient step is not bounded by the data:
    a step too large moves probability to completions that were never rewarded.

    ## Fix
    Divide `optimizer.learning_rate` by 10: 1e-7 to 5e-6 suits billions of weights, up to ten times more LoRA. Add
    `optimizer.warmup_steps`, and check `optimizer.max_grad_norm` (1.0).

    ## References
    jjyaoao/HelloAgents pull 108 (57 % to 2.4 % at a fine-tuning rate). The limit of 1 nat in ten steps is leadline's
    choice: a jump of 0.1 within a few updates is already suspect.
    """

    id = "LL405"
    name = "learning-rate-too-high"
    severity = "error"
    needs = ("kl/k3",)
    sick = (RunLog.from_columns({"kl/k3": [0.0, 0.2, 1.7, 40.0]}),)
    healthy = (
        RunLog.from_columns({"kl/k3": [0.0, 0.001, 0.02, 0.9]}),
        RunLog.from_columns({"kl/k3": [0.01] * 10 + [1.2]}),
    )
    limit = 1.0
    first_steps = 10

    def examine(self, run: RunLog) -> list[Evidence]:
        return [
            Evidence(
                "kl/k3",
                streak.last,
                streak.value,
                self.limit,
                f"The KL to the reference was {streak.value:.3g} nats per token {when(streak)}; "
                f"{self.limit:g} in the first {self.first_steps} steps is far too much.",
            )
            for streak in run.streaks("kl/k3", above(self.limit), 1)
            if streak.first <= self.first_steps
        ]
