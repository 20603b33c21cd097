"""Settings in the files and forms in which frameworks have them."""

import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from leadline.doctor.readers import read_runs
from leadline.doctor.readers.training_args import read_training_args
from leadline.doctor.run_log import RunLog
from leadline.errors import LogError

VERL = """
actor_rollout_ref:
  actor:
    optim: {lr: 1e-6}
    kl_loss_coef: 0.001
    use_kl_loss: true
    kl_loss_type: low_var_kl
  rollout: {n: 5, temperature: 0.6, val_kwargs: {temperature: 0}}
algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: "0.5_5.0"}}
data: {max_response_length: 2048}
"""
OPENRLHF = """#!/bin/bash
python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_learning_rate 5e-7 \\
   --init_kl_coef 0.01 \\
   --n_samples_per_prompt 8 \\
   --algo.advantage.is_correction_enable
"""
SLIME = """GRPO_ARGS=(
   --n-samples-per-prompt 8
   --rollout-temperature 0.8
   --eps-clip 0.2
   --use-tis
   --lr 1e-6
)
"""
PRIME_RL = """max_steps = 100
[trainer.optim]
lr = 1e-6
[orchestrator]
rollouts_per_example = 8
max_off_policy_steps = 4
[orchestrator.sampling]
max_tokens = 2048
"""
LEADLINE = """[sampling]
max_tokens = 64
[rollout]
group_size = 4
[optimizer]
learning_rate = 1e-3
"""
HYDRA = """- actor_rollout_ref.rollout.n=5
- actor_rollout_ref.actor.kl_loss_coef=0.01
- data.max_response_length=512
"""
TRL = (
    '{"beta": "0 (no kl key)", "num_generations": 8, "vllm_importance_sampling_mode": "sequence_mask", "epsilon": ">0"}'
)


def read(text: str, tmp_path: Path) -> RunLog:
    path = tmp_path / "settings"
    path.write_text(text)
    (run,) = read_runs([path])
    return run


@pytest.mark.parametrize(
    ("text", "framework", "settings"),
    [
        (
            VERL,
            "verl",
            {
                "optimizer.learning_rate": 1e-6,
                "rollout.group_size": 5,
                "sampling.temperature": 0.6,
                "objective.importance_action": "mask",
                "objective.importance_high": 5.0,
                "objective.kl_estimator": "k3",
            },
        ),
        (HYDRA, "verl", {"rollout.group_size": 5, "objective.beta": 0.01, "sampling.max_tokens": 512}),
        (OPENRLHF, "openrlhf", {"optimizer.learning_rate": 5e-7, "objective.importance_action": "truncate"}),
        (SLIME, "slime", {"rollout.group_size": 8, "sampling.temperature": 0.8, "objective.clip_low": 0.2}),
        (PRIME_RL, "prime_rl", {"optimizer.learning_rate": 1e-6, "rollout.max_staleness": 4}),
        (LEADLINE, "leadline", {"rollout.group_size": 4, "optimizer.learning_rate": 1e-3}),
        (TRL, "trl", {"objective.beta": 0, "objective.importance_level": "sequence", "objective.clip_low": ">0"}),
    ],
    ids=["verl", "hydra", "openrlhf", "slime", "prime_rl", "leadline", "trl"],
)
def test_settings_are_read_in_each_frameworks_form(
    text: str, framework: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    run = read(text, tmp_path)
    assert run.framework == framework and len(run.rows) == 0
    assert {name: run.setting(name) for name in settings} == settings


class Strategy:
    def __init__(self, value: str) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return (Strategy, (self.value,))


class Arguments:
    def __init__(self) -> None:
        self.beta = 0.04
        self.num_generations = 8
        self.learning_rate = 2e-6
        self.lr_scheduler_type = Strategy("cosine")
        self.generation_kwargs = {"stop": ["</a>"], "top_p": 0.9}


def archived(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        archive.writestr("training_args/data.pkl", pickled)
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_training_args_are_read_without_unpickling(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "training_args.bin"
    path.write_bytes(archived(pickle.dumps(Arguments(), protocol)))
    (run,) = read_runs([path])
    assert run.setting("objective.beta") == 0.04
    assert run.setting("optimizer.schedule") == "cosine"
    assert run.setting("sampling.stop") == ["</a>"]


def corrupted(whole: bytes, seed: int) -> bytes:
    """A few bytes changed, or the end cut off."""
    draw = random.Random(seed)
    data = bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randrange(4, len(data))] if seed % 5 == 0 else data)


@pytest.mark.parametrize(
    "compression", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
def test_training_args_damaged_in_any_way_are_settings_or_none(compression: int | None) -> None:
    pickled = pickle.dumps(Arguments())
    whole = pickled if compression is None else archived(pickled, compression)
    assert read_training_args(whole)
    for seed in range(1000):
        found = read_training_args(corrupted(whole, seed))
        assert found is None or isinstance(found, dict)


@pytest.mark.parametrize("left", [archived(pickle.dumps(Arguments()))[:100], b"PK\x03\x04 nothing else", b""])
def test_training_args_that_cannot_be_read_are_said_to_be_missing(left: bytes, tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").write_bytes(left)
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 0.1, "reward": 0.2, "grad_norm": 1.0}\n')
    (run,) = read_runs([tmp_path])
    assert any("training_args.bin" in note and "damaged" in note for note in run.notes), run.notes
    with pytest.raises(LogError, match="the file is damaged"):
        read_runs([tmp_path / "training_args.bin"])


class Attack:
    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> Any:
        return (Path.touch, (self.victim,))


def test_no_code_in_a_pickle_is_run(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    arguments = Arguments()
    arguments.attack = Attack(victim)  # type: ignore[attr-defined]
    (tmp_path / "training_args.bin").write_bytes(archived(pickle.dumps(arguments)))
    (run,) = read_runs([tmp_path / "training_args.bin"])
    assert run.setting("objective.beta") == 0.04
    assert not victim.exists()


def test_a_config_that_is_named_is_that_of_the_log(tmp_path: Path) -> None:
    log, config = tmp_path / "log", tmp_path / "config"
    log.write_text("{'loss': 0.1, 'reward': 0.2, 'grad_norm': 1.0, 'learning_rate': 1e-6}\n")
    config.write_text('{"beta": 0.04, "epsilon": 0.2}')
    for runs in (read_runs([log], config_paths=[config]), read_runs([log, config])):
        (run,) = runs
        assert run.setting("objective.beta") == 0.04
        assert run.series("reward/mean") == [(1, 0.2)]


def test_the_kl_loss_goes_to_the_estimator_that_the_settings_name(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "data": {"actor/kl_loss": 0.1, "actor/lr": 1e-6}}\n' * 2)
    (tmp_path / "config.yaml").write_text(VERL.replace("low_var_kl", "kl"))
    (run,) = read_runs([tmp_path])
    assert run.series("kl/k1") == [(1, 0.1)]
    assert run.is_missing("kl/k3")
