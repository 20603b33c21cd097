"""The kernels between the products: as plain functions in every case, and as compiled ones."""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.objective import fused
from leadline.objective.chunked import chunked_scores
from leadline.objective.chunks import Head, Replay
from tests.objective.test_chunked import PARTS, REPLAYS, SWEEPS, assert_equal, case, dense_scores, gradients

ROOT = Path(__file__).parents[2]


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of kernels that were called, each as plain Python."""
    names: list[str] = []

    def plain(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            names.append(function.__name__)
            return function(*given)

        return call

    monkeypatch.setattr(fused, "compiled", plain)
    return names


def assert_right(
    hidden: Tensor, head: Head, tokens: Tensor, replay: Replay, entropies: bool, sweep: int | None
) -> None:
    expected = dense_scores(hidden, head, tokens, replay)
    found = chunked_scores(hidden, head, tokens, replay, entropy_gradient=entropies, sweep=sweep, compiled=True)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    assert_equal(gradients(found, hidden, head, entropies), gradients(expected, hidden, head, entropies))


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("replay", REPLAYS.values(), ids=REPLAYS)
@pytest.mark.parametrize("entropies", [False, True])
def test_scores_and_gradients_equal_those_of_whole_logits(
    replay: Replay, parts: tuple[str, ...], sweep: int | None, entropies: bool, called: list[str]
) -> None:
    assert_right(*case(parts), replay, entropies, sweep)
    takes_kernels = "softcap" not in parts and replay in (REPLAYS["plain"], REPLAYS["temperature"])
    assert set(called) == ({"row_scores", "by_product"} if takes_kernels else set())


def test_without_the_wish_no_kernel_is_called(called: list[str]) -> None:
    hidden, head, tokens = case()
    chunked_scores(hidden, head, tokens, Replay())
    assert not called


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_they_give_the_same_for_any_size_and_dtype() -> None:
    """In a process of its own: a compiler cannot see through the checks of shapes that tests run under."""
    script = "from tests.objective import test_fused; test_fused.check_compiled()"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) in range(2, 7)  # two kernels, again for a single row, and for columns of what was kept


def check_compiled() -> None:
    """Prints how many graphs were compiled."""
    for entropies in (False, True):
        for sweep in SWEEPS.values():
            for replay in (REPLAYS["plain"], REPLAYS["temperature"]):
                assert_right(*case(("bias", "scale")), replay, entropies, sweep)
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    hidden, head, tokens = case(dtype=torch.bfloat16)
    found = chunked_scores(hidden, head, tokens, Replay(), compiled=True)
    expected = chunked_scores(hidden, head, tokens, Replay())
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    assert_equal(gradients(found, hidden, head, False), gradients(expected, hidden, head, False), relative=1e-2)


def test_an_entry_without_mass_has_no_entropy_and_no_gradient(called: list[str]) -> None:
    hidden, head, tokens = case(("bias",))
    assert head.bias is not None
    gone = (int(tokens[0]) + 1) % len(head.bias)
    with torch.no_grad():
        head.bias[gone] = -math.inf
    tokens[tokens == gone] = tokens[0]
    logprobs, entropies = chunked_scores(hidden, head, tokens, Replay(), entropy_gradient=True, compiled=True)
    by_hidden, by_weight, by_bias = gradients((logprobs, entropies), hidden, head, True)
    assert all(bool(x.isfinite().all()) for x in (logprobs, entropies, by_hidden, by_weight, by_bias))
    assert not by_weight[gone].any()
    assert by_bias[gone] == 0


def test_a_row_without_a_gradient_takes_no_part_in_the_backward_pass(called: list[str]) -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        hidden[3] = math.nan
    logprobs, _ = chunked_scores(hidden, head, tokens, Replay(), compiled=True)
    others = torch.arange(len(tokens)) != 3
    for gradient in torch.autograd.grad(logprobs[others].sum(), [hidden, head.weight]):
        assert bool(gradient.isfinite().all())


def test_what_is_kept_for_the_backward_is_the_product_in_its_own_dtype(called: list[str]) -> None:
    hidden, head, tokens = case(dtype=torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        chunked_scores(hidden, head, tokens, Replay(), compiled=True)
    [logits] = [tensor for tensor in kept if tensor.shape == (len(tokens), len(head.weight))]
    assert logits.dtype == torch.bfloat16
