import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from leadline.objective.logprobs import token_logprobs
from leadline.objective.sampling import NUCLEUS_CANDIDATES, draw, processed_logits

GENERATOR = torch.Generator().manual_seed(3)
LOGITS = torch.randn(8, 30, generator=GENERATOR) * 2
SEEN = torch.rand(8, 30, generator=GENERATOR) < 0.3
OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def support(logits):
    return [[i for i, x in enumerate(row) if x > -math.inf] for row in logits.tolist()]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, 30, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3, 1e-6])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5])
@pytest.mark.parametrize("penalty", [1.0, 1.15, 0.8])
def test_processed_logits_equal_the_reference(temperature, top_k, top_p, min_p, penalty):
    options = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": penalty,
    }
    got = processed_logits(LOGITS, **options, seen=SEEN)
    for row, seen, processed in zip(LOGITS.tolist(), SEEN.tolist(), got.tolist(), strict=True):
        assert processed == pytest.approx(reference.processed_logits(row, **options, seen=seen), rel=1e-5)


LADDER = [[math.log(0.5), math.log(0.3), math.log(0.15), math.log(0.05)]]  # probabilities .5 .3 .15 .05


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3]),  # nothing on: everything stays
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 4}, [0, 1, 2, 3]),  # as many as there are
        ({"top_p": 0.79}, [0, 1]),  # .5 is not enough, .8 is
        ({"top_p": 0.81}, [0, 1, 2]),  # .8 is not enough any more
        ({"top_p": 1e-9}, [0]),  # at least one always stays
        ({"min_p": 0.2}, [0, 1, 2]),  # .2 of the best is .1
        ({"min_p": 0.7}, [0]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # of the two kept the first has .625: top_p sees top_k's renormalised mass
        ({"min_p": 0.5, "top_p": 0.6}, [0]),  # ... and min_p's: vLLM's order. Min_p last would keep both
        ({"min_p": 0.5, "top_k": 3}, [0, 1]),  # the stricter of the two
        ({"temperature": 2.0, "min_p": 0.4}, [0, 1, 2]),  # sqrt(.15 / .5) = .55, sqrt(.05 / .5) = .32
    ],
)
def test_supports_by_hand(options, kept):
    assert support(processed_logits(torch.tensor(LADDER), **(OFF | options))) == [kept]


def test_a_nucleus_that_has_exactly_the_mass_asked_for_is_complete():
    logits = torch.tensor(LADDER)
    first = logits.softmax(-1)[0, 0].item()
    assert support(processed_logits(logits, **(OFF | {"top_p": first}))) == [[0]]
    assert support(processed_logits(logits, **(OFF | {"top_p": first + 1e-9}))) == [[0, 1]]


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.9999])
def test_a_nucleus_wider_than_the_candidates_looked_at_first_is_found(top_p):
    logits = torch.randn(3, 3000, generator=torch.Generator().manual_seed(5)) * torch.tensor([[0.1], [1.0], [6.0]])
    kept = [len(row) for row in support(processed_logits(logits, **(OFF | {"top_p": top_p})))]
    for row, count in zip(logits.double(), kept, strict=True):
        mass = row.softmax(-1).sort(descending=True).values.cumsum(-1)
        assert abs(count - int((mass < top_p).sum()) - 1) <= (top_p > 0.99)  # in the far tail by rounding
    assert max(kept) > NUCLEUS_CANDIDATES or top_p < 0.5
    assert min(kept) < NUCLEUS_CANDIDATES


def test_ties_with_the_last_kept_entry_stay():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, 2.0]])
    assert support(processed_logits(logits, **(OFF | {"top_k": 2}))) == [[1, 2, 3, 4]]
    assert support(processed_logits(logits, **(OFF | {"top_p": 0.5}))) == [[1, 2, 3, 4]]


def test_the_penalty_makes_seen_entries_less_likely_whatever_their_sign():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    got = processed_logits(logits, **(OFF | {"repetition_penalty": 2.0}), seen=seen)
    assert got.tolist() == [[1.0, -4.0, 2.0, -2.0]]


def test_the_penalty_comes_before_the_temperature_and_the_temperature_before_the_support():
    # penalised 2 -> 1, then halved; min_p at log .6 = -.51 keeps an entry half a nat below the best, not one nat
    logits = torch.tensor([[2.0, 2.0]])
    seen = torch.tensor([[True, False]])
    got = processed_logits(logits, **(OFF | {"repetition_penalty": 2.0, "temperature": 2.0, "min_p": 0.6}), seen=seen)
    assert got.tolist() == [[0.5, 1.0]]


def test_with_everything_off_the_logits_themselves_come_back():
    assert processed_logits(LOGITS, **OFF) is LOGITS
    half = processed_logits(LOGITS.bfloat16(), **(OFF | {"temperature": 0.5}))
    assert half.dtype == torch.float32
    assert half.equal(LOGITS.bfloat16().float() / 0.5)


def test_the_kept_entry_stays_in_the_support_and_only_that():
    keep = torch.tensor([0, 3])
    logits = torch.tensor(LADDER * 2)
    for option in ({"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}):
        got = processed_logits(logits, **(OFF | option), keep=keep)
        assert support(got) == [[0], [0, 3]]
        assert token_logprobs(got, keep).tolist() == pytest.approx([0.0, math.log(0.05 / 0.55)], abs=1e-6)


def test_a_token_inside_the_support_has_the_same_logprob_with_and_without_keep():
    options = OFF | {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7}
    plain = processed_logits(LOGITS, **options)
    tokens = plain.argmax(-1)
    assert processed_logits(LOGITS, **options, keep=tokens).equal(plain)


def test_the_gradient_flows_through_kept_entries_and_never_through_excluded_ones():
    logits = LOGITS.clone().requires_grad_()
    options = {"temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.2}
    processed = processed_logits(logits, **options, seen=SEEN)
    inside = processed > -math.inf
    processed[inside].sum().backward()
    slope = torch.where(SEEN, torch.where(LOGITS > 0, 2 / 1.2, 2 * 1.2), 2.0)
    torch.testing.assert_close(logits.grad, torch.where(inside, slope, 0.0))
    assert inside.sum() < inside.numel() / 2


def test_the_gradient_of_a_logprob_under_a_small_support_equals_finite_differences():
    options = OFF | {"top_k": 6, "temperature": 0.8}
    tokens = LOGITS.argsort(-1)[:, -3]
    logits = LOGITS.clone().requires_grad_()
    token_logprobs(processed_logits(logits, **options), tokens).sum().backward()
    best = LOGITS.argmax(-1, keepdim=True)
    bump = torch.zeros_like(LOGITS).scatter(-1, best, 1e-2)
    up = token_logprobs(processed_logits(LOGITS + bump, **options), tokens)
    down = token_logprobs(processed_logits(LOGITS - bump, **options), tokens)
    slopes = logits.grad.gather(-1, best).squeeze(-1)
    assert slopes.tolist() == pytest.approx(((up - down) / 2e-2).tolist(), abs=1e-3)
    assert (slopes < -0.1).all()


def test_a_nan_logit_is_not_hidden_by_the_support():
    logits = torch.tensor([[0.0, math.nan, 1.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    got = processed_logits(logits, **(OFF | {"top_k": 2, "top_p": 0.9, "min_p": 0.1}))
    assert got[0].isnan().any() and support(got)[1] == [2, 3]


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_is_not_positive_raises(temperature):
    with pytest.raises(ValueError, match=r"temperature is .*argmax"):
        processed_logits(LOGITS, **(OFF | {"temperature": temperature}))


def test_a_penalty_without_seen_raises():
    with pytest.raises(ValueError, match=r"repetition_penalty is 1\.2.*seen"):
        processed_logits(LOGITS, **(OFF | {"repetition_penalty": 1.2}))


def test_draws_follow_the_softmax():
    logits = torch.tensor([1.0, 0.0, -math.inf, 2.0, -1.0, 0.5])
    n = 20000
    uniforms = torch.rand(n, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    counts = torch.bincount(draw(logits.expand(n, -1), uniforms), minlength=6).double()
    expected = logits.double().softmax(-1) * n
    inside = expected > 0
    chi_square = ((counts - expected)[inside] ** 2 / expected[inside]).sum().item()
    assert chi_square < 18.5  # 99.9 % quantile for 4 degrees of freedom
    assert counts[2] == 0


def test_draws_invert_the_cumulative_distribution():
    logits = torch.tensor(LADDER).expand(8, -1)
    uniforms = torch.tensor([0.0, 0.4999, 0.5001, 0.7999, 0.8001, 0.9499, 0.9501, 0.9999])
    assert draw(logits, uniforms).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(-700, 700) | st.just(-math.inf), min_size=1, max_size=12).filter(lambda r: max(r) > -math.inf),
    st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0]) | st.floats(0, 1, exclude_max=True),
)
def test_an_excluded_entry_is_never_drawn(row, uniform):
    drawn = draw(torch.tensor([row], dtype=torch.float64), torch.tensor([uniform], dtype=torch.float64)).item()
    assert row[drawn] > -math.inf


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53, 1.0])
def test_the_ends_of_the_unit_interval_stay_in_a_support_that_has_gaps_at_both_ends(uniform):
    # 1.0 is outside the contract, but is what float32 rounding makes of 1 - 2^-53
    logits = torch.full((1, 50000), -math.inf)
    logits[0, 20000:30000] = torch.randn(10000, generator=GENERATOR)
    drawn = draw(logits, torch.tensor([uniform], dtype=torch.float64)).item()
    assert drawn == (20000 if uniform == 0 else 29999)


@pytest.mark.parametrize("row", [[math.nan, 0.0], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_without_a_distribution_raise_and_name_the_row(row):
    with pytest.raises(ValueError, match=r"row 1"):
        draw(torch.tensor([[0.0, 0.0], row]), torch.tensor([0.5, 0.5]))


def test_tensors_of_different_length_raise():
    with pytest.raises(TypeCheckError):
        draw(LOGITS, torch.zeros(7))
    with pytest.raises(TypeCheckError):
        processed_logits(LOGITS, **OFF, keep=torch.zeros(7, dtype=torch.long))
    with pytest.raises(TypeCheckError):
        processed_logits(LOGITS, **(OFF | {"repetition_penalty": 1.2}), seen=SEEN[:, :29])
