"""Ratios of probabilities from differences of log-probabilities."""

from jaxtyping import Float
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""A log ratio above this counts as this: e^20 = 4.9e8. Two models that differ by more on a token they both sampled
are not one policy, and e^89 would be infinite in float32. Below there is no bound: exp underflows to 0, harmlessly."""


def bounded_exp(log_ratio: Float[Tensor, "*axes"], log_cap: float = MAX_LOG_RATIO) -> Float[Tensor, "*axes"]:
    """exp(min(log_ratio, log_cap)): finite for any input but NaN, with gradient 0 above the cap. NaN stays NaN."""
    return log_ratio.clamp(max=log_cap).exp()
