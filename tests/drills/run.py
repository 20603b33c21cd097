"""A drill: a small run of the real trainer, broken in one place or not at all, and what the doctor says of its directory.

The policy is the tiny model, the engine the hf engine, the loop and the run directory those of `leadline train`.
"""

import asyncio
import contextlib
import io
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from leadline.config import Config, parse_config
from leadline.data import PromptData, PromptStream
from leadline.doctor.diagnosis import diagnose
from leadline.doctor.report import Report
from leadline.engines.base import Engine
from leadline.engines.hf import HFEngine
from leadline.errors import LeadlineError
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.rewards.scorer import build_scorer
from leadline.rollouts import Roller
from leadline.run_dir import RunDir
from leadline.screen import Screen
from leadline.session import Session, _restore
from leadline.types import Prompt

END_IDS = frozenset({3, *range(230, 260)})
"""A random model says its one end token about never. With these thirty bytes it ends after ten tokens or so."""

Sections = Mapping[str, Any]


@dataclass(slots=True)
class Parts:
    """What a fault may put its hands on before the run starts."""

    config: Config
    policy: Policy
    engine: Engine
    prompts: list[Prompt]
    patches: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Undone after the run."""
    roller: Roller = field(init=False)

    def __post_init__(self) -> None:
        self.roller = self.make_roller(self.config)

    def make_roller(self, config: Config) -> Roller:
        loaded = self.policy.loaded
        return Roller(self.engine, build_scorer(config.rewards), loaded.tokenizer, loaded.eos_ids, config)

    def patch(self, where: Any, name: str, value: Any) -> None:
        """During the run `where.name` is `value`."""
        self.patches.callback(setattr, where, name, getattr(where, name))
        setattr(where, name, value)

    def set_engine(self, engine: Engine) -> None:
        """From now on completions come from this engine."""
        self.engine = engine
        self.roller = self.make_roller(self.config)


def intact(parts: Parts) -> None:
    """Nothing is broken, or the settings alone are the fault."""


@dataclass(frozen=True, slots=True)
class Drill:
    """One run. `cause` is the finding that must come first; "" for a healthy run, which must have no error."""

    name: str
    cause: str = ""
    sections: Sections = field(default_factory=dict)
    """Settings that differ from those of `SETTINGS`."""
    unchecked: Sections = field(default_factory=dict)
    """Settings that the config would refuse, put in behind its back."""
    breaks: Callable[[Parts], None] = intact
    resumed: bool = False
    """Stopped half-way, and continued from the checkpoint by a second session."""


SETTINGS: dict[str, Any] = {
    "model": {"name": "tiny", "device": "cpu"},
    "data": {"source": "prompts.jsonl"},
    "rewards": [{"name": "tests.drills.rewards:even_share"}],
    "sampling": {"max_tokens": 40},
    "rollout": {"group_size": 6, "groups_per_step": 4},
    "optimizer": {"learning_rate": 2e-4},
    "eval": {"prompts": 0},
    "run": {"steps": 24, "checkpoint_every": 0, "blackbox_steps": 2},
}


def drilled_config(drill: Drill) -> Config:
    values = dict(SETTINGS)
    for name, section in drill.sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
    config = parse_config(values)
    changed = {name: getattr(config, name).model_copy(update=dict(more)) for name, more in drill.unchecked.items()}
    return config.model_copy(update=changed)


def drilled_prompts(tokenizer: Any, count: int = 64) -> list[Prompt]:
    draw = random.Random(0)
    texts = [f"{draw.randrange(99)} + {draw.randrange(99)} =" for _ in range(count)]
    return [Prompt(i, text, tuple(tokenizer.encode(text)), {"answer": "7"}) for i, text in enumerate(texts)]


def run(drill: Drill, path: Path) -> Report:
    """What the doctor says of the directory that the run left."""
    run_into(drill, path)
    return diagnose(path)


def run_into(drill: Drill, path: Path) -> None:
    """The run, from the parts to its directory. An error that stops it is what a person would see too: the log stays."""
    config = drilled_config(drill)
    half = math.ceil(config.run.steps / 2)
    for resume in (False, True) if drill.resumed else (False,):
        parts = _parts(config)
        drill.breaks(parts)
        session = _session(parts, path, resume=resume)
        if drill.resumed and not resume:
            session.stopping = lambda policy=session.policy: policy.version >= half
        with parts.patches, contextlib.suppress(LeadlineError):
            asyncio.run(session.run())


def _parts(config: Config) -> Parts:
    loaded = replace(load_model(config.model, config.run.seed), eos_ids=END_IDS)
    engine = HFEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        seed=config.run.seed,
        dtype=config.engine.dtype,
        own_copy=config.rollout.max_staleness > 0,
    )
    return Parts(config, Policy(loaded, config), engine, drilled_prompts(loaded.tokenizer))


def _session(parts: Parts, path: Path, *, resume: bool) -> Session:
    config = parts.config
    held_out = parts.prompts[: config.eval.prompts]
    train = PromptStream(parts.prompts[config.eval.prompts :], config.run.seed)
    session = Session(
        config,
        parts.policy,
        parts.engine,
        parts.roller,
        PromptData(train, held_out, frozenset({"answer"}), removed=0),
        RunDir.resume(path) if resume else RunDir.create(path, config),
        Screen(config, console=Console(file=io.StringIO(), width=200)),
        trackers=[],
        stopping=lambda: False,
    )
    if resume:
        _restore(session)
    return session
