"""One query per row attends as torch's own attention does."""

from typing import Any

import pytest
import torch
from torch import nn

from leadline.engines import hf_attention
from leadline.engines.hf_attention import OneTokenAttention, decode_attention
from leadline.models import load_model
from leadline.settings.model import Model


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
@pytest.mark.parametrize("queries", [1, 3])
def test_it_equals_the_fused_kernel(kind: str, queries: int, dtype: torch.dtype, error: float) -> None:
    torch.manual_seed(0)
    sizes = ((6, queries), (2, 20), (2, 20))
    query, key, value = (torch.randn(3, heads, n, 8).to(dtype) for heads, n in sizes)
    seen = torch.rand(3, 1, queries, 20) < 0.6
    seen[..., -1] = True
    mask = {"none": None, "boolean": seen, "additive": torch.where(seen, 0.0, -1e30).to(dtype)}[kind]
    if mask is None and queries > 1:
        pytest.skip("a prompt attends causally")
    module = nn.Module()
    module.num_key_value_groups = 3  # type: ignore[assignment]
    result, _ = decode_attention(module, query, key, value, mask, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float(),
        key.float(),
        value.float(),
        attn_mask=mask if mask is None or kind == "boolean" else mask.float(),
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(result.float(), expected.transpose(1, 2), atol=error, rtol=error)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_used_inside_only(dtype: str) -> None:
    model: Any = load_model(Model.model_validate({"name": "tiny", "device": "cpu", "dtype": dtype})).model
    own = model.config._attn_implementation
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        with OneTokenAttention(model).active():
            inside = model.config._attn_implementation
            logits = model(ids).logits
    assert inside == hf_attention.NAME != own
    assert model.config._attn_implementation == own
    torch.testing.assert_close(logits, expected, atol=0.05, rtol=0.05)


def test_a_model_that_spells_its_attention_out_keeps_it() -> None:
    model: Any = load_model(Model.model_validate({"name": "tiny", "device": "cpu"})).model
    model.config._attn_implementation = "eager"
    with OneTokenAttention(model).active():
        assert model.config._attn_implementation == "eager"
