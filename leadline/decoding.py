"""Token ids -> the text a reward may score.

Only padding and the terminator are stripped. Every other special token stays: answer tags that were registered as
special tokens are what a reward looks for, and `skip_special_tokens=True` would make them vanish.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from leadline.settings.reward import Decoding
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode(
    tokenizer: PreTrainedTokenizerBase,
    completion: Completion,
    *,
    prompt_text: str,
    settings: Decoding,
    sampling: Sampling,
    eos_ids: Collection[int],
) -> str:
    """The completion's text without padding, terminator and (unless `settings` keeps it) reasoning.

    A token that is no valid UTF-8 on its own becomes U+FFFD; no token ids make this raise.
    """
    ids = _without_padding(completion.token_ids, tokenizer.pad_token_id)
    text = _without_terminator(tokenizer, ids, completion.finish_reason, sampling, eos_ids)
    if not settings.strip_reasoning:
        return text
    opened = prompt_text.rstrip().endswith(settings.reasoning_open)
    return strip_reasoning(text, opened, settings.reasoning_open, settings.reasoning_close)


def strip_reasoning(text: str, opened_by_prompt: bool, open: str, close: str) -> str:
    """What follows the first `close`, stripped; "" if reasoning began and never closed; else `text` as it is.

    `opened_by_prompt` says that the prompt ends inside a reasoning block: a completion that never closes it is
    unfinished reasoning, not an answer. Markers after the first close stay in place.
    """
    _, closed, answer = text.partition(close)
    if closed:
        return answer.strip()
    if opened_by_prompt or open in text:
        return ""
    return text


def _without_padding(ids: Sequence[int], pad_id: int | None) -> list[int]:
    kept = list(ids)
    while kept and kept[-1] == pad_id:
        kept.pop()
    return kept


def _without_terminator(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    finish_reason: FinishReason,
    sampling: Sampling,
    eos_ids: Collection[int],
) -> str:
    """The text up to what ended it: an EOS token, a stop token, or (kept if `include_stop`) a stop string."""
    if not ids:
        return ""
    if finish_reason is FinishReason.EOS and ids[-1] in eos_ids:
        return _text(tokenizer, ids[:-1])
    text = _text(tokenizer, ids)
    if finish_reason is not FinishReason.STOP:
        return text
    head = _text(tokenizer, ids[:-1])
    start = _stop_start(text, head, sampling.stop)
    if start is not None:
        return text if sampling.include_stop else text[:start]
    return head if ids[-1] in sampling.stop_token_ids else text


def _stop_start(text: str, head: str, stop: Sequence[str]) -> int | None:
    """Where the first stop string begins that the last token completed; `head` is the text before that token."""
    # A character whose bytes span tokens is U+FFFD in `head` and may belong to the stop string.
    length = len(head.rstrip("\ufffd"))
    starts = [text.find(s, max(0, length - len(s) + 1)) for s in stop]
    return min((start for start in starts if start >= 0), default=None)


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
