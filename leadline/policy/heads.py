"""Where a model's logits come from: its head, and the hidden states that go into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from leadline.models import plain_model
from leadline.objective.chunks import Head

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Names in a model's config of a number that its logits are multiplied by (Cohere; Falcon-H1) ..."""
DIVISORS = ("logits_scaling",)
"""... divided by (Granite) ..."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""... and softly capped at (Gemma 2 and later; RecurrentGemma). A model that does anything else to them fails the
self-check, and its whole logits are taken."""


class ModelHead:
    """The linear layer at a model's end, with what the model does to its product."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError, saying why, for a head that is not a linear layer, with or without a LoRA adapter."""
        plain = plain_model(model)
        found: Any = plain.get_output_embeddings() if hasattr(plain, "get_output_embeddings") else None
        base = found.get_base_layer() if hasattr(found, "get_base_layer") else found
        if type(base) is not nn.Linear:
            raise ValueError(
                f"its head is {'missing' if base is None else f'a {type(base).__name__}'}, no linear layer"
            )
        self.module: Any = found
        self.base = base
        config = plain.config.get_text_config()
        self.scale = _product_of(config, MULTIPLIERS) / _product_of(config, DIVISORS)
        self.compiled = False
        """What lies between its products goes through compiled kernels, where there are some."""
        self.softcap: float | None = next((cap for name in SOFTCAPS if (cap := getattr(config, name, None))), None)

    @property
    def edited(self) -> bool:
        """Whether a hook changes what the layer gives: then only its whole logits are right."""
        return bool(self.module._forward_hooks or self.base._forward_hooks)

    def on(self, hidden: Float[Tensor, "token width"]) -> tuple[Float[Tensor, "token wider"], Head]:
        """What to multiply with what. An adapter W + s B A on the head is one wider layer: [h, s A h] [W, B]^T."""
        weight, bias = self.base.weight, self.base.bias
        if self.module is not self.base and not self.module.disable_adapters:
            for name in self.module.active_adapters:
                low, wide = self.module.lora_A[name], self.module.lora_B[name]
                inner = low(hidden.to(low.weight.dtype)) * self.module.scaling[name]
                hidden = torch.cat([hidden, inner.to(hidden.dtype)], dim=1)
                weight = torch.cat([weight, wide.weight.to(weight.dtype)], dim=1)
        return hidden, Head(weight, bias, self.scale, self.softcap)


@contextmanager
def head_input(head: ModelHead) -> Iterator[list[Tensor]]:
    """Inside, a forward of the model leaves the head's input in the list, and the head itself computes nothing.

    So the hidden states come through the model's own forward, whatever it does on the way, and its logits are empty.
    """
    inputs: list[Tensor] = []

    def take(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        inputs.append(given[0])
        return (given[0][..., :0, :], *given[1:])

    handle = head.module.register_forward_pre_hook(take)
    try:
        yield inputs
    finally:
        handle.remove()


def _product_of(config: Any, names: tuple[str, ...]) -> float:
    product = 1.0
    for name in names:
        product *= getattr(config, name, None) or 1.0
    return product
