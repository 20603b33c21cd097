"""Ten steps of the tiny model whose losses, gradient norms and rewards were written down once.

Whatever changes the numerics of the update (packing, masks, advantages, weights, losses, clipping, AdamW) changes them.
If that is meant, regenerate with

    python -m tests.test_golden

and say in the commit why they moved.

The completions come from a script: sampled ones could flip from one machine to another, where a last digit of a logit
decides between two tokens, and everything after would differ. So only the numerics of the update are compared. They
differ between machines by rounding, which ten steps of AdamW let grow: weights that start 1e-7 off (relative), four
threads for one, or another BLAS kernel moved no number by more than 2e-5 of itself. Six digits are kept, 1e-4 is
allowed.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from leadline.config import Config
from leadline.engines.scripted import ScriptedEngine, echo_script
from leadline.models import load_model
from leadline.policy.policy import Policy
from tests.builders import settings
from tests.loops import run, token_sum

GOLDEN = Path(__file__).parent / "golden" / "tiny.json"
KEPT = ("loss", "optimizer/grad_norm", "reward/mean")

RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "dapo": {},
    "grpo with a reference": {
        "objective": {"loss": "grpo", "beta": 0.05, "entropy_bonus": 0.01},
        "optimizer": {"tokens_per_micro": 64, "schedule": "cosine", "weight_decay": 0.1},
    },
    "gspo in two minibatches": {
        "objective": {"loss": "gspo", "importance_action": "geometric_truncate"},
        "optimizer": {"minibatches": 2},
    },
}


def config(name: str) -> Config:
    sections = {"rollout": {"group_size": 4, "groups_per_step": 4}, "run": {"steps": 10}, **RUNS[name]}
    return settings(**sections)


def ten_steps(name: str) -> list[dict[str, float]]:
    loaded = load_model(config(name).model, seed=0)
    policy = Policy(loaded, config(name))
    engine = ScriptedEngine(echo_script(vocab_size=260, eos_ids=loaded.eos_ids, max_tokens=16))
    steps = run(config(name), engine, policy=policy, reward=token_sum)
    return [{key: float(f"{step.metrics[key]:.6g}") for key in KEPT} for step in steps]


@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_have_the_losses_gradient_norms_and_rewards_that_were_written_down(name: str) -> None:
    expected = json.loads(GOLDEN.read_text())[name]
    assert len(expected) == 10
    for step, (found, kept) in enumerate(zip(ten_steps(name), expected, strict=True), start=1):
        assert found == pytest.approx(kept, rel=1e-4, abs=1e-7), f"step {step}"


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: ten_steps(name) for name in RUNS}, indent=1) + "\n")
