"""Demonstrations: prompts, each with the completion that the policy shall learn to write."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from leadline.config import Config
from leadline.data import PromptData, is_messages, load_prompts, uses_template
from leadline.errors import DataError, ModelError
from leadline.policy.batch import Batch, build_batch
from leadline.settings.data import Data
from leadline.sft.config import SftConfig
from leadline.sources import Row
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout

COLUMN = "demonstration"
"""Where a Prompt holds the text of its completion."""


@dataclass(frozen=True, slots=True)
class Writer:
    """From the text of a demonstration to the tokens that the policy should draw."""

    tokenizer: Any
    terminator: int
    """The id that ends a completion."""

    def completion(self, prompt: Prompt) -> Completion:
        """The demonstrated completion, which ends with the terminator. Unscored: nobody has sampled it."""
        ids = self.tokenizer(prompt.columns[COLUMN], add_special_tokens=False)["input_ids"]
        ids = ids if ids[-1:] == [self.terminator] else [*ids, self.terminator]
        return Completion(tuple(ids), (math.nan,) * len(ids), (0,) * len(ids), FinishReason.EOS)


def load_demonstrations(config: SftConfig, writer: Writer, *, context_length: int | None) -> PromptData:
    """The demonstrations of a run; `Prompt.columns["demonstration"]` is the text to write.

    Raises what `load_prompts` raises, and DataError: a row without a completion, an empty or too long one.
    """
    data = load_prompts(
        config.policy_config(),
        writer.tokenizer,
        context_length=context_length,
        prepare=partial(
            _with_demonstration, prompt_column=config.data.prompt_column, column=config.sft.completion_column
        ),
    )
    for prompt in (*(data.train.prompt(i) for i in range(len(data.train))), *data.held_out):
        _check_length(prompt, len(writer.completion(prompt).token_ids), config)
    return data


def make_writer(tokenizer: Any, eos_ids: frozenset[int], data: Data) -> Writer:
    """A writer whose terminator is the end that the chat template writes, else the tokenizer's. Raises ModelError."""
    written = _after_answer(tokenizer) if uses_template(tokenizer, data) else []
    terminator = next((i for i in written if i in eos_ids), tokenizer.eos_token_id)
    if terminator is None:
        raise ModelError(
            "The tokenizer has no end-of-sequence token, but every demonstration must end with one. The policy would never "
            "learn to stop. Use a tokenizer with an eos_token (model.tokenizer)."
        )
    return Writer(tokenizer, terminator)


def demonstration_batch(prompts: Sequence[Prompt], writer: Writer, config: Config) -> Batch:
    """A batch in which each demonstration has advantage 1; those of the same prompt are a group and share it."""
    by_prompt: dict[tuple[int, ...], list[Prompt]] = {}
    for prompt in prompts:
        by_prompt.setdefault(prompt.token_ids, []).append(prompt)
    groups = [
        Group(members[0], [Rollout(writer.completion(p), p.columns[COLUMN], reward=1.0) for p in members])
        for members in by_prompt.values()
    ]
    batch = build_batch(groups, config, 0)
    every = tuple(range(batch.num_completions))
    return replace(batch, advantages=torch.ones(len(every)), lost_at=(None,) * len(every), forwarded=every)


def as_demonstrated(completion: str, demonstration: str) -> float:
    """1.0 if the completion is the demonstrated one, whitespace around both apart, else 0.0."""
    return float(completion.strip() == demonstration.strip())


def _with_demonstration(row: Row, prompt_column: str, column: str) -> Row:
    """The row with its prompt alone in `prompt_column`, and the text of the completion in `demonstration`."""
    if column in row:
        return {**row, COLUMN: _text(row[column], column)}
    conversation = row[prompt_column]
    if not is_messages(conversation) or conversation[-1]["role"] != "assistant" or len(conversation) < 2:
        raise DataError(
            f"sft.completion_column is {column!r}, but the row has the columns {', '.join(sorted(row))}, and "
            f"{prompt_column!r} is no conversation that ends with an assistant message. There is nothing to learn. Name "
            "the column with the completion."
        )
    return {**row, prompt_column: conversation[:-1], COLUMN: _text(conversation[-1]["content"], prompt_column)}


def _text(value: Any, column: str) -> str:
    if is_messages(value) and len(value) == 1 and value[0]["role"] == "assistant":
        value = value[0]["content"]
    if not isinstance(value, str):
        raise DataError(
            f"The column {column!r} holds a {type(value).__name__}, but a completion is a string or one assistant message. "
            "It cannot be learned. Name another column with sft.completion_column."
        )
    if not value.strip():
        raise DataError(
            f"The column {column!r} is empty, but a completion has text. The policy would learn to say nothing. Remove the "
            "row."
        )
    return value


def _check_length(prompt: Prompt, length: int, config: SftConfig) -> None:
    most = config.sampling.max_tokens
    if length > most:
        shown = " ".join(prompt.text.split())[-60:]
        raise DataError(
            f"sampling.max_tokens is {most}, but the completion of the prompt that ends with {shown!r} has {length} tokens, "
            "its end token included. Cut short, it would teach never to end. Raise sampling.max_tokens, or remove the row."
        )


def _after_answer(tokenizer: Any) -> list[int]:
    """The token ids that the chat template writes after what the assistant says."""
    says = "x"
    conversation = [{"role": "user", "content": "."}, {"role": "assistant", "content": says}]
    text: str = tokenizer.apply_chat_template(conversation, tokenize=False)
    return list(tokenizer(text[text.rindex(says) + len(says) :], add_special_tokens=False)["input_ids"])
