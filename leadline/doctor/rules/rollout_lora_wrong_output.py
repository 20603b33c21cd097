from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.setup import (
    filters_support,
    uses_lora,
    uses_server_engine,
)
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class RolloutLoraWrongOutput(Rule):
    """The engine computes the adapter wrongly: outputs differ before any update.

    ## Symptom
    At the first step, with the same weights, reward or logprobs of the engine differ from the trainer's; some rollouts are
    garbled; it changed with a version of the engine.

    ## Cause
    A defect of the engine's LoRA path: scaling, target modules or a fused kernel.

    ## Fix
    Serve merged weights instead of the adapter, or change the engine's version; compare the logprobs of one prompt in both
    before training.

    ## References
    verl issue 4286. 0.1 nats in the first rows (slime's CI limit) in a LoRA run; other causes of a first-step gap are rivals.
    """

    id = "LL309"
    name = "rollout-lora-wrong-output"
    severity = "error"
    explains = ("rollout-logprob-mismatch",)
    confirm = "Compare engine and trainer on one prompt with the adapter, and again with merged weights."
    sick = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.4, 0.41, 0.4]},
            {"model": {"lora_rank": 16}, "engine": {"kind": "vllm"}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.02, 0.02, 0.4]},
            {"model": {"lora_rank": 16}, "engine": {"kind": "vllm"}},
        ),
        RunLog.from_columns(
            {"importance/log_ratio_abs_mean": [0.4] * 3}, {"model": {"lora_rank": 0}, "engine": {"kind": "vllm"}}
        ),
    )

    def examine(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite.head(3)
        if not uses_lora(run) or not uses_server_engine(run):
            return []
        found = []
        if len(gap) and gap.first > 0.1:
            note = "Engine and trainer differ by {value} nats per token at the first row already, with a LoRA adapter."
            found.append(run.fact(gap, gap.first, 0.1, note, since=int(gap.steps[0])))
        steps = run.steps
        reward = run["reward/mean"].finite
        same = len(reward) == 2 and len(steps) == 2 and steps[0] == steps[1] and reward.low < 0.7 * reward.high
        if same:
            note = "Two runs differ in reward at the same first step: {value} against {limit}."
            found.append(run.fact(reward, reward.low, reward.high, note, "strong"))
        return found

    def against(self, run: View) -> list[Evidence]:
        if filters_support(run) or abs(run.number("sampling.temperature") - 1) > 0.02:
            return [Evidence("sampling", 0, 1.0, 0.0, "Temperature or top_p alone could show the same.", "weak")]
        return []
