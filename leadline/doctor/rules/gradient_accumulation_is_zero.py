from leadline.doctor.rule import Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.view import View


class GradientAccumulationIsZero(Rule):
    """The micro-batch is larger than the mini-batch, so the number of accumulation steps is 0.

    ## Symptom
    A loss or gradient of NaN from the first step.

    ## Cause
    mini-batch / micro-batch rounds down to 0, and the loss is divided by it.

    ## Fix
    Make the micro-batch per GPU at most the mini-batch per GPU and a divisor of it.

    ## References
    verl issue 2505. Arithmetic: a whole number rounds down to 0.
    """

    id = "LL431"
    name = "gradient-accumulation-is-zero"
    severity = "error"
    explains = ("nan-poisoned-weights", "updates-skipped")
    sick = (RunLog([], {"raw": {"actor": {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 8}}}),)
    healthy = (RunLog([], {"raw": {"actor": {"ppo_mini_batch_size": 64, "ppo_micro_batch_size_per_gpu": 8}}}),)

    def examine(self, run: View) -> list[Evidence]:
        return []

    def lint(self, run: View) -> list[Evidence]:
        mini = [float(v) for _, v in run.raw(r"mini_batch_size$") if isinstance(v, int | float)]
        micro = [
            (n, float(v))
            for n, v in run.raw(r"micro_batch_size(_per_gpu)?$")
            if isinstance(v, int | float) and "log_prob" not in n and "infer" not in n
        ]
        if mini and micro and micro[0][1] > mini[0] > 0:
            name, size = micro[0]
            return [
                Evidence(
                    name, 0, size, mini[0], f"{name} is {number(size)}, more than the mini-batch of {number(mini[0])}."
                )
            ]
        if any(
            v == 0
            for _, v in run.raw(r"gradient_accumulation(_steps)?$")
            if isinstance(v, int | float) and not isinstance(v, bool)
        ):
            return [Evidence("gradient_accumulation_steps", 0, 0.0, 1.0, "gradient_accumulation_steps is 0.")]
        return []
