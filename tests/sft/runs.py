"""Fine-tuning runs of the tiny model on a few sums, for the tests."""

import asyncio
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from leadline.screen import Screen
from leadline.sft.config import SftConfig, parse_sft_config
from leadline.sft.screen import sft_face
from leadline.sft.session import SftSession, open_sft_session


def values(**sections: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"source": "reasoning_gym:chain_sum", "size": 24},
        "sft": {"completion_column": "answer", "demonstrations_per_step": 4},
        "sampling": {"max_tokens": 8},
        "optimizer": {"learning_rate": 3e-3},
        "eval": {"prompts": 3},
        "run": {"steps": 4, "checkpoint_every": 2},
    }
    for name, section in sections.items():
        made[name] = {**made.get(name, {}), **section} if isinstance(section, dict) else section
    return made


def sft_config(**sections: Any) -> SftConfig:
    return parse_sft_config(values(**sections))


def opened(config: SftConfig, path: Path, *, resume: bool = False, **more: Any) -> SftSession:
    screen = Screen(config, face=sft_face(config), console=Console(file=io.StringIO(), width=200))
    return open_sft_session(config, path, resume=resume, **{"stopping": lambda: False, "screen": screen, **more})


def tuned(path: Path, **sections: Any) -> SftSession:
    """A run from start to end."""
    session = opened(sft_config(**sections), path)
    asyncio.run(session.run())
    return session


def printed(session: SftSession) -> str:
    file = session.screen.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
