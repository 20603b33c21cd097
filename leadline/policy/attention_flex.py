"""Shared-prompt attention on an accelerator: one flex-attention kernel that skips the blocks in which nothing is seen.

The kernel is compiled once for all rows (dynamic shapes); soft cap, sliding window and sinks are parts of it. On a CPU flex
attention has no backward pass.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from leadline.policy.batch import Span


class RowMask:
    """What attends to what in a row, per sliding window one block mask, made when first asked for."""

    def __init__(self, spans: Sequence[Span], length: int, device: torch.device) -> None:
        self._length, self._device = length, device
        self._group, self._completion, self._position = (x.to(device) for x in _places(spans, length))
        self._block_masks: dict[int | None, Any] = {}

    def block_mask(self, window: int | None) -> Any:
        """The BlockMask of flex attention."""
        if window not in self._block_masks:
            compiled = self._device.type != "cpu"  # or the whole [row, row] would be made on the way
            self._block_masks[window] = create_block_mask(
                self._seen(window), None, None, self._length, self._length, device=self._device, _compile=compiled
            )
        return self._block_masks[window]

    def _seen(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        group, completion, position = self._group, self._completion, self._position

        def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (completion[key] == -1) | (completion[key] == completion[query])
            before = (key <= query) & (group[key] == group[query]) & own
            return before if window is None else before & (position[query] - position[key] < window)

        return seen


def flex_row_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: RowMask,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """query [1, head, row, dim], key and value [1, kv_head, row, dim] -> [1, head, row, dim]."""
    out, found = _kernel(query.device.type)(
        query,
        key.to(query.dtype),
        value.to(query.dtype),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=mask.block_mask(window),
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is None:
        return out  # type: ignore[no-any-return]
    log_sum = found.lse
    share = (log_sum - torch.logaddexp(log_sum, sinks.float()[None, :, None])).exp()
    return out * share[..., None].to(out.dtype)  # type: ignore[no-any-return]


def _capped(softcap: float) -> Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]:
    def capped(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


@cache
def _kernel(device: str) -> Any:
    return flex_attention if device == "cpu" else torch.compile(flex_attention, dynamic=True)


def _places(spans: Sequence[Span], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """By place in the row: its group, its completion (-1 in a prompt), its position in the sequence."""
    group, position = torch.zeros(2, length, dtype=torch.int32)
    completion = torch.full((length,), -1, dtype=torch.int32)
    count = 0
    for number, span in enumerate(spans):
        start, stop = span.prompt
        group[start:stop] = number
        position[start:stop] = torch.arange(stop - start)
        for first, last in span.completions:
            group[first:last], completion[first:last] = number, count
            position[first:last] = torch.arange(last - first) + stop - start
            count += 1
    return group, completion, position
