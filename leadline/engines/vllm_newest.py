"""The weights that every server of a run must hold."""

from dataclasses import dataclass
from typing import Any

from leadline.types import Weights


@dataclass(frozen=True, slots=True)
class Newest:
    """A version of the policy's weights, apart from the policy."""

    weights: Weights
    version: int
    name: str
    """Of no other weights, in this run or another."""
    rows: Any = None
    """The policy's logprobs behind the probe prompts, [probe, vocab]; None = unknown."""


def newest_of(weights: Weights, version: int, name: str) -> Newest:
    """A copy of the weights on the CPU: a server may come back while the policy is being updated. Ties stay ties."""
    copies: dict[tuple[Any, ...], Any] = {}
    for tensor in weights.values():
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
    held = {own: copies[tensor.data_ptr(), tuple(tensor.shape)] for own, tensor in weights.items()}
    return Newest(held, version, name)
