"""AdamW behind a guard: a step that is not finite is not taken.

Weights in half precision keep fp32 masters here: with a learning rate of 1e-6 an update is far below what bfloat16 can
resolve, and would round away without a trace.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leadline.settings.optimizer import Optimizer as OptimizerSettings


@dataclass(frozen=True, slots=True)
class Outcome:
    """One optimizer step."""

    discarded: bool
    grad_norm: float
    """Before clipping; as it was, if discarded."""
    grad_norm_clipped: float
    update_norm: float
    """|change of the weights| / |weights|; 0 if discarded."""


def learning_rate(settings: OptimizerSettings, step: int, total_steps: int) -> float:
    """The rate of step `step` (from 0): linear warm-up, then constant, linear or cosine to 0 at `total_steps`."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / (settings.warmup_steps + 1)
    progress = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * min(1.0, progress))) / 2,
    }[settings.schedule]
    return settings.learning_rate * max(0.0, factor)


class Optimizer:
    """AdamW over the trainable parameters of a model."""

    def __init__(self, model: nn.Module, settings: OptimizerSettings) -> None:
        self._settings = settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [m for m in self._masters if m.ndim >= 2], "weight_decay": settings.weight_decay},
                {"params": [m for m in self._masters if m.ndim < 2], "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )

    def collect(self) -> None:
        """Add the gradients of one backward pass to the masters': a sum of many small parts stalls in bfloat16."""
        for master, parameter in self._pairs():
            if parameter.grad is None:
                continue
            master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None

    def step(self, loss: float, rate: float) -> Outcome:
        """Clip the gradients and step, unless the loss or the gradient norm is not finite."""
        self.collect()
        grads = [m.grad for m in self._masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        if not (math.isfinite(loss) and bool(torch.isfinite(norm))):
            self._clear()
            return Outcome(discarded=True, grad_norm=float(norm), grad_norm_clipped=math.nan, update_norm=0.0)
        torch.nn.utils.clip_grads_with_norm_(self._masters, self._settings.max_grad_norm, norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        update_norm = self._update_norm(rate)
        self._copy_masters_to_weights()
        self._clear()
        clipped = min(float(norm), self._settings.max_grad_norm)
        return Outcome(discarded=False, grad_norm=float(norm), grad_norm_clipped=clipped, update_norm=update_norm)

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self._adamw.state_dict(), "masters": self._own_masters()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._adamw.load_state_dict(state["adamw"])
        for master, saved in zip(self._own_masters(), state["masters"], strict=True):
            master.copy_(saved)

    def _own_masters(self) -> list[Tensor]:
        return [m for m, p in zip(self._masters, self.parameters, strict=True) if m is not p]

    def _pairs(self) -> Iterable[tuple[Tensor, Tensor]]:
        return ((m, p) for m, p in zip(self._masters, self.parameters, strict=True) if m is not p)

    @torch.no_grad()
    def _copy_masters_to_weights(self) -> None:
        for master, parameter in self._pairs():
            parameter.copy_(master)

    def _clear(self) -> None:
        for tensor in (*self.parameters, *self._masters):
            tensor.grad = None

    @torch.no_grad()
    def _update_norm(self, rate: float) -> float:
        """|change| / |weights|, from AdamW's state: the step it took was rate * m_hat / (sqrt(v_hat) + eps), plus decay."""
        beta1, beta2, eps = self._settings.beta1, self._settings.beta2, self._settings.eps
        change = torch.zeros((), dtype=torch.float64)
        size = torch.zeros((), dtype=torch.float64)
        for group in self._adamw.param_groups:
            for weight in group["params"]:
                state = self._adamw.state.get(weight)
                size += weight.norm().double().square().cpu()
                if weight.grad is None or not state:  # AdamW leaves it alone, whatever moved it before
                    continue
                count = float(state["step"])
                scale = 1 / (1 - beta2**count) ** 0.5
                move = state["exp_avg"] / (state["exp_avg_sq"].sqrt().mul_(scale).add_(eps)) / (1 - beta1**count)
                if group["weight_decay"]:
                    move = move + group["weight_decay"] * weight
                change += (rate * move.norm()).double().square().cpu()
        return float((change / size).sqrt()) if size > 0 else math.nan
