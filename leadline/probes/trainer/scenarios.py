"""TRL's settings, and the equation that each is meant to be."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from leadline.probes.code import advantages, importance, loss
from leadline.probes.code.batch import ProbeBatch
from leadline.probes.code.loss import LossSteps
from leadline.probes.code.search import Variant

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One combination of settings.

    Example:
        Scenario("dapo", {"loss_type": "dapo"}, "dapo", variants)
    """

    name: str
    settings: Settings
    equation: str
    """The name of the variant that it should be."""
    variants: Sequence[Variant]
    """What it is compared with, the equation first."""
    part: str = "loss"
    """loss, advantages or weights."""
    micro_batches: int = 1
    remark: str = ""
    """Why it departs, where that is known."""


def _losses(name: str, aggregation: str = "", **settings: Any) -> list[Variant]:
    """The variants of a loss with clip 0.2 / 0.2 unless said otherwise, the named one first."""
    weighted = settings.pop("weighted", False)
    known = loss.variants({"clip": 0.2, "delta": None, **settings}, aggregated=True, weighted=weighted)
    first = [v for v in known if v.name == name and v.detail.startswith(aggregation) and (aggregation or v.rank == 0)]
    return [*first[:1], *known]


def _soft_gate(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    """SAPO (Gao et al. 2025): -4 / tau * sigmoid(tau (rho - 1)) A, with tau by the advantage's sign."""
    tau = torch.where(given > 0, 1.0, 1.05).to(ratio.dtype)
    return -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * given


def _gamma(ratio: Tensor, given: Tensor, batch: ProbeBatch, steps: LossSteps) -> Tensor:
    """VESPO: -sg(e^l w^k e^(-l w)) A logprob, with w the completion's ratio and (k, l) by the advantage's sign."""
    log_w = importance.by_sequence((batch.logprobs - batch.old_logprobs).detach(), batch).clamp(math.log(1e-8), 20)
    k = torch.where(given >= 0, 2.0, 3.0)
    rate = torch.where(given >= 0, 3.0, 2.0)
    return -(rate + k * log_w - rate * log_w.exp()).exp() * given * batch.logprobs


def _with_surrogate(name: str, base: str, surrogate: Callable[..., Tensor]) -> list[Variant]:
    (first, *rest) = _losses(base)
    return [Variant(name, "", replace(first.steps, surrogate=surrogate)), *rest]


_KL: Settings = {"beta": 0.04, "ref_logprobs": True}

_RATIO_ON_KL = "use_bias_correction_kl is on by default (DeepSeek-V3.2); the logged kl is multiplied, too."
_BY_MICRO_BATCH = "each micro-batch is divided by its own tokens: gradient accumulation changes the result."

LOSSES = (
    Scenario("grpo", {"loss_type": "grpo"}, "grpo", _losses("grpo")),
    Scenario("bnpo", {"loss_type": "bnpo"}, "dapo (one mini-batch)", _losses("dapo")),
    Scenario("dapo, the default", {}, "dapo", _losses("dapo")),
    Scenario("dapo, epsilon_high=0.28", {"epsilon_high": 0.28}, "dapo", _losses("dapo", clip_low=0.2, clip_high=0.28)),
    Scenario("dapo, delta=1.5", {"delta": 1.5}, "dapo, two-sided", _losses("dapo", delta=1.5)),
    Scenario("dr_grpo", {"loss_type": "dr_grpo"}, "dr_grpo", _losses("dr_grpo")),
    Scenario(
        "gspo (grpo, importance_sampling_level=sequence)",
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "gspo",
        _losses("gspo"),
    ),
    Scenario(
        "luspo (sequence level)",
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        "gspo, summed over tokens",
        _losses("gspo", "sequence sum"),
    ),
    Scenario(
        "cispo, epsilon_high=0.28",
        {"loss_type": "cispo", "epsilon_high": 0.28},
        "cispo",
        _losses("cispo", clip=0.28),
        remark="epsilon_high is the cap itself, not what is added to 1: 0.28 lets no ratio above 0.28 through.",
    ),
    Scenario("sapo", {"loss_type": "sapo"}, "sapo", _with_surrogate("sapo", "grpo", _soft_gate)),
    Scenario("vespo", {"loss_type": "vespo"}, "vespo", _with_surrogate("vespo", "dapo", _gamma)),
    Scenario("dapo, beta=0.04", {"beta": 0.04}, "dapo + beta k3", _losses("dapo", **_KL), remark=_RATIO_ON_KL),
    Scenario(
        "dapo, beta=0.04, use_bias_correction_kl=False",
        {"beta": 0.04, "use_bias_correction_kl": False},
        "dapo + beta k3",
        _losses("dapo", **_KL),
    ),
    Scenario(
        "gspo, beta=0.04",
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.04},
        "gspo + beta k3",
        _losses("gspo", **_KL),
        remark=_RATIO_ON_KL,
    ),
    Scenario("dapo with rollout weights", {"use_vllm": True}, "weights * dapo", _losses("dapo", weighted=True)),
    Scenario(
        "dapo with rollout weights, beta=0.04, use_bias_correction_kl=False",
        {"use_vllm": True, "beta": 0.04, "use_bias_correction_kl": False},
        "weights * dapo + beta k3",
        _losses("dapo", weighted=True, **_KL),
    ),
    *(
        Scenario(
            f"{name} in two micro-batches", {"loss_type": name}, f"{base}, whole", _losses(base), "loss", 2, remark
        )
        for name, base, remark in (
            ("grpo", "grpo", ""),
            ("dapo", "dapo", ""),
            ("dr_grpo", "dr_grpo", ""),
            ("bnpo", "dapo", _BY_MICRO_BATCH),
        )
    ),
)


def _scaled(name: str) -> list[Variant]:
    known = advantages.variants({})
    return sorted(known, key=lambda variant: variant.name != name)


ADVANTAGES = tuple(
    Scenario(
        f"scale_rewards={given}",
        {"scale_rewards": given},
        name,
        _scaled(name),
        "advantages",
    )
    for given, name in (("group", "group_std"), ("batch", "batch_std"), ("none", "none"))
)


def _bounded(level: str, action: str) -> list[Variant]:
    known = importance.variants({"low": -math.inf, "high": 3.0}, per_token=True)
    return sorted(known, key=lambda v: (v.name, v.detail.split()[0]) != (f"{level} weights", action))


WEIGHTS = tuple(
    Scenario(
        f"vllm_importance_sampling_mode={level}_{mode}",
        {"use_vllm": True, "vllm_importance_sampling_mode": f"{level}_{mode}"},
        f"{level} weights, {action} above 3",
        _bounded(level, action),
        "weights",
    )
    for level in ("token", "sequence")
    for mode, action in (("truncate", "truncated"), ("mask", "masked"))
)

SCENARIOS = (*LOSSES, *ADVANTAGES, *WEIGHTS)
