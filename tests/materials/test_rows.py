import pytest

from leadline.config import parse_config
from leadline.data import load_prompts
from leadline.decoding import decode
from leadline.materials import rewards
from leadline.materials.compounds import COMPOUNDS
from leadline.materials.judge import TAGS, gap_of
from leadline.materials.modification import Strain, Substitute, Swap
from leadline.materials.rows import (
    HELD_OUT,
    demonstrations,
    held_out_demonstrations,
    held_out_prompts,
    prompts,
    proposal,
)
from leadline.model_sources import add_special_tokens
from leadline.settings.reward import Decoding
from leadline.settings.rollout import Sampling
from leadline.types import Completion, FinishReason
from tests.byte_tokenizer import byte_tokenizer


def test_rows_depend_on_size_and_seed_alone() -> None:
    assert prompts(40, 3) == prompts(40, 3)
    assert prompts(20, 3) == prompts(40, 3)[:20]
    assert prompts(20, 3) != prompts(20, 4)
    assert prompts(2, -1)


def test_a_prompt_names_the_compound_its_gap_and_a_window_that_excludes_it() -> None:
    for row in prompts(200, 0):
        gap = gap_of(row["material"])
        material, band_gap, window, change = [line.split(": ")[1] for line in row["prompt"].splitlines()]
        assert material == row["material"]
        assert band_gap == f"{gap:.2f} eV"
        assert window == f"{row['lowest']:.2f} to {row['highest']:.2f} eV"
        assert [float(n) for n in change.removesuffix(" eV").split(" to ")] == pytest.approx(
            [row["lowest"] - round(gap, 2), row["highest"] - round(gap, 2)]
        )
        assert row["lowest"] > 0
        assert row["highest"] - row["lowest"] == pytest.approx(0.2)
        assert not row["lowest"] <= gap <= row["highest"]


def test_held_out_prompts_start_from_other_compounds_and_have_other_windows() -> None:
    trained, held_out = prompts(500, 0), held_out_prompts(500, 0)
    assert {row["material"] for row in trained} == set(COMPOUNDS) - set(HELD_OUT)
    assert {row["material"] for row in held_out} == set(HELD_OUT)
    assert not {row["lowest"] for row in trained} & {row["lowest"] for row in held_out}
    assert len({row["prompt"] for row in held_out}) >= 100


def test_demonstrations_are_right_but_for_the_window_which_half_of_them_hit_on_purpose() -> None:
    rows = demonstrations(200, 0)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in prompts(200, 0)]
    columns = {name: [row[name] for row in rows] for name in ("material", "lowest", "highest")}
    completions = [row["completion"] for row in rows]
    for reward in (rewards.parses, rewards.physical, rewards.hypothesis):
        assert set(reward(completions, columns["material"])) == {1.0}
    assert 0.4 < sum(rewards.inside(completions, **columns)) / 200 < 0.7
    assert all("completion" in row for row in held_out_demonstrations(5, 0))


def test_a_demonstrated_hypothesis_says_sign_and_size_of_the_change() -> None:
    assert "raises the gap slightly<" in proposal("GaAs", Strain(-1))
    assert "raises the gap clearly<" in proposal("GaAs", Substitute("Ga", "Al", 0.25))
    assert "lowers the gap strongly<" in proposal("GaAs", Swap("GaAs", "InAs"))


def test_decoding_that_strips_special_tokens_would_leave_the_reward_nothing_to_read() -> None:
    tokenizer = byte_tokenizer()
    add_special_tokens(tokenizer, TAGS)
    row = demonstrations(1, 0)[0]
    ids = tokenizer(row["completion"], add_special_tokens=False)["input_ids"]
    assert [ids.count(tokenizer.convert_tokens_to_ids(tag)) for tag in TAGS] == [1, 1, 1, 1]
    end = ids[-1]
    sampling = Sampling(stop=("</modification>",), stop_token_ids=(tokenizer.eos_token_id, end))
    completion = Completion(tuple(ids), (0.0,) * len(ids), (0,) * len(ids), FinishReason.STOP)
    text = decode(tokenizer, completion, prompt_text=row["prompt"], settings=Decoding(), sampling=sampling, eos_ids={0})
    stripped = tokenizer.decode(ids, skip_special_tokens=True)
    assert text == row["completion"]  # the stop string is kept
    assert rewards.parses([text, stripped], [row["material"]] * 2) == [1, 0]
    assert "modification" not in stripped


def test_a_run_can_draw_its_prompts_from_here() -> None:
    rows = "leadline.materials.rows"
    config = parse_config(
        {
            "model": {"name": "tiny"},
            "data": {"source": f"{rows}:prompts", "eval_source": f"{rows}:held_out_prompts", "size": 100},
            "rewards": [{"name": "leadline.materials.rewards:inside"}],
            "sampling": {"max_tokens": 8},
            "eval": {"prompts": 16},
        }
    )
    data = load_prompts(config, byte_tokenizer(), context_length=None)
    assert data.columns == {"material", "lowest", "highest"}
    assert data.removed == 0
    assert {prompt.columns["material"] for prompt in data.held_out} <= set(HELD_OUT)
