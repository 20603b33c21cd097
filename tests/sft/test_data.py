"""From rows to demonstrations: what is learned is exactly what an engine should sample."""

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.data import PromptData
from leadline.errors import DataError, ModelError
from leadline.settings.data import Data
from leadline.sft.data import Writer, as_demonstrated, demonstration_batch, load_demonstrations, make_writer
from leadline.types import Prompt
from tests.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer
from tests.loops import TOKENIZER
from tests.sft.runs import sft_config

ENDS = frozenset({TOKENIZER.eos_token_id})


def loaded(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any = TOKENIZER, **sections: Any) -> PromptData:
    """The demonstrations of these rows, none held out."""
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "data": {"source": str(source)},
        "sft": {"completion_column": "completion"},
        "sampling": {"max_tokens": 64},
        "eval": {"prompts": 0},
    }
    config = sft_config(**{name: {**values.get(name, {}), **sections.get(name, {})} for name in {*values, *sections}})
    return load_demonstrations(config, make_writer(tokenizer, ENDS, config.data), context_length=None)


def shown(data: PromptData, tokenizer: Any = TOKENIZER) -> tuple[str, str]:
    """The first prompt and its completion, as text with all special tokens."""
    prompt = data.train.prompt(0)
    writer = make_writer(tokenizer, ENDS, Data(source="x.jsonl"))
    return tokenizer.decode(prompt.token_ids), tokenizer.decode(writer.completion(prompt).token_ids)


EXPECTED = ("<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n", "Three.<|im_end|>")
QUESTION, ANSWER = {"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Three."}


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "How many?", "completion": "Three."}, {}),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, {}),
        ({"messages": [QUESTION, ANSWER]}, {"data": {"prompt_column": "messages"}}),
        ({"prompt": "How many?", "right": "Three."}, {"sft": {"completion_column": "right"}}),
        ({"prompt": "How many?", "completion": "Three.<|im_end|>"}, {}),
    ],
    ids=["strings", "messages in columns", "a conversation", "another column", "already terminated"],
)
def test_every_form_of_row_gives_the_same_prompt_and_a_terminated_completion(
    row: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    assert shown(loaded(tmp_path, [row], **settings)) == EXPECTED


def test_only_the_last_message_of_a_conversation_is_learned(tmp_path: Path) -> None:
    turns = [QUESTION, {"role": "assistant", "content": "Two."}, {"role": "user", "content": "Sure?"}, ANSWER]
    prompt, completion = shown(loaded(tmp_path, [{"prompt": turns}]))
    assert "Two." in prompt and prompt.endswith("Sure?<|im_end|>\n<|im_start|>assistant\n")
    assert completion == "Three.<|im_end|>"


def test_without_a_chat_template_the_text_is_plain_and_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    data = loaded(tmp_path, [{"prompt": "1 + 1 = ", "completion": "2"}], tokenizer)
    writer = make_writer(tokenizer, frozenset({tokenizer.eos_token_id}), Data(source="x.jsonl"))
    assert data.train.prompt(0).text == "1 + 1 = "
    assert tokenizer.decode(writer.completion(data.train.prompt(0)).token_ids) == "2<eos>"


def test_the_terminator_is_what_the_template_writes_after_the_assistant() -> None:
    """Not the tokenizer's end of sequence, with which base models of the same vocabulary end a document."""
    tokenizer = byte_tokenizer("{% for m in messages %}{{ m.content }}</answer>{% endfor %}")
    ends = frozenset({tokenizer.convert_tokens_to_ids("</answer>"), tokenizer.eos_token_id})
    data = Data(source="x.jsonl")
    assert make_writer(tokenizer, ends, data).terminator == tokenizer.convert_tokens_to_ids("</answer>")
    assert make_writer(byte_tokenizer(CHAT_TEMPLATE), ends, data).terminator == tokenizer.eos_token_id


def test_a_tokenizer_without_an_end_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        make_writer(tokenizer, frozenset(), Data(source="x.jsonl"))


def test_special_tokens_in_a_completion_are_one_token_each(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    writer = Writer(tokenizer, tokenizer.eos_token_id)
    ids = writer.completion(Prompt(0, "", (1,), {"demonstration": "<answer>4</answer>"})).token_ids
    assert len(ids) == 4


def test_every_token_of_a_completion_is_in_the_loss_and_none_of_a_prompt() -> None:
    config = sft_config().policy_config()
    prompts = [Prompt(i, "", (5, 6, 7), {"demonstration": text}) for i, text in enumerate(("a", "bcd"))]
    batch = demonstration_batch(prompts, Writer(TOKENIZER, 3), config)
    assert batch.num_groups == 1  # one prompt, forwarded once
    assert batch.lengths.tolist() == [2, 4]
    assert bool(batch.loss_mask.all()) and batch.advantages.tolist() == [1.0, 1.0]
    assert batch.forwarded == (0, 1)


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no completion": ({"prompt": "x"}, r"Row 0 .* 'train': sft.completion_column is 'completion', but the row has"),
    "a number": ({"prompt": "x", "completion": 3}, "'completion' holds a int"),
    "nothing": ({"prompt": "x", "completion": "  "}, "'completion' is empty"),
    "too long": ({"prompt": "x", "completion": "y" * 64}, "sampling.max_tokens is 64, but .* has 65 tokens"),
    "a conversation of one": ({"prompt": [ANSWER]}, "no conversation that ends with an assistant message"),
    "a question last": ({"prompt": [QUESTION, QUESTION]}, "no conversation that ends with an assistant message"),
    "no prompt": ({"completion": "x"}, "data.prompt_column is 'prompt'"),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_a_row_that_cannot_be_learned_is_an_error_before_anything_starts(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        loaded(tmp_path, [row])


def test_a_held_out_demonstration_is_checked_too(tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"prompt": "y", "completion": "z" * 99}) + "\n")
    with pytest.raises(DataError, match="has 100 tokens"):
        loaded(tmp_path, [{"prompt": "x", "completion": "y"}], data={"eval_source": str(held_out)}, eval={"prompts": 1})


def test_a_completion_is_compared_with_the_demonstration_without_the_space_around() -> None:
    assert as_demonstrated(" 4\n", "4") == 1.0
    assert as_demonstrated("4 5", "45") == 0.0
