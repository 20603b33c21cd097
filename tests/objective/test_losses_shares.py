import math

import pytest
import reference
import torch
from jaxtyping import TypeCheckError

from leadline.objective.losses import entropy_threshold, high_entropy_mask, token_shares

NAN = math.nan

# Shares. Completion 0 has 3 tokens of which 2 are in the loss, 1 none at all, 2 one, 3 two that are both masked.
MASK = torch.tensor([True, False, True, True, False, False])
OF = torch.tensor([0, 0, 0, 2, 3, 3])
COUNTS = {"num_loss_tokens": 3, "num_loss_completions": 2, "max_tokens": 10}


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),  # long completions count more
        ("minibatch_token_mean", [1 / 3, 0, 1 / 3, 1 / 3, 0, 0]),
        ("sequence_mean", [1 / 4, 0, 1 / 4, 1 / 2, 0, 0]),  # every completion counts the same
        ("constant", [1 / 20, 0, 1 / 20, 1 / 20, 0, 0]),  # no length in the denominator: Dr. GRPO
    ],
)
def test_shares_by_hand(aggregation, expected):
    shares = token_shares(aggregation, MASK, OF, 4, **COUNTS)
    assert shares.tolist() == pytest.approx(expected)
    assert shares.tolist() == pytest.approx(reference.token_shares(aggregation, MASK.tolist(), OF.tolist(), 10))


@pytest.mark.parametrize("aggregation", ["token_mean", "minibatch_token_mean", "sequence_mean"])
def test_the_shares_of_a_mean_add_up_to_1(aggregation):
    completion_of_token = torch.tensor([0, 0, 0, 0, 1, 3, 3, 3, 3, 3])
    mask = torch.tensor([True, True, False, True, False, True, True, True, True, False])
    counts = {
        "num_loss_tokens": int(mask.sum()),
        "num_loss_completions": len(completion_of_token[mask].unique()),
        "max_tokens": 99,
    }
    shares = token_shares(aggregation, mask, completion_of_token, 4, **counts)
    assert shares.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "minibatch_token_mean"])
def test_shares_do_not_depend_on_the_micro_batch(aggregation):
    whole = token_shares(aggregation, MASK, OF, 4, **COUNTS)
    first = token_shares(aggregation, MASK[:3], OF[:3], 1, **COUNTS)
    second = token_shares(aggregation, MASK[3:], OF[3:] - 2, 2, **COUNTS)
    assert torch.cat([first, second]).equal(whole)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant", "minibatch_token_mean"])
def test_a_step_without_loss_tokens_has_no_shares_and_a_false_count_raises(aggregation):
    none = {"num_loss_tokens": 0, "num_loss_completions": 0, "max_tokens": 10}
    assert token_shares(aggregation, torch.zeros(6, dtype=torch.bool), OF, 4, **none).tolist() == [0.0] * 6
    with pytest.raises(ValueError, match=r"0 loss tokens"):
        token_shares(aggregation, MASK, OF, 4, **none)


def test_an_unknown_aggregation_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'mean'.*token_mean, minibatch_token_mean, sequence_mean, constant"):
        token_shares("mean", MASK, OF, 4, **COUNTS)


ENTROPIES = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6, 1.0])
ALL = torch.ones(10, dtype=torch.bool)


@pytest.mark.parametrize(
    ("quantile", "kept"),
    [
        (0.0, 10),  # everything
        (0.8, 2),  # the top fifth
        (0.5, 5),
        (1.0, 1),  # exactly the highest
    ],
)
def test_a_quantile_keeps_the_share_above_it(quantile, kept):
    mask = high_entropy_mask(ENTROPIES, ALL, entropy_threshold(ENTROPIES, ALL, quantile).item())
    assert mask.tolist() == [e > 1.05 - kept / 10 for e in ENTROPIES.tolist()]
    assert mask.sum() == kept


def test_the_quantile_is_taken_over_loss_tokens_only_and_selects_only_them():
    # five loss tokens with 0.1 .. 0.5; the masked ones have more entropy than all of them, or NaN
    loss_mask = torch.tensor([True] * 5 + [False] * 3)
    entropies = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 9.0, 8.0, NAN])
    threshold = entropy_threshold(entropies, loss_mask, 0.8).item()
    assert threshold == pytest.approx(0.5)
    assert high_entropy_mask(entropies, loss_mask, threshold).tolist() == [False] * 4 + [True] + [False] * 3


def test_without_loss_tokens_nothing_is_selected():
    none = torch.zeros(10, dtype=torch.bool)
    for quantile in (0.0, 0.8):
        threshold = entropy_threshold(ENTROPIES, none, quantile).item()
        assert math.isnan(threshold)
        assert not high_entropy_mask(ENTROPIES, none, threshold).any()


def test_equal_entropies_all_stay():
    flat = torch.full((6,), 0.25)
    mask = torch.ones(6, dtype=torch.bool)
    assert high_entropy_mask(flat, mask, entropy_threshold(flat, mask, 0.8).item()).all()


def test_a_nan_entropy_is_not_dropped_out_of_sight():
    entropies = torch.tensor([0.1, NAN, 0.3])
    mask = torch.ones(3, dtype=torch.bool)
    assert high_entropy_mask(entropies, mask, entropy_threshold(entropies, mask, 0.8).item())[1]
    assert high_entropy_mask(entropies, mask, 0.2).tolist() == [False, True, True]
    assert high_entropy_mask(entropies, mask, -math.inf).all()  # no quantile set


def test_shares_and_entropies_of_another_length_raise():
    with pytest.raises(TypeCheckError):
        token_shares("constant", MASK, OF[:5], 4, **COUNTS)
    with pytest.raises(TypeCheckError):
        entropy_threshold(ENTROPIES, ALL[:9], 0.5)
    with pytest.raises(TypeCheckError):
        high_entropy_mask(ENTROPIES, ALL[:9], 0.5)
