"""What TRL's losses do with each token, by its own formulas: shares, weights, gains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leadline.objective.losses import policy_loss
from leadline.objective.ratios import bounded_exp
from leadline.objective.segments import segment_mean, segment_sum

SURROGATES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSSES = (*SURROGATES, "cispo", "sapo", "vespo")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The settings of a GRPOTrainer on which the fate of a token depends."""

    loss_type: str
    level: str
    clip_low: float
    clip_high: float
    delta: float | None
    beta: float
    sapo_temperatures: tuple[float, float]
    """For positive and for other advantages."""
    vespo: Mapping[str, float]
    max_tokens: int
    slices: int
    """Micro-batches of one generation."""
    processes: int
    kept_entropy: float
    """Share of the tokens, those of highest entropy, that are trained."""
    off_policy_threshold: float | None
    importance_level: str
    importance_on: bool

    @classmethod
    def of(cls, trainer: Any) -> Self:
        """Raises AttributeError: the trainer is none of TRL's GRPO trainers."""
        args = trainer.args
        mode = str(getattr(args, "vllm_importance_sampling_mode", ""))
        vespo = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
        return cls(
            loss_type=trainer.loss_type,
            level=trainer.importance_sampling_level,
            clip_low=trainer.epsilon_low,
            clip_high=trainer.epsilon_high,
            delta=args.delta,
            beta=trainer.beta,
            sapo_temperatures=(
                getattr(args, "sapo_temperature_pos", math.nan),
                getattr(args, "sapo_temperature_neg", math.nan),
            ),
            vespo={name: getattr(args, f"vespo_{name}") for name in vespo if hasattr(args, f"vespo_{name}")},
            max_tokens=trainer.max_completion_length,
            slices=args.steps_per_generation,
            processes=trainer.accelerator.num_processes,
            kept_entropy=trainer.top_entropy_quantile,
            off_policy_threshold=getattr(trainer, "off_policy_mask_threshold", None),
            importance_level="sequence" if mode.startswith("sequence") else "token",
            importance_on=bool(trainer.use_vllm and getattr(trainer, "vllm_importance_sampling_correction", False)),
        )

    @property
    def known(self) -> bool:
        """Whether `gains` and `shares` say what this loss does."""
        return self.loss_type in LOSSES and (self.level == "token" or self.loss_type in SURROGATES)


def shares(
    settings: LossSettings,
    counted: Bool[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    loss_tokens: Int[Tensor, " completion"],
    items: float,
    accumulation: int,
) -> Float[Tensor, " token"]:
    """Share of each counted token in the loss of its optimizer step; 0 for the others.

    `loss_tokens`: trained tokens by completion (a completion that has none is measured by its counted ones);
    `items`: trained tokens of the whole generation batch, all processes; `accumulation`: micro-batches of the step.
    """
    everything = counted.float()
    if settings.loss_type in ("dapo", "cispo", "vespo"):
        return everything * settings.processes * settings.slices / (max(1.0, items) * accumulation)
    everything = everything / accumulation
    if settings.loss_type == "bnpo":
        return everything / max(1.0, float(loss_tokens.sum()))
    if settings.loss_type == "dr_grpo":
        return everything / (num_completions * settings.max_tokens)
    if settings.loss_type == "luspo":
        return everything / num_completions
    lengths = segment_sum(counted.float(), completion_of_token, num_completions)
    lengths = torch.where(loss_tokens > 0, loss_tokens.float(), lengths).clamp(min=1)
    return everything / (num_completions * lengths[completion_of_token])


def gains(
    settings: LossSettings,
    logprobs: Float[Tensor, " token"],
    old_logprobs: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    weights: Float[Tensor, " token"],
) -> tuple[Float[Tensor, " token"], Bool[Tensor, " token"]]:
    """|d token loss / d logprob| / |A| before the rollout weight, and where the clip acted; all tokens are loss tokens."""
    everything = torch.ones_like(logprobs, dtype=torch.bool)
    nothing = ~everything
    ratio = bounded_exp(logprobs - old_logprobs)
    if settings.loss_type == "sapo":
        positive, other = settings.sapo_temperatures
        temperature = torch.where(advantages > 0, positive, other)
        soft = torch.sigmoid(temperature * (ratio - 1))
        return 4 * soft * (1 - soft) * ratio, nothing
    if settings.loss_type == "vespo":
        return _gamma(
            settings, logprobs - old_logprobs, advantages, completion_of_token, num_completions, weights
        ), nothing
    cispo = settings.loss_type == "cispo"
    loss = policy_loss(
        "cispo" if cispo else "gspo" if settings.level == "sequence" else "grpo",
        logprobs,
        old_logprobs,
        advantages,
        completion_of_token,
        num_completions,
        everything,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high - 1 if cispo else settings.clip_high,  # TRL's bound is on the ratio itself
        clip_delta=settings.delta,
    )
    return loss.gain, loss.clipped


def _gamma(
    settings: LossSettings,
    log_ratio: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
    weights: Float[Tensor, " token"],
) -> Float[Tensor, " token"]:
    """VESPO's weight of a completion, e^l w^k e^(-l w) with w its ratio to the sampler, bounded as in TRL."""
    low, high = math.log(1e-8), 20.0
    log_weight = segment_sum(log_ratio.clamp(-20, 20), completion_of_token, num_completions)
    log_weight += segment_sum(weights.log().clamp(low, high), completion_of_token, num_completions)
    log_weight = log_weight.clamp(low, high)[completion_of_token]
    k = torch.where(advantages >= 0, settings.vespo["k_pos"], settings.vespo["k_neg"])
    scale = torch.where(advantages >= 0, settings.vespo["lambda_pos"], settings.vespo["lambda_neg"]).clamp(min=1e-4)
    return (scale + k * log_weight - scale * log_weight.exp()).exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def off_policy(
    settings: LossSettings,
    logprobs: Float[Tensor, " token"],
    sampled_from: Float[Tensor, " token"],
    advantages: Float[Tensor, " token"],
    completion_of_token: Int[Tensor, " token"],
    num_completions: int,
) -> Bool[Tensor, " token"]:
    """True for tokens of completions that TRL drops for having drifted: A < 0 and a mean gap above the threshold."""
    if settings.off_policy_threshold is None:
        return torch.zeros_like(logprobs, dtype=torch.bool)
    gap = (sampled_from - logprobs).nan_to_num(nan=0.0)
    mean = segment_mean(gap, completion_of_token, num_completions, torch.ones_like(gap, dtype=torch.bool))
    return (advantages < 0) & (mean[completion_of_token] > settings.off_policy_threshold)
