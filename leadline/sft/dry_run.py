"""`leadline sft RECIPE --dry-run`: as much of a fine-tuning run as this machine can do without your model."""

from typing import Any

from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from leadline.data import PromptData
from leadline.dry_run import Check, attempt, on_hub, print_checks
from leadline.errors import DataError, ModelError
from leadline.model_sources import read_tokenizer
from leadline.rewards.scorer import Scorer, build_scorer
from leadline.sft.config import SftConfig
from leadline.sft.data import COLUMN, load_demonstrations, make_writer


def check_sft_recipe(config: SftConfig, console: Console) -> int:
    """Print what is right, wrong and not checked; 0 if nothing is wrong, else 2."""
    disable_progress_bar()
    checks = [
        Check("recipe", "ok", "every setting is known and none contradicts another"),
        Check("model", "not checked", "its weights and its context are not loaded in a dry run"),
    ]
    trainer = config.policy_config()
    scorer = attempt(checks, "rewards", lambda: build_scorer(trainer.rewards, trainer.decoding), _reward_note)
    tokenizer = attempt(
        checks,
        "tokenizer",
        lambda: read_tokenizer(config.model),
        lambda tokenizer: f"{len(tokenizer)} tokens",
        ModelError if on_hub(config.model.tokenizer or config.model.name) else None,
    )
    if tokenizer is None:
        checks.append(Check("data", "not checked", "demonstrations are rendered with the model's tokenizer"))
    else:
        _check_data(checks, config, tokenizer, scorer)
    print_checks(checks, console)
    return 2 if any(check.verdict == "wrong" for check in checks) else 0


def _check_data(checks: list[Check], config: SftConfig, tokenizer: Any, scorer: Scorer | None) -> None:
    def load() -> PromptData:
        ends = frozenset(() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,))
        data = load_demonstrations(config, make_writer(tokenizer, ends, config.data), context_length=None)
        if scorer is not None:
            scorer.check_columns(data.columns)
        return data

    on_hubs = on_hub(config.data.source) or (config.data.eval_source is not None and on_hub(config.data.eval_source))
    attempt(checks, "data", load, _data_note, DataError if on_hubs else None)


def _reward_note(scorer: Scorer) -> str:
    return ", ".join(component.label for component in scorer.components)


def _data_note(data: PromptData) -> str:
    first = data.train.prompt(0)
    pair = " ".join(f"{first.text} → {first.columns[COLUMN]}".split())
    return f"{len(data.train)} training and {len(data.held_out)} held-out demonstrations; the first: {pair[:160]}"
