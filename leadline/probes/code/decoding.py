"""Token ids -> scored text in exchangeable steps, the cases, and the variants that are right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from leadline.decoding import strip_reasoning
from leadline.probes.code.search import Variant

OPEN, CLOSE = "<think>", "</think>"
TAGS = ("<answer>", "</answer>")
"""Registered as special tokens: answers are found by them."""


@dataclass(frozen=True, slots=True)
class TextCase:
    """A completion: what was sampled, with the padding behind it."""

    words: str
    body: str
    ended: bool = True
    """An EOS token follows."""
    padding: int = 0
    middle_eos: bool = False
    """An EOS token stands between two halves: another turn, not the end."""

    @property
    def ids(self) -> list[int]:
        """Token ids of the bundled byte tokenizer."""
        tokenizer = byte_tokenizer()
        half = len(self.body) // 2 if self.middle_eos else len(self.body)
        ids = tokenizer(self.body[:half])["input_ids"]
        if self.middle_eos:
            ids = [*ids, tokenizer.eos_token_id, *tokenizer(self.body[half:])["input_ids"]]
        return [*ids, *[tokenizer.eos_token_id] * self.ended, *[tokenizer.pad_token_id] * self.padding]


CASES = (
    TextCase("plain text", "The answer is 5."),
    TextCase("plain text and padding", "It is 12.", padding=3),
    TextCase("cut off by the length limit", "It is 12, because", ended=False),
    TextCase("cut off, and padded", "It is 13, because", ended=False, padding=2),
    TextCase("answer tags that are special tokens", "So: <answer>5</answer>", padding=1),
    TextCase("spaces around", "  5  "),
    TextCase("another turn after an EOS", "first.second", middle_eos=True),
    TextCase("nothing", "", padding=2),
    TextCase("nothing, and cut off", "", ended=False, padding=2),
    TextCase("several lines", "a\n\nb ,c 's\n"),
    TextCase("reasoning, then an answer", "<think>2+3</think>\n 5 "),
    TextCase("reasoning that never closes", "<think>2+3 is perhaps"),
    TextCase("reasoning that never closes, cut off", "<think>2+3 is", ended=False),
    TextCase("reasoning with nothing after it", "<think>2+3</think>", padding=1),
    TextCase("reasoning in two blocks", "<think>a</think>mid<think>b</think> end"),
    TextCase("reasoning opened by the prompt", "2+3 is</think>5"),
    TextCase("prose that sounds like reasoning", "Let me think. 5"),
    TextCase("tags inside an answer after reasoning", "<think>x</think><answer>7</answer>", padding=2),
)
"""From the five shapes of a reasoning model's output, and what padding and terminators add."""


@dataclass(frozen=True, slots=True)
class DecodeSteps:
    """finish(reasoning(text(terminator(padding(ids)))))."""

    padding: Callable[[list[int]], list[int]]
    terminator: Callable[[list[int]], list[int]]
    text: Callable[[list[int]], str]
    reasoning: Callable[[str], str]
    finish: Callable[[str], str]

    def __call__(self, case: TextCase) -> str:
        return self.finish(self.reasoning(self.text(self.terminator(self.padding(case.ids)))))


@dataclass(frozen=True, slots=True)
class TextSteps:
    """The same for a function from text to text."""

    reasoning: Callable[[str], str]
    finish: Callable[[str], str]

    def __call__(self, case: TextCase) -> str:
        return self.finish(self.reasoning(case.body))


def without_padding(ids: list[int]) -> list[int]:
    """Up to the last token that is no padding."""
    pad = byte_tokenizer().pad_token_id
    end = max((i + 1 for i, token in enumerate(ids) if token != pad), default=0)
    return ids[:end]


def without_eos(ids: list[int]) -> list[int]:
    """Without the EOS at its end."""
    return ids[:-1] if ids and ids[-1] == byte_tokenizer().eos_token_id else ids


def as_text(ids: list[int]) -> str:
    """With all special tokens."""
    return str(byte_tokenizer().decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def answer(text: str) -> str:
    """What follows the reasoning, as `leadline.decoding.strip_reasoning` has it."""
    return strip_reasoning(text, False, OPEN, CLOSE)


def unchanged(text: str) -> str:
    """Not touched."""
    return text


def variants(*, from_ids: bool) -> list[Variant]:
    """With and without the reasoning, with and without the spaces around a plain text."""
    found = []
    for name, reasoning in (("decoding without reasoning", answer), ("decoding that keeps reasoning", unchanged)):
        for detail, finish in (("", unchanged), ("spaces around stripped", str.strip)):
            steps: Any = (
                DecodeSteps(without_padding, without_eos, as_text, reasoning, finish)
                if from_ids
                else TextSteps(reasoning, finish)
            )
            found.append(Variant(name, detail, steps))
    return found


def same_texts(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Every case gives the same text."""
    return list(one) == list(other)


@cache
def byte_tokenizer() -> Any:
    """One token a byte; the pad, EOS and answer tags are special tokens, the reasoning markers are not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=list(TAGS)
    )
