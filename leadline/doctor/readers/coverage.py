"""What of a log was understood, what not, and what its framework could log but does not here."""

from collections.abc import Mapping
from dataclasses import dataclass

from leadline.doctor.run_log import RunLog
from leadline.doctor.table import State


@dataclass(frozen=True, slots=True)
class Understood:
    """A logged key and the quantity it is. `caveat`: how this framework's number differs from the quantity."""

    key: str
    quantity: str
    state: State
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Coverage:
    """A run's keys. `could_log`: quantity -> the option that turns it on."""

    understood: tuple[Understood, ...]
    not_understood: Mapping[str, str]
    could_log: Mapping[str, str]

    @property
    def share(self) -> float:
        """Understood keys of all that are no bookkeeping; 1 for a log without keys."""
        total = len(self.understood) + len(self.not_understood)
        return len(self.understood) / total if total else 1.0


def coverage(run: RunLog) -> Coverage:
    """Each logged quantity with its key and state, each other key with the reason, and what could be logged."""
    understood = tuple(
        Understood(run.raw_name(name) or name, name, run.state(name), run.caveats.get(name, "")) for name in run.names
    )
    return Coverage(understood, run.unread, run.could_log)
