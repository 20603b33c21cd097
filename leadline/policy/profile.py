"""Where the time of a step goes, and how near the update comes to what the machine can multiply.

`leadline train --profile` prints `Profile.report` at the end and leaves `profile.json` in the run directory.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from leadline.models import plain_model
from leadline.policy.batch import Batch

STAGES = ("generate", "reward", "score", "forward", "backward", "optimizer", "load_weights", "record")
"""Of a step, in their order. What is left of its time is overhead."""


class Stopwatch:
    """Wall seconds of the stages of an update, summed up until they are read."""

    def __init__(self, device: torch.device) -> None:
        self.waits = False
        """Whether an accelerator's work is waited for at the ends of a stage: else it counts where it is waited for anyway."""
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """What runs inside belongs to this stage."""
        started = self._now()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + self._now() - started

    def metrics(self) -> dict[str, float]:
        """`time/STAGE_s` of each stage since the last call."""
        seconds, self._seconds = self._seconds, {}
        return {f"time/{stage}_s": value for stage, value in seconds.items()}

    def _now(self) -> float:
        if self.waits:
            _finish(self._device)
        return time.perf_counter()


@dataclass(slots=True)
class Profile:
    """The steps of a run, stage by stage."""

    gemm_flops_per_s: float
    """What bare matrix multiplication of this model's sizes reaches on this machine."""
    steps: list[dict[str, float]] = field(default_factory=list)
    """Seconds by stage, `whole` for all of the step, `flops` for the useful work of its update."""

    def add(self, metrics: Mapping[str, float], flops: float, record_seconds: float) -> None:
        """One step, from its metrics `time/STAGE_s`. Reward and generation overlap: only what the loop waits counts."""
        seconds = {stage: metrics.get(f"time/{stage}_s", 0.0) for stage in STAGES} | {"record": record_seconds}
        waited = metrics.get("time/wait_for_rollouts_s", 0.0)
        seconds["reward"] = min(seconds["reward"], waited)
        seconds["generate"] = waited - seconds["reward"]
        self.steps.append(seconds | {"whole": metrics["time/step_s"] + record_seconds, "flops": flops})

    def summary(self) -> dict[str, Any]:
        """Median seconds of each stage and their share of the step, the first step (which loads kernels) left out."""
        steps = self.steps[1:] or self.steps
        whole = _median(steps, "whole")
        seconds = {stage: _median(steps, stage) for stage in STAGES}
        seconds["overhead"] = max(0.0, whole - sum(seconds.values()))
        update = seconds["forward"] + seconds["backward"]
        rate = _median(steps, "flops") / update if update else 0.0
        return {
            "steps": len(steps),
            "step_s": whole,
            "stages": {name: {"seconds": s, "share": s / whole if whole else 0.0} for name, s in seconds.items()},
            "update_flops_per_s": rate,
            "gemm_flops_per_s": self.gemm_flops_per_s,
            "gemm_share": rate / self.gemm_flops_per_s,
        }

    def report(self) -> RenderableType:
        """The summary as it is printed."""
        summary = self.summary()
        table = Table(title=f"where a step of {summary['step_s']:.3f} s went (median of {summary['steps']})", box=None)
        for column in ("stage", "seconds", "share"):
            table.add_column(column, justify="left" if column == "stage" else "right")
        for name, stage in summary["stages"].items():
            table.add_row(name.replace("_", " "), f"{stage['seconds']:.4f}", f"{stage['share']:.1%}")
        rates = (
            f"forward and backward: {summary['update_flops_per_s'] / 1e9:.3g} GFLOP/s of useful work, "
            f"{summary['gemm_share']:.0%} of bare matrix multiplication ({self.gemm_flops_per_s / 1e9:.3g} GFLOP/s)"
        )
        return Group(table, Text(rates))


def gemm_rate(model: nn.Module, rows: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """FLOP/s of bare multiplications of `rows` rows by the model's largest layer: forward, and both gradients."""
    weight = max(_layer_matrices(model), key=lambda matrix: matrix.numel())
    x = torch.ones(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    y = torch.ones(rows, weight.shape[0], dtype=weight.dtype, device=weight.device)
    times = []
    with torch.no_grad():
        for _ in range(6):
            _finish(weight.device)
            started = clock()
            for _ in range(4):
                x @ weight.t(), y @ weight, y.t() @ x
            _finish(weight.device)
            times.append(clock() - started)
    return float(4 * 6 * rows * weight.numel() / statistics.median(times[1:]))


def update_flops(model: nn.Module, batch: Batch, *, passes: int = 1) -> float:
    """Useful floating-point operations of an update on the batch: each prompt once, nothing padded, nothing recomputed.

    Forward 2 (m n + h t) + 4 d a, with m the entries of the layers' matrices, n the positions forwarded, h the entries
    of the head, t the tokens predicted, d the width of all queries of all layers, a the pairs that attend. Backward is
    twice that. Of a mixture of experts all experts are counted, which overstates it.
    """
    plain = plain_model(model)
    config = plain.config.get_text_config()
    matrices = sum(weight.numel() for weight in _layer_matrices(model))
    head = int(plain.get_output_embeddings().weight.numel())
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = int(config.num_hidden_layers * config.num_attention_heads * head_dim)
    positions, pairs, predicted = _work(batch)
    forward = 2 * (matrices * positions + head * predicted) + 4 * width * pairs
    return 3.0 * passes * forward


def _work(batch: Batch) -> tuple[int, int, int]:
    """Positions forwarded, pairs that attend, and tokens predicted, for the completions that have a gradient."""
    lengths = batch.lengths.tolist()
    positions = pairs = predicted = 0
    group_before = None
    for completion in batch.forwarded:
        group, length = int(batch.group_of_completion[completion]), lengths[completion]
        prompt = len(batch.prompt_ids[group])
        if group != group_before:
            positions, pairs, group_before = positions + prompt, pairs + prompt * (prompt + 1) // 2, group
        positions += length - 1
        pairs += (length - 1) * prompt + length * (length - 1) // 2
        predicted += length
    return positions, pairs, predicted


def _layer_matrices(model: nn.Module) -> list[Tensor]:
    """The matrices of the model's layers; not its embeddings and not its head."""
    plain = plain_model(model)
    ends = {id(plain.get_input_embeddings().weight), id(plain.get_output_embeddings().weight)}
    return [p for p in plain.parameters() if p.ndim == 2 and id(p) not in ends]


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _median(steps: Sequence[Mapping[str, float]], key: str) -> float:
    return statistics.median(step[key] for step in steps)
