import numpy as np

from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    uses_lora,
)
from leadline.doctor.signals import (
    GRAD,
    KL,
    reward_rises,
)
from leadline.doctor.view import View


class LearningRateTooLowForLora(Rule):
    """A LoRA adapter is trained at a learning rate that only suits full fine-tuning.

    ## Symptom
    The KL stays between 1e-6 and 1e-4, the reward is flat, the gradient norm is above 0: weights change, but hardly.

    ## Cause
    A rate of 1e-6 or less moves the few adapter weights, whose B starts at 0, far too little.

    ## Fix
    Multiply `optimizer.learning_rate` by ten or more (1e-5 to 1e-4 for LoRA).

    ## References
    huggingface/trl issue 2872; TRL's LoRA guide uses 1e-5 against 1e-6 for full fine-tuning. 2e-6 as the limit is leadline's choice.
    """

    id = "LL406"
    name = "learning-rate-too-low-for-lora"
    severity = "warning"
    explains = ("reference-not-frozen",)
    sick = (
        RunLog([], {"optimizer": {"learning_rate": 5e-7}, "model": {"lora_rank": 8}}),
        RunLog.from_columns(
            {"kl/k3": [1e-5] * 30, "reward/mean": [0.3] * 30, "optimizer/grad_norm": [0.2] * 30},
            {"optimizer": {"learning_rate": 1e-6}, "model": {"lora_rank": 8}},
        ),
    )
    healthy = (
        RunLog([], {"optimizer": {"learning_rate": 5e-7}, "model": {"lora_rank": 0}}),
        RunLog([], {"optimizer": {"learning_rate": 1e-5}, "model": {"lora_rank": 8}}),
    )
    limit = 2e-6

    def _low(self, run: View) -> float:
        rate = run.number("optimizer.learning_rate")
        rate = run["optimizer/learning_rate"].finite.high if np.isnan(rate) else rate
        return rate if uses_lora(run) and 0 < rate <= self.limit else np.nan

    def examine(self, run: View) -> list[Evidence]:
        kl, reward, rate = run.first_of(*KL).finite, run["reward/mean"].finite, self._low(run)
        flat = len(reward) < TREND or not reward_rises(run)
        if np.isnan(rate) or len(kl) < TREND or kl.high > 1e-3 or not flat or not run.first_of(*GRAD).median > 1e-6:
            return []
        return [
            run.fact(kl, kl.high, 1e-3, "The KL never exceeds {value} and the reward is flat: the policy hardly moves.")
        ]

    def lint(self, run: View) -> list[Evidence]:
        rate = self._low(run)
        if np.isnan(rate) or (len(run["reward/mean"].finite) >= TREND and reward_rises(run)):
            return []
        note = f"The learning rate is {number(rate)} for a LoRA adapter, which wants about ten times as much."
        return [Evidence("optimizer.learning_rate", 0, rate, self.limit, note, "weak")]
