"""What is read from each trainer's files, and what is said of a file that cannot be used."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.errors import LogError
from leadline.policy.policy import Policy
from leadline.probes.engine.files import read_recorded
from leadline.run_dir import RunDir
from tests.builders import groups, on_policy, policy, settings

MASK = [0, 0, 1, 1, 0, 1]
IDS = [5, 6, 7, 8, 9, 10]
ENGINE = [0.0, 0.0, -1.0, -2.0, 0.0, -3.0]
TRAINER = [0.0, -9.0, -1.5, -2.5, -9.0, -3.5]


def nan_to_none(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def check(path: Path) -> None:
    """One sequence: two prompt tokens, then four, of which the third was not drawn by the policy."""
    drawn = read_recorded(path).drawn
    assert drawn.prompts == ((5, 6),)
    assert drawn.completions == ((7, 8, 9, 10),)
    assert nan_to_none(drawn.engine) == [-1.0, -2.0, None, -3.0]
    assert drawn.trainer is not None and nan_to_none(drawn.trainer) == [-1.5, -2.5, None, -3.5]


def test_nemo_rl(tmp_path: Path) -> None:
    row = {"token_ids": IDS, "token_loss_mask": MASK, "generation_logprobs": ENGINE, "prev_logprobs": TRAINER}
    path = tmp_path / "train_data_step3.jsonl"
    path.write_text(json.dumps(row) + "\n")
    check(path)
    check(tmp_path)  # a directory of them: the last


def test_prime_rl(tmp_path: Path) -> None:
    row = {"token_ids": IDS, "loss_mask": MASK, "inference_logprobs": ENGINE, "trainer_logprobs": TRAINER}
    path = tmp_path / "rank_0.jsonl"
    path.write_text(json.dumps({**row, "entropy": [2.0] * 6}) + "\n\n")
    check(path)
    entropies = read_recorded(path).drawn.entropies
    assert entropies is not None and nan_to_none(entropies) == [2.0, 2.0, None, 2.0]


def test_slime(tmp_path: Path) -> None:
    data = {
        "tokens": [torch.tensor(IDS)],
        "response_lengths": [4],
        "loss_masks": [torch.tensor(MASK[2:])],
        "rollout_log_probs": [torch.tensor(ENGINE[2:])],
        "log_probs": [torch.tensor(TRAINER[2:])],
    }
    path = tmp_path / "train_0_0.pt"
    torch.save({"rollout_id": 0, "rank": 0, "rollout_data": data}, path)
    check(path)


def test_slime_before_training_has_no_column_of_the_trainer(tmp_path: Path) -> None:
    sample = {"tokens": IDS, "response_length": 4, "loss_mask": MASK[2:], "rollout_log_probs": ENGINE[2:]}
    path = tmp_path / "rollout_0.pt"
    torch.save({"samples": [sample]}, path)
    drawn = read_recorded(path).drawn
    assert drawn.trainer is None and nan_to_none(drawn.engine) == [-1.0, -2.0, None, -3.0]


class Harmful:
    ran = False

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return setattr, (Harmful, "ran", True)


def test_a_dump_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    path = tmp_path / "train_0_0.pt"
    torch.save({"rollout_data": Harmful()}, path)
    with pytest.raises(LogError, match="cannot be loaded without running code"):
        read_recorded(path)
    assert not Harmful.ran


def test_csv_in_any_order_with_missing_numbers(tmp_path: Path) -> None:
    path = tmp_path / "tokens.csv"
    path.write_text(
        "completion,position,engine_logprob,trainer_logprob,age\n"
        "b,0,-3.0,-3.5,1\na,1,,-2.5,0\na,0,-1.0,-1.5,0\nb,1,nan,-9,1\n"
    )
    drawn = read_recorded(path).drawn
    assert [len(c) for c in drawn.completions] == [2, 2]
    assert nan_to_none(drawn.engine) == [-1.0, None, -3.0, None]
    assert drawn.trainer is not None and drawn.trainer.tolist() == [-1.5, -2.5, -3.5, -9.0]
    assert drawn.ages is not None and drawn.ages.tolist() == [0, 0, 1, 1]


def black_box(path: Path) -> Policy:
    made = policy(settings(sampling={"temperature": 0.7}))
    batch = on_policy(made, groups(), offset=0.25)
    box = made.update(batch).blackbox
    RunDir.create(path, made.config).write_blackbox(1, box, {})
    return made


def test_a_black_box_holds_both_columns_and_how_it_was_sampled(tmp_path: Path) -> None:
    black_box(tmp_path)
    recorded = read_recorded(tmp_path)
    drawn = recorded.drawn
    assert recorded.sampling is not None and recorded.sampling.temperature == 0.7
    assert drawn.trainer is not None and drawn.ages is not None and drawn.entropies is not None
    assert torch.allclose(drawn.trainer - drawn.engine, torch.tensor(0.25, dtype=torch.float64), atol=1e-4)
    assert drawn.completions[1] == groups()[0].rollouts[1].completion.token_ids
    assert drawn.prompts[4] == groups()[1].prompt.token_ids


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.txt", "x", "none of the files that can be read"),
        ("a.jsonl", "{", "a line that is not JSON"),
        ("a.jsonl", '{"step": 1, "loss": 0.5}', "no rows with token_ids"),
        ("a.csv", "completion,position\n0,0\n", "lacks the columns engine_logprob, trainer_logprob"),
        ("a.pt", "not a pickle", "cannot be loaded without running code"),
        ("a.safetensors", "x", "is not whole"),
        (
            "a.jsonl",
            json.dumps({"token_ids": IDS, "token_loss_mask": MASK, "generation_logprobs": ENGINE[:-1]}),
            "different lengths in row 1",
        ),
        (
            "a.jsonl",
            json.dumps({"token_ids": IDS, "token_loss_mask": [0] * 6, "generation_logprobs": ENGINE}),
            "holds no token that was drawn",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_what_could(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(LogError, match=message) as error:
        read_recorded(path)
    assert str(path) in str(error.value) and "CSV" in str(error.value)


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="cannot be read"):
        read_recorded(tmp_path / "a.csv")
    with pytest.raises(LogError, match="no black box"):
        read_recorded(tmp_path)
