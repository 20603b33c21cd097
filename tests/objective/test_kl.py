import math

import pytest
import reference
import torch
from jaxtyping import TypeCheckError

from leadline.objective.kl import ESTIMATORS, kl_divergence

GENERATOR = torch.Generator().manual_seed(1)
LOGPROBS = -torch.rand(12, generator=GENERATOR, dtype=torch.float64) * 4
REF = -torch.rand(12, generator=GENERATOR, dtype=torch.float64) * 4


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_estimate_and_its_gradient_equal_the_reference(estimator):
    logprobs = LOGPROBS.clone().requires_grad_()
    estimate = kl_divergence(logprobs, REF, estimator)
    estimate.sum().backward()
    pairs = list(zip(LOGPROBS.tolist(), REF.tolist(), strict=True))
    assert estimate.tolist() == pytest.approx([reference.kl(p, r, estimator) for p, r in pairs], rel=1e-12)
    slopes = [(reference.kl(p + 1e-6, r, estimator) - reference.kl(p - 1e-6, r, estimator)) / 2e-6 for p, r in pairs]
    assert logprobs.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize(
    ("logprob", "ref", "k1", "k2", "k3"),
    [
        (-1.0, -1.0, 0.0, 0.0, 0.0),  # same policy: every estimate is exactly 0
        (-1.0, -2.0, 1.0, 0.5, math.exp(-1)),  # the policy likes the token more: k1 positive
        (-2.0, -1.0, -1.0, 0.5, math.e - 2),  # ... less: k1 negative, k2 and k3 still positive
    ],
)
def test_estimates_by_hand(logprob, ref, k1, k2, k3):
    values = [kl_divergence(torch.tensor([logprob]), torch.tensor([ref]), e).item() for e in ESTIMATORS]
    assert values == pytest.approx([k1, k2, k3], rel=1e-6)


def test_k1_and_k3_average_to_the_true_kl_and_k2_nearly():
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.4, 0.4, 0.2]).double()
    true = (p * (p / q).log()).sum().item()
    expected = {e: (p * kl_divergence(p.log(), q.log(), e)).sum().item() for e in ESTIMATORS}
    assert expected["k1"] == pytest.approx(true, rel=1e-12)
    assert expected["k3"] == pytest.approx(true, rel=1e-12)
    assert expected["k2"] == pytest.approx(true, rel=0.1) and expected["k2"] != pytest.approx(true, rel=1e-3)


def test_the_reference_has_no_gradient():
    logprobs, ref = LOGPROBS.clone().requires_grad_(), REF.clone().requires_grad_()
    kl_divergence(logprobs, ref, "k3").sum().backward()
    assert ref.grad is None
    assert logprobs.grad.abs().min() > 0


def test_small_differences_do_not_cancel():
    # float32: exp(d) - 1 - d of d = 1e-3 loses digits to 1; expm1 does not.
    estimate = kl_divergence(torch.tensor([-1.0]), torch.tensor([-0.999]), "k3").item()
    d = torch.tensor(-0.999).item() - torch.tensor(-1.0).item()
    assert estimate == pytest.approx(math.expm1(d) - d, rel=1e-3)


def test_k3_is_finite_for_any_gap_and_pulls_a_runaway_policy_back():
    logprobs = torch.tensor([-100.0, -1.0], requires_grad=True)
    estimate = kl_divergence(logprobs, torch.tensor([0.0, -100.0]), "k3")
    estimate.sum().backward()
    assert estimate.tolist() == pytest.approx([math.exp(20) - 21, 98.0])
    assert logprobs.grad.tolist() == [0.0, 1.0]  # beyond the bound: none; far above the reference: down again


def test_an_unknown_estimator_names_the_known_ones():
    with pytest.raises(ValueError, match=r"k4.*k1, k2, k3"):
        kl_divergence(LOGPROBS, REF, "k4")


def test_tensors_of_different_length_raise():
    with pytest.raises(TypeCheckError):
        kl_divergence(LOGPROBS, REF[:3], "k3")
