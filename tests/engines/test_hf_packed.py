"""Packed weights multiply as plain ones do, inside only, and are as new as the last refresh."""

import pytest
import torch
from torch import nn

from leadline.engines.hf_packed import PackedLinears


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 40, bias=False)).to(dtype)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 8, 200])
@torch.inference_mode()
def test_the_product_is_the_same_up_to_rounding(dtype: torch.dtype, error: float, rows: int) -> None:
    layers, x = model(dtype), torch.randn(2, rows, 64).to(dtype)
    packed = PackedLinears(layers)
    packed.refresh()
    with packed.active():
        assert "forward" in vars(layers[0])
        result = layers(x)
    torch.testing.assert_close(result, layers(x), atol=error, rtol=error)


@torch.inference_mode()
def test_weights_are_those_of_the_last_refresh_inside_and_their_own_outside() -> None:
    layers, x = model(torch.float32), torch.randn(3, 64)
    packed = PackedLinears(layers)
    with packed.active():
        torch.testing.assert_close(layers(x), layers(x))  # never refreshed: the plain weights
    packed.refresh()
    before = layers(x)
    layers[2].weight.mul_(2)
    with packed.active():
        torch.testing.assert_close(layers(x), before, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(layers(x), 2 * before)
    packed.refresh()
    with packed.active():
        torch.testing.assert_close(layers(x), 2 * before, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_packed_is_left_alone() -> None:
    layers = model(torch.float16)
    packed = PackedLinears(layers)
    packed.refresh()
    with packed.active():
        assert "forward" not in vars(layers[0])
