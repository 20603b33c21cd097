"""What `chunked.py` computes between two products, written so that a compiler makes one pass over the logits of it.

Plain torch goes over a chunk of logits some ten times, reading it from memory and writing it back each time, which counts
where products are fast. `torch.compile` turns each function here into one kernel that reads the logits twice (a row's largest
comes first) or writes their gradient: in Triton on a GPU, in C++ on a CPU.

s = factor z, for z the product of hidden states and head.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as one kernel for matrices of any size; compiled at its first call, which takes some seconds."""
    return torch.compile(function, dynamic=True)


def row_scores(
    product: Float[Tensor, "token vocab"], targets: Int[Tensor, " token"], factor: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(log p of the target, entropy, the row's largest s, logsumexp of s minus that), each a float32 per token."""
    scaled = product.float() * factor
    tops = scaled.amax(-1)
    below = scaled - tops[:, None]
    masses = below.exp()
    total = masses.sum(-1)
    log_total = total.log()
    weighted = torch.where(masses == 0, 0.0, masses * below).sum(-1)  # p log p is 0 in the limit
    at_target = product.gather(1, targets[:, None])[:, 0].float() * factor
    return at_target - tops - log_total, log_total - weighted / total, tops, log_total


def by_product(
    product: Float[Tensor, "token entry"],
    normalisers: Float[Tensor, " token"],
    places: Int[Tensor, " token"],
    by_logprobs: Float[Tensor, " token"],
    entropies: Float[Tensor, " token"],
    by_entropies: Float[Tensor, " token"],
    factor: float,
) -> Float[Tensor, "token entry"]:
    """dL/dz = factor (dL/dlogprob (1[target] - p) - dL/dH p (log p + H)), in z's dtype.

    A target is `places` entries behind the first one here; `normalisers` are the logsumexp of each whole row's s.
    """
    logprobs = product.float() * factor - normalisers[:, None]
    masses = logprobs.exp()
    slope = torch.where(masses == 0, 0.0, masses * (logprobs + entropies[:, None]))
    at_target = torch.arange(product.shape[1], device=product.device) == places[:, None]
    gradient = by_logprobs[:, None] * (at_target.float() - masses) - by_entropies[:, None] * slope
    return (gradient * factor).to(product.dtype)
