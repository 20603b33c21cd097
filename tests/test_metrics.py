import asyncio
import re

import pytest

from leadline.config import Config, parse_config
from leadline.data import load_prompts
from leadline.engines.hf import HFEngine
from leadline.evaluate import evaluate
from leadline.metrics import LEDGER_STAGES, QUANTITIES, find
from leadline.models import load_model
from leadline.policy.policy import Policy
from leadline.rewards.scorer import build_scorer
from leadline.rollouts import Roller
from leadline.train import Step, train

UNITS = {"", "steps", "tokens", "groups", "rollouts", "nats", "s", "tokens/s", "bytes"}
"""'' is a pure number."""


def test_names_are_unique() -> None:
    names = [quantity.name for quantity in QUANTITIES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda q: q.name)
def test_every_quantity_says_what_it_is(quantity: object) -> None:
    assert quantity.unit in UNITS  # type: ignore[attr-defined]
    assert len(quantity.meaning.split()) >= 2  # type: ignore[attr-defined]
    assert re.fullmatch(r"[a-zA-Z_0-9]+(/[a-zA-Z_0-9]+)*", quantity.name)  # type: ignore[attr-defined]
    if quantity.healthy is not None:  # type: ignore[attr-defined]
        low, high = quantity.healthy  # type: ignore[attr-defined]
        assert low <= high


def test_a_concrete_name_is_found_in_its_family() -> None:
    expected = {
        "time/generate_s": "time/STAGE_s",
        "reward/exact_match/mean": "reward/LABEL/mean",
        "eval/pass_at_16": "eval/pass_at_K",
        "rollout/finish_length_fraction": "rollout/finish_REASON_fraction",
        "ledger/sampled_tokens": "ledger/sampled_tokens",
    }
    found = {name: find(name) for name in expected}
    assert {name: quantity and quantity.name for name, quantity in found.items()} == expected


@pytest.mark.parametrize("name", ["reward", "time/generate", "reward/a/b/mean", "eval/pass_at_", "loss/", "Loss"])
def test_an_unknown_name_is_not_found(name: str) -> None:
    assert find(name) is None


def test_every_stage_of_the_ledger_has_its_columns() -> None:
    for stage in LEDGER_STAGES:
        for column in ("tokens", "mass", "share"):
            assert find(f"ledger/{stage}_{column}").name == f"ledger/STAGE_{column}"  # type: ignore[union-attr]


def tiny_run(config: Config) -> tuple[list[Step], dict[str, float]]:
    loaded = load_model(config.model)
    data = load_prompts(config, loaded.tokenizer, context_length=loaded.context_length)
    engine = HFEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        eos_ids=loaded.eos_ids,
        own_copy=config.rollout.max_staleness > 0,
    )
    part = Roller(engine, build_scorer(config.rewards), loaded.tokenizer, loaded.eos_ids, config)
    steps: list[Step] = []

    async def record(step: Step) -> None:
        steps.append(step)

    async def run() -> dict[str, float]:
        metrics = (await evaluate(part, data.held_out, config)).metrics
        policy = Policy(loaded, config)
        await train(config, policy=policy, engine=engine, roller=part, prompts=data.train, record=record)
        await engine.close()
        return metrics

    return steps, asyncio.run(run())


COMMON = {
    "model": {"name": "tiny", "device": "cpu"},
    "data": {"source": "reasoning_gym:chain_sum", "size": 16},
    "rewards": [{"name": "tests.loops:token_sum"}, {"name": "exact_match", "weight": 0.1}],
    "sampling": {"max_tokens": 8},
    "rollout": {"group_size": 4, "groups_per_step": 2},
    "eval": {"prompts": 2, "samples": 2},
    "run": {"steps": 2},
}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "objective": {"beta": 0.1, "entropy_bonus": 0.01, "overlong_buffer": 4},
            "optimizer": {"minibatches": 2, "epochs_per_batch": 2},
            "rollout": {"group_size": 4, "groups_per_step": 2, "max_staleness": 1, "refill": 1},
        },
    ],
)
def test_every_metric_that_a_real_run_writes_is_known(sections: dict[str, dict[str, object]]) -> None:
    steps, evaluation = tiny_run(parse_config({**COMMON, **sections}))
    written = {name for step in steps for name in step.metrics} | evaluation.keys()
    assert {name for name in written if find(name) is None} == set()
    assert {"loss", "reward/token_sum/mean", "ledger/reached_share", "eval/pass_at_2", "policy/entropy"} <= written
    assert ("kl/k3" in written) is bool(sections)
