from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    GRAD,
    dead_gradient,
    has_signal,
    share_with,
)
from leadline.doctor.view import View


class AllCompletionsMasked(Rule):
    """Every completion that carries a signal is masked because it was truncated.

    ## Symptom
    Loss and gradient norm are exactly 0 while rewards vary; the truncated share is 1 and truncated completions are masked.

    ## Cause
    `objective.mask_truncated` is on and the completions run into `sampling.max_tokens`, or are taken for truncated because
    they end with a stop string or an end token that the trainer does not know. Nothing is left to train.

    ## Fix
    Set `objective.mask_truncated` to false, and raise `sampling.max_tokens` or let completions end earlier
    (`sampling.stop`).

    ## References
    TRL (`mask_truncated_completions`; measured on 1.16 with a stop string: no parameter changed), ms-swift (`overlong_filter`).
    The limit of 0.95 over three steps is leadline's choice.
    """

    id = "LL203"
    name = "all-completions-masked"
    severity = "error"
    needs = (("ledger/truncated_share", "rollout/truncated_fraction"),)
    explains = ("dead-update", "no-update-grad-and-kl-exactly-zero", "truncation-rate-high-unresolved")
    sick = (
        RunLog.from_columns({"ledger/truncated_share": [0.8, 1.0, 0.97, 1.0]}),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [1.0] * 2, "optimizer/grad_norm": [0.0] * 2, "reward/std": [0.4] * 2},
            {"objective": {"mask_truncated": True}},
        ),
    )
    healthy = (
        RunLog.from_columns({"ledger/truncated_share": [0.0, 1.0, 0.9, 1.0, 0.3]}),
        RunLog.from_columns(
            {"rollout/truncated_fraction": [1.0] * 2, "optimizer/grad_norm": [0.3] * 2, "reward/std": [0.4] * 2},
            {"objective": {"mask_truncated": True}},
        ),
    )
    limit = 0.95

    def examine(self, run: View) -> list[Evidence]:
        note = "{percent} of the signal was in truncated completions, which are masked, {when}."
        found = run.lasting("ledger/truncated_share", lambda v: v > self.limit, self.limit, note)
        cut, dead = run["rollout/truncated_fraction"].finite, dead_gradient(run)
        masked = run.setting("objective.mask_truncated") is True or self._masked_by_name(run)
        if found or run.has("ledger/truncated_share") or not len(cut) or cut.median <= self.limit:
            return found
        if masked and (len(dead) or not run.has(*GRAD)):
            note = "{percent} of the completions count as truncated, and truncated ones are masked."
            return [run.fact(cut, cut.median, self.limit, note, "proof" if len(dead) else "strong", int(cut.steps[0]))]
        unknown = run.setting("objective.mask_truncated") is None
        if unknown and len(dead) and share_with(has_signal(run), dead) > 0.5:
            note = "{percent} of the completions count as truncated and the gradient is 0 although rewards vary."
            return [run.fact(cut, cut.median, self.limit, note, "strong", int(cut.steps[0]))]
        return []

    def forbids(self, run: View) -> list[Evidence]:
        if run.setting("objective.mask_truncated") is False:
            return [run.chosen("objective.mask_truncated", 1, "{option} is {value}.")]
        cut = run["rollout/truncated_fraction"].finite
        if len(cut) and cut.high <= 0.9:
            return [run.fact(cut, cut.high, self.limit, "At most {percent} of the completions are truncated.")]
        grad = run.first_of(*GRAD).finite
        if (
            len(grad)
            and grad.low > 1e-6
            and not run.has("ledger/truncated_share")
            and run.number("objective.beta") == 0
        ):
            return [
                run.fact(grad, grad.low, 0.0, "The gradient norm is at least {value}; with all masked it would be 0.")
            ]
        return []

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return "Do not lower the token limit: even more completions would be masked."

    @staticmethod
    def _masked_by_name(run: View) -> bool:
        return run.says(r"(mask_truncated\w*|overlong_filter\w*|mask_overlong\w*)\W*= (true|1)") is not None
