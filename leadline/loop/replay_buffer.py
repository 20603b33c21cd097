"""Groups that had a signal, kept to stand in for groups that have none.

A replayed group is trained with the logprobs of the weights that drew it, so its rollout weight pi_old / mu is that of
its age. It is replayed once at most, and never when it is older than the bound.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from leadline.types import Group


class ReplayBuffer:
    """Groups of earlier steps whose tokens are at most `max_staleness` versions old when they are taken; 0 = off."""

    def __init__(self, max_staleness: int, groups: Iterable[Group] = ()) -> None:
        self.max_staleness = max_staleness
        self._groups = list(groups)

    @property
    def groups(self) -> tuple[Group, ...]:
        """What it holds, in the order in which it was kept."""
        return tuple(self._groups)

    def keep(self, groups: Iterable[Group], policy_version: int) -> None:
        """Those that may still be replayed at `policy_version`, which is the version of the next step; others go."""
        fresh = [replace(group, replayed=True) for group in groups if not group.replayed]
        self._groups = [group for group in [*self._groups, *fresh] if self._fits(group, policy_version)]

    def take(self, count: int, policy_version: int) -> list[Group]:
        """At most `count` groups for the step at `policy_version`, the youngest first; they are not kept any longer."""
        fit = [group for group in self._groups if self._fits(group, policy_version)]
        taken = sorted(fit, key=_youngest_first)[: max(0, count)]
        self._groups = [group for group in fit if not any(group is other for other in taken)]
        return taken

    def _fits(self, group: Group, policy_version: int) -> bool:
        version = group.policy_version
        return version is not None and policy_version - version <= self.max_staleness


def _youngest_first(group: Group) -> tuple[int, int]:
    return -(group.policy_version or 0), group.prompt.index


def fresh(groups: Sequence[Group]) -> list[Group]:
    """Those that were sampled for this step: what every monitor is about."""
    return [group for group in groups if not group.replayed]
