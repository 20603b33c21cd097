import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from leadline.objective import chunked, chunks, truncated
from leadline.objective.chunked import chunked_scores
from leadline.objective.chunks import Head, Replay, Seen
from leadline.objective.logprobs import token_entropies, token_logprobs
from leadline.objective.sampling import processed_logits

TOKENS, WIDTH, VOCAB = 23, 16, 700
"""The vocabulary is wider than two of the narrowest blocks: a small sweep goes through it in three."""


def draw(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(parts: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> tuple[Tensor, Head, Tensor]:
    """(hidden, head with the named parts, tokens)."""
    options: dict[str, Any] = {}
    if "bias" in parts:
        options["bias"] = draw(VOCAB, seed=3).to(dtype).requires_grad_()
    if "scale" in parts:
        options["scale"] = 0.3
    if "softcap" in parts:
        options["softcap"] = 2.5
    hidden = draw(TOKENS, WIDTH, seed=1).to(dtype).requires_grad_()
    weight = draw(VOCAB, WIDTH, seed=2, scale=0.8).to(dtype).requires_grad_()
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(6))
    return hidden, Head(weight, **options), tokens


def dense_logits(hidden: Tensor, head: Head) -> Tensor:
    logits = hidden @ head.weight.T
    logits = (logits if head.bias is None else logits + head.bias).float() * head.scale
    return logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)


def dense_scores(hidden: Tensor, head: Head, tokens: Tensor, replay: Replay) -> tuple[Tensor, Tensor]:
    settings = {f.name: getattr(replay, f.name) for f in dataclasses.fields(replay) if f.name != "seen"}
    seen = replay.seen.block(slice(0, TOKENS), slice(0, VOCAB)) if replay.seen else None
    logits = processed_logits(dense_logits(hidden, head), **settings, seen=seen, keep=tokens)
    return token_logprobs(logits, tokens), token_entropies(logits)


def gradients(
    scores: tuple[Tensor, Tensor], hidden: Tensor, head: Head, entropies: bool, coefficients: Tensor | None = None
) -> list[Tensor]:
    tensors = [t for t in (hidden, head.weight, head.bias) if t is not None]
    loss = (scores[0] * (draw(TOKENS, seed=7) if coefficients is None else coefficients)).sum()
    if entropies:
        loss = loss + (scores[1] * draw(TOKENS, seed=8)).sum()
    return list(torch.autograd.grad(loss, tensors))


def assert_equal(found: list[Tensor], expected: list[Tensor], relative: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert float((one - other).norm()) <= relative * float(other.norm())


def seen() -> Seen:
    """By two completions, behind prompts that hold half of the vocabulary."""
    prompts = torch.randint(VOCAB, (2, VOCAB // 2), generator=torch.Generator().manual_seed(9)).tolist()
    tokens = case()[2].tolist()
    return Seen.in_contexts(zip(prompts, (tokens[:11], tokens[11:]), strict=True))


REPLAYS = {
    "plain": Replay(),
    "temperature": Replay(temperature=0.6),
    "top_k": Replay(top_k=20),
    "top_p": Replay(top_p=0.7),
    "min_p": Replay(min_p=0.05),
    "penalty": Replay(repetition_penalty=1.4, seen=seen()),
    "all": Replay(temperature=1.3, top_k=90, top_p=0.9, min_p=0.003, repetition_penalty=0.8, seen=seen()),
}
PARTS = {
    "linear": (),
    "bias": ("bias",),
    "scaled": ("scale",),
    "capped": ("scale", "softcap"),
    "all": ("bias", "scale", "softcap"),
}
SWEEPS = {"one chunk": None, "many": 4 * VOCAB, "a row each": 1}


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("replay", REPLAYS.values(), ids=REPLAYS)
@pytest.mark.parametrize("entropies", [False, True])
def test_scores_and_gradients_equal_those_of_whole_logits(
    replay: Replay, parts: tuple[str, ...], sweep: int | None, entropies: bool
) -> None:
    hidden, head, tokens = case(parts)
    expected = dense_scores(hidden, head, tokens, replay)
    found = chunked_scores(hidden, head, tokens, replay, entropy_gradient=entropies, sweep=sweep)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)
    assert found[0].requires_grad
    assert found[1].requires_grad == entropies
    assert_equal(gradients(found, hidden, head, entropies), gradients(expected, hidden, head, entropies))


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_bfloat16_is_summed_in_float32(sweep: int | None) -> None:
    hidden, head, tokens = case(("bias",), torch.bfloat16)
    expected = dense_scores(hidden, head, tokens, Replay())
    found = chunked_scores(hidden, head, tokens, Replay(), sweep=sweep)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.03)  # a bias added before or after rounding
    assert_equal(gradients(found, hidden, head, False), gradients(expected, hidden, head, False), relative=1e-2)


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
def test_scores_are_the_same_to_the_last_digit_with_and_without_a_gradient(sweep: int | None) -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        expected = chunked_scores(hidden, head, tokens, Replay(top_k=30), sweep=sweep)
    found = chunked_scores(hidden, head, tokens, Replay(top_k=30), sweep=sweep)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("replay", [Replay(), Replay(top_k=20)], ids=["plain", "top_k"])
def test_a_row_without_a_gradient_takes_no_part_in_the_backward_pass(replay: Replay, sweep: int | None) -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        hidden[3] = math.nan  # ... so that it would be seen
    logprobs, _ = chunked_scores(hidden, head, tokens, replay, sweep=sweep)
    coefficients = draw(TOKENS, seed=7)
    coefficients[3] = 0
    loss = torch.where(coefficients != 0, logprobs * coefficients, 0.0).sum()
    found = torch.autograd.grad(loss, [hidden, head.weight])
    with torch.no_grad():
        hidden[3] = 0.0
    expected = gradients(dense_scores(hidden, head, tokens, replay), hidden, head, False, coefficients)
    assert_equal(list(found), expected)
    assert found[0][3].eq(0).all()


@pytest.mark.parametrize("replay", [Replay(), Replay(top_k=20)], ids=["plain", "top_k"])
def test_a_nan_coefficient_reaches_the_gradient(replay: Replay) -> None:
    hidden, head, tokens = case()
    logprobs, _ = chunked_scores(hidden, head, tokens, replay)
    coefficients = torch.zeros(TOKENS)
    coefficients[5] = math.nan
    assert torch.autograd.grad((logprobs * coefficients).sum(), head.weight)[0].isnan().any()


def test_a_nan_stays_in_its_row() -> None:
    hidden, head, tokens = case()
    with torch.no_grad():
        hidden[3, 0] = math.nan
        logprobs, entropies = chunked_scores(hidden, head, tokens, Replay(top_p=0.9))
    assert logprobs.isnan().nonzero().flatten().tolist() == [3]
    assert entropies.isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("sweep", SWEEPS.values(), ids=SWEEPS)
@pytest.mark.parametrize("replay", [Replay(), Replay(top_k=20)], ids=["plain", "top_k"])
def test_nothing_to_score_has_no_scores_and_a_gradient_of_zeros(replay: Replay, sweep: int | None) -> None:
    hidden, head, tokens = case()
    none = hidden[:0]
    logprobs, entropies = chunked_scores(none, head, tokens[:0], replay, sweep=sweep)
    assert logprobs.shape == entropies.shape == (0,)
    assert torch.autograd.grad(logprobs.sum(), head.weight)[0].eq(0).all()


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_only_what_is_trained_gets_a_gradient(trained: str) -> None:
    hidden, head, tokens = case(("bias",))
    assert head.bias is not None
    tensors = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == trained)
    expected = torch.autograd.grad(dense_scores(hidden, head, tokens, Replay())[0].sum(), tensors[trained])
    found = torch.autograd.grad(chunked_scores(hidden, head, tokens, Replay())[0].sum(), tensors[trained])
    assert_equal(list(found), list(expected))


@pytest.mark.parametrize(
    ("replay", "passes"),
    [(Replay(), 2), (REPLAYS["penalty"], 2), (REPLAYS["all"], 1), (Replay(top_p=0.999), 2)],
    ids=["plain", "penalty", "a small support", "a large support"],
)
def test_no_more_logits_exist_at_once_than_the_sweep(
    replay: Replay, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both passes compute each logit, but for truncated sampling with small supports, which the forward pass keeps."""
    hidden, head, tokens = case()
    sizes: list[int] = []
    product = chunks.product

    def spy(*args: Any) -> Tensor:
        made = product(*args)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(chunked, "product", spy)
    monkeypatch.setattr(truncated, "product", spy)
    logprobs, _ = chunked_scores(hidden, head, tokens, replay, sweep=10 * VOCAB)
    logprobs.sum().backward()
    assert max(sizes) <= 10 * VOCAB
    assert sum(sizes) >= passes * TOKENS * VOCAB - 10 * VOCAB * (passes - 1)
    assert sum(sizes) <= passes * TOKENS * VOCAB
