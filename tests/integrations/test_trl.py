"""Against the real TRL: healthy runs, the ledger, other trainers, and the parts of the callback."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")
pytest.importorskip("torch")

import torch

from leadline.errors import ConfigError
from leadline.integrations import trl_probe
from leadline.integrations.trl import DoctorCallback
from leadline.integrations.trl_probe import trainer_calling
from leadline.integrations.trl_step import packed_metrics
from leadline.metrics import LEDGER_STAGES, find
from tests.integrations import trl_runs as runs
from tests.integrations.trl_async_runs import build_async
from tests.integrations.trl_seen import equal, finite, names, nan_loss, own_output, rows

pytestmark = [
    pytest.mark.filterwarnings("default"),  # TRL and transformers warn about each other, and that is theirs
]


# Healthy --------------------------------------------------------------------------------------------------------------


def test_a_healthy_run_is_silent_and_leaves_a_whole_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = DoctorCallback(blackbox_steps=2)
    trainer = runs.build(tmp_path, callback, max_steps=6)
    runs.run(trainer)

    assert own_output(capsys.readouterr().out) == []
    assert callback.findings == []
    written = rows(tmp_path)
    assert [row["step"] for row in written] == [1, 2, 3, 4, 5, 6]
    assert all(row["ledger/reached_share"] > 0.99 for row in written)
    assert all(find(name) for row in written for name in row)
    boxes = sorted(path.name for path in (tmp_path / "leadline" / "blackbox").iterdir())
    assert boxes == ["step_000005.safetensors", "step_000006.safetensors"]


def test_the_callback_changes_no_number_of_the_training(tmp_path: Path) -> None:
    after = []
    for name, callback in (("with", DoctorCallback()), ("without", None)):
        trainer = runs.build(tmp_path / name, callback)
        runs.run(trainer)
        after.append((runs.weights(trainer), [entry.get("loss") for entry in trainer.state.log_history]))
    assert after[0][1] == after[1][1]
    assert equal(after[0][0], after[1][0])


def test_the_trainer_is_as_it_was_afterwards(tmp_path: Path) -> None:
    trainer = runs.build(tmp_path, DoctorCallback(), max_steps=1)
    before = set(vars(trainer))
    runs.run(trainer)
    added = set(vars(trainer)) - before
    assert not added & {"compute_loss", "_get_grad_norm", "_calculate_rewards", "_generate_and_score_completions"}


def test_an_evaluation_in_between_is_not_taken_for_a_step(tmp_path: Path) -> None:
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, max_steps=4, eval_strategy="steps", eval_steps=2))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]
    assert callback.findings == []


def test_what_it_leaves_can_be_read_by_the_doctor(tmp_path: Path) -> None:
    from leadline.doctor import diagnose

    runs.run(runs.build(tmp_path, DoctorCallback(), max_steps=4))
    report = diagnose(tmp_path / "leadline" / "metrics.jsonl")
    assert report.verdict == "healthy"


# The ledger -----------------------------------------------------------------------------------------------------------


def measured_gradients(trainer: Any) -> list[float]:
    """Sum of |d loss / d logprob| by micro-batch, from autograd itself."""
    sums: list[float] = []
    score = trainer._get_per_token_logps_and_entropies

    def listening(*args: Any, **kwargs: Any) -> Any:
        result = score(*args, **kwargs)
        if result[0].requires_grad:
            result[0].register_hook(lambda gradient: sums.append(float(gradient.abs().sum())))
        return result

    trainer._get_per_token_logps_and_entropies = listening
    return sums


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "gradient_accumulation_steps": 2},
        {"loss_type": "dapo", "gradient_accumulation_steps": 1, "steps_per_generation": 2, "learning_rate": 1e-2},
        {"loss_type": "bnpo", "num_iterations": 2, "learning_rate": 3e-2},
        {"loss_type": "dr_grpo", "num_iterations": 2, "learning_rate": 3e-2, "delta": 1.5},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2, "learning_rate": 3e-2},
        {"loss_type": "cispo", "num_iterations": 2, "learning_rate": 1e-2, "epsilon_high": 1.05},
        {"loss_type": "sapo", "num_iterations": 2, "learning_rate": 1e-2},
        {"loss_type": "vespo", "num_iterations": 2, "learning_rate": 1e-2},
        {"loss_type": "dapo", "top_entropy_quantile": 0.5},
        {"loss_type": "grpo", "mask_truncated_completions": True, "max_completion_length": 12},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values()),
)
def test_what_the_ledger_says_reached_the_gradient_is_what_autograd_says(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    callback = DoctorCallback()
    trainer = runs.build(tmp_path, callback, max_steps=2, **settings)
    gradients = measured_gradients(trainer)
    runs.run(trainer)

    parts = settings.get("gradient_accumulation_steps", 1)
    for i, row in enumerate(rows(tmp_path)):
        assert row["ledger/reached_mass"] == pytest.approx(sum(gradients[i * parts : (i + 1) * parts]), rel=2e-3)
        stages = [row.get(f"ledger/{stage}_mass", 0.0) for stage in LEDGER_STAGES]
        assert sum(stages) == pytest.approx(row["ledger/sampled_mass"], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "stage", "share"),
    [
        ({"vllm_importance_sampling_mode": "sequence_truncate"}, "importance_shrunk", 0.3),
        ({"vllm_importance_sampling_mode": "token_truncate"}, "importance_shrunk", 0.04),
        (
            {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.96},
            "importance_masked",
            1.0,
        ),
        ({"off_policy_mask_threshold": 0.01}, "importance_masked", 0.1),
        ({"vllm_importance_sampling_mode": "token_truncate", "loss_type": "vespo"}, "reached", 0.1),
    ],
    ids=["sequence_truncate", "token_truncate", "token_mask", "off_policy", "vespo"],
)
def test_the_ledger_follows_the_weights_of_the_correction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], stage: str, share: float
) -> None:
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", runs.FakeVLLM)
    monkeypatch.setattr(runs.FakeVLLM, "offset", 0.05)
    trainer = runs.build(tmp_path, DoctorCallback(), max_steps=2, use_vllm=True, **settings)
    gradients = measured_gradients(trainer)
    runs.run(trainer)

    for row, gradient in zip(rows(tmp_path), gradients, strict=True):
        assert row["ledger/reached_mass"] == pytest.approx(gradient, rel=2e-3)
        assert row["importance/log_ratio_mean"] == pytest.approx(-0.05, abs=1e-3)
        assert row[f"ledger/{stage}_share"] >= share


# Other trainers -------------------------------------------------------------------------------------------------------


def test_a_trainer_of_another_loss_is_watched_and_guarded_without_a_ledger(tmp_path: Path) -> None:
    from trl import RLOOConfig, RLOOTrainer

    class Overflowing(RLOOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs) * (math.nan if self.state.global_step == 2 else 1.0)

    callback = DoctorCallback(on_nonfinite="rollback")
    trainer = runs.build(tmp_path, callback, trainer_class=Overflowing, config_class=RLOOConfig, max_steps=4, beta=0.0)
    runs.run(trainer)
    assert [row["optimizer/discarded_steps"] for row in rows(tmp_path)] == [0, 0, 1, 0]
    assert finite(trainer)
    assert "ledger/reached_mass" not in rows(tmp_path)[0]
    assert names(callback) == ["nan-poisoned-weights"]


def test_without_a_trainer_the_log_is_watched_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("leadline.integrations.trl.trainer_calling", lambda _: None)
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, trainer_class=nan_loss(2)))
    assert names(callback)[0] == "nan-poisoned-weights"
    assert "was not found" in own_output(capsys.readouterr().out)[0]


# The asynchronous trainer ---------------------------------------------------------------------------------------------


def test_a_healthy_asynchronous_run_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = DoctorCallback()
    trainer = build_async(tmp_path, callback, monkeypatch, missing=0)
    runs.run(trainer)
    assert trainer.state.global_step == 3
    assert callback.findings == []
    assert [row["rollout/unscored_fraction"] for row in rows(tmp_path / "run")] == [0, 0, 0]


def test_one_missing_logprob_does_not_reach_the_weights_of_an_asynchronous_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = DoctorCallback(on_nonfinite="rollback")
    trainer = build_async(tmp_path, callback, monkeypatch, missing=1)
    runs.run(trainer)
    assert names(callback) == ["nan-poisoned-weights", "unscored-tokens"]
    assert trainer.state.global_step == 3
    assert finite(trainer)
    assert [row["optimizer/discarded_steps"] for row in rows(tmp_path / "run")] == [1, 0, 0]
    assert (tmp_path / "run" / "leadline" / "blackbox" / "step_000001.safetensors").exists()


# Parts ----------------------------------------------------------------------------------------------------------------


def test_the_black_box_can_be_read_by_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leadline.doctor.readers import read_runs

    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", runs.FakeVLLM)
    monkeypatch.setattr(runs.FakeVLLM, "offset", 0.01)
    runs.run(runs.build(tmp_path, DoctorCallback(), use_vllm=True, max_steps=2))
    (run,) = read_runs([tmp_path / "leadline" / "blackbox" / "step_000002.safetensors"])
    assert run.series("importance/log_ratio_abs_mean")[0][1] == pytest.approx(0.01, abs=1e-3)


def test_a_finding_is_printed_once_while_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = DoctorCallback()
    runs.run(runs.build(tmp_path, callback, reward=lambda completions, **_: [None] * len(completions), max_steps=7))
    assert len(names(callback)) == len(set(names(callback)))
    written = (tmp_path / "leadline" / "findings.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in written] == names(callback)
    assert len(own_output(capsys.readouterr().out)) == len(written)


def test_an_unmeasurable_step_is_said_and_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("no such shape")

    monkeypatch.setattr("leadline.integrations.trl.flatten", broken)
    trainer = runs.build(tmp_path, DoctorCallback())
    runs.run(trainer)
    assert trainer.state.global_step == 3
    (line,) = own_output(capsys.readouterr().out)
    assert "could not be measured (ValueError: no such shape)" in line


def test_the_asynchronous_trainers_missing_logprobs_are_counted() -> None:
    parts = [(torch.tensor([-1.0, math.nan]), torch.tensor([0.5, 0.5])), (torch.tensor([-2.0, -1.0]), -torch.ones(2))]
    row = packed_metrics(parts)
    assert row["rollout/unscored_fraction"] == 0.25
    assert (row["advantage/min"], row["advantage/max"], row["advantage/abs_mean"]) == (-1.0, 0.5, 0.75)


def test_an_unknown_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="on_nonfinite is 'ignore'"):
        DoctorCallback(on_nonfinite="ignore")  # type: ignore[arg-type]


def test_nobody_calls_a_callback_that_no_trainer_has() -> None:
    assert trainer_calling(DoctorCallback()) is None


def test_the_callback_takes_less_than_two_percent_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = _timed(monkeypatch)
    trainer = runs.build(
        tmp_path,
        DoctorCallback(),
        model=runs.tiny_model(hidden=256, layers=6, ends=0),
        per_device_train_batch_size=16,
        max_completion_length=128,
        max_steps=3,
    )
    started = time.perf_counter()
    runs.run(trainer)
    whole = time.perf_counter() - started
    assert sum(spent) < 0.02 * whole, f"{sum(spent):.3f} s of {whole:.2f} s"


def _timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds spent in the callback, and in what it adds to the trainer's methods."""
    spent: list[float] = []

    def wrap(owner: Any, name: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            spent.append(time.perf_counter() - began)
            return result

        monkeypatch.setattr(owner, name, timed)

    for name in ("on_pre_optimizer_step", "on_step_end", "on_log"):
        wrap(DoctorCallback, name)
    wrap(trl_probe, "reward_metrics")
    return spent
