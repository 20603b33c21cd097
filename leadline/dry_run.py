"""`leadline train RECIPE --dry-run`: as much of a run as this machine can do without your model.

The recipe is already checked when this starts. Here the rewards are resolved, the tokenizer and the data are read if
they can be reached, and two steps of the whole path run with a random tiny model and a scripted engine in place of
yours. What could not be reached is said, and is not counted as fine.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from leadline.config import Config
from leadline.data import PromptData, load_prompts
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.errors import DataError, LeadlineError, ModelError
from leadline.model_sources import read_tokenizer
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.rewards.scorer import Scorer, build_scorer
from leadline.rollouts import Roller
from leadline.settings.model import Model
from leadline.sources import FUNCTION, REASONING_GYM, Row, load_rows
from leadline.train import Step, train
from leadline.types import Prompt

STEPS = 2


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    part: str
    verdict: str
    """ok, wrong, or not checked."""
    note: str


def check_recipe(config: Config, console: Console) -> int:
    """Print what is right, wrong and not checked; 0 if nothing is wrong, else 2."""
    disable_progress_bar()
    checks: list[Check] = [Check("recipe", "ok", "every setting is known and none contradicts another")]
    if config.engine.kind != "hf":
        checks.append(Check("engine", "not checked", f"{config.engine.kind!r} is not started in a dry run"))
    checks.append(Check("model", "not checked", "its weights and its context are not loaded in a dry run"))
    scorer = attempt(checks, "rewards", lambda: build_scorer(config.rewards, config.decoding), _reward_note)
    tokenizer = attempt(
        checks,
        "tokenizer",
        lambda: read_tokenizer(config.model),
        lambda tokenizer: f"{len(tokenizer)} tokens",
        ModelError if on_hub(config.model.tokenizer or config.model.name) else None,
    )
    data = None
    if attempt(checks, "rows", lambda: _rows(config), _rows_note, DataError if on_hub(config.data.source) else None):
        if tokenizer is None:
            checks.append(Check("data", "not checked", "prompts are rendered with the model's tokenizer"))
        else:
            held_out_on_hub = config.data.eval_source is not None and on_hub(config.data.eval_source)
            data = attempt(
                checks,
                "data",
                lambda: load_prompts(config, tokenizer, context_length=None),
                _data_note,
                DataError if held_out_on_hub else None,
            )
    if data is None or scorer is None:
        checks.append(Check("loop", "not checked", "it needs data and rewards"))
    elif attempt(checks, "columns", lambda: _columns(scorer, data), lambda _: "every reward gets what it needs"):
        attempt(checks, "loop", lambda: _two_steps(config, data, scorer), _loop_note)
    print_checks(checks, console)
    return 2 if any(check.verdict == "wrong" for check in checks) else 0


def on_hub(name: str) -> bool:
    """Whether it may be a name on the hub, which this machine may not reach: no failure of the recipe."""
    local = name == "tiny" or name.startswith(("package:", REASONING_GYM)) or name.endswith((".gguf", ".jsonl"))
    return not (local or FUNCTION.fullmatch(name) or Path(name).exists())


def _rows(config: Config) -> list[Row]:
    data = config.data
    return load_rows(data, data.source, data.split, size=data.size, seed=config.run.seed)


def _columns(scorer: Scorer, data: PromptData) -> bool:
    scorer.check_columns(data.columns)
    return True


def attempt(
    checks: list[Check],
    part: str,
    work: Callable[[], Any],
    note: Callable[[Any], str],
    unreachable: type[LeadlineError] | None = None,
) -> Any:
    """The result of `work`, or None. An error counts as wrong, unless it only says that a hub cannot be reached."""
    try:
        result = work()
    except LeadlineError as error:
        missing = unreachable is not None and isinstance(error, unreachable)
        checks.append(Check(part, "not checked" if missing else "wrong", str(error)))
        return None
    checks.append(Check(part, "ok", note(result)))
    return result


def _two_steps(config: Config, data: PromptData, scorer: Scorer) -> list[Step]:
    """Two steps with a tiny random policy on prompts of its own, scored with the recipe's rewards and columns."""
    values = config.model_dump()
    values["model"] = Model(name="tiny").model_dump()
    values["run"]["steps"] = STEPS
    values["rollout"]["max_steps_without_signal"] = STEPS + 1  # random completions seldom earn a reward
    small = Config.model_validate(values)
    loaded = load_model(small.model)
    script = echo_script(
        vocab_size=len(loaded.tokenizer), eos_ids=loaded.eos_ids, max_tokens=min(16, config.sampling.max_tokens)
    )
    engine = ScriptedEngine(script)
    roller = Roller(engine, scorer, loaded.tokenizer, loaded.eos_ids, small)
    steps: list[Step] = []

    async def record(step: Step) -> None:
        steps.append(step)

    policy = Policy(loaded, small)
    asyncio.run(train(small, policy=policy, engine=engine, roller=roller, prompts=_ShortPrompts(data), record=record))
    return steps


class _ShortPrompts:
    """The data's prompts with token ids that the tiny model knows."""

    def __init__(self, data: PromptData) -> None:
        self._stream = data.train

    @property
    def position(self) -> int:
        return self._stream.position

    def __next__(self) -> Prompt:
        return replace(next(self._stream), token_ids=(5, 6, 7))


def _rows_note(rows: list[Row]) -> str:
    return f"{len(rows)} rows with the columns {', '.join(rows[0])}"


def _reward_note(scorer: Scorer) -> str:
    return ", ".join(component.label for component in scorer.components)


def _data_note(data: PromptData) -> str:
    first = " ".join(data.train.prompt(0).text.split())
    return f"{len(data.train)} training and {len(data.held_out)} held-out prompts; the first: {first[:120]}"


def _loop_note(steps: list[Step]) -> str:
    failed = steps[-1].metrics["rollout/failed_fraction"]
    tail = f"; {failed:.0%} of the random completions failed in a reward" if failed else ""
    return f"{len(steps)} steps with a tiny random model and random completions{tail}"


def print_checks(checks: list[Check], console: Console) -> None:
    """One line a check."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    colours = {"ok": "green", "wrong": "bold red", "not checked": "yellow"}
    for check in checks:
        table.add_row(check.part, Text(check.verdict, colours[check.verdict]), Text(check.note))  # no markup in notes
    console.print(table)
