"""A reward that takes its time, so that a step can be interrupted."""

import time
from collections.abc import Sequence


def slow(completion_ids: Sequence[int]) -> float:
    time.sleep(1.5)
    return float(len(completion_ids))
