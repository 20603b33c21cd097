from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GAP,
)
from leadline.doctor.view import View


class DropoutInRlForward(Rule):
    """Dropout is on, so the same weights give other logprobs in each pass.

    ## Symptom
    Engine and trainer, or two passes of the trainer, differ by tenths of a nat at the very first step; tokens are clipped
    before any update.

    ## Cause
    A dropout other than 0 (Megatron's default is 0.1) in the forward passes of RL.

    ## Fix
    Set every dropout to 0 (Megatron: attention_dropout and hidden_dropout; TRL: disable_dropout = True).

    ## References
    reef issue 536 (0.86 nats and half of the tokens clipped at the first step). A setting; 0.1 nats is slime's CI limit.
    """

    id = "LL324"
    name = "dropout-in-rl-forward"
    severity = "error"
    explains = ("rollout-logprob-mismatch", "first-update-identity-broken")
    sick = (
        RunLog([], {"raw": {"attention_dropout": 0.1}}),
        RunLog.from_columns({"importance/log_ratio_abs_mean": [0.86] * 3}, {"raw": {"hidden_dropout": 0.1}}),
    )
    healthy = (RunLog([], {"raw": {"attention_dropout": 0.0}}), RunLog([], {"raw": {"lora_dropout": 0.0}}))

    def examine(self, run: View) -> list[Evidence]:
        gap = run.first_of(*GAP).finite.head(3)
        if not self._on(run) or not len(gap) or gap.median < 0.05:
            return []
        return [
            run.fact(
                gap, gap.median, 0.05, "Logprobs differ by {value} nats at the first rows.", since=int(gap.steps[0])
            )
        ]

    def lint(self, run: View) -> list[Evidence]:
        return [
            Evidence(
                name, 0, value, 0.0, f"{name} is {value:g}: it must be 0 in RL.", "weak" if "lora" in name else "strong"
            )
            for name, value in self._on(run)
        ]

    @staticmethod
    def _on(run: View) -> list[tuple[str, float]]:
        return [
            (n, float(v))
            for n, v in run.raw(r"dropout")
            if isinstance(v, int | float) and not isinstance(v, bool) and v > 0
        ]
