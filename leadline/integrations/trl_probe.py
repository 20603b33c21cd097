"""What a TRL trainer computes in a step, taken from the trainer while it computes it."""

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from leadline.integrations.trl_loss import LossSettings
from leadline.integrations.trl_step import GROUP, LENGTH, REWARD, Seen, reward_metrics

LEDGER_NEEDS = (
    "_calculate_rewards",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "epsilon_low",
    "importance_sampling_level",
    "loss_type",
    "reward_weights",
)
"""What tells TRL's GRPOTrainer from its other trainers, and from versions before 1.0."""


def trainer_calling(callback: object) -> Any:
    """The trainer among whose callbacks this is, found on the call stack: transformers tells callbacks everything but
    who calls. None if nobody does."""
    frame: FrameType | None = sys._getframe(1)
    while frame:
        owner = frame.f_locals.get("self")
        if any(callback is other for other in getattr(getattr(owner, "callback_handler", None), "callbacks", ())):
            return owner
        frame = frame.f_back
    return None


def _known_settings(trainer: Any) -> LossSettings | None:
    """None for a trainer whose loss `trl_loss` does not describe: one without a `loss_type`, or of TRL's experiments."""
    makers = [kind for kind in type(trainer).__mro__ if "_compute_loss" in vars(kind)]
    experimental = any(kind.__module__.startswith("trl.experimental") for kind in makers)
    if experimental or not all(hasattr(trainer, name) for name in LEDGER_NEEDS):
        return None
    settings = LossSettings.of(trainer)
    return settings if settings.known else None


@dataclass
class Probe:
    """Listens to a trainer: its methods are wrapped on the instance, and behave as before. `remove` takes it off."""

    trainer: Any
    settings: LossSettings | None = None
    """None: this trainer's loss is not known, so there is no ledger."""
    seen: list[Seen] = field(default_factory=list)
    """Micro-batches since the last `take`."""
    packed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """The same of the asynchronous trainer: the sampler's logprobs and the advantages of the trained tokens."""
    losses: list[Tensor] = field(default_factory=list)
    grad_norm: float = math.nan
    generation: dict[str, float] = field(default_factory=dict)
    """Metrics of the latest generation batch."""
    fresh: bool = False
    """It was generated since the last `take`."""
    _rewards: list[tuple[Tensor, list[int]]] = field(default_factory=list)
    _in_loss: bool = False
    _scored: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _wrapped: list[str] = field(default_factory=list)

    def install(self) -> None:
        """Listens from now on."""
        self._wrap("compute_loss", self._compute_loss)
        self._wrap("_get_grad_norm", self._get_grad_norm)
        self.settings = _known_settings(self.trainer)
        if self.settings:
            self._wrap("_calculate_rewards", self._calculate_rewards)
            self._wrap("_generate_and_score_completions", self._generate)
            self._wrap("_get_per_token_logps_and_entropies", self._score)

    def remove(self) -> None:
        """The trainer's own methods are back."""
        for name in self._wrapped:
            self.trainer.__dict__.pop(name, None)
        self._wrapped.clear()

    def take(self) -> tuple[list[Seen], bool]:
        """The micro-batches of the optimizer step that ends, and whether they were generated for it."""
        seen, fresh = self.seen, self.fresh
        self.seen, self.packed, self.losses, self.fresh = [], [], [], False
        return seen, fresh

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        original = getattr(self.trainer, name, None)
        if original is None:
            return
        self.trainer.__dict__[name] = functools.wraps(original)(functools.partial(around, original))
        self._wrapped.append(name)

    def _compute_loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.trainer.model.training:
            return original(model, inputs, *args, **kwargs)
        self._in_loss = True
        self._scored.clear()
        try:
            result = original(model, inputs, *args, **kwargs)
        finally:
            self._in_loss = False
        loss = result[0] if isinstance(result, tuple) else result
        self.losses.append(loss.detach())
        if self._scored and LENGTH in inputs:
            self.seen.append(Seen(inputs, *self._scored[-1]))
        if "old_log_probs" in inputs and "token_index" in inputs:
            trained = inputs["token_index"] >= 0
            self.packed.append((inputs["old_log_probs"][trained], inputs["advantages"][trained]))
        self._scored.clear()
        return result

    def _score(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if self._in_loss:
            self._scored.append((result[0].detach(), result[1].detach()))
        return result

    def _get_grad_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        self.grad_norm = math.nan if result is None else float(result)
        return result

    def _calculate_rewards(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        ids = kwargs.get("completion_ids_list", args[-1])
        self._rewards.append((result.detach(), [len(one) for one in ids]))
        return result

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._rewards.clear()
        output = original(*args, **kwargs)
        if not self.trainer.model.training or not self._rewards:
            return output
        by_function, lengths = self._rewards[-1]
        weights = self.trainer.reward_weights.to(by_function.device)
        rewards = (by_function * weights).nansum(1)
        rewards = torch.where(by_function.isnan().all(1), math.nan, rewards)
        device, count = output["advantages"].device, len(lengths)
        start = self.trainer.accelerator.process_index * count
        group_size = self.trainer.num_generations
        output[REWARD] = rewards[start : start + count].to(device)
        output[LENGTH] = torch.tensor(lengths, device=device)
        output[GROUP] = (torch.arange(count, device=device) + start) // group_size
        self.generation = reward_metrics(rewards.float().cpu(), output["advantages"].float().cpu(), group_size)
        self.fresh = True
        return output
