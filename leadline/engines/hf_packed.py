"""Linear layers of a model on a CPU, in the layout that oneDNN multiplies a few rows by without rearranging the weights.

A decode step multiplies every weight by a handful of rows. A plain product then spends more time on rearranging the weights
than on multiplying: with 8 rows the packed one takes 0.56 of its time in float32, and 0.55 in bfloat16 (SmolLM2-135M, Zen 4).
The products are the same up to rounding.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 8
"""The rows that the layout is chosen for; it serves any number."""


class PackedLinears:
    """The packed weights of a model; used inside `active` only, so that the model itself stays as it is.

    Costs the memory of the weights once more, and `refresh` about as long as one decode step. Where torch has no such
    layout (accelerators, float16, builds without oneDNN) `active` changes nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = [module for module in model.modules() if type(module) is nn.Linear]
        self._usable = bool(self._layers) and all(_can_pack(layer.weight) for layer in self._layers)
        self._forwards: list[Callable[[Tensor], Tensor]] = []

    def refresh(self) -> None:
        """From now on the layers multiply by the weights as they are at this moment."""
        if self._usable:
            self._forwards = [_packed_forward(layer) for layer in self._layers]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model's linear layers use their packed weights."""
        # Past `nn.Module.__setattr__`, which would cost as much as a layer of the model, at each token.
        own = [vars(layer) for layer, _ in zip(self._layers, self._forwards, strict=False)]  # none before a refresh
        for names, forward in zip(own, self._forwards, strict=True):
            names["forward"] = forward
        try:
            yield
        finally:
            for names in own:
                del names["forward"]


def _packed_forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    ops: Any = torch.ops.mkldnn
    packed, bias = ops._reorder_linear_weight(layer.weight.detach(), ROWS), layer.bias

    def forward(input: Tensor) -> Tensor:
        product: Tensor = ops._linear_pointwise(input, packed, bias, "none", [], "")
        return product

    return forward


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported() if weight.dtype == torch.bfloat16 else True
    return weight.dtype in (torch.float32, torch.bfloat16) and bool(supported)
