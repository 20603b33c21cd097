"""Who waited for whom within a step: its timings, and the bottleneck in words."""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leadline.loop.activity import Activity
from leadline.numerals import share
from leadline.types import Group

NOTICED = 0.1
"""Share of a step below which waiting is no bottleneck."""


class StepWatch:
    """The seconds of one step, from its start on.

    A step is the wait for its groups, the update, and the load of the weights. While the trainer waits, groups are under
    way; while no group is under way, the engine waits for the trainer; what is left is overlap:

        step = wait_for_rollouts + wait_for_trainer + overlap
    """

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._marks: dict[str, tuple[float, float]] = {}
        self.mark("start")

    def mark(self, name: str) -> None:
        """This part of the step ends now."""
        self._marks[name] = time.perf_counter(), self._activity.rolling_seconds

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """The timings of a step whose parts "groups", "update" and "load" are marked; without the last, up to now.

        `groups` are those sampled for the step.
        """
        if "load" not in self._marks:
            self.mark("load")
        (started, rolled_before), (end, rolled) = self._marks["start"], self._marks["load"]
        step, waited = end - started, self._marks["groups"][0] - started
        held_up = min(step, max(0.0, step - (rolled - rolled_before)))
        tokens = sum(len(rollout.completion.token_ids) for group in groups for rollout in group.rollouts)
        return {
            "time/step_s": step,
            "time/wait_for_rollouts_s": waited,
            "time/wait_for_trainer_s": held_up,
            "time/overlap_share": max(0.0, step - waited - held_up) / step,
            "time/load_weights_s": end - self._marks["update"][0],
            "time/generate_s": max(group.timings.get("generate", 0.0) for group in groups),
            "time/reward_s": max(group.timings.get("reward", 0.0) for group in groups),
            "throughput/sampled_tokens_per_s": tokens / step,
        }


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What steps waited for most."""

    who: Literal["trainer", "engine"]
    """Who waited."""
    waits_for: Literal["generation", "rewards", "training"]
    share: float
    """Of their time."""

    def __str__(self) -> str:
        return f"{self.who} waited {share(self.share)} for {self.waits_for}"


def bottleneck(rows: Iterable[Mapping[str, float]]) -> Bottleneck | None:
    """Whom the others waited for in these steps; None if nobody waited a tenth of the time, or it was not measured.

    Of several steps, for one alone may mislead: where two steps' groups start together, every second one waits for none.
    """
    timed = [row for row in rows if "time/wait_for_rollouts_s" in row]

    def seconds(name: str) -> float:
        return sum(row.get(f"time/{name}_s", 0.0) for row in timed)

    step = seconds("step") or math.nan
    trainer, engine = seconds("wait_for_rollouts") / step, seconds("wait_for_trainer") / step
    if not max(trainer, engine) >= NOTICED:
        return None
    if engine > trainer:
        return Bottleneck("engine", "training", engine)
    return Bottleneck("trainer", "rewards" if seconds("reward") > seconds("generate") else "generation", trainer)
