import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leadline.objective import fused
from leadline.policy import attention, self_check
from leadline.policy.policy import Policy
from leadline.policy.self_check import Measured, difference
from tests.builders import policy, settings
from tests.families import model_of, policy_of

ROOT = Path(__file__).parents[2]


class Odd(nn.Linear):
    """Does to its product what no config says."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).tanh()


def test_what_is_taken_and_what_is_not_is_said_in_a_line_each() -> None:
    model: Any = model_of("llama")
    model.set_output_embeddings(Odd(32, 260))
    made = policy_of(model)
    assert made.packs
    assert made.head is None
    assert made.slow_paths == (
        "Logits are computed whole, not a chunk at a time (its head is a Odd, no linear layer), which takes more memory "
        "and is right.",
    )


def test_a_map_of_the_logits_that_the_config_does_not_name_keeps_them_whole() -> None:
    model: Any = model_of("llama")
    forward = model.forward

    def scaled(*args: Any, **options: Any) -> Any:
        output = forward(*args, **options)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled
    made = policy_of(model)
    assert made.head is None
    assert "logprobs would change by up to" in made.slow_paths[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", ["hears the completion before", "does not see its prompt"])
def test_attention_that_is_wrong_is_found_out(fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.flash_attention

    def wrong(query: Tensor, key: Tensor, value: Tensor, spans: Any, *rest: Any) -> Tensor:
        if fault.startswith("hears"):
            everything = attention.Span((0, query.shape[2]), ())
            return right(query, key, value, (everything,), *rest)
        alone = [attention.Span(s.prompt, ()) for s in spans] + [
            attention.Span(c, ()) for s in spans for c in s.completions if c[1] > c[0]
        ]
        return right(query, key, value, alone, *rest)

    monkeypatch.setattr(attention, "flash_attention", wrong)
    made = policy(settings(model={"dtype": dtype}))
    assert made.model.config._attn_implementation == attention.SPAN_NAME
    monkeypatch.setattr(attention, "span_attention", wrong)
    made = policy(settings(model={"dtype": dtype}))
    assert not made.packs
    assert made.head is not None
    assert "each sequence is forwarded on its own" in made.slow_paths[0]
    assert made.model.config._attn_implementation == "sdpa"


def test_a_wrong_gradient_is_found_out_where_the_logprobs_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.flash_attention
    monkeypatch.setattr(attention, "flash_attention", lambda q, k, *rest: right(q, k.detach(), *rest))
    assert policy(settings()).model.config._attn_implementation == attention.SPAN_NAME


def test_where_the_fast_back_end_fails_the_general_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(attention, "flash_attention", broken)
    made = policy(settings())
    assert made.packs
    assert made.model.config._attn_implementation == attention.SPAN_NAME
    assert made.slow_paths == ("Attention goes span by span, which is slower and right: no kernel image is available.",)


@pytest.mark.parametrize("fault", [None, "raises", "a wrong score", "a wrong gradient"])
def test_compiled_kernels_are_taken_if_they_are_right(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if fault == "raises":
                raise RuntimeError("no compiler is found\nlines of a log")
            found = kernel(*given)
            if fault == "a wrong score" and kernel is fused.row_scores:
                return (found[0] + 0.01, *found[1:])
            return found * 1.01 if fault == "a wrong gradient" and kernel is fused.by_product else found

        return call

    monkeypatch.setattr(fused, "compiled", compiled)
    made = policy(settings(model={"compile": True}, objective={"beta": 0.1}))
    assert made.head is not None
    assert made.reference_head is not None
    assert made.head.compiled == made.reference_head.compiled == (fault is None)
    if fault == "raises":
        assert made.slow_paths == (
            "Log-probabilities are not computed by compiled kernels (no compiler is found), which is slower and right.",
        )
    assert len(made.slow_paths) == (fault is not None)


def test_without_a_compiler_the_operations_of_torch_are_taken(tmp_path: Path) -> None:
    script = (
        "from tests.builders import policy, settings; made = policy(settings(model={'compile': True}));"
        "print(made.head.compiled, *made.slow_paths)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.startswith("False Log-probabilities are not computed by compiled kernels ("), ran.stderr
    assert "C++ compiler" in ran.stdout
    assert len(ran.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("wanted", "device", "taken"), [("auto", "cpu", False), ("auto", "cuda", True), (False, "cuda", False)]
)
def test_kernels_are_compiled_by_default_on_a_gpu_alone(
    wanted: bool | str, device: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused, "compiled", lambda kernel: kernel)
    made = policy(settings(model={"compile": wanted}))
    plain = self_check.Measured(torch.zeros(1), torch.ones(1))
    monkeypatch.setattr(Policy, "device", torch.device(device))
    self_check._compile_head(made, plain, lambda: plain)
    assert made.head is not None
    assert made.head.compiled == taken


def test_in_half_precision_a_whisper_from_a_neighbour_is_heard() -> None:
    made = policy(settings(model={"dtype": "bfloat16"}))
    batch = self_check.probe_batch(260, made.config)
    assert self_check._hears_neighbours(made, batch) is None
    score = Policy.logprobs

    def whispering(*args: Any, **options: Any) -> Any:
        scores = score(made, *args, **options)
        return type(scores)(scores.logprobs + 0.05 * scores.logprobs.flip(0), scores.entropies)

    made.logprobs = whispering  # type: ignore[method-assign]
    assert "what its neighbours hold changes a logprob" in str(self_check._hears_neighbours(made, batch))


def test_a_nan_is_a_difference() -> None:
    plain = Measured(torch.zeros(2), torch.ones(2))
    assert difference(plain, plain, self_check.EXACT) is None
    assert difference(Measured(torch.tensor([0.0, torch.nan]), torch.ones(2)), plain, self_check.EXACT) is not None
    assert difference(Measured(torch.zeros(2), torch.tensor([1.0, torch.nan])), plain, self_check.EXACT) is not None
    assert difference(Measured(torch.zeros(2), torch.tensor([1.0, 1.01])), plain, self_check.EXACT) is not None
