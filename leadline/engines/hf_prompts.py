"""Prompts whose keys and values are held once, whichever number of completions attends to them.

    group      prompt, held once            own tokens of its rows, in the storage of `hf_cache.py`
    0          p p p p p p p                a a a a | b b b b | c c c c
    1          q q q                        d d | e e

A token attends to its group's prompt and to its own row; the two parts are merged by their log-sum-exps, which is exact.
The prompt's keys are read once for all rows of the group instead of once a row, and rows are not padded to one length of
prompts.

Whether a model can take it is seen, not guessed: layers mark the keys that they hand out, and a prompt may be shared if the
attention of every layer was given just these keys, under causality and the layer's sliding window and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class MarkedLayer(DynamicLayer):  # type: ignore[misc]
    """A layer of a cache that the attention can find by the keys it was given (`layer_of`)."""

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys and values to attend to, with the new ones in them."""
        keys, values = super().update(keys, values, *args, **kwargs)
        return self.marked(keys), values

    def marked(self, keys: Tensor) -> Tensor:
        # On the tensor itself: keys that the model changes on their way to the attention lose it, and should.
        keys.held_by = ref(self)  # type: ignore[attr-defined]
        return keys


def layer_of(keys: Tensor) -> MarkedLayer | None:
    """The layer of a cache that handed out these very keys."""
    held_by: ref[MarkedLayer] | None = getattr(keys, "held_by", None)
    return None if held_by is None else held_by()


class PromptLayer(MarkedLayer):
    """The keys and values of one prompt, and how they were attended to: not at all, under a window, or otherwise."""

    attended = False
    plainly = False
    window: int | None = None

    def witness(self, plainly: bool, window: int | None) -> None:
        """To be called by the attention that was given these keys."""
        self.attended, self.plainly, self.window = True, plainly, window


class PromptCache(Cache):  # type: ignore[misc]
    """The cache that a prompt is prefilled into."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=PromptLayer)

    def can_be_shared(self, windows: Sequence[int | None]) -> bool:
        """Whether each layer attended plainly to its own keys, under the window that the model's configuration says."""
        return len(self.layers) == len(windows) and all(
            layer.attended and layer.plainly and layer.window == window
            for layer, window in zip(self.layers, windows, strict=True)
        )


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """By layer, how many tokens a token attends to, itself among them; None = all."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]


@dataclass
class Group:
    """Rows that began together, with one prompt: they are of one length as long as they run."""

    rows: int
    own: int
    """Tokens in the rows' own storage, a prompt that was copied there among them."""
    prompt: int = 0
    """Tokens of the prompt that is held once; 0 = it was copied."""
    layers: Sequence[PromptLayer] = ()

    @property
    def length(self) -> int:
        return self.prompt + self.own

    def seen(self, layer: int, window: int | None) -> tuple[Tensor, Tensor] | None:
        """Keys and values [1, kv_head, token, dim] of the prompt that the newest token attends to; None = none."""
        first = 0 if window is None else max(0, self.length - window)
        if first >= self.prompt:
            return None
        held = self.layers[layer]
        return held.keys[:, :, first:], held.values[:, :, first:]


def attend_to_prompts(
    query: Tensor, groups: Sequence[Group], layer: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """query [row, kv_head, query, dim], the rows in the order of their groups -> output alike, log-sum-exp [..., 1].

    The log-sum-exp is -inf (and the output 0) where a row sees nothing of its prompt.
    """
    rows, heads, queries, dim = query.shape
    by_head = query.transpose(0, 1).reshape(1, heads, rows * queries, dim)
    outs, sums, first = [], [], 0
    for group in groups:
        last = first + group.rows * queries
        out, total = _attend(by_head[:, :, first:last], group.seen(layer, window), scale)
        outs.append(out)
        sums.append(total)
        first = last
    out, total = (parts[0] if len(parts) == 1 else torch.cat(parts, 2) for parts in (outs, sums))
    return (
        out.view(heads, rows, queries, dim).transpose(0, 1),
        total.view(heads, rows, queries, 1).transpose(0, 1),
    )


def _attend(query: Tensor, seen: tuple[Tensor, Tensor] | None, scale: float) -> tuple[Tensor, Tensor]:
    if seen is None:
        return torch.zeros_like(query), query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    out, total = _flash(query, *seen, scale=scale)
    return out, total
