"""Where prompts come from: an endless, seeded, resumable stream of them, and a held-out list that is never trained.

Rows come from a `.jsonl` file, a Hugging Face dataset or a reasoning-gym task (`sources.py`). All are rendered,
tokenised and checked before the first step: a run does not find a bad row after an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from leadline.config import Config
from leadline.errors import ConfigError, DataError
from leadline.settings.data import Data as DataSettings
from leadline.sources import REASONING_GYM, Row, load_rows
from leadline.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HELD_OUT_SEED = 1_000_000_007
"""Added to the seed for held-out reasoning-gym rows. Row i of a task is drawn with seed + i, so a small number here
would only shift the training rows."""


class PromptStream:
    """The training prompts, shuffled anew each epoch, without end.

    Prompt number p is a function of (seed, p) alone: `seek(p)` resumes a run at exactly the prompt that comes next.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._position = 0
        self._epoch = -1
        self._order: list[int] = []

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        prompt = self.prompt(self._position)
        self._position += 1
        return prompt

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self._prompts)

    @property
    def position(self) -> int:
        """Prompts handed out so far, and the index of the next one."""
        return self._position

    def seek(self, position: int) -> None:
        """The next prompt is the one with index `position`."""
        self._position = position

    def prompt(self, position: int) -> Prompt:
        """The prompt with index `position`, wherever the stream is."""
        epoch, offset = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = _rng(self._seed, epoch).permutation(len(self._prompts)).tolist()
        return replace(self._prompts[self._order[offset]], index=position)


@dataclass(frozen=True)
class PromptData:
    """What a run draws from."""

    train: PromptStream
    held_out: list[Prompt]
    """`eval.prompts` prompts with the indices -1, -2, ...; none of their texts is in `train`."""
    columns: frozenset[str]
    """Columns that every row has, the prompt column apart: what a reward can rely on."""
    removed: int
    """Training rows left out because a held-out prompt has the same text."""


def load_prompts(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    context_length: int | None,
    prepare: Callable[[Row], Row] = lambda row: row,
) -> PromptData:
    """The prompts of a run, all of them within the model's `context_length` (None = unknown); `prepare` sees each row first.

    Raises ConfigError: limits that leave no room for a prompt. Raises DataError: a source that cannot be read, has no
    rows, lacks the prompt column, has a prompt that cannot be rendered, is empty or too long, or has too few rows.
    """
    limit = prompt_limit(config, context_length)
    load = partial(_load, config, tokenizer, limit, prepare)
    candidates = load(config.data.source, config.data.split, config.data.size, config.run.seed)
    held_out = _held_out(config, load, candidates) if config.eval.prompts else []
    return _divide(candidates, held_out, config.data.source, config.run.seed)


def _load(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    limit: int | None,
    prepare: Callable[[Row], Row],
    source: str,
    split: str,
    size: int,
    seed: int,
) -> list[Prompt]:
    rows = load_rows(config.data, source, split, size=size, seed=seed)
    return [
        _prompt(tokenizer, row, f"Row {i} (counting from 0) of {source!r}, split {split!r},", config, limit, prepare)
        for i, row in enumerate(rows)
    ]


def _held_out(
    config: Config, load: Callable[[str, str, int, int], list[Prompt]], candidates: list[Prompt]
) -> list[Prompt]:
    """`eval.prompts` prompts of different texts, from `eval_source` or, without one, from `source`."""
    data, count, seed = config.data, config.eval.prompts, config.run.seed
    source = data.eval_source or data.source
    if data.eval_source or data.eval_split or source.startswith(REASONING_GYM):
        split = data.eval_split or data.split
        # A task may draw the same question twice; four times as many rows are nearly always enough.
        candidates = load(source, split, 4 * count, seed + HELD_OUT_SEED)
    different = list({p.text: p for p in candidates}.values())
    if len(different) < count:
        raise DataError(
            f"eval.prompts is {count}, but {source!r} has only {len(different)} different prompts to hold out. "
            "Evaluation would be of fewer than asked for. Lower eval.prompts."
        )
    order = _rng(seed, 0, 1).permutation(len(different)).tolist()
    return [different[i] for i in order[:count]]


def prompt_limit(config: Config, context_length: int | None) -> int | None:
    """Most tokens that a prompt may have; None = no limit is known. Raises ConfigError."""
    asked, most = config.data.max_prompt_tokens, config.sampling.max_tokens
    if context_length is None:
        return asked
    room = context_length - most
    if room < 1:
        raise ConfigError(
            f"sampling.max_tokens is {most}, but the model's context is {context_length} tokens. No prompt would fit. "
            f"Use at most {context_length - 1}, less the longest prompt."
        )
    if asked is not None and asked > room:
        raise ConfigError(
            f"data.max_prompt_tokens is {asked}, but the model's context of {context_length} tokens less "
            f"sampling.max_tokens = {most} leaves {room}. Completions would be cut short. Use at most {room}."
        )
    return asked or room


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    value: Any,
    data: DataSettings,
    chat_template_kwargs: Mapping[str, Any],
) -> tuple[str, list[int]]:
    """The text that the model continues, and its token ids.

    A string, or a list of {role, content} messages, goes through the chat template (which writes special tokens such
    as BOS itself: none are added); with `data.chat = false`, or no template, a string is tokenised as plain text.
    Raises DataError.
    """
    if uses_template(tokenizer, data):
        text = _chat_text(tokenizer, _messages(value, data.system_prompt), chat_template_kwargs)
        return text, _token_ids(tokenizer, text, add_special_tokens=False)
    if data.system_prompt is not None:
        raise DataError(
            "data.system_prompt is set, but prompts are plain text: the tokenizer has no chat template, or data.chat "
            "is false. It would be ignored. Put it into the prompts, or use a chat model."
        )
    if not isinstance(value, str):
        raise DataError(
            f"data.prompt_column holds {_shape(value)}, but prompts are plain text: the tokenizer has no chat "
            "template, or data.chat is false. Messages cannot be rendered. Use a chat model's tokenizer "
            "(model.tokenizer), or a column of strings."
        )
    return value, _token_ids(tokenizer, value, add_special_tokens=True)


def _divide(candidates: list[Prompt], held_out: list[Prompt], source: str, seed: int) -> PromptData:
    """Training without any held-out text."""
    texts = {p.text for p in held_out}
    train = [p for p in candidates if p.text not in texts]
    if not train:
        raise DataError(
            f"eval.prompts is {len(held_out)}, but the {len(candidates)} rows of {source!r} have no other prompt than "
            "the held-out ones. Nothing would be left to train on. Lower eval.prompts, or add rows."
        )
    columns = frozenset.intersection(*(frozenset(p.columns) for p in (*train, *held_out)))
    numbered = [replace(p, index=-1 - i) for i, p in enumerate(held_out)]
    return PromptData(PromptStream(train, seed), numbered, columns, removed=len(candidates) - len(train))


def _rng(seed: int, *words: int) -> np.random.Generator:
    return np.random.default_rng([seed % 2**64, *words])  # numpy takes no negative seeds


def _prompt(
    tokenizer: PreTrainedTokenizerBase,
    row: Row,
    where: str,
    config: Config,
    limit: int | None,
    prepare: Callable[[Row], Row],
) -> Prompt:
    column = config.data.prompt_column
    if column not in row:
        raise DataError(
            f"data.prompt_column is {column!r}, but {where} has the columns {', '.join(sorted(row)) or '(none)'}. "
            "There is nothing to sample from. Name one of them."
        )
    try:
        row = prepare(row)
        text, ids = render_prompt(tokenizer, row[column], config.data, config.model.chat_template_kwargs)
    except DataError as error:
        raise DataError(f"{where.rstrip(',')}: {error}") from error
    if not ids:
        raise DataError(f"{where} has an empty prompt. The model would have nothing to continue. Remove the row.")
    if limit is not None and len(ids) > limit:
        raise DataError(
            f"{where} has {len(ids)} prompt tokens, but the limit is {limit} (data.max_prompt_tokens, or the model's "
            "context less sampling.max_tokens). Its completions would be cut short. Remove the row, or lower "
            "sampling.max_tokens."
        )
    return Prompt(0, text, tuple(ids), {name: value for name, value in row.items() if name != column})


def uses_template(tokenizer: PreTrainedTokenizerBase, data: DataSettings) -> bool:
    """Whether prompts go through the chat template. Raises DataError: they should, and there is none."""
    has_template = tokenizer.chat_template is not None
    if data.chat and not has_template:
        raise DataError(
            "data.chat is true, but the tokenizer has no chat template. Messages cannot be rendered. "
            "Use a chat model's tokenizer (model.tokenizer), or set data.chat = false."
        )
    return has_template if data.chat is None else data.chat


def _messages(value: Any, system_prompt: str | None) -> list[dict[str, Any]]:
    if isinstance(value, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
    elif is_messages(value):
        messages = [dict(message) for message in value]
    else:
        raise DataError(
            f"data.prompt_column holds {_shape(value)}, but a prompt is a string or a list of {{role, content}} "
            "messages. It cannot be rendered. Name another column."
        )
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def is_messages(value: Any) -> bool:
    """Whether the value is a conversation: a list of {role, content} messages, at least one."""
    return (
        isinstance(value, (list, tuple))
        and bool(value)
        and all(isinstance(m, Mapping) and {"role", "content"} <= m.keys() for m in value)
    )


def _shape(value: Any) -> str:
    return "messages" if is_messages(value) else f"a {type(value).__name__}"


def _chat_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], kwargs: Mapping[str, Any]) -> str:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)
    except TemplateError as error:
        roles = ", ".join(str(m["role"]) for m in messages)
        raise DataError(
            f"The conversation has the roles {roles}, but the chat template refuses it: {error}. It cannot be "
            "rendered. Change the messages, data.system_prompt or model.chat_template_kwargs."
        ) from error
    return str(text)


def _token_ids(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
