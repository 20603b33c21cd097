"""How often all rewards of a group are equal, so that it teaches nothing."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

GROUP_SIZES = (2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Rewards that one model got, by prompt."""

    rewards: Sequence[Sequence[float]]

    @property
    def count(self) -> int:
        """Completions."""
        return sum(map(len, self.rewards))

    @property
    def values(self) -> list[tuple[float, float]]:
        """(reward, share), largest share first."""
        counts = Counter(value for group in self.rewards for value in group)
        return [(value, count / self.count) for value, count in counts.most_common()]

    def without_signal(self, group_size: int) -> float:
        """The expected share of groups of this size whose rewards are all equal: the mean over prompts of
        sum_v p_v^G, which for rewards of 0 and 1 is p^G + (1 - p)^G.

        Where a prompt has at least G completions, p_v^G is estimated without bias: as the share of the draws of G of
        them that are all v. NaN for no completions.
        """
        shares = [equal_share(group, group_size) for group in self.rewards if group]
        return math.fsum(shares) / len(shares) if shares else math.nan


def equal_share(rewards: Sequence[float], group_size: int) -> float:
    """The probability that `group_size` draws of these rewards are equal: without replacement if there are enough."""
    n = len(rewards)
    counts = Counter(rewards).values()
    if n >= group_size:
        return math.fsum(math.comb(count, group_size) for count in counts) / math.comb(n, group_size)
    return math.fsum((count / n) ** group_size for count in counts)
