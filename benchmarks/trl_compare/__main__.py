"""Measure, cell by cell, each in a fresh process, and write `docs/benchmarks.md` after each.

python -m benchmarks.trl_compare                              a sample of the grid, half an hour on two cores
python -m benchmarks.trl_compare --full                       the whole grid: hours
python -m benchmarks.trl_compare --only train:256x64x8:float32    one cell, printed and not written down
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.trl_compare import measure
from benchmarks.trl_compare.cells import FULL, SHORT, Cell
from benchmarks.trl_compare.report import write

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MEMORY = Cell.parse("train:256x64x8:float32")


def commands(full: bool, seconds: float) -> Iterator[list[str]]:
    """The processes to start, in order."""
    for side in (measure.SHIPPED, measure.COMPACT, measure.BEST, measure.OURS, measure.OURS_LESS):
        yield ["measure", "memory", MEMORY.name, "--side", side]
    yield ["growth", *(["--full"] if full else [])]
    for cell in FULL if full else SHORT:
        yield ["measure", "time", cell.name, "--seconds", str(seconds)]


def run(command: list[str]) -> dict[str, Any]:
    """What the process measured. Raises CalledProcessError."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.run(
        [sys.executable, "-m", f"benchmarks.trl_compare.{command[0]}", *command[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="leadline against TRL on the same work.")
    parser.add_argument("--full", action="store_true", help="the whole grid: hours")
    parser.add_argument("--only", type=Cell.parse, help="one cell, e.g. train:256x64x8:float32")
    parser.add_argument("--seconds", type=float, default=45.0, help="a cell is repeated while it has taken less")
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(run(["measure", "time", asked.only.name, "--seconds", str(asked.seconds)]), indent=2))
        return
    results = []
    for command in commands(asked.full, asked.seconds):
        print(" ".join(command), flush=True)
        results.append(run(command))
        print(f"    {json.dumps(results[-1])}", flush=True)
        write(results, PAGE, full=asked.full)
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
