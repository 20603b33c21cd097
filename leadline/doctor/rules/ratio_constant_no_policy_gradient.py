import numpy as np

from leadline.doctor import measurements as probe
from leadline.doctor.rule import TREND, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.signals import (
    GRAD,
    KL,
    dead_gradient,
    has_signal,
    share_with,
)
from leadline.doctor.view import View


class RatioConstantNoPolicyGradient(Rule):
    """The policy ratio is a constant without gradient, so only the KL term moves the weights.

    ## Symptom
    With a KL term: the gradient norm is about 0 while policy equals reference and grows only with the KL. Without one it is
    exactly 0 although rewards vary. LoRA's B stays exactly 0.

    ## Cause
    The ratio is computed from detached logprobs (at one level of importance sampling), or the wrong tensor is divided by
    itself.

    ## Fix
    Change the level of importance sampling as a test (`importance_sampling_level`, `objective.importance_level`): if the
    gradient returns, mend the ratio: exp(logp - logp.detach()) keeps the gradient, exp((logp - logp).detach()) does not.

    ## References
    Common Pitfalls in RL Post-Training, "loss not connected to policy parameters"; torchforge issue 571. Correlation of gradient norm and KL above 0.95 with a
    start at 0: leadline's choice.
    """

    id = "LL409"
    name = "ratio-constant-no-policy-gradient"
    severity = "error"
    needs = (GRAD,)
    explains = ("no-update-grad-and-kl-exactly-zero",)
    confirm = "Set beta to 0: does the gradient norm become exactly 0?"
    sick = (
        RunLog.from_columns(
            {
                "optimizer/grad_norm": [1e-8] + [0.001 * i for i in range(1, 30)],
                "kl/k3": [0.0] + [0.0001 * i for i in range(1, 30)],
                "reward/std": [0.4] * 30,
            }
        ),
        RunLog([{"step": 1, "lora_b_max": 0.0, "optimizer/grad_norm": 0.0}]),
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.0] * 2, "reward/std": [0.4] * 2},
            {"raw": {"importance_sampling_level": None, "level_note": "ratio is constant"}},
        ),
    )
    healthy = (
        RunLog.from_columns(
            {"optimizer/grad_norm": [0.3] * 30, "kl/k3": [0.0001 * i for i in range(30)], "reward/std": [0.4] * 30}
        ),
        RunLog([{"step": 1, "lora_b_max": 0.01, "optimizer/grad_norm": 0.2}]),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        steps, grad, kl = paired(run.first_of(*GRAD), run.first_of(*KL))
        alive = share_with(has_signal(run), run.first_of(*GRAD).finite) > 0.5
        if (
            len(steps) >= TREND
            and alive
            and grad[0] < 1e-3 * grad.max()
            and kl.max() > 10 * abs(kl[0])
            and np.ptp(grad) > 0
        ):
            match = float(np.corrcoef(grad, np.sqrt(np.abs(kl)))[0, 1])
            match = max(match, float(np.corrcoef(grad, kl)[0, 1]))
            if match > 0.95:
                note = f"The gradient norm starts at {number(float(grad[0]))} and follows the KL (correlation {{value}}): only the KL term pulls."
                found.append(run.fact(run.first_of(*GRAD), match, 0.95, note, since=int(steps[0])))
        dead = dead_gradient(run)
        said = run.says(r"ratio.*constant|constant.*ratio|detach|importance_sampling_level.*(none|null)")
        level = [n for n, v in run.raw(r"importance_sampling_level") if v in (None, "none", "None", "null")]
        if len(dead) and len(has_signal(run)) and (said or level):
            found.append(
                run.fact(
                    dead,
                    0.0,
                    0.0,
                    f"The gradient norm is {{value}} though rewards vary ({said or level[0] + ' is none'}).",
                )
            )
        return found

    def measure(self, run: View) -> list[Evidence]:
        return probe.zero(run, r"lora b\b|\blora b ", "{name} is 0: the adapter's B never moved.")

    def forbids(self, run: View) -> list[Evidence]:
        grad, beta = run.first_of(*GRAD).finite, run.number("objective.beta")
        if len(grad) and beta == 0 and grad.median > 1e-6:
            return [run.fact(grad, grad.median, 0.0, "There is no KL term, and the gradient norm is {value}.")]
        if len(grad) and grad.first > 1e-3:
            return [run.fact(grad, grad.first, 0.0, "The gradient norm starts at {value}, before any KL.")]
        return []
