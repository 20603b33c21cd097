import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from leadline.objective.losses import LOSSES, policy_loss

NAN, INF = math.nan, math.inf
CLIP = {"clip_low": 0.2, "clip_high": 0.3, "clip_delta": None}
PER_TOKEN = [name for name in LOSSES if name != "gspo"]


def one_token(name, ratio, advantage, **clip):
    """(loss, d loss / d logprob, gain, clipped) of a single token with old logprob -1."""
    logprobs = torch.tensor([-1.0 + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, one = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([True])
    advantages = torch.tensor([advantage], dtype=torch.float64)
    got = policy_loss(name, logprobs, old, advantages, torch.tensor([0]), 1, one, **(CLIP | clip))
    got.loss.sum().backward()
    return got.loss.item(), logprobs.grad.item(), got.gain.item(), got.clipped.item()


@pytest.mark.parametrize("name", ["grpo", "dapo", "dr_grpo", "bnpo", "gspo"])
@pytest.mark.parametrize(
    ("ratio", "advantage", "delta", "loss", "slope", "clipped"),
    [
        # on policy: loss -A, gradient -A: plain policy gradient
        (1.0, 2.0, None, -2.0, -2.0, False),
        (1.0, -2.0, None, 2.0, 2.0, False),
        # a good token already likelier than 1 + high: enough, no gradient
        (1.5, 2.0, None, -2.6, 0.0, True),
        # a bad token already rarer than 1 - low: enough, no gradient
        (0.5, -2.0, None, 1.6, 0.0, True),
        # a good token that became rarer must be pulled back: never clipped
        (0.5, 2.0, None, -1.0, -1.0, False),
        # a bad token that became likelier must be pushed down, the harder the likelier it is
        (4.0, -2.0, None, 8.0, 8.0, False),
        # ... up to delta, beyond which a two-sided clip drops it
        (4.0, -2.0, 3.0, 6.0, 0.0, True),
        (2.5, -2.0, 3.0, 5.0, 5.0, False),
        # delta changes nothing where the ordinary clip acts
        (4.0, 2.0, 3.0, -2.6, 0.0, True),
        # clip_high (0.3) is wider than clip_low (0.2): DAPO's clip-higher
        (1.25, 1.0, None, -1.25, -1.25, False),
        (0.75, -1.0, None, 0.8, 0.0, True),
        # no advantage, no loss, no gradient, nothing to clip
        (9.0, 0.0, None, 0.0, 0.0, False),
    ],
)
def test_the_clipped_surrogate_by_hand(name, ratio, advantage, delta, loss, slope, clipped):
    got = one_token(name, ratio, advantage, clip_delta=delta)
    assert got[:2] == pytest.approx((loss, slope))
    assert got[2:] == (pytest.approx(0.0 if clipped else ratio), clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "coefficient", "clipped"),
    [
        (1.0, 2.0, 1.0, False),  # on policy
        (0.1, 2.0, 0.1, False),  # a rare token counts little ...
        (0.1, -2.0, 0.1, False),  # ... and is never clipped from below
        (5.0, 2.0, 1.3, True),  # a coefficient is capped, the gradient stays: that is the point of CISPO
        (5.0, -2.0, 1.3, True),
    ],
)
def test_cispo_by_hand(ratio, advantage, coefficient, clipped):
    loss, slope, gain, was_clipped = one_token("cispo", ratio, advantage)
    assert loss == pytest.approx(-coefficient * advantage * (-1 + math.log(ratio)))
    assert slope == pytest.approx(-coefficient * advantage)
    assert (gain, was_clipped) == (pytest.approx(coefficient), clipped)


@pytest.mark.parametrize("ratio", [0.01, 1.0, 50.0])
def test_reinforce_knows_no_ratio(ratio):
    loss, slope, gain, clipped = one_token("reinforce", ratio, -2.0)
    assert (loss, slope) == pytest.approx((2.0 * (-1 + math.log(ratio)), 2.0))
    assert (gain, clipped) == (1.0, False)


def test_gspo_takes_the_mean_log_ratio_of_the_loss_tokens_and_spreads_its_gradient():
    # completion 0: log ratios .3, -.1 and a masked 9; mean .1. Completion 1: a single -.1. Completion 2: all masked.
    old = torch.zeros(5, dtype=torch.float64) - 2
    logprobs = (old + torch.tensor([0.3, -0.1, 9.0, -0.1, 1.0])).requires_grad_()
    mask = torch.tensor([True, True, False, True, False])
    advantages = torch.tensor([2.0, 2.0, 2.0, -1.0, 5.0], dtype=torch.float64)
    got = policy_loss("gspo", logprobs, old, advantages, torch.tensor([0, 0, 0, 1, 2]), 3, mask, **CLIP)
    up, down = math.exp(0.1), math.exp(-0.1)
    assert got.loss.tolist() == pytest.approx([-2 * up, -2 * up, 0.0, down, 0.0])
    assert got.gain.tolist() == pytest.approx([up, up, 0.0, down, 0.0])
    (got.loss * torch.tensor([0.7, 0.1, 1.0, 1.0, 1.0])).sum().backward()
    # both tokens push the mean equally, whatever weight their own loss has: -A s (.7 + .1) / 2
    assert logprobs.grad.tolist() == pytest.approx([-2 * up * 0.4, -2 * up * 0.4, 0.0, down, 0.0])


def test_gspo_clips_a_whole_completion_or_none_of_it():
    old = torch.full((4,), -1.0)
    logprobs = old + torch.tensor([0.6, 0.2, 0.6, -0.6])  # means .4 and 0: the second has the same outlier
    advantages = torch.ones(4)
    got = policy_loss(
        "gspo", logprobs, old, advantages, torch.tensor([0, 0, 1, 1]), 2, torch.ones(4, dtype=torch.bool), **CLIP
    )
    assert got.clipped.tolist() == [True, True, False, False]


def random_tokens(seed, n=60, completions=7):
    generator = torch.Generator().manual_seed(seed)
    completion_of_token = torch.randint(0, completions, (n,), generator=generator).sort().values
    old = -torch.rand(n, generator=generator, dtype=torch.float64) * 3
    logprobs = old + torch.randn(n, generator=generator, dtype=torch.float64) * 0.4
    advantages = torch.randn(completions, generator=generator, dtype=torch.float64)[completion_of_token]
    mask = torch.rand(n, generator=generator) < 0.8
    return logprobs, old, advantages, completion_of_token, completions, mask


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("delta", [None, 1.4])
def test_token_losses_equal_the_reference(name, delta):
    logprobs, old, advantages, completion_of_token, completions, mask = random_tokens(6)
    got = policy_loss(
        name, logprobs, old, advantages, completion_of_token, completions, mask, **(CLIP | {"clip_delta": delta})
    )
    lists = [x.tolist() for x in (logprobs, logprobs, old, advantages, completion_of_token, mask)]
    assert got.loss.tolist() == pytest.approx(reference.token_losses(name, *lists, 0.2, 0.3, delta), rel=1e-12)


@pytest.mark.parametrize("name", PER_TOKEN)
@pytest.mark.parametrize("delta", [None, 1.4])
def test_the_gain_times_the_advantage_is_the_size_of_the_gradient(name, delta):
    logprobs, *rest = random_tokens(7)
    logprobs.requires_grad_()
    got = policy_loss(name, logprobs, *rest, **(CLIP | {"clip_delta": delta}))
    got.loss.sum().backward()
    assert (got.gain * rest[1].abs()).tolist() == pytest.approx(logprobs.grad.abs().tolist(), rel=1e-9, abs=1e-12)
    assert got.clipped.any() == (name != "reinforce")
    if name not in ("cispo", "reinforce"):
        assert ((got.gain == 0) == (got.clipped | ~rest[4])).all()


def test_the_gain_of_gspo_gives_the_gradient_summed_over_a_completion_whatever_the_weights():
    logprobs, old, advantages, completion_of_token, completions, mask = random_tokens(8)
    logprobs.requires_grad_()
    clip = CLIP | {"clip_low": 0.05, "clip_high": 0.05}
    got = policy_loss("gspo", logprobs, old, advantages, completion_of_token, completions, mask, **clip)
    coefficients = torch.rand(60, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (coefficients * got.loss).sum().backward()
    for c in range(completions):
        of = completion_of_token == c
        expected = (coefficients * got.gain * advantages.abs())[of].sum().item()
        assert logprobs.grad[of].abs().sum().item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert got.clipped.any() and not got.clipped[mask].all()


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name):
    logprobs, _, *rest = random_tokens(10)
    gradients = {}
    for loss in (name, "reinforce"):
        leaf = logprobs.clone().requires_grad_()
        shares = torch.ones_like(leaf)
        got = policy_loss(loss, leaf, logprobs, *rest, **CLIP)
        (shares * got.loss).sum().backward()
        gradients[loss] = leaf.grad.tolist()
        assert not got.clipped.any()
    assert gradients[name] == pytest.approx(gradients["reinforce"], rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_lies_outside_the_mask_is_never_read(name, poison):
    logprobs, old, advantages, completion_of_token, completions, mask = random_tokens(11)
    clean = logprobs.clone().requires_grad_()
    expected = policy_loss(name, clean, old, advantages, completion_of_token, completions, mask, **CLIP)
    expected.loss.sum().backward()
    sick = [torch.where(mask, x, poison) for x in (logprobs, old, advantages)]
    sick[0].requires_grad_()
    got = policy_loss(name, *sick, completion_of_token, completions, mask, **CLIP)
    got.loss.sum().backward()
    assert got.loss.equal(expected.loss) and got.gain.equal(expected.gain) and got.clipped.equal(expected.clipped)
    assert sick[0].grad.equal(clean.grad)
    assert (got.loss[~mask] == 0).all() and (sick[0].grad[~mask] == 0).all() and not got.clipped[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", ["logprobs", "advantages"])
def test_a_nan_inside_the_mask_reaches_the_loss(name, which):
    values = {"logprobs": torch.tensor([-1.0, -1.0]), "advantages": torch.ones(2)}
    values[which][0] = NAN
    got = policy_loss(
        name, values["logprobs"], torch.tensor([-1.0, -1.0]), values["advantages"], torch.tensor([0, 1]), 2,
        torch.tensor([True, True]), **CLIP,
    )  # fmt: skip
    assert got.loss.isnan().tolist() == [True, False]


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(list(LOSSES)),
    st.lists(st.tuples(*[st.floats(-1e4, 0, width=32)] * 2, st.floats(-1e4, 1e4, width=32)), min_size=1, max_size=5),
    st.sampled_from([None, 3.0]),
)
def test_finite_inputs_give_finite_losses_and_gradients(name, tokens, delta):
    logprobs, old, advantages = (torch.tensor(column) for column in zip(*tokens, strict=True))
    logprobs.requires_grad_()
    n = len(tokens)
    clip = CLIP | {"clip_delta": delta}
    got = policy_loss(
        name, logprobs, old, advantages, torch.zeros(n).long(), 1, torch.ones(n, dtype=torch.bool), **clip
    )
    got.loss.sum().backward()
    assert got.loss.isfinite().all() and got.gain.isfinite().all() and logprobs.grad.isfinite().all()


def test_a_nan_of_a_completion_stays_out_of_its_tokens_outside_the_mask():
    logprobs = torch.tensor([NAN, -1.0], requires_grad=True)
    got = policy_loss(
        "gspo", logprobs, torch.full((2,), -1.0), torch.ones(2), torch.tensor([0, 0]), 1, torch.tensor([True, False]), **CLIP
    )  # fmt: skip
    assert got.loss[0].isnan() and got.loss[1] == 0 and got.gain[1] == 0


@pytest.mark.parametrize("ratio", [1.0, 9.0, math.exp(30)])
def test_without_an_advantage_there_is_nothing_to_clip(ratio):
    loss, slope, _, clipped = one_token("grpo", ratio, 0.0, clip_delta=3.0)
    assert (loss, slope, clipped) == (0.0, 0.0, False)


def test_a_ratio_beyond_the_overflow_bound_has_no_gradient_and_says_so():
    loss, slope, gain, clipped = one_token("grpo", math.exp(30), -1.0)
    assert (loss, slope, gain, clipped) == (pytest.approx(math.exp(20)), 0.0, 0.0, True)


@pytest.mark.parametrize("name", LOSSES)
def test_only_the_policys_logprobs_carry_a_gradient(name):
    logprobs, old, advantages, *rest = random_tokens(12)
    leaves = [x.clone().requires_grad_() for x in (logprobs, old, advantages)]
    got = policy_loss(name, *leaves, *rest, **CLIP)
    got.loss.sum().backward()
    assert leaves[0].grad.abs().sum() > 0
    assert leaves[1].grad is None and leaves[2].grad is None
    assert not got.gain.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_no_tokens_and_no_loss_tokens_give_zeros(name):
    empty = torch.zeros(0)
    assert policy_loss(name, empty, empty, empty, empty.long(), 2, empty.bool(), **CLIP).loss.shape == (0,)
    leaf = torch.tensor([-1.0, NAN], requires_grad=True)
    got = policy_loss(name, leaf, leaf, leaf, torch.tensor([0, 1]), 2, torch.tensor([False, False]), **CLIP)
    got.loss.sum().backward()
    assert got.loss.tolist() == [0.0, 0.0] and leaf.grad.tolist() == [0.0, 0.0]


def test_an_unknown_loss_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'ppo'.*grpo, dapo, dr_grpo, bnpo, gspo, cispo, reinforce"):
        policy_loss("ppo", *random_tokens(1), **CLIP)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
@pytest.mark.parametrize("short", range(5))
def test_tensors_of_different_length_raise(name, short):
    tensors = [torch.zeros(4), torch.zeros(4), torch.zeros(4), torch.zeros(4).long(), torch.zeros(4).bool()]
    tensors[short] = tensors[short][:3]
    with pytest.raises(TypeCheckError):
        policy_loss(name, *tensors[:4], 1, tensors[4], **CLIP)
