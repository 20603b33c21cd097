import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.autograd import gradcheck

from leadline.objective.logprobs import token_entropies, token_logprobs

LOGITS = torch.randn(6, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
IDS = torch.tensor([0, 8, 3, 3, 1, 7])


def test_a_logprob_is_the_logarithm_of_the_softmax():
    for row, token, logprob in zip(LOGITS.tolist(), IDS.tolist(), token_logprobs(LOGITS, IDS).tolist(), strict=True):
        total = sum(math.exp(x) for x in row)
        assert logprob == pytest.approx(math.log(math.exp(row[token]) / total), rel=1e-12)


def test_an_entropy_is_minus_the_mean_logprob():
    for row, entropy in zip(LOGITS.tolist(), token_entropies(LOGITS).tolist(), strict=True):
        probs = [math.exp(x) / sum(map(math.exp, row)) for x in row]
        assert entropy == pytest.approx(-sum(p * math.log(p) for p in probs), rel=1e-12)


def test_a_uniform_distribution_has_the_logarithm_of_its_size_and_a_certain_one_nothing():
    assert token_entropies(torch.zeros(1, 8)).item() == pytest.approx(math.log(8))
    assert token_entropies(torch.tensor([[100.0, 0.0, 0.0]])).item() == pytest.approx(0.0, abs=1e-30)


def test_both_gradients_equal_finite_differences():
    logits = LOGITS.clone().requires_grad_()
    assert gradcheck(lambda x: token_logprobs(x, IDS), logits)
    assert gradcheck(token_entropies, logits)


def test_bfloat16_logits_are_summed_in_float32():
    # 2000 equal entries: bfloat16 has 8 bits, its own log-sum-exp would be off in the third digit.
    logits = torch.full((1, 2000), 5.0, dtype=torch.bfloat16)
    logprob = token_logprobs(logits, torch.tensor([7]))
    assert logprob.dtype == torch.float32
    assert logprob.item() == pytest.approx(-math.log(2000), rel=1e-6)
    assert token_entropies(logits).item() == pytest.approx(math.log(2000), rel=1e-6)


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e4, 1e4 - 1.0, -1e4]])
    ulp = 2.0**-10  # of 1e4 in float32
    logprob = token_logprobs(logits, torch.tensor([1])).item()
    assert logprob == pytest.approx(-1 - math.log1p(math.exp(-1)), abs=ulp)
    assert token_entropies(logits).isfinite().all()


def test_excluded_entries_contribute_nothing_and_have_gradient_0():
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf]], requires_grad=True)
    plain = torch.tensor([[1.0, 2.0]], requires_grad=True)
    assert token_logprobs(logits, torch.tensor([2])).item() == token_logprobs(plain, torch.tensor([1])).item()
    assert token_entropies(logits).item() == pytest.approx(token_entropies(plain).item(), rel=1e-6)
    (token_entropies(logits) + token_logprobs(logits, torch.tensor([0]))).sum().backward()
    (token_entropies(plain) + token_logprobs(plain, torch.tensor([0]))).sum().backward()
    assert logits.grad[0].tolist() == pytest.approx([plain.grad[0, 0].item(), 0.0, plain.grad[0, 1].item(), 0.0])


def test_a_token_outside_the_support_has_logprob_minus_infinity():
    assert token_logprobs(torch.tensor([[0.0, -math.inf]]), torch.tensor([1])).item() == -math.inf


def test_a_nan_logit_gives_nan_in_its_own_row_only():
    logits = torch.tensor([[0.0, math.nan], [0.0, 0.0]])
    assert token_logprobs(logits, torch.tensor([0, 0])).isnan().tolist() == [True, False]
    assert token_entropies(logits).isnan().tolist() == [True, False]


def test_ids_of_another_length_raise():
    with pytest.raises(TypeCheckError):
        token_logprobs(LOGITS, IDS[:5])
    with pytest.raises(TypeCheckError):
        token_logprobs(LOGITS[None], IDS)
    with pytest.raises(TypeCheckError):
        token_entropies(LOGITS[0])
