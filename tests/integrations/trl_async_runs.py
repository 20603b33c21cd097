"""Small real runs of TRL's asynchronous trainer on the CPU: a worker without a server, attention without a GPU kernel."""

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from leadline.integrations.trl import DoctorCallback
from tests.byte_tokenizer import byte_tokenizer
from tests.integrations.trl_runs import tiny_model


def attention(query: Any, key: Any, value: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """What flash attention computes for sequences in a row: causal, the queries being the last of each one's keys."""
    out = torch.empty_like(query)
    for i in range(len(cu_q) - 1):
        q = query[cu_q[i] : cu_q[i + 1]].transpose(0, 1)
        k, v = (x[cu_k[i] : cu_k[i + 1]].transpose(0, 1) for x in (key, value))
        mask = torch.ones(q.size(1), k.size(1), dtype=torch.bool).tril(k.size(1) - q.size(1))
        scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~mask, float("-inf"))
        out[cu_q[i] : cu_q[i + 1]] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


class Worker:
    """Has all rollouts ready before training begins; `missing` of them lack one logprob."""

    def __init__(self, missing: int) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        random = np.random.default_rng(0)
        for i in range(256):
            logprobs = np.full(16, -5.56, dtype=np.float32)
            logprobs[:6] = 0.0
            if i < missing:
                logprobs[9] = np.nan
            reward = float(i % 4)
            sample = RolloutSample(
                prompt=[],
                completion=[],
                input_ids=random.integers(61, 120, 16),
                completion_mask=np.array([0] * 6 + [1] * 10),
                old_log_probs=logprobs,
                advantage=(reward - 1.5) / 1.1,
                model_version=0,
                group_id=i // 4,
                metrics={"reward": reward, "reward_std": 1.1},
            )
            self.rollout_buffer.put(sample)

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def update_model_version(self, model_version: int) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...


class NoTransfer:
    """The weights go nowhere."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass


def build_async(path: Path, callback: DoctorCallback, monkeypatch: pytest.MonkeyPatch, missing: int) -> Any:
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    kernels = SimpleNamespace(flash_attn_varlen_func=attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: kernels)
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: 1e12)
    tiny_model().save_pretrained(path / "model")
    args = AsyncGRPOConfig(
        output_dir=str(path / "run"),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=4,
        num_generations=4,
        token_budget=128,
        max_staleness=100,
        max_steps=3,
        save_strategy="no",
        disable_tqdm=True,
    )
    return AsyncGRPOTrainer(
        model=str(path / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        processing_class=byte_tokenizer(),
        callbacks=[callback],
        rollout_worker=Worker(missing),
        weight_transfer=NoTransfer(),
    )
