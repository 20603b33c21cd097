import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pytest
import reasoning_gym

from leadline.config import Config, parse_config
from leadline.data import PromptStream, load_prompts, prompt_limit, render_prompt
from leadline.errors import ConfigError, DataError
from leadline.settings.data import Data
from leadline.types import Prompt
from tests.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(CHAT_TEMPLATE)
ROWS = [{"prompt": f"{n} + 1 =", "answer": n + 1} for n in range(20)]


def config(source: str | Path, *, prompts: int = 4, seed: int = 0, max_tokens: int = 8, **data: Any) -> Config:
    return parse_config(
        {
            "model": {"name": "tiny"},
            "data": {"source": str(source), **data},
            "rewards": [{"name": "exact_match"}],
            "sampling": {"max_tokens": max_tokens},
            "eval": {"prompts": prompts},
            "run": {"seed": seed},
        }
    )


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(count: int, seed: int = 0) -> PromptStream:
    return PromptStream([Prompt(0, str(n), (n,), {"n": n}) for n in range(count)], seed)


def texts(prompts: Sequence[Prompt]) -> list[str]:
    return [p.text for p in prompts]


# --- the stream ---------------------------------------------------------------------------------------------------


def test_each_epoch_has_every_prompt_once_in_another_order() -> None:
    prompts = list(islice(stream(8), 24))
    epochs = [texts(prompts[i : i + 8]) for i in (0, 8, 16)]
    assert [sorted(epoch) for epoch in epochs] == [[str(n) for n in range(8)]] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_the_index_of_a_prompt_is_its_position_in_the_stream() -> None:
    assert [p.index for p in islice(stream(3), 7)] == list(range(7))


@pytest.mark.parametrize("position", [0, 4, 5, 6, 9, 10, 23])
def test_seek_resumes_at_the_exact_next_prompt_also_over_an_epoch_boundary(position: int) -> None:
    straight = list(islice(stream(5), 30))
    resumed = stream(5)
    resumed.seek(position)
    assert resumed.position == position
    assert list(islice(resumed, 30 - position)) == straight[position:]
    assert resumed.position == 30


def test_random_access_gives_the_prompt_of_the_stream_and_does_not_move_it() -> None:
    prompts = stream(5)
    assert [prompts.prompt(i) for i in (12, 3, 12)] == [list(islice(stream(5), 13))[i] for i in (12, 3, 12)]
    assert prompts.position == 0


def test_the_order_depends_on_the_seed_alone() -> None:
    assert texts(list(islice(stream(9, 1), 18))) == texts(list(islice(stream(9, 1), 18)))
    assert texts(list(islice(stream(9, 1), 9))) != texts(list(islice(stream(9, 2), 9)))
    assert len(list(islice(stream(9, -1), 9))) == 9


# --- held-out rows ------------------------------------------------------------------------------------------------


def test_held_out_rows_are_split_off_and_never_trained(tmp_path: Path) -> None:
    data = load_prompts(config(jsonl(tmp_path / "rows.jsonl")), PLAIN, context_length=None)
    trained = {p.text for p in islice(data.train, 64)}
    assert len(trained) == len(data.train) == 16
    assert len(data.held_out) == 4
    assert trained | set(texts(data.held_out)) == {row["prompt"] for row in ROWS}
    assert [p.index for p in data.held_out] == [-1, -2, -3, -4]
    assert data.removed == 4


def test_a_held_out_text_is_removed_from_every_training_row_that_has_it(tmp_path: Path) -> None:
    data = load_prompts(config(jsonl(tmp_path / "rows.jsonl", ROWS * 3)), PLAIN, context_length=None)
    held_out = texts(data.held_out)
    assert len(set(held_out)) == 4
    assert data.removed == 12
    assert not {p.text for p in islice(data.train, 48)} & set(held_out)


def test_which_rows_are_held_out_depends_on_the_seed(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl")

    def held_out(seed: int) -> list[str]:
        return texts(load_prompts(config(path, seed=seed), PLAIN, context_length=None).held_out)

    assert held_out(1) == held_out(1)
    assert held_out(1) != held_out(2)


def test_an_eval_source_gives_the_held_out_rows_and_keeps_its_texts_out_of_training(tmp_path: Path) -> None:
    train, test = jsonl(tmp_path / "train.jsonl"), jsonl(tmp_path / "test.jsonl", [*ROWS[:1], {"prompt": "new"}])
    data = load_prompts(config(train, prompts=2, eval_source=str(test)), PLAIN, context_length=None)
    assert sorted(texts(data.held_out)) == ["0 + 1 =", "new"]
    assert (len(data.train), data.removed) == (19, 1)


def test_without_evaluation_all_rows_are_trained(tmp_path: Path) -> None:
    data = load_prompts(config(jsonl(tmp_path / "rows.jsonl"), prompts=0), PLAIN, context_length=None)
    assert (data.held_out, len(data.train)) == ([], 20)


def test_holding_out_every_row_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"eval.prompts is 20, but the 20 rows .* Nothing would be left"):
        load_prompts(config(jsonl(tmp_path / "rows.jsonl"), prompts=20), PLAIN, context_length=None)


def test_asking_for_more_held_out_prompts_than_there_are_is_an_error(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", ROWS[:3] * 5)
    with pytest.raises(DataError, match=r"eval.prompts is 4, but .* has only 3 different prompts"):
        load_prompts(config(path), PLAIN, context_length=None)


# --- sources ------------------------------------------------------------------------------------------------------


def test_the_other_columns_of_a_row_are_kept_for_rewards(tmp_path: Path) -> None:
    rows = [{**row, "level": 3} for row in ROWS[:-1]] + ROWS[-1:]
    data = load_prompts(config(jsonl(tmp_path / "rows.jsonl", rows)), PLAIN, context_length=None)
    assert data.columns == {"answer"}  # `level` is not in every row
    prompt = next(p for p in islice(data.train, 16) if "level" in p.columns)
    assert prompt.columns == {"answer": int(prompt.text.split()[0]) + 1, "level": 3}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\n\n{"prompt": ', r"rows\.jsonl, line 3 is no JSON"),
        ('{"prompt": "a"}\n["b"]\n', r"rows\.jsonl, line 2 holds a list, but each line is one JSON object"),
        ("\n\n", r"rows\.jsonl', but it has no rows"),
        ('{"question": "a", "answer": 1}', r"prompt_column is 'prompt', but Row 0 .* has the columns answer, question"),
        ('{"prompt": 5}', r"Row 0 .* data\.prompt_column holds a int, but"),
        ('{"prompt": ""}', r"Row 0 .* has an empty prompt"),
    ],
)
def test_a_bad_jsonl_row_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_prompts(config(tmp_path / "rows.jsonl", prompts=0), PLAIN, context_length=None)


def test_a_missing_file_and_parameters_for_jsonl_are_errors(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts(config(tmp_path / "none.jsonl"), PLAIN, context_length=None)
    with pytest.raises(DataError, match="takes none"):
        load_prompts(config(jsonl(tmp_path / "rows.jsonl"), params={"n": 1}), PLAIN, context_length=None)


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    data = load_prompts(config(tmp_path / "rows.jsonl", prompts=0), PLAIN, context_length=None)
    assert next(data.train).text == "a\u2028b"


def test_a_dataset_saved_to_disk_is_read_with_its_splits(tmp_path: Path) -> None:
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list([{"prompt": "held?", "answer": 0}])
    )
    saved.save_to_disk(tmp_path / "set")
    data = load_prompts(config(tmp_path / "set", prompts=1, eval_split="test"), PLAIN, context_length=None)
    assert texts(data.held_out) == ["held?"]
    assert {p.text for p in islice(data.train, 20)} == {row["prompt"] for row in ROWS}

    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "flat")
    assert len(load_prompts(config(tmp_path / "flat"), PLAIN, context_length=None).train) == 16
    with pytest.raises(DataError, match="cannot load it: KeyError"):
        load_prompts(config(tmp_path / "set", split="nope"), PLAIN, context_length=None)


def test_a_directory_of_parquet_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "set" / "train-00000.parquet")
    asked = config(tmp_path / "set", params={"cache_dir": str(tmp_path / "cache")})
    data = load_prompts(asked, PLAIN, context_length=None)
    assert len(data.train) == 16
    assert data.columns == {"answer"}


def test_a_hugging_face_dataset_that_cannot_be_found_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot load it.*Give a \.jsonl file"):
        load_prompts(config(tmp_path / "nothing-here"), PLAIN, context_length=None)


def test_reasoning_gym_rows_carry_what_their_scorer_needs() -> None:
    asked = config("reasoning_gym:chain_sum", size=30, params={"max_terms": 3})
    data = load_prompts(asked, PLAIN, context_length=None)
    prompt = next(data.train)
    assert data.columns == {"answer", "entry", "task"}
    assert prompt.columns["task"] == "chain_sum"
    assert prompt.columns["entry"]["question"] == prompt.text
    score = reasoning_gym.get_score_answer_fn("chain_sum")
    assert score(answer=prompt.columns["answer"], entry=prompt.columns["entry"]) == 1.0


def drawn_rows(size: int, seed: int, **params: Any) -> list[dict[str, Any]]:
    if params:
        raise ValueError(f"no such parameters: {params}")
    return [{"prompt": f"{seed % 1000} {i}", "answer": i} for i in range(size)]


def test_a_function_is_called_for_rows_and_with_another_seed_for_held_out_ones(tmp_path: Path) -> None:
    name = f"{__name__}:drawn_rows"
    data = load_prompts(config(name, eval_source=name, prompts=3, size=5, seed=4), PLAIN, context_length=None)
    assert sorted(p.text for p in islice(data.train, 5)) == [f"4 {i}" for i in range(5)]
    assert all(text.startswith("11 ") for text in texts(data.held_out))  # 4 + 1,000,000,007
    assert data.columns == {"answer"}


@pytest.mark.parametrize(
    ("source", "params", "message"),
    [
        ("no.such:rows", {}, "importing 'no.such' raises ModuleNotFoundError"),
        (f"{__name__}:drawn_rows", {"width": 2}, "it raises ValueError: no such parameters"),
        ("builtins:dict", {}, "among its rows is a str"),
    ],
)
def test_a_function_that_cannot_give_rows_is_an_error(source: str, params: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(config(source, params=params), PLAIN, context_length=None)


def test_held_out_reasoning_gym_questions_are_never_trained() -> None:
    # So few questions exist (two terms of one digit) that drawing with another seed alone would repeat many.
    params = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    asked = config("reasoning_gym:chain_sum", size=300, prompts=20, params=params)
    data = load_prompts(asked, PLAIN, context_length=None)
    held_out = set(texts(data.held_out))
    assert len(held_out) == 20
    assert data.removed > 0
    assert not held_out & {p.text for p in islice(data.train, len(data.train))}


@pytest.mark.parametrize(
    ("source", "params", "message"),
    [
        ("reasoning_gym:chain_sun", {}, r"no such task.*Names near it: chain_sum"),
        ("reasoning_gym:chain_sum", {"terms": 3}, r"data\.params is .* refuses it.*terms"),
        ("reasoning_gym:chain_sum", {"min_terms": 9, "max_terms": 2}, r"refuses it"),
        ("reasoning_gym:chain_sum", {"seed": 3}, r"refuses it.*seed"),
    ],
)
def test_a_task_or_parameter_that_reasoning_gym_lacks_is_an_error(source: str, params: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(config(source, params=params), PLAIN, context_length=None)


# --- rendering ----------------------------------------------------------------------------------------------------

USER = {"role": "user", "content": "2 + 3?"}
SYSTEM = {"role": "system", "content": "Mine."}


@pytest.mark.parametrize(
    ("value", "data", "expected"),
    [
        ("2 + 3?", {}, "[user]2 + 3?[assistant]"),
        ([USER], {}, "[user]2 + 3?[assistant]"),
        ([USER], {"system_prompt": "Be brief."}, "[system]Be brief.[user]2 + 3?[assistant]"),
        ("2 + 3?", {"system_prompt": "Be brief."}, "[system]Be brief.[user]2 + 3?[assistant]"),
        ([SYSTEM, USER], {"system_prompt": "Be brief."}, "[system]Mine.[user]2 + 3?[assistant]"),
        ("2 + 3?", {"chat": False}, "2 + 3?"),
    ],
)
def test_a_prompt_is_rendered_through_the_chat_template(value: Any, data: dict[str, Any], expected: str) -> None:
    text, ids = render_prompt(CHAT, value, Data(source="x", **data), {})
    assert text == expected
    assert CHAT.decode(ids) == expected


def test_template_arguments_reach_the_template() -> None:
    text, _ = render_prompt(CHAT, "2 + 3?", Data(source="x"), {"enable_thinking": True})
    assert text == "[user]2 + 3?[assistant]<think>\n"


def test_bos_is_there_once_whether_the_template_or_the_tokenizer_writes_it() -> None:
    with_bos = byte_tokenizer("{{ bos_token }}" + CHAT_TEMPLATE, bos=True)
    bos = with_bos.bos_token_id
    for data in (Data(source="x"), Data(source="x", chat=False)):
        _, ids = render_prompt(with_bos, "2 + 3?", data, {})
        assert ids[0] == bos
        assert ids.count(bos) == 1


@pytest.mark.parametrize(
    ("value", "data", "message"),
    [
        ([USER], {}, "holds messages, but prompts are plain text"),
        ("2 + 3?", {"chat": True}, "data.chat is true, but the tokenizer has no chat template"),
        ("2 + 3?", {"system_prompt": "Be brief."}, "data.system_prompt is set, but prompts are plain text"),
        (None, {}, "holds a NoneType"),
    ],
)
def test_what_needs_a_chat_template_is_refused_without_one(value: Any, data: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        render_prompt(PLAIN, value, Data(source="x", **data), {})


@pytest.mark.parametrize("value", [None, [], ["a"], [{"role": "user"}], {"role": "user", "content": "a"}])
def test_a_value_that_is_no_conversation_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="a prompt is a string or a list"):
        render_prompt(CHAT, value, Data(source="x"), {})


def test_a_conversation_that_the_template_refuses_is_an_error_with_its_reason() -> None:
    strict = byte_tokenizer("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"has the roles user, user, but .* roles must alternate"):
        render_prompt(strict, [USER, USER], Data(source="x"), {})


# --- limits -------------------------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_context_less_the_completion_is_an_error_at_load(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a" * 10}, {"prompt": "b" * 13}])
    assert len(load_prompts(config(path, prompts=0), PLAIN, context_length=21).train) == 2
    with pytest.raises(DataError, match=r"Row 1 \(.*has 13 prompt tokens, but the limit is 12"):
        load_prompts(config(path, prompts=0), PLAIN, context_length=20)
    with pytest.raises(DataError, match=r"Row 1 \(.*has 13 prompt tokens, but the limit is 11"):
        load_prompts(config(path, prompts=0, max_prompt_tokens=11), PLAIN, context_length=None)


def test_the_prompt_limit_is_what_was_asked_for_within_the_context() -> None:
    assert prompt_limit(config("x"), None) is None
    assert prompt_limit(config("x"), 20) == 12
    assert prompt_limit(config("x", max_prompt_tokens=5), 20) == 5
    with pytest.raises(ConfigError, match=r"max_prompt_tokens is 13, but .* leaves 12"):
        prompt_limit(config("x", max_prompt_tokens=13), 20)
    with pytest.raises(ConfigError, match=r"sampling.max_tokens is 8, but the model's context is 8 tokens"):
        prompt_limit(config("x"), 8)
