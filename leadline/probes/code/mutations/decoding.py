"""What goes wrong between token ids and the text that a reward scores."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from leadline.probes.code.decoding import CLOSE, OPEN, DecodeSteps, answer, byte_tokenizer
from leadline.probes.code.search import Mutation

Change = Callable[[Any], Any]


def _reasoning(new: Callable[[str], str]) -> Change:
    return lambda steps: replace(steps, reasoning=new) if steps.reasoning is answer else steps


def _ids(**new: Any) -> Change:
    return lambda steps: replace(steps, **new) if isinstance(steps, DecodeSteps) else steps


def _same(value: Any) -> Any:
    return value


def _without_special(ids: list[int]) -> str:
    return str(byte_tokenizer().decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _cleaned(ids: list[int]) -> str:
    text = str(byte_tokenizer().decode(ids, skip_special_tokens=False))
    for spaced in (" .", " ?", " !", " ,", " n't", " 'm", " 's", " 've", " 're"):
        text = text.replace(spaced, spaced[1:])
    return text


def _up_to_first_eos(ids: list[int]) -> list[int]:
    eos = byte_tokenizer().eos_token_id
    return ids[: ids.index(eos)] if eos in ids else ids


def _without_any_eos(ids: list[int]) -> list[int]:
    return [token for token in ids if token != byte_tokenizer().eos_token_id]


def _last_dropped(ids: list[int]) -> list[int]:
    return ids[:-1]


def _unclosed_kept(text: str) -> str:
    return answer(text) if CLOSE in text else text


def _marker_removed(text: str) -> str:
    return answer(text) if CLOSE in text else text.replace(OPEN, "")


def _after_last(text: str) -> str:
    return text.rsplit(CLOSE, 1)[-1].strip() if CLOSE in text else answer(text)


def _between_first_two(text: str) -> str:
    return text.split(CLOSE)[1].strip() if CLOSE in text else answer(text)


def _not_stripped(text: str) -> str:
    return text.partition(CLOSE)[2] if CLOSE in text else answer(text)


def _blocks_removed(text: str) -> str:
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)


def _blocks_removed_and_stripped(text: str) -> str:
    return _blocks_removed(text).strip()


def _everything_between_removed(text: str) -> str:
    return re.sub(r"<think>.*</think>", "", text, flags=re.DOTALL).strip()


def _blocks_removed_else_empty(text: str) -> str:
    rest = _blocks_removed_and_stripped(text)
    return "" if OPEN in rest else rest


def _needs_open(text: str) -> str:
    return answer(text) if OPEN in text else text


def _falls_back(text: str) -> str:
    return answer(text) or text


def _reasoning_scored(text: str) -> str:
    return text.partition(CLOSE)[0].replace(OPEN, "").strip()


def _closed_reasoning_scored(text: str) -> str:
    return _reasoning_scored(text) if CLOSE in text else answer(text)


MUTATIONS = (
    Mutation(
        "special_tokens_stripped",
        "skip_special_tokens=True: custom answer tags stripped",
        "The reward's pattern finds nothing: rewards are pinned to their minimum.",
        "Strip padding and the terminator by id, and decode with skip_special_tokens=False.",
        (_ids(text=_without_special), _ids(text=_without_special, padding=_same, terminator=_same)),
    ),
    Mutation(
        "padding_kept",
        "padding in the text",
        "The reward scores pad markers: exact matches fail where completions are short.",
        "Cut at the completion's length.",
        (_ids(padding=_same),),
    ),
    Mutation(
        "eos_kept",
        "the EOS token in the text",
        "The reward scores the terminator: an anchored pattern or an exact match fails.",
        "Drop the last token if it is an EOS.",
        (_ids(terminator=_same),),
    ),
    Mutation(
        "cut_at_first_eos",
        "the text cut at the first EOS, not at the last",
        "Completions of several turns lose all but the first.",
        "Strip the terminator at the end only.",
        (_ids(terminator=_up_to_first_eos),),
    ),
    Mutation(
        "every_eos_removed",
        "every EOS removed, not only the last",
        "Two turns are joined into one word.",
        "Strip the terminator at the end only.",
        (_ids(terminator=_without_any_eos),),
    ),
    Mutation(
        "last_token_dropped",
        "the last token dropped whether or not it is an EOS",
        "A completion cut at the length limit loses its last token.",
        "Drop it only if it is a terminator.",
        (_ids(terminator=_last_dropped),),
    ),
    Mutation(
        "spaces_cleaned_up",
        "clean_up_tokenization_spaces=True",
        "Text that is scored is not what was sampled: code and mathematics change.",
        "Pass clean_up_tokenization_spaces=False.",
        (_ids(text=_cleaned),),
    ),
    Mutation(
        "unclosed_reasoning_kept",
        "reasoning that never closes kept",
        "Unfinished reasoning is scored as an answer: rambling until the limit can be right by chance.",
        "Return the empty string: no answer was given.",
        (_reasoning(_unclosed_kept), _reasoning(_marker_removed)),
    ),
    Mutation(
        "after_last_marker",
        "what follows the last closing marker",
        "What stands between two blocks is lost.",
        "text.split('</think>', 1)[-1].",
        (_reasoning(_after_last),),
    ),
    Mutation(
        "between_markers",
        "split without a limit: what stands between the first two closing markers",
        "The end of the answer is lost when markers repeat.",
        "text.split('</think>', 1)[-1].",
        (_reasoning(_between_first_two),),
    ),
    Mutation(
        "answer_not_stripped",
        "the answer not stripped",
        "An exact match fails on the newline that follows the reasoning.",
        ".strip() what follows the marker.",
        (_reasoning(_not_stripped),),
    ),
    Mutation(
        "blocks_cut_out",
        "every reasoning block cut out with a pattern",
        "Unclosed reasoning, and reasoning that the prompt opened, are scored as answers.",
        "Take what follows the first closing marker; nothing if a block is open.",
        tuple(
            map(
                _reasoning,
                (
                    _blocks_removed,
                    _blocks_removed_and_stripped,
                    _everything_between_removed,
                    _blocks_removed_else_empty,
                ),
            )
        ),
    ),
    Mutation(
        "opening_marker_required",
        "reasoning only recognised by its opening marker",
        "Where the template opens the block, the whole reasoning is scored.",
        "Split at the closing marker, whether or not an opening one is there.",
        (_reasoning(_needs_open),),
    ),
    Mutation(
        "empty_answer_falls_back",
        "the reasoning scored where no answer follows it",
        "Reasoning without an answer is rewarded.",
        "Return the empty string.",
        (_reasoning(_falls_back),),
    ),
    Mutation(
        "reasoning_scored",
        "the reasoning returned instead of the answer",
        "The reward scores what comes before the marker.",
        "Take what follows it: [-1], not [0].",
        (_reasoning(_reasoning_scored), _reasoning(_closed_reasoning_scored)),
    ),
)
