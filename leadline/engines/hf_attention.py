"""Attention of the hf engine: one new token per row.

On a CPU in half precision torch's fused kernel, which is made for many queries, takes three to eight times as long as two
matrix products and a soft maximum. In float32 it takes as long, and stays in use.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from leadline.attention import NAME as SHARED
from leadline.attention import shared_prefix_attention

NAME = "leadline_one_token"


@contextmanager
def one_token_attention(model: nn.Module) -> Iterator[None]:
    """Inside, the model attends by `decode_attention`, where it would by sdpa or ours and that is slow."""
    first = next(model.parameters())
    slow = first.device.type == "cpu" and first.dtype in (torch.bfloat16, torch.float16)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None} if slow else {}
    changed = [(c, own) for c in configs.values() if (own := c._attn_implementation) in ("sdpa", SHARED)]
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [row, head, position, dim], key and value [row, kv_head, column, dim].

    softmax(scale q k + mask) v, the soft maximum in float32. The heads of a group read their keys and values in place:
    nothing is repeated. A prompt, a soft cap, sinks and a mask by head are left to the attention of the trainer.
    """
    plain = softcap is None and s_aux is None and (attention_mask is None or attention_mask.shape[1:3] == (1, 1))
    if query.shape[2] > 1 or not plain:
        options |= {"scaling": scaling, "softcap": softcap, "s_aux": s_aux}
        return shared_prefix_attention(module, query, key, value, attention_mask, **options)
    rows, heads, _, dim = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], dim)
    scores = torch.matmul(grouped, key.transpose(2, 3)).float() * (dim**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        lowest = torch.finfo(torch.float32).min
        boolean = attention_mask.dtype == torch.bool
        scores = scores + (torch.where(attention_mask, 0.0, lowest) if boolean else attention_mask)
    weights = scores.softmax(-1).to(value.dtype)
    return torch.matmul(weights, value).reshape(rows, 1, heads, -1), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
