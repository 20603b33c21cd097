"""Attention of the hf engine on a CPU: one new token per row.

torch's fused kernel is made for many queries. For one query a row, two matrix products and a soft maximum take a third to
an eighth of its time in half precision, and in float32 0.6 to 1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from leadline.engines.hf_cache import RowLayer
from leadline.engines.hf_prompts import PromptLayer, attend_to_prompts, layer_of
from leadline.policy.attention import NAME as SHARED
from leadline.policy.attention import shared_prefix_attention

NAME = "leadline_one_token"


class OneTokenAttention:
    """What says how a model attends; used inside `active` only, so that the model itself stays as it is."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}
        self._configs = list(configs.values()) if next(model.parameters()).device.type == "cpu" else []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model attends by `decode_attention`, where it would by sdpa or ours and is on a CPU."""
        changed = [(c, own) for c in self._configs if (own := c._attn_implementation) in ("sdpa", SHARED)]
        for config, _ in changed:
            config._attn_implementation = NAME
        try:
            yield
        finally:
            for config, own in changed:
                config._attn_implementation = own


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [row, head, position, dim], key and value [row, kv_head, column, dim].

    softmax(scale q k + mask) v over the row's own keys and its shared prompt, the soft maximum in float32. The heads of a
    group read their keys and values in place: nothing is repeated. A prompt, a soft cap, sinks and a mask by head are left
    to the attention of the trainer.
    """
    layer = layer_of(key)
    plain = softcap is None and s_aux is None and (attention_mask is None or attention_mask.shape[1] == 1)
    if isinstance(layer, PromptLayer):
        layer.witness(plain and key.shape[-1] == value.shape[-1], sliding_window)
    if query.shape[2] > 1 or not plain:
        options |= {"scaling": scaling, "sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux}
        return shared_prefix_attention(module, query, key, value, attention_mask, **options)
    rows, heads, _, dim = query.shape
    scale = dim**-0.5 if scaling is None else scaling
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float() * scale
    if attention_mask is not None:
        lowest = torch.finfo(torch.float32).min
        boolean = attention_mask.dtype == torch.bool
        scores = scores + (torch.where(attention_mask, 0.0, lowest) if boolean else attention_mask)
    weights = scores.softmax(-1)
    out = torch.matmul(weights.to(value.dtype), value)
    if isinstance(layer, RowLayer) and layer.shares_prompts():
        layer.prompts_read = True
        own = scores.amax(-1, keepdim=True) - weights.amax(-1, keepdim=True).log()
        over_prompts, total = attend_to_prompts(grouped, layer.groups, layer.index, scale, sliding_window)
        share = (total - own).sigmoid()  # e^total / (e^total + e^own)
        out = torch.lerp(out, over_prompts, share.to(out.dtype))
    return out.reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
