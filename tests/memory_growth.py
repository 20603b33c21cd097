"""Run as a process of its own: bytes in use after 10 and after 30 updates on rows of ever other lengths, in bfloat16."""

import ctypes
import json
import random

from leadline.config import Config
from leadline.policy.batch import Batch, build_batch
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import settings
from tests.memory_peak import random_policy

FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallocInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


def in_use() -> int:
    """Bytes that were asked of glibc and not given back: neither holes nor the machine's other load are in it."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = MallocInfo
    info = ask()
    return int(info.uordblks + info.hblkhd)


def random_batch(rng: random.Random, config: Config) -> Batch:
    def rollout() -> Rollout:
        n = rng.randint(4, 40)
        return Rollout(Completion((7,) * n, (-1.0,) * n, (0,) * n, FinishReason.EOS), "", reward=rng.random())

    return build_batch([Group(Prompt(0, "", (5,) * rng.randint(9, 60)), [rollout() for _ in range(4)])], config, 0)


def measure() -> list[int]:
    config = settings(model={"dtype": "bfloat16"}, rollout={"group_size": 4, "groups_per_step": 1})
    policy, rng, counts = random_policy(config), random.Random(0), []
    for _ in range(3):
        for _ in range(10):
            policy.update(random_batch(rng, config))
        counts.append(in_use())
    return counts


if __name__ == "__main__":
    print(json.dumps(measure()))
