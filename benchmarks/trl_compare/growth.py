"""How an update grows with the tokens of a step, and how near it comes to the machine's matrix multiplication.

    python -m benchmarks.trl_compare.growth [--full]

prints one line of JSON. A small model shows what grows besides the multiplications; `--full` takes the real one.
"""

import argparse
import json
import time
from typing import Any

import torch

from benchmarks.trl_compare.cells import MODEL, Cell
from benchmarks.trl_compare.measure import reset_peak, resident
from leadline.config import parse_config
from leadline.models import load_model
from leadline.policy.batch import Batch, build_batch
from leadline.policy.policy import Policy
from leadline.policy.profile import gemm_rate, update_flops
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

BUDGET = 2048
GROUP = Cell("train", 128, 64, 8, "float32")


def measure(model: str, sizes: list[int], shares: list[Cell]) -> dict[str, Any]:
    """Seconds and peak memory by tokens a step, and the share of the bare multiplication by shape."""
    torch.set_num_threads(1)
    config = parse_config(
        {
            "model": {"name": model, "device": "cpu"},
            "data": {"source": "unused.jsonl"},
            "rewards": [{"name": "length", "params": {"target": 64}}],
            "objective": {"importance_action": "off"},
            "optimizer": {"learning_rate": 1e-9, "tokens_per_micro": BUDGET},
        }
    )
    policy = Policy(load_model(config.model), config)
    vocabulary = policy.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    policy.update(_batch(GROUP, 1, vocabulary, config))
    rows = []
    for tokens in sizes:
        batch = _batch(GROUP, max(1, tokens // (GROUP.prompt + sum(GROUP.lengths()))), vocabulary, config)
        before = reset_peak()
        seconds = _cpu(policy, batch)
        rows.append({"tokens": _tokens(batch), "seconds": seconds, "bytes": resident("VmHWM") - before})
    return {"model": model, "growth": rows, "shares": [_share(policy, cell, vocabulary, config) for cell in shares]}


def _share(policy: Policy, cell: Cell, vocabulary: int, config: Any) -> dict[str, Any]:
    """Useful FLOP/s of one update against those of bare multiplications of the same row, in turn."""
    batch = _batch(cell, 1, vocabulary, config)
    seconds, rates = [], []
    for _ in range(3):
        rates.append(gemm_rate(policy.model, _tokens(batch), time.process_time))
        seconds.append(_cpu(policy, batch))
    rate = update_flops(policy.model, batch) / sorted(seconds)[1]
    return {"cell": cell.shape, "flops_per_s": rate, "gemm_flops_per_s": sorted(rates)[1]}


def _cpu(policy: Policy, batch: Batch) -> float:
    started = time.process_time()
    policy.update(batch)
    return time.process_time() - started


def _tokens(batch: Batch) -> int:
    return len(batch.token_ids) + sum(map(len, batch.prompt_ids))


def _batch(cell: Cell, groups: int, vocabulary: int, config: Any) -> Batch:
    def rollout(ids: tuple[int, ...], reward: float) -> Rollout:
        ids = tuple(i % vocabulary for i in ids)
        return Rollout(Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.EOS), "", reward=reward)

    def group(index: int) -> Group:
        prompt = Prompt(index, "", tuple(i % vocabulary for i in cell.prompt_ids(index)))
        return Group(prompt, [rollout(ids, float(i)) for i, ids in enumerate(cell.completion_ids(eos=2))])

    return build_batch([group(i) for i in range(groups)], config, 0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    sizes = [1000 * 2**i for i in range(7 if full else 5)]
    shares = [Cell("train", p, c, 8, "float32") for p, c in ((64, 256), (256, 64), (256, 256), (1024, 64))]
    small = measure("tiny", [1000 * 2**i for i in range(7)], [])
    real = measure(MODEL, sizes if full else [], shares if full else shares[1:2])
    print(json.dumps({"small": small, "real": real}))


if __name__ == "__main__":
    main()
