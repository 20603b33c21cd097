"""Small real runs that leave black boxes, for the tests of their replay."""

import asyncio
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from leadline.config import parse_config
from leadline.screen import Screen
from leadline.session import open_session

LOST: dict[str, Any] = {
    "objective": {"importance_action": "sequence_mask", "importance_low": 0.98, "importance_high": 1.02},
    "rollout": {"max_staleness": 2},
    "optimizer": {"learning_rate": 5e-3},
    "run": {"steps": 5},
}
"""Stale groups under a product over tokens with narrow bounds: the correction takes all of the signal."""


def trained(path: Path, *, reward: str = "token_sum", **sections: dict[str, Any]) -> Path:
    """The directory of a run of the tiny model that has ended."""
    values: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"source": "reasoning_gym:chain_sum", "size": 24},
        "rewards": [{"name": f"tests.loops:{reward}"}],
        "sampling": {"max_tokens": 8},
        "rollout": {"group_size": 3, "groups_per_step": 4},
        "optimizer": {"learning_rate": 1e-3},
        "eval": {"prompts": 0},
        "run": {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 9},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    config = parse_config(values)
    screen = Screen(config, console=Console(file=io.StringIO(), width=200))
    session = open_session(config, path, resume=False, stopping=lambda: False, screen=screen)
    asyncio.run(session.run())
    return path
