"""The replayed zero loss, on the tiny model: each wrong engine is wrong as told, and the page is written from the runs."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.materials_failure import (
    GAP,
    LONG,
    LOW,
    REPORTED_GAP,
    SPREAD,
    TENFOLD,
    VARIANTS,
    WARM,
    WHOLE,
    Skewed,
    Story,
    Told,
    as_long_rope,
    doctor_of_report,
    tell,
    tuned_model,
    with_long_factors,
)
from benchmarks.materials_failure_page import write
from leadline.engines.scripted import ScriptedEngine
from leadline.errors import ModelError
from leadline.models import load_model, save_model
from leadline.settings.model import Model
from leadline.settings.rollout import Sampling
from leadline.types import Prompt
from tests.loops import completion

RECIPE = Path(__file__).parents[1] / "recipes/tiny.toml"
SETTINGS = (
    "model.device=cpu",
    "rewards.0.name=tests.loops:token_sum",
    "rewards.0.params={}",
    "sampling.top_k=100",
    "sampling.repetition_penalty=1.15",
    "rollout.groups_per_step=2",
    "run.steps=1",
    "run.checkpoint_every=0",
    "eval.prompts=0",
)
RUN = ("right", "sequence_mask"), (TENFOLD, "sequence_mask"), (LOW, "token_truncate, cap 10"), (LONG, "sequence_mask")
"""Of the variants, those that are run here."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    loaded = load_model(Model(name="tiny", device="cpu"), 0)
    save_model(loaded.model, loaded.tokenizer, directory)
    return directory


@pytest.fixture(scope="module")
def story(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Story:
    variants = [variant for variant in VARIANTS if (variant.engine, variant.correction) in RUN]
    return tell(RECIPE, tiny, tmp_path_factory.mktemp("story"), SETTINGS, variants)


def test_the_gap_has_the_reported_mean_of_its_absolute_value() -> None:
    folded = SPREAD * math.sqrt(2 / math.pi) * math.exp(-((GAP / SPREAD) ** 2) / 2) + GAP * math.erf(
        GAP / SPREAD / math.sqrt(2)
    )
    assert folded == pytest.approx(REPORTED_GAP, abs=1e-3)


def test_a_skewed_engine_reports_logprobs_that_are_off_as_told_and_draws_as_before() -> None:
    engine = Skewed(ScriptedEngine(lambda prompt, n: [completion(500)] * n), -GAP, SPREAD)
    drawn = asyncio.run(engine.generate(Prompt(3, "", (1,)), 2, Sampling(max_tokens=500)))
    off = np.array([one.logprobs for one in drawn]) + 1.0  # the script's are -1
    assert off.mean() == pytest.approx(GAP, abs=0.04)
    assert off.std() == pytest.approx(SPREAD, abs=0.04)
    assert not np.array_equal(off[0], off[1])
    assert [replace(one, logprobs=completion(500).logprobs) for one in drawn] == [completion(500)] * 2


def test_written_with_long_rope_the_model_is_the_same_until_its_engine_takes_the_long_factors(
    tiny: Path, tmp_path: Path
) -> None:
    plain = load_model(Model(name=str(tiny), device="cpu"), 0)
    dressed = load_model(Model(name=str(as_long_rope(tiny, tmp_path / "dressed")), device="cpu"), 0)
    ids = torch.arange(20, 60)[None]
    with torch.no_grad():
        own, same, other = (m(ids).logits for m in (plain.model, dressed.model, with_long_factors(dressed)))
    assert torch.equal(own, same)
    assert float((own - other).abs().max()) > 0.01


def told(story: Story, engine: str) -> Told:
    return next(one for one in story.told if one.variant.engine == engine)


def test_each_engine_is_wrong_as_its_name_says(story: Story) -> None:
    for engine in ("right", LOW, TENFOLD):
        gap = told(story, engine).variant.gap
        assert told(story, engine).mean("importance/log_ratio_mean") == pytest.approx(gap, abs=0.02 + 0.1 * abs(gap))
    assert "LongRoPE" in told(story, LONG).refused
    assert {one.variant.engine for one in story.told if one.refused} == {LOW, TENFOLD, LONG}


def test_the_ledger_says_what_each_correction_lets_through(story: Story) -> None:
    assert told(story, "right").mean("ledger/reached_share") == pytest.approx(1, abs=1e-3)
    assert told(story, TENFOLD).mean("ledger/reached_share") < 1e-6
    assert 0.7 < told(story, LOW).mean("ledger/reached_share") < 0.95


def test_the_replay_brings_the_lost_signal_back_and_the_doctor_speaks(story: Story) -> None:
    dead = told(story, TENFOLD)
    assert dead.remedy
    assert dead.restored > 0.5 > dead.mean("ledger/reached_share")
    assert "importance-correction-erases-signal" in dead.findings
    assert "importance-correction-erases-signal" not in told(story, "right").findings
    assert told(story, "right").remedy == ""


def test_log_ratios_are_those_that_the_run_has_measured(story: Story) -> None:
    for one in story.told:
        measured = [row["importance/sequence_ratio_max"] for row in one.rows]
        assert math.exp(max(one.log_ratios)) == pytest.approx(max(measured), rel=1e-4)


def test_a_report_of_the_whole_block_is_above_what_the_temperature_alone_gives(story: Story) -> None:
    readings = {(one.engine, one.trainer): one for one in story.readings}
    assert readings[WHOLE, WARM].mean < -0.01
    assert readings["raw", WHOLE].mean == pytest.approx(-readings[WHOLE, "raw"].mean)


def test_the_doctor_names_the_correction_from_the_reported_numbers_alone(tmp_path: Path) -> None:
    assert doctor_of_report(tmp_path)[0] == "importance-correction-erases-signal"


def test_the_page_and_its_plots_are_written(story: Story, tmp_path: Path) -> None:
    stand_ins = tuple(
        replace(next((one for one in story.told if one.variant.engine == v.engine), story.told[0]), variant=v)
        for v in VARIANTS
    )
    write(replace(story, told=stand_ins), tmp_path)
    text = (tmp_path / "materials-failure.md").read_text()
    assert all(f"]({path.name})" in text for path in tmp_path.glob("*.svg"))
    assert len(list(tmp_path.glob("*.svg"))) == 3
    assert str(tmp_path) not in text
    assert "nan" not in text.replace("nano", "")


def test_a_missing_model_is_said_with_the_command_that_makes_it() -> None:
    with pytest.raises(ModelError, match="leadline sft recipes/materials-sft"):
        tuned_model("/nowhere")
