"""What the tests of run directories share."""

import math
from pathlib import Path

from leadline.config import Config, parse_config
from leadline.doctor.rule import Evidence, Finding


def config(**run: object) -> Config:
    return parse_config(
        {
            "model": {"name": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rewards": [{"name": "exact_match"}, {"name": "brevity", "label": "short"}],
            "run": run,
        }
    )


def finding(step: int) -> Finding:
    evidence = (Evidence("kl/k3", step, math.inf, 1.0, "The KL was inf."),)
    return Finding("LL405", "learning-rate-too-high", "error", "Title.", "Message.", "Fix.", evidence, step)


def write_weights(folder: Path) -> None:
    (folder / "model.bin").write_bytes(b"w" * 1000)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
