import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, Strength, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import Series, above
from leadline.doctor.setup import (
    is_tiny,
    learning_rate,
    rate_bound,
    uses_lora,
)
from leadline.doctor.signals import (
    ENTROPY,
    KL,
    reward_falls,
    reward_rises,
)
from leadline.doctor.view import View


class LearningRateTooHigh(Rule):
    """The learning rate moves the policy farther than a reinforcement-learning step may.

    ## Symptom
    The KL exceeds 1 within the first steps, or jumps by 0.1 and more in a few updates; outputs degrade within tens of steps;
    the rate is one of supervised fine-tuning (1e-5 and more for all weights, 1e-4 and more for LoRA).

    ## Cause
    A learning rate that suits supervised fine-tuning is reused.

    ## Fix
    Lower `optimizer.learning_rate` to 1e-6 (full fine-tuning) or 1e-5 (LoRA) and add a warm-up (`optimizer.warmup_steps`);
    go back to a checkpoint before the rise.

    ## References
    Common Pitfalls in RL Post-Training: stable updates need 1e-7 to 5e-6, and a KL above 1 within the first steps says too high. jjyaoao/HelloAgents pull 108 (5e-5:
    57 % to 2.4 %). From 5e-5 (full) and 5e-4 (LoRA) on the setting alone is a strong sign; tiny models bear more.
    A step that changes the weights by a tenth of their norm is far beyond any: stable ones change them by 1e-3 and less.
    """

    id = "LL405"
    name = "learning-rate-too-high"
    severity = "error"
    explains = (
        "entropy-collapse",
        "entropy-explosion",
        "zero-reward-variance-within-group",
        "kl-drift-reward-collapse",
        "clip-range-too-narrow",
        "k3-kl-outlier-explosion",
        "truncation-rate-high-unresolved",
    )
    confirm = "Repeat the first steps with a tenth of the rate."
    sick = (
        RunLog.from_columns({"kl/k3": [0.0, 0.4, 1.6, 3.0]}),
        RunLog([], {"optimizer": {"learning_rate": 5e-5}, "model": {"name": "Qwen3-0.6B", "lora_rank": 0}}),
        RunLog.from_columns({"kl/k3": [0.001, 0.01, 0.2, 0.5], "optimizer/learning_rate": [2e-5] * 4}),
        RunLog.from_columns({"optimizer/update_norm": [0.9, 0.4, 0.2]}),
    )
    healthy = (
        RunLog.from_columns({"kl/k3": [0.0, 0.001, 0.004, 0.01]}),
        RunLog.from_columns({"kl/k3": [0.01 * i for i in range(200)]}),
        RunLog([], {"optimizer": {"learning_rate": 1e-4}, "model": {"lora_rank": 16}}),
        RunLog.from_columns({"optimizer/update_norm": [0.04, 0.03, 0.02]}),
    )
    first_steps, limit = 50, 1.0

    def examine(self, run: View) -> list[Evidence]:
        kl = run.first_of("kl/k3", "kl/reference", "kl/k2").finite
        found = []
        early = kl.where((kl.steps <= self.first_steps) & (kl.values > self.limit))
        rate = learning_rate(run)
        if len(early) and kl.first < 0.1:
            said = "" if np.isnan(rate) else f" at a learning rate of {number(rate)}"
            note = f"The KL to the reference reached {{value}} at step {int(early.steps[0])}{said}; {{limit}} is too much so early."
            found.append(run.fact(early, float(early.values[0]), self.limit, note, since=int(early.steps[0])))
        elif (
            len(kl) >= 3
            and not is_tiny(run)
            and rate >= rate_bound(run)
            and kl.first < 0.1
            and kl.head(20).high > 0.1
            and kl.head(20).high > 10 * kl.first
        ):
            note = (
                f"The KL rose from {number(kl.first)} to {{value}} within its first rows at a rate of {number(rate)}."
            )
            found.append(run.fact(kl, kl.head(20).high, 0.1, note, since=int(kl.steps[0])))
        note = "The weights changed by {percent} of their norm {when}; more than 10 % in one step replaces the model."
        found += run.lasting("optimizer/update_norm", above(0.1), 0.1, note, rows=2, strength="proof")
        if rate >= rate_bound(run) and not found:
            found += self._slow_harm(run, kl, rate)
        if rate >= rate_bound(run):
            found += probe.falls(run, r"acc|score|eval|pass|reward", 0.3)
        return found

    @staticmethod
    def _slow_harm(run: View, kl: Series, rate: float) -> list[Evidence]:
        """What a rate that is too high does over a whole run: the KL runs away, or the entropy is used up."""
        entropy, found = run.first_of(*ENTROPY).finite, []
        improving = reward_rises(run) and not reward_falls(run)
        if kl.is_trend and not improving and kl.late > 0.5 and kl.late > 10 * max(kl.early, 1e-6):
            note = f"The KL rose from {number(kl.early)} to {{value}} at a rate of {number(rate)}, and the reward does not."
            found.append(run.fact(kl, kl.late, 0.5, note, since=int(kl.steps[0])))
        if entropy.is_trend and entropy.late < 0.1 * entropy.early and entropy.late < 0.1 and not improving:
            note = f"Entropy fell from {number(entropy.early)} to {{value}} nats at a rate of {number(rate)}."
            found.append(run.fact(entropy, entropy.late, 0.1, note, since=int(entropy.steps[0])))
        return found

    def lint(self, run: View) -> list[Evidence]:
        rate, bound = learning_rate(run), rate_bound(run)
        if not rate >= bound:
            return []
        kl, reward = run.first_of(*KL).finite, run["reward/mean"].finite
        calm = len(reward) >= 6 and not reward_falls(run) and (not len(kl) or kl.high < 0.5)
        if calm or is_tiny(run):
            return []
        kind = "LoRA" if uses_lora(run) else "full fine-tuning"
        strength: Strength = "strong" if rate >= 4.9 * bound else "weak"
        note = f"The learning rate is {number(rate)}; {kind} in RL wants at most {number(bound)}."
        return [Evidence("optimizer.learning_rate", 0, rate, bound, note, strength)]

    def forbids(self, run: View) -> list[Evidence]:
        kl, rate = run.first_of(*KL).finite, learning_rate(run)
        if len(kl) >= TREND and kl.high < 0.05 and not rate >= rate_bound(run):
            return [run.fact(kl, kl.high, self.limit, "The KL never exceeds {value}: the policy moves slowly.")]
        if rate == 0:
            return [Evidence("optimizer.learning_rate", 0, 0.0, 0.0, "The learning rate is 0.")]
        return []
