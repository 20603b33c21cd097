"""One cell, in a process of its own: every side in turn, so that what else the machine does meets all of them alike.

    python -m benchmarks.trl_compare.measure time train:256x64x8:float32 --seconds 60
    python -m benchmarks.trl_compare.measure memory train:256x64x8:float32 --side leadline

prints one line of JSON.
"""

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.trl_compare.cells import Cell
from leadline.compute import computes

SHIPPED, COMPACT, BEST, OURS, OURS_BF16, OURS_LESS = SIDES = (
    "trl-shipped",
    "trl-compact",
    "trl-best",
    "leadline",
    "leadline-bf16-decode",
    "leadline-recomputing",
)
MOST_REPETITIONS = 5


def build(side: str, cell: Cell, others: Mapping[str, Any]) -> Any:
    """The side of this name, ready to run the parts of the cell."""
    from benchmarks.trl_compare.leadline_side import Leadline
    from benchmarks.trl_compare.trl_side import Trl

    if side in (SHIPPED, COMPACT, BEST):
        return Trl(cell, compact=side != SHIPPED, best=side == BEST, sharing=others.get(SHIPPED))
    return Leadline(cell, decode="bfloat16" if side == OURS_BF16 else None, checkpointing=side == OURS_LESS)


def sides_of(cell: Cell) -> list[str]:
    """What is compared. What TRL's training configurations change does not change how it samples in float32."""
    if cell.part == "train":
        return [SHIPPED, BEST, OURS]
    if cell.dtype == "bfloat16":
        return [SHIPPED, BEST, OURS]
    return [SHIPPED, *([BEST] if cell.part == "step" else []), OURS, OURS_BF16]


def times(cell: Cell, seconds: float) -> dict[str, Any]:
    """Median CPU and wall seconds of each side: repeated in turn until `seconds` are spent, one to five times."""
    use_threads(cell.threads)
    small = Cell(cell.part, 16, 8, cell.group, cell.dtype)
    sides: dict[str, Any] = {}
    for side in sides_of(cell):
        sides[side] = build(side, cell, sides)
        sides[side].use(small)
        getattr(sides[side], cell.part)()  # first calls load kernels and allocate AdamW's state
        sides[side].use(cell)
    clocks: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    began = time.perf_counter()
    while not (n := len(clocks[OURS])) or (n < MOST_REPETITIONS and time.perf_counter() - began < seconds):
        for side, runner in sides.items():
            clocks[side].append(clocked(getattr(runner, cell.part)))
    medians = {
        side: [statistics.median(column) for column in zip(*pairs, strict=True)] for side, pairs in clocks.items()
    }
    return {"cell": cell.name, "repetitions": n, "seconds": medians}


def use_threads(count: int) -> None:
    """The number that torch computes with, in this thread and in the one that computes."""
    torch.set_num_threads(count)
    computes(torch.set_num_threads)(count)


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """CPU seconds of this process, and wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def memory(cell: Cell, side: str) -> dict[str, Any]:
    """Peak resident bytes of the first part above what stays: weights, whatever else was loaded, and one gradient."""
    use_threads(cell.threads)
    runner = build(side, cell, {})
    peaks: list[int] = []
    runner.after_backward = lambda: peaks.append(resident("VmHWM"))
    weights = _model_of(runner)
    before = reset_peak() + sum(p.numel() * p.element_size() for p in weights.parameters() if p.requires_grad)
    getattr(runner, cell.part)()
    return {"cell": cell.name, "side": side, "bytes": (peaks or [resident("VmHWM")])[0] - before}


def _model_of(runner: Any) -> torch.nn.Module:
    model: torch.nn.Module = runner.trainer.model if hasattr(runner, "trainer") else runner.session.policy.model
    return model


def reset_peak() -> int:
    """Bytes that are resident now; the high-water mark starts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(name: str) -> int:
    """VmRSS, bytes resident now, or VmHWM, the most there were."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def main() -> None:
    """The command line."""
    warnings.simplefilter("ignore")  # TRL warns of everything; the sides are checked in the tests
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("time", "memory"))
    parser.add_argument("cell", type=Cell.parse)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--side", choices=SIDES, default=OURS)
    asked = parser.parse_args()
    result = times(asked.cell, asked.seconds) if asked.what == "time" else memory(asked.cell, asked.side)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
