from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leadline.errors import ConfigError, DataError, ModelError
from leadline.probes.preflight import text
from leadline.probes.preflight.parts import Undecided
from tests.probes.preflight.flights import parts, with_prompts

NAMED = {"name": "tests.probes.preflight.test_text:found", "params": {"pattern": r"<answer>(?P<given>.*)</answer>"}}


def found(completion: str, pattern: str) -> float:
    return float(pattern in completion)


# Tokenizer and template


def test_prompts_that_their_tokens_spell_are_fine_and_it_is_said_how_they_begin(tmp_path: Path) -> None:
    said = text.tokenizer(parts(tmp_path))
    assert said == (
        "7 prompts are spelled the same by their tokens; the chat template writes them, the first token is '<|im_start|>'"
    )


def test_a_marker_that_the_tokenizer_has_no_token_for_is_said(tmp_path: Path) -> None:
    made = with_prompts(parts(tmp_path), ["<|user|>2 + 3?"])
    assert text.tokenizer(made).endswith("the model reads <|user|> as ordinary text")


def test_a_second_bos_is_wrong(tmp_path: Path) -> None:
    made = with_prompts(parts(tmp_path), ["<|bos|><|bos|>2 + 3?"])
    with pytest.raises(DataError, match=r"begins with '<\|bos\|>' twice"):
        text.tokenizer(made)


def test_an_eos_behind_the_prompt_is_wrong_unless_the_prompt_has_it(tmp_path: Path) -> None:
    made = parts(tmp_path)
    ids = [*made.tokenizer("2 + 3?")["input_ids"], made.tokenizer.eos_token_id]
    with pytest.raises(DataError, match=r"puts '<\|im_end\|>' behind a prompt"):
        text.tokenizer(with_prompts(made, ["2 + 3?"], [ids]))
    text.tokenizer(with_prompts(made, ["2 + 3?<|im_end|>"], [ids]))


def test_tokens_that_spell_another_text_are_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    with pytest.raises(DataError, match=r"spell '2 \+ 4\?' where its text is '2 \+ 3\?'"):
        text.tokenizer(with_prompts(made, ["2 + 3?"], [made.tokenizer("2 + 4?")["input_ids"]]))


def test_unknown_tokens_are_wrong(tmp_path: Path) -> None:
    made = parts(tmp_path)
    made.tokenizer.unk_token = "\u0120"  # what the byte tokenizer makes of a space
    with pytest.raises(DataError, match=r"does not know 2 of the 6 tokens of prompt 0"):
        text.tokenizer(with_prompts(made, ["2 + 3?"]))


# Terminators


def test_terminators_that_agree_are_fine(tmp_path: Path) -> None:
    assert text.terminators(parts(tmp_path)) == (
        "completions end at <|im_end|> (3), as config, generation config and tokenizer agree; <|im_end|> ends a turn"
    )


def test_sources_that_differ_are_all_obeyed_and_said(tmp_path: Path) -> None:
    made = parts(tmp_path)
    made.policy.model.generation_config.eos_token_id = [3, 9]  # type: ignore[union-attr]
    made.tokenizer.pad_token = "<|im_end|>"
    said = text.terminators(replace(made, loaded=replace(made.loaded, eos_ids=frozenset({3, 9}))))
    assert "any of them, for the sources differ (config <|im_end|> (3), generation config <|im_end|> (3)," in said
    assert "padding is an EOS too" in said


def test_a_model_without_any_terminator_is_wrong_unless_the_recipe_has_one(tmp_path: Path) -> None:
    endless = parts(tmp_path, data={"chat": False})
    endless = replace(endless, loaded=replace(endless.loaded, eos_ids=frozenset()))
    with pytest.raises(ModelError, match=r"has an EOS id, and sampling\.stop is empty"):
        text.terminators(endless)
    ended = parts(tmp_path, data={"chat": False}, sampling={"stop": ["\n"]})
    text.terminators(replace(ended, loaded=replace(ended.loaded, eos_ids=frozenset())))


def test_a_terminator_that_the_model_cannot_draw_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="but 999, which is to end completions, is no token of its 260"):
        text.terminators(parts(tmp_path, sampling={"stop_token_ids": [999]}))


@pytest.mark.parametrize("sampling", [{"stop_token_ids": [3]}, {"stop": ["<|im_end|>"]}])
def test_a_turn_that_ends_with_none_of_the_eos_ids_is_wrong_unless_the_recipe_stops_there(
    sampling: dict[str, Any], tmp_path: Path
) -> None:
    def of_a_base_model(**sections: Any) -> Any:
        made = parts(tmp_path, **sections)
        return replace(made, loaded=replace(made.loaded, eos_ids=frozenset({1})))

    with pytest.raises(ConfigError, match=r"ends a turn with '<\|im_end\|>' \(3\).*stop_token_ids = \[3\]"):
        text.terminators(of_a_base_model())
    text.terminators(of_a_base_model(sampling=sampling))


# What a reward gets to see


def test_tags_that_rewards_name_survive_decoding(tmp_path: Path) -> None:
    assert text.special_tokens(parts(tmp_path, rewards=[NAMED])) == (
        "<answer>, </answer> are still there after decoding"
    )
    by_name = parts(tmp_path, rewards=[{"name": "exact_match", "params": {"tag": "answer"}}])
    assert text.special_tokens(by_name) == "<answer>, </answer> are still there after decoding"


def test_without_tags_nothing_is_claimed(tmp_path: Path) -> None:
    with pytest.raises(Undecided):
        text.special_tokens(parts(tmp_path))


def test_a_tag_that_a_stop_string_strips_is_wrong(tmp_path: Path) -> None:
    stop = {"stop": ["</answer>"], "include_stop": False}
    with pytest.raises(ConfigError, match=r"'found' names </answer>, but sampling.stop is .*include_stop = true"):
        text.special_tokens(parts(tmp_path, rewards=[NAMED], sampling=stop))
    text.special_tokens(parts(tmp_path, rewards=[NAMED], sampling=stop | {"include_stop": True}))


@pytest.mark.parametrize(
    ("tag", "cause"),
    [("</think>", "decoding.strip_reasoning is true"), ("<|im_end|>", "sampling ends completions with")],
)
def test_a_tag_that_decoding_strips_is_wrong(tag: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=cause):
        text.special_tokens(parts(tmp_path, rewards=[NAMED | {"params": {"pattern": tag}}]))


def test_a_block_that_the_template_opens_is_recognised(tmp_path: Path) -> None:
    made = parts(tmp_path)
    assert "no prompt ends inside a reasoning block;" in text.reasoning(made)
    assert text.reasoning(with_prompts(made, ["2?<think>\n"])).startswith("1 of 1 prompts end with <think>")
    assert "closes an empty one" in text.reasoning(with_prompts(made, ["2?<think>\n\n</think>\n\n"]))


def test_a_block_of_another_name_is_wrong_unless_decoding_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with '<reasoning>'.*\('</reasoning>'\?\)"):
        text.reasoning(with_prompts(parts(tmp_path), ["2?<reasoning>\n"]))
    named = {"reasoning_open": "<reasoning>", "reasoning_close": "</reasoning>"}
    text.reasoning(with_prompts(parts(tmp_path, decoding=named), ["2?<reasoning>\n"]))
    text.reasoning(with_prompts(parts(tmp_path), ["2?<answer>\n"]))


def test_the_longest_prompt_has_to_leave_room_for_its_completion(tmp_path: Path) -> None:
    made = with_prompts(parts(tmp_path), ["2 + 3?", "2 + 3 + 4?"])
    assert text.lengths(made) == (
        "the longest of 2 prompts has 10 tokens, and 18 with sampling.max_tokens, of a context of 2048"
    )
    with pytest.raises(ConfigError, match=r"has 10 tokens and the model's context is 17.*Use at most 7"):
        text.lengths(replace(made, loaded=replace(made.loaded, context_length=17)))
    with pytest.raises(Undecided, match="states no context"):
        text.lengths(replace(made, loaded=replace(made.loaded, context_length=None)))
