import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.decoding import decode, strip_reasoning
from leadline.settings.reward import Decoding
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason
from tests.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
EOS, PAD, BOS = TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, TOKENIZER.bos_token_id


def completion(ids: list[int], finish_reason: FinishReason = FinishReason.EOS) -> Completion:
    return Completion(tuple(ids), (math.nan,) * len(ids), (0,) * len(ids), finish_reason)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def decoded(
    token_ids: list[int],
    finish_reason: FinishReason = FinishReason.EOS,
    prompt_text: str = "2 + 3?",
    settings: Decoding | None = None,
    **sampling: object,
) -> str:
    return decode(
        TOKENIZER,
        completion(token_ids, finish_reason),
        prompt_text=prompt_text,
        settings=settings or Decoding(),
        sampling=Sampling.model_validate(sampling),
        eos_ids={EOS},
    )


REASONING_SHAPES = [
    ("  The answer is 5.\n", "  The answer is 5.\n"),  # 1 a direct answer: unchanged, whitespace too
    ("<think>2 and 3 make 5</think>\n\n5\n", "5"),  # 2 reasoning, then an answer
    ("<think>2 and 3 ma", ""),  # 3 never closed: nothing to score
    ("<think>2 and 3 make 5</think>\n ", ""),  # 4 closed, and nothing after it
    ("Let me see: 2 and 3 make 5", "Let me see: 2 and 3 make 5"),  # 4 reads like reasoning, but has no markers
    ("<think>a</think>mid<think>b</think>end", "mid<think>b</think>end"),  # 5 repeated: inner markers stay
    ("<think>a<think>b</think>c</think>d", "c</think>d"),  # 5 nested
    ("2 and 3 make 5</think>5", "5"),  # closed only: the prompt opened the block
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), REASONING_SHAPES)
def test_each_shape_of_reasoning_gives_the_text_to_score(text: str, expected: str) -> None:
    assert strip_reasoning(text, False, "<think>", "</think>") == expected
    assert decoded([*ids(text), EOS]) == expected


@pytest.mark.parametrize(("text", "expected"), [("2 and 3 ma", ""), ("5</think> five ", "five"), ("</think>", "")])
def test_a_block_opened_by_the_prompt_must_be_closed_by_the_completion(text: str, expected: str) -> None:
    assert strip_reasoning(text, True, "<think>", "</think>") == expected
    assert decoded(ids(text), FinishReason.LENGTH, prompt_text="[assistant]<think>\n") == expected


@pytest.mark.parametrize("prompt", ["Use <think> tags. 2 + 3?", "[assistant]<think>\n\n</think>\n\n"])
def test_a_marker_that_does_not_end_the_prompt_opens_nothing(prompt: str) -> None:
    assert decoded(ids("5"), prompt_text=prompt) == "5"


def test_the_markers_are_settings() -> None:
    settings = Decoding(reasoning_open="[R]", reasoning_close="[/R]")
    assert decoded(ids("[R]x[/R]y</think>z"), settings=settings) == "y</think>z"


def test_reasoning_stays_when_strip_reasoning_is_off() -> None:
    settings = Decoding(strip_reasoning=False)
    text = "<think>a</think> 5 "
    assert decoded([*ids(text), EOS], settings=settings) == text
    assert decoded(ids("<think>a"), FinishReason.LENGTH, "<think>", settings) == "<think>a"


def test_special_tokens_that_are_not_the_terminator_stay() -> None:
    text = "<answer>5 .</answer>"
    assert len(ids(text)) == 5  # the tags are single special tokens
    assert decoded([*ids(text), EOS]) == text
    assert decoded([BOS, EOS, *ids("5"), EOS]) == "<bos><eos>5"


def test_padding_is_stripped_at_the_end_only() -> None:
    assert decoded([PAD, *ids("5"), PAD, *ids("6"), EOS, PAD, PAD]) == "<pad>5<pad>6"
    assert decoded([PAD, PAD]) == ""


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT])
def test_an_eos_token_that_did_not_end_the_completion_stays(reason: FinishReason) -> None:
    assert decoded([*ids("5"), EOS], reason) == "5<eos>"


def test_only_one_eos_is_the_terminator() -> None:
    assert decoded([*ids("5"), EOS, EOS]) == "5<eos>"


def test_an_empty_completion_is_empty_text() -> None:
    for reason in FinishReason:
        assert decoded([], reason) == ""


def test_a_stop_token_is_stripped_only_if_it_ended_the_completion() -> None:
    stop = TOKENIZER.convert_tokens_to_ids("</answer>")
    tokens = ids("<answer>5</answer>")
    assert decoded(tokens, FinishReason.STOP, stop_token_ids=[stop]) == "<answer>5"
    assert decoded(tokens, FinishReason.LENGTH, stop_token_ids=[stop]) == "<answer>5</answer>"
    assert decoded(tokens, FinishReason.STOP, stop_token_ids=[stop + 1]) == "<answer>5</answer>"


def test_a_stop_string_is_kept_or_cut_as_the_sampling_settings_say() -> None:
    tokens = ids("a END b END")
    assert decoded(tokens, FinishReason.STOP, stop=["END"]) == "a END b END"
    # A stop string before the last token did not end this completion.
    assert decoded(tokens, FinishReason.STOP, stop=["END"], include_stop=False) == "a END b "
    assert decoded(tokens, FinishReason.LENGTH, stop=["END"], include_stop=False) == "a END b END"


def test_a_stop_string_wins_over_a_stop_token_that_is_its_last_token() -> None:
    stop = TOKENIZER.convert_tokens_to_ids("</answer>")
    both = {"stop": ["</answer>"], "stop_token_ids": [stop]}
    assert decoded(ids("5</answer>"), FinishReason.STOP, **both) == "5</answer>"
    assert decoded(ids("5</answer>"), FinishReason.STOP, **both, include_stop=False) == "5"


def test_the_stop_string_may_end_inside_the_last_token() -> None:
    tokens = ids("5</answer>")  # the last token is `</answer>`, the stop string only its beginning
    assert decoded(tokens, FinishReason.STOP, stop=["5</ans"], include_stop=False) == ""
    assert decoded(tokens, FinishReason.STOP, stop=["r", "</ans", ">"], include_stop=False) == "5"


def test_a_stop_string_of_several_bytes_per_character_is_found() -> None:
    assert decoded(ids("5€"), FinishReason.STOP, stop=["€"], include_stop=False) == "5"


def test_bytes_that_are_no_utf8_become_replacement_characters() -> None:
    assert decoded(ids("5é")[:-1], FinishReason.LENGTH) == "5\ufffd"


@given(st.lists(st.integers(0, 2 * len(TOKENIZER)), max_size=20), st.sampled_from(FinishReason))
def test_no_token_ids_make_decoding_raise(token_ids: list[int], reason: FinishReason) -> None:
    assert isinstance(decoded(token_ids, reason, stop=["a", "</answer>"], stop_token_ids=[3]), str)
