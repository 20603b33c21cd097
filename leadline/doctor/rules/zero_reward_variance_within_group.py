from collections.abc import Sequence

from leadline.doctor.rule import Evidence, Rule
from leadline.doctor.run_log import RunLog
from leadline.doctor.signals import (
    SPREAD,
    ZERO_SIGNAL,
)
from leadline.doctor.view import View


class ZeroRewardVarianceWithinGroup(Rule):
    """Most groups have equal rewards, so they teach nothing.

    ## Symptom
    Loss and gradient norm are near zero, the reward curve is flat, and more than 80 % of the groups have no advantage
    (`rollout/zero_signal_fraction`, TRL: frac_reward_zero_std). The reward's std over all rollouts may still look
    healthy: it also counts the difference between prompts.

    ## Cause
    An advantage compares a completion with the others of its group. When all rewards of a group are equal, every
    advantage is zero. At the lowest reward: the task is too hard, or the reward cannot parse the completions. At the
    highest: the data is solved.

    ## Fix
    Read a few completions with their rewards: if right answers get no reward, mend the reward or the answer format; if
    all are right or all wrong, choose data of another difficulty. A larger `rollout.group_size` or dynamic sampling
    (`rollout.refill`) finds more groups that disagree.

    ## References
    Yu et al. 2025, DAPO (arXiv 2503.14476), dynamic sampling. huggingface/trl issue 3857, modelscope/ms-swift issue 4570.
    The limit of 0.8 over three steps is leadline's choice: below it a step still learns from a fifth of its samples.
    """

    id = "LL101"
    name = "zero-reward-variance-within-group"
    severity = "warning"
    needs = ((*ZERO_SIGNAL, "reward/group_std", "reward/std"),)
    sick = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [1.0, 1.0, 1.0]}),
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.2, 0.875, 0.875, 1.0]}),
        RunLog.from_columns({"reward/std": [0.0, 0.0], "optimizer/grad_norm": [0.0, 0.0]}),
    )
    healthy = (
        RunLog.from_columns({"rollout/zero_signal_fraction": [0.5, 0.8, 0.8, 0.8, 0.25]}),
        RunLog.from_columns({"rollout/zero_signal_fraction": [1.0, 0.9, 0.5, 0.9, 1.0]}),
    )
    limit = 0.8

    def examine(self, run: View) -> list[Evidence]:
        share = run.first_of(*ZERO_SIGNAL)
        if len(share.known):
            note = "{percent} of the groups had no advantage {when}; more than 80 % is too many."
            return run.lasting(share, lambda v: v > self.limit, self.limit, note)
        note = "The rewards did not vary at all {when} (std {value}), so no completion had an advantage."
        return run.lasting(run.first_of(*SPREAD), lambda v: v <= 1e-9, 0.0, note)

    def forbids(self, run: View) -> list[Evidence]:
        share = run.first_of(*ZERO_SIGNAL).finite
        if len(share) and share.median <= self.limit and share.late <= self.limit:
            return [run.fact(share, share.median, self.limit, "Typically {percent} of the groups had no advantage.")]
        spread = run["reward/group_std"].finite
        if not len(share) and len(spread) and spread.median > 1e-6:
            return [run.fact(spread, spread.median, 0.0, "The std within groups was {value}: groups do disagree.")]
        return []

    def fix(self, run: View, evidence: Sequence[Evidence]) -> str:
        reward, best = run["reward/mean"].finite, run["reward/max"].finite
        if len(reward) and len(best) and reward.median >= best.high - 1e-9 and best.high > 0:
            return run.worded("Every rollout reaches the highest reward: the data is solved. Take harder prompts.")
        return super().fix(run, evidence)

    def avoid(self, run: View, evidence: Sequence[Evidence]) -> str:
        return "A higher learning rate does not help: there is no gradient to scale."
