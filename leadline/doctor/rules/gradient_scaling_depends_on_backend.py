import numpy as np

from leadline.doctor.rule import PERSISTENT, Evidence, Rule, number
from leadline.doctor.run_log import RunLog
from leadline.doctor.series import paired
from leadline.doctor.setup import (
    is_moe,
)
from leadline.doctor.signals import (
    GRAD,
    KL,
    reward_falls,
)
from leadline.doctor.view import View


class GradientScalingDependsOnBackend(Rule):
    """The gradient norm depends on the number of machines or accumulation steps, not on the data.

    ## Symptom
    The norm differs by powers of ten, or by the world size or accumulation steps, between set-ups on the same data; or it is
    in the thousands with everything else ordinary.

    ## Cause
    The loss is summed where it should be averaged (or the reverse) over ranks, micro-batches or context-parallel parts.

    ## Fix
    Divide by whole-step counts once, after the sum over all micro-batches and ranks; check that one batch gives the same norm
    with another micro-batch size.

    ## References
    verl issue 6609 (thousands with context parallelism) and 5625, modelscope/ms-swift. A typical norm above 1000 with a KL below 0.1: leadline's
    choice.
    """

    id = "LL425"
    name = "gradient-scaling-depends-on-backend"
    severity = "warning"
    confirm = "Compute the norm of one batch with two micro-batch sizes."
    sick = (
        RunLog.from_columns({"optimizer/grad_norm": [4000.0] * 6, "kl/k3": [0.001] * 6}),
        RunLog([{"step": 1, "grad_norm_zero2": 0.4, "grad_norm_zero3": 3.2}]),
        RunLog(
            [
                {"step": 1, "optimizer/grad_norm": 0.4, "world_size": 1},
                {"step": 2, "optimizer/grad_norm": 3.2, "world_size": 8},
            ]
        ),
    )
    healthy = (
        RunLog.from_columns({"optimizer/grad_norm": [4.0] * 6, "kl/k3": [0.001] * 6}),
        RunLog([{"step": 1, "grad_norm_zero2": 0.4, "grad_norm_zero3": 0.41}]),
    )

    def examine(self, run: View) -> list[Evidence]:
        found = []
        grad, kl = run.first_of(*GRAD).finite, run.first_of(*KL).finite
        calm = (not len(kl) or kl.high < 0.1) and not reward_falls(run)
        if len(grad) >= PERSISTENT and grad.median > 1000 and grad.early > 300 and calm:
            found.append(
                run.fact(
                    grad, grad.median, 1000.0, "The gradient norm is typically {value} while the policy moves little."
                )
            )
        norms = [s.finite for _, s in run.measured(r"grad.*norm|norm.*grad") if len(s.finite) and s.median > 0]
        if len(norms) > 1:
            low, high = min(norms, key=lambda s: s.median), max(norms, key=lambda s: s.median)
            if high.median > 1.9 * low.median:
                found.append(
                    run.fact(
                        high,
                        high.median,
                        low.median,
                        f"{high.name} is {{value}} and {low.name} {{limit}} on the same data.",
                    )
                )
        for name, scale in run.measured(r"world size|accum|n(um)? gpus|\bdp\b|ranks|zero stage|micro batch"):
            steps, size, norm = paired(scale, norms[0] if len(norms) == 1 else grad)
            if len(steps) > 1 and np.ptp(size) > 0 and norm.max() > 1.9 * norm.min():
                found.append(
                    run.fact(
                        scale,
                        float(size.max()),
                        float(size.min()),
                        f"The gradient norm goes from {number(float(norm.min()))} to {number(float(norm.max()))} with {name}.",
                    )
                )
        return found

    def lint(self, run: View) -> list[Evidence]:
        parts = [(n, v) for n, v in run.raw(r"context_parallel|(^|[._])cp(_size)?$") if isinstance(v, int) and v > 1]
        if parts and run.says(r"calculate_per_token_loss\W*= (true|1)") and is_moe(run):
            return [
                Evidence(
                    parts[0][0],
                    0,
                    float(parts[0][1]),
                    1.0,
                    "Context parallelism with a per-token loss and experts scales the auxiliary loss wrongly in some versions.",
                    "weak",
                )
            ]
        return []
