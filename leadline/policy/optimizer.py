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

from leadline.errors import ConfigError, TrainingError
from leadline.settings.optimizer import Optimizer as OptimizerSettings


@dataclass(frozen=True, slots=True)
class Outcome:
    """One optimizer step."""

    discarded: bool
    grad_norm: float
    """Before clipping; as it was, if discarded."""
    grad_norm_clipped: float
    update_norm: float
    """|change of the weights| / |weights|; 0 if not taken."""

    @property
    def taken(self) -> bool:
        """Not discarded, and there was a gradient."""
        return not self.discarded and self.grad_norm != 0


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
        groups = [
            {"params": [m for m in self._masters if m.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [m for m in self._masters if m.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = _adamw(groups, settings)

    def collect(self) -> None:
        """Add the gradients of one backward pass to the masters': a sum of many small parts stalls in bfloat16."""
        for master, parameter in self._pairs():
            if parameter.grad is None:
                continue
            master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        """|gradient| of what was collected; 0 if there is none."""
        self.collect()
        grads = [m.grad for m in self._masters if m.grad is not None]
        return torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())

    def check_complete(self, model: nn.Module) -> None:
        """Raise TrainingError unless it moves each trainable parameter of the model once, and nothing else."""
        trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        held = [id(p) for p in self.parameters]
        moved = {id(master) for group in self._adamw.param_groups for master in group["params"]}
        still = [trainable[id(p)] for m, p in zip(self._masters, self.parameters, strict=True) if id(m) not in moved]
        missing = [name for key, name in trainable.items() if key not in held] + still
        if missing or len(held) != len(trainable) or len(moved) != len(held):
            raise TrainingError(
                f"The optimizer moves {len(moved)} tensors, but {len(trainable)} of the model are trainable"
                f"{' (' + ', '.join(missing[:3]) + ' is not among them)' if missing else ''}. Part of the model would stay "
                "as it is, or something else would move. Report this as a bug; a model that freezes or unties weights after "
                "it was loaded does this too."
            )

    def step(self, loss: float, rate: float) -> Outcome:
        """Clip the gradients and step, unless the loss or the gradient norm is not finite, or there is no gradient.

        A gradient of exactly 0 is a step in which nothing was to be learned (all of it masked, say). AdamW would still
        move the weights, by what it remembers of earlier steps and by its decay.
        """
        norm = self.gradient_norm()
        if not (math.isfinite(loss) and bool(torch.isfinite(norm))):
            self.forget()
            return Outcome(discarded=True, grad_norm=float(norm), grad_norm_clipped=math.nan, update_norm=0.0)
        if norm == 0:
            self.forget()
            return Outcome(discarded=False, grad_norm=0.0, grad_norm_clipped=0.0, update_norm=0.0)
        torch.nn.utils.clip_grads_with_norm_(self._masters, self._settings.max_grad_norm, norm)
        for group in self._adamw.param_groups:
            _set_rate(group, rate)
        self._adamw.step()
        update_norm = self._update_norm(rate)
        self._copy_masters_to_weights()
        self.forget()
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

    def forget(self) -> None:
        """There are no gradients any more."""
        for tensor in (*self.parameters, *self._masters):
            tensor.grad = None

    @torch.no_grad()
    def _update_norm(self, rate: float) -> float:
        """|change| / |weights|, from AdamW's state: the step it took was rate * m_hat / (sqrt(v_hat) + eps), plus decay."""
        change = size = 0.0
        for group in self._adamw.param_groups:
            for weight in group["params"]:
                size += float(weight.norm()) ** 2
                state = self._adamw.state.get(weight)
                if weight.grad is not None and state:  # else AdamW left it alone, whatever moved it before
                    change += (rate * self._move(weight, state, group["weight_decay"])) ** 2
        return math.sqrt(change / size) if size > 0 else math.nan

    def _move(self, weight: Tensor, state: dict[str, Any], decay: float) -> float:
        """|change of the weight| / rate, in pieces that stay in a CPU's cache.

        m / first / (sqrt(v) / second + eps) = second / first * m / (sqrt(v) + eps * second): two passes fewer.
        """
        beta1, beta2, count = self._settings.beta1, self._settings.beta2, float(state["step"])
        first, second = 1 - beta1**count, (1 - beta2**count) ** 0.5
        factor: float = second / first
        total = torch.zeros((), dtype=torch.float64, device=weight.device)
        flat = [_in_full(x).flatten().split(PIECE) for x in (state["exp_avg"], state["exp_avg_sq"], weight)]
        for mean, square, value in zip(*flat, strict=True):
            move = mean / square.sqrt().add_(self._settings.eps * second)
            total += (move.add_(value, alpha=decay / factor) if decay else move).norm().double().square()
        return factor * float(total.sqrt())


PIECE = 2**18
"""Elements: 1 MiB in float32 on a CPU, where memory that is fresh costs more than the arithmetic."""


def _adamw(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """torch's fused AdamW, or one that keeps its moments in 8 bits (Dettmers et al. 2021). Raises ConfigError."""
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.eps,
    }
    if settings.moments == "float32":
        return torch.optim.AdamW(groups, fused=True, **options)
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            f"optimizer.moments is '8bit', but torchao cannot be imported ({error}). There is nothing that keeps moments in "
            "8 bits. Install torchao, or use float32."
        ) from error
    made: torch.optim.Optimizer = AdamW8bit([group for group in groups if group["params"]], **options)
    return made


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # of torchao, whose step is compiled
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _in_full(tensor: Tensor) -> Tensor:
    """Of moments in 8 bits the float32 values; any other tensor itself."""
    return tensor.dequantize() if hasattr(tensor, "block_size") else tensor
