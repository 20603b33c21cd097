"""The three numbers during a run: each fault moves its own."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from leadline.engines.hf import HFEngine
from leadline.policy.policy import Policy
from leadline.probes.engine.live import FRESH, measure_mismatch
from leadline.run_dir import read_metrics
from leadline.settings.rollout import Sampling
from leadline.types import Completion, Prompt
from tests.builders import policy, settings, token_ids
from tests.test_session import config, opened, run

PROMPTS = [Prompt(i, "", token_ids(12, 40 + i)) for i in range(6)]


class Watched(HFEngine):
    """Says what it was asked for, and may spoil what it answers."""

    def __init__(self, made: Policy, **options: Any) -> None:
        super().__init__(made.model, tokenizer=made.loaded.tokenizer, eos_ids=frozenset(), own_copy=True, **options)
        self.asked: list[tuple[int, int]] = []
        self.offset: float = 0.0

    async def generate(self, prompt: Prompt, n: int, sampling: Sampling) -> list[Completion]:
        self.asked.append((prompt.index, sampling.max_tokens))
        found = await super().generate(prompt, n, sampling)
        return [replace(c, logprobs=tuple(value + self.offset for value in c.logprobs)) for c in found]


def measured(made: Policy, engine: Watched, total: float | None = 0.05) -> dict[str, float]:
    async def run() -> dict[str, float]:
        try:
            return await measure_mismatch(made, engine, PROMPTS, total, made.config)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_a_right_engine_in_float32_has_only_rounding_of_float32() -> None:
    made = policy(settings())
    found = measured(made, engine := Watched(made), total=None)
    assert found["mismatch/numerics"] < 1e-5
    assert found["mismatch/bug"] == 0
    assert "mismatch/staleness" not in found
    assert engine.asked == [(FRESH + i, 16) for i in range(4)]


def test_a_half_precision_engine_has_rounding_and_no_bug() -> None:
    made = policy(settings(engine={"dtype": "bfloat16"}))
    found = measured(made, Watched(made, dtype="bfloat16"))
    assert 1e-3 < found["mismatch/numerics"] < 0.1
    assert found["mismatch/bug"] == 0


def test_a_half_precision_policy_and_engine_have_rounding_and_no_bug() -> None:
    made = policy(settings(model={"dtype": "bfloat16"}))
    found = measured(made, Watched(made))
    assert found["mismatch/numerics"] > 1e-4
    assert found["mismatch/bug"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_of_other_weights_has_a_bug(dtype: str) -> None:
    made = policy(settings(engine={"dtype": dtype}))
    engine = Watched(made, dtype=dtype)
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.05)
    found = measured(made, engine)
    assert found["mismatch/bug"] > 0.1


def test_what_the_batch_has_beyond_fresh_completions_is_staleness() -> None:
    made = policy(settings())
    engine = Watched(made)
    engine.offset = 0.02
    found = measured(made, engine, total=0.05)
    assert found["mismatch/bug"] == pytest.approx(0.02, abs=2e-4)
    assert found["mismatch/staleness"] == pytest.approx(0.03, abs=2e-4)


def test_an_engine_that_scores_nothing_is_not_measured() -> None:
    made = policy(settings())
    engine = Watched(made)
    engine.offset = torch.nan
    assert measured(made, engine) == {}


def test_a_run_measures_on_its_schedule_and_right_after_the_push(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run(opened(config(run={"mismatch_every": 2, "steps": 4}), path))
    found = {row["step"]: row.get("mismatch/bug") for row in read_metrics(path / "metrics.jsonl")}
    assert found == {1: None, 2: 0, 3: None, 4: 0}


def test_measuring_changes_nothing_about_the_run(tmp_path: Path) -> None:
    losses = []
    for every in (0, 1):
        run(opened(config(run={"mismatch_every": every, "steps": 3}), tmp_path / str(every)))
        losses.append([row["loss"] for row in read_metrics(tmp_path / str(every) / "metrics.jsonl")])
    assert losses[0] == losses[1]
