"""Where the learning signal went.

Every sampled completion token ends at exactly one stage, and so does all of its mass. The mass of a token is
|advantage| x its share in the loss: what its gradient would be if nothing stood in the way. A token meets the stages in
this order:

    failed             its rollout has no finite reward (it raised, timed out or returned None; engine aborted)
    no_signal          its advantage is 0: all rewards of the group equal, or its own equal to the mean
    stale              older than the bound (always 0: the queue never starts such a group)
    truncated          its completion ran into the token limit and `mask_truncated` is set
    unscored           its rollout logprob is missing and `on_unscored` is "drop"
    low_entropy        below `entropy_quantile`
    importance_masked  its rollout weight was set to 0 by a bound or the veto
    importance_shrunk  mass only: what a weight w below 1 took, m (1 - w); negative where w is above 1
    clipped            the policy ratio's clip removed its gradient
    ratio_drift        mass only: m w (1 - ratio), what a ratio away from 1 took or (negative) added
    discarded          the optimizer step was not finite and not taken: all tokens that it saw, as nothing that was
                       computed of them can be trusted
    reached            |d policy loss / d logprob|, as autograd would say

sampled = the sum of all stages, in tokens and in mass, exactly. With replay it is of all the step's groups, and
`replayed` says how much of it an earlier step had trained already. With several optimizer steps on one batch each column
is the mean over epochs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.metrics import LEDGER_STAGES

MASS_ONLY = ("importance_shrunk", "ratio_drift")


@dataclass(frozen=True, slots=True)
class Pass:
    """What happened to the forwarded loss tokens of one optimizer step. All tensors have the axis "token".

    Example: a token of advantage -0.5 with one hundredth of the loss, weight 0.8 and ratio 1.1, not clipped:
        mass 0.005, weight 0.8, gain 1.1 -> importance_shrunk 0.001, ratio_drift -0.0004, reached 0.0044
    """

    completion_of_token: Int[Tensor, " token"]
    mass: Float[Tensor, " token"]
    kept: Bool[Tensor, " token"]
    """False = dropped by the entropy quantile."""
    weights: Float[Tensor, " token"]
    masked: Bool[Tensor, " token"]
    gain: Float[Tensor, " token"]
    discarded: bool


@dataclass(slots=True)
class Ledger:
    """Tokens and mass by stage, and by completion (from which comes its fate)."""

    num_completions: int
    tokens: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    mass: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_completion: dict[str, Float[Tensor, " completion"]] = field(default_factory=dict)
    replayed: Bool[Tensor, " completion"] | None = None
    """Completions that an earlier step has trained already; None = there is no replay."""
    replayed_tokens: float = 0.0
    replayed_mass: float = 0.0

    def add(self, stage: str, completions: Int[Tensor, " token"], mass: Float[Tensor, " token"], share: float) -> None:
        """These tokens end at `stage` (for a mass-only stage: leave this mass there); `share` = 1 / epochs."""
        if stage not in MASS_ONLY:
            self.tokens[stage] += len(completions) * share
        self.mass[stage] += float(mass.double().sum()) * share
        if self.replayed is not None:
            again = self.replayed[completions]
            self.replayed_tokens += 0.0 if stage in MASS_ONLY else int(again.sum()) * share
            self.replayed_mass += float(mass[again].double().sum()) * share
        row = self.by_completion.setdefault(stage, torch.zeros(self.num_completions, dtype=torch.float64))
        row.index_add_(0, completions, mass.double().abs() * share + 1e-30)  # so that no mass has a fate too

    def add_pass(self, step: Pass, share: float) -> None:
        """Account the forwarded tokens of one optimizer step."""
        everything = torch.ones_like(step.kept)
        if step.discarded:
            self._add_where("discarded", everything, step, step.mass, share)
            return
        self._add_where("low_entropy", ~step.kept, step, step.mass, share)
        self._add_where("importance_masked", step.kept & step.masked, step, step.mass, share)
        live = step.kept & ~step.masked
        weighted = step.mass * step.weights
        self._add_where("importance_shrunk", live, step, step.mass - weighted, share)
        stopped = step.gain == 0
        self._add_where("clipped", live & stopped, step, weighted, share)
        self._add_where("ratio_drift", live & ~stopped, step, weighted * (1 - step.gain), share)
        self._add_where("reached", live & ~stopped, step, weighted * step.gain, share)

    def _add_where(
        self, stage: str, where: Bool[Tensor, " token"], step: Pass, mass: Float[Tensor, " token"], share: float
    ) -> None:
        self.add(stage, step.completion_of_token[where], mass[where], share)

    def metrics(self) -> dict[str, float]:
        """`ledger/...` columns; shares are NaN when no mass was sampled."""
        sampled = sum(self.mass[stage] for stage in LEDGER_STAGES)
        row: dict[str, float] = {
            "ledger/sampled_tokens": sum(self.tokens[stage] for stage in LEDGER_STAGES),
            "ledger/sampled_mass": sampled,
        }
        if self.replayed is not None:
            row |= {"ledger/replayed_tokens": self.replayed_tokens, "ledger/replayed_mass": self.replayed_mass}
        for stage in LEDGER_STAGES:
            if stage not in MASS_ONLY:
                row[f"ledger/{stage}_tokens"] = self.tokens[stage]
            row[f"ledger/{stage}_mass"] = self.mass[stage]
            row[f"ledger/{stage}_share"] = self.mass[stage] / sampled if sampled else float("nan")
        return row

    def fates(self) -> list[str]:
        """By completion: the stage where most of its mass ended ("empty" for one without tokens)."""
        stages = list(self.by_completion)
        if not stages:
            return ["empty"] * self.num_completions
        table = torch.stack([self.by_completion[stage] for stage in stages])
        best = table.max(0)
        return [
            stages[int(stage)] if value > 0 else "empty" for stage, value in zip(best.indices, best.values, strict=True)
        ]


def account_unforwarded(
    ledger: Ledger,
    lost_at: Sequence[str | None],
    completion_of_token: Int[Tensor, " token"],
    mass: Float[Tensor, " token"],
    elsewhere: Bool[Tensor, " token"],
) -> None:
    """Tokens that no optimizer step sees: completions lost before the loss, and dropped unscored tokens.

    `elsewhere` marks the tokens that `add_pass` accounts; `mass` is 0 where there is no advantage.
    """
    stages = [lost or "unscored" for lost in lost_at]
    for stage in dict.fromkeys(stages):
        here = torch.tensor([s == stage for s in stages])[completion_of_token] & ~elsewhere
        ledger.add(stage, completion_of_token[here], mass[here], 1.0)
