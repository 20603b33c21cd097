import itertools
import math

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from leadline.objective.importance import ACTIONS, LEVELS, effective_sample_size, rollout_weights

NAN, INF = math.nan, math.inf
MODES = list(itertools.product(LEVELS, ACTIONS))


def weights_of(log_ratios, completions=None, *, level, action, low=0.0, high=2.0, veto=0.0):
    """Rollout weights for given log pi_old - log mu; None = unscored."""
    completions = completions or [0] * len(log_ratios)
    old = torch.full((len(log_ratios),), -1.0, dtype=torch.float64)
    rollout = torch.tensor([NAN if x is None else -1.0 - x for x in log_ratios], dtype=torch.float64)
    of_token = torch.tensor(completions)
    return rollout_weights(
        old, rollout, of_token, max(completions) + 1, level=level, action=action, low=low, high=high, veto=veto
    )


@pytest.mark.parametrize(("level", "action"), MODES)
@pytest.mark.parametrize(("low", "high", "veto"), [(0.0, 2.0, 0.0), (0.5, 1.5, 0.0), (0.9, 1.1, 0.4), (0.0, 2.0, 0.55)])
def test_weights_equal_the_reference(level, action, low, high, veto):
    generator = torch.Generator().manual_seed(5)
    completion_of_token = torch.tensor([0] * 5 + [2] * 1 + [3] * 9 + [4] * 2 + [5] * 3)  # completion 1 is empty
    old = -torch.rand(20, generator=generator, dtype=torch.float64) * 3
    rollout = old + torch.randn(20, generator=generator, dtype=torch.float64) * 0.4
    rollout[[2, 7, 15, 16]] = NAN  # completion 4 is wholly unscored
    got = rollout_weights(
        old, rollout, completion_of_token, 6, level=level, action=action, low=low, high=high, veto=veto
    )
    expected = reference.rollout_weights(
        old.tolist(), rollout.tolist(), completion_of_token.tolist(), level, action, low, high, veto
    )
    assert got.weights.tolist() == pytest.approx(expected[0], rel=1e-12)
    assert (got.masked.tolist(), got.truncated.tolist()) == (expected[1], expected[2])


@pytest.mark.parametrize(
    ("log_ratios", "options", "weights"),
    [
        # engine and trainer agree: weight 1 in every mode
        ([0.0, 0.0], {"level": "token", "action": "truncate"}, [1.0, 1.0]),
        ([0.0, 0.0], {"level": "sequence", "action": "mask", "low": 0.9, "high": 1.1}, [1.0, 1.0]),
        # each token its own ratio, cut at 2
        ([math.log(3), math.log(0.5)], {"level": "token", "action": "truncate"}, [2.0, 0.5]),
        # a lower bound raises
        ([math.log(3), math.log(0.5)], {"level": "token", "action": "truncate", "low": 0.8}, [2.0, 0.8]),
        # IcePop: outside -> 0, the neighbour keeps its ratio
        ([math.log(3), math.log(0.5)], {"level": "token", "action": "mask"}, [0.0, 0.5]),
        # the bounds themselves are inside
        ([math.log(2), math.log(0.5)], {"level": "token", "action": "mask", "low": 0.4999, "high": 2.0001}, [2.0, 0.5]),
        # the product 1.5 on both tokens
        ([math.log(3), math.log(0.5)], {"level": "sequence", "action": "truncate"}, [1.5, 1.5]),
        # the product 6 is outside: the completion is gone
        ([math.log(3), math.log(2)], {"level": "sequence", "action": "mask"}, [0.0, 0.0]),
        # the geometric mean of 4 and 1 is 2
        ([math.log(4), 0.0], {"level": "geometric", "action": "truncate", "high": 3.0}, [2.0, 2.0]),
        ([math.log(4), 0.0], {"level": "geometric", "action": "mask", "high": 1.9}, [0.0, 0.0]),
        # off: no correction whatever the ratios
        ([5.0, -5.0], {"level": "sequence", "action": "off", "veto": 0.5}, [1.0, 1.0]),
        # an unscored token weighs 1; the sum does not contain it
        ([math.log(1.5), None], {"level": "sequence", "action": "truncate"}, [1.5, 1.0]),
        # ... nor does the mean divide by it
        ([math.log(1.5), None], {"level": "geometric", "action": "truncate"}, [1.5, 1.0]),
        # one unscored token in a masked completion goes with it
        ([math.log(9), None], {"level": "sequence", "action": "mask"}, [0.0, 0.0]),
        # ... but not in token mode
        ([math.log(9), None], {"level": "token", "action": "mask"}, [0.0, 1.0]),
        # one token at 1/1000: the veto takes the whole completion, in truncate mode too
        ([math.log(1e-3), 0.0, None], {"level": "token", "action": "truncate", "veto": 1e-2}, [0.0, 0.0, 0.0]),
        # a veto below the smallest ratio does nothing
        ([math.log(1e-3), 0.0], {"level": "token", "action": "truncate", "veto": 1e-4}, [1e-3, 1.0]),
    ],
)
def test_weights_by_hand(log_ratios, options, weights):
    assert weights_of(log_ratios, **options).weights.tolist() == pytest.approx(weights, rel=1e-12)


def test_a_veto_takes_one_completion_and_leaves_the_others():
    got = weights_of([-9.0, 0.0, 0.0, 0.0], [0, 0, 1, 2], level="token", action="truncate", veto=0.01)
    assert got.weights.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert got.masked.tolist() == [True, True, False, False]


def test_masked_and_truncated_say_what_the_bounds_did():
    truncated = weights_of([1.0, 0.0, -1.0, None], level="token", action="truncate", low=0.5)
    assert truncated.truncated.tolist() == [True, False, True, False]
    assert not truncated.masked.any()
    masked = weights_of([1.0, 0.0, -1.0, None], level="token", action="mask", low=0.5)
    assert masked.masked.tolist() == [True, False, True, False]
    assert not masked.truncated.any()


@pytest.mark.parametrize(("level", "action"), MODES)
def test_the_log_ratio_is_raw_in_every_mode(level, action):
    got = weights_of([30.0, -3.0, None], level=level, action=action, low=0.9, high=1.1)
    assert got.log_ratio[:2].tolist() == [30.0, -3.0]
    assert got.log_ratio[2].isnan()


@pytest.mark.parametrize(("level", "action"), MODES)
@pytest.mark.parametrize(("low", "high"), [(0.0, 2.0), (0.5, 1.5), (1.2, 3.0)])
def test_an_unscored_completion_has_weight_exactly_1_in_every_mode(level, action, low, high):
    got = weights_of([None, None, 0.1], [0, 0, 1], level=level, action=action, low=low, high=high, veto=1.5)
    assert got.weights[:2].tolist() == [1.0, 1.0]
    assert not got.masked[:2].any() and not got.truncated[:2].any()


@pytest.mark.parametrize(("level", "action"), MODES)
def test_one_unscored_token_leaves_the_weights_of_the_others_as_if_it_were_not_there(level, action):
    without = weights_of([0.3, -0.2, 0.1], level=level, action=action, low=0.5)
    with_it = weights_of([0.3, None, -0.2, 0.1], level=level, action=action, low=0.5)
    assert with_it.weights[[0, 2, 3]].tolist() == pytest.approx(without.weights.tolist(), rel=1e-12)
    assert with_it.weights[1] == 1.0


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(MODES),
    st.lists(
        st.tuples(
            st.floats(-(2.0**100), 0, width=32) | st.just(-INF),
            st.floats(-(2.0**100), 0, width=32) | st.sampled_from([-INF, NAN]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([1.5, INF]),
)
def test_weights_are_finite_and_within_bounds_for_any_logprobs(mode, pairs, low, high):
    old, rollout = (torch.tensor(column) for column in zip(*pairs, strict=True))
    level, action = mode
    got = rollout_weights(
        old, rollout, torch.zeros(len(pairs)).long(), 1, level=level, action=action, low=low, high=high, veto=0.0
    )
    assert got.weights.isfinite().all()
    assert (got.masked | (got.weights >= (1.0 if action == "off" else low))).all()
    assert (got.weights <= high).all()
    assert (got.weights[rollout.isnan() & ~got.masked] == 1).all()


@pytest.mark.parametrize(
    ("old", "rollout", "weight"),
    [
        (-INF, -1.0, 0.0),  # the trainer gives the token no mass: the ratio is 0
        (-1.0, -INF, 2.0),  # the engine claims it drew the impossible: the ratio is huge, and bounded
        (-INF, -INF, 1.0),  # both agree
        (-1e30, -1.0, 0.0),  # exp underflows, harmlessly
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_infinite_logprobs_give_finite_weights(old, rollout, weight, level):
    got = rollout_weights(
        torch.tensor([old]), torch.tensor([rollout]), torch.tensor([0]), 1,
        level=level, action="truncate", low=0.0, high=2.0, veto=0.0,
    )  # fmt: skip
    assert got.weights.tolist() == [weight]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("action", ["truncate", "mask"])
def test_a_nan_of_the_trainer_is_not_hidden(level, action):
    # Masking it, or calling it 1, would let a broken forward pass train.
    got = rollout_weights(
        torch.tensor([NAN, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 1]), 2,
        level=level, action=action, low=0.5, high=2.0, veto=0.1,
    )  # fmt: skip
    assert got.weights[0].isnan() and not got.masked[0]
    assert got.weights[1] == 1.0


def test_weights_are_constants():
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    for level, action in MODES:
        got = rollout_weights(
            old, torch.tensor([-1.5, -1.5]), torch.tensor([0, 0]), 1, level=level, action=action, low=0.0, high=2.0, veto=0.0
        )  # fmt: skip
        assert not got.weights.requires_grad and not got.log_ratio.requires_grad


def seed_offset(level, action, low, high, nats=-0.3, tokens=150):
    return weights_of([nats] * tokens, level=level, action=action, low=low, high=high).weights


def test_a_systematic_offset_of_0_3_nat_over_150_tokens_is_fatal_per_sequence_and_mild_per_token():
    # A public report: loss exactly 0.0 at every step, because product ratios fell to 1e-20.
    assert seed_offset("sequence", "mask", 0.0, 3.0).tolist() == pytest.approx([math.exp(-45)] * 150)  # 2.9e-20: shrunk
    assert seed_offset("sequence", "mask", 0.5, 3.0).tolist() == [0.0] * 150  # a lower bound: masked, all of it
    assert seed_offset("sequence", "mask", 0.0, 3.0, nats=0.3).tolist() == [0.0] * 150  # the other sign: masked too
    kept = seed_offset("token", "truncate", 0.0, 2.0).mean().item()
    assert kept == pytest.approx(math.exp(-0.3)) and kept > 0.7
    assert seed_offset("geometric", "mask", 0.5, 2.0).mean().item() == pytest.approx(math.exp(-0.3))


def test_the_product_ratio_underflows_no_earlier_in_float32():
    old = torch.full((150,), -1.0)
    got = rollout_weights(
        old, old + 0.3, torch.zeros(150).long(), 1, level="sequence", action="mask", low=0.0, high=3.0, veto=0.0
    )
    assert got.weights.tolist() == pytest.approx([math.exp(-45)] * 150, rel=1e-3)
    assert not got.masked.any()


@pytest.mark.parametrize("tokens", [1, 16, 256, 4096])
@pytest.mark.parametrize("nats", [0.02, -0.02])
def test_a_constant_offset_costs_the_same_at_every_length_per_token_and_geometrically(tokens, nats):
    for level in ("token", "geometric"):
        weight = seed_offset(level, "truncate", 0.0, 2.0, nats, tokens)
        assert weight.tolist() == pytest.approx([math.exp(nats)] * tokens)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], 1.0),  # all count
        ([7.0, 7.0], 1.0),  # the scale does not matter
        ([1.0, 0.0, 0.0, 0.0], 0.25),  # one in four carries everything
        ([3.0, 1.0], 0.8),  # 16 / (2 * 10)
        ([1e30, 1e30], 1.0),  # squares would overflow in float32
    ],
)
def test_effective_sample_sizes_by_hand(ratios, expected):
    assert effective_sample_size(torch.tensor(ratios)).item() == pytest.approx(expected)


@pytest.mark.parametrize("ratios", [[], [0.0, 0.0]])
def test_the_effective_sample_size_of_nothing_is_nan(ratios):
    assert effective_sample_size(torch.tensor(ratios)).isnan()


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match=r"'word'.*token, sequence, geometric"):
        weights_of([0.0], level="word", action="truncate")
    with pytest.raises(ValueError, match=r"'clip'.*truncate, mask, off"):
        weights_of([0.0], level="token", action="clip")


def test_tensors_of_different_length_raise():
    options = {"level": "token", "action": "truncate", "low": 0.0, "high": 2.0, "veto": 0.0}
    with pytest.raises(TypeCheckError):
        rollout_weights(torch.zeros(3), torch.zeros(2), torch.zeros(3).long(), 1, **options)
    with pytest.raises(TypeCheckError):
        rollout_weights(torch.zeros(3), torch.zeros(3), torch.zeros(2).long(), 1, **options)
    with pytest.raises(TypeCheckError):
        effective_sample_size(torch.zeros(2, 2))
