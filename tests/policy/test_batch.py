import math
from collections.abc import Sequence

import pytest

from leadline.policy.batch import Span, build_batch, micro_batches, minibatches, pack
from leadline.types import Completion, FinishReason, Group, Prompt, Rollout
from tests.builders import NAN, group, groups, rollout, settings

EMPTY = Completion((), (), (), FinishReason.EOS)


def two_groups() -> list[Group]:
    """The example of `Batch`: completions of 3, 0, 2 and 4 tokens."""
    first = Group(Prompt(0, "", (1, 2)), [rollout(1.0, 3, 1), Rollout(EMPTY, text="", reward=0.0)])
    second = Group(Prompt(1, "", (3, 4, 5)), [rollout(0.0, 2, 2), rollout(2.0, 4, 3)])
    return [first, second]


def with_rewards(*rewards: float) -> list[Group]:
    return [group(rewards, [3] * len(rewards))]


def test_a_batch_is_flat_and_says_to_whom_each_token_belongs() -> None:
    batch = build_batch(two_groups(), settings(), 0)
    assert batch.completion_of_token.tolist() == [0, 0, 0, 2, 2, 3, 3, 3, 3]
    assert batch.group_of_completion.tolist() == [0, 0, 1, 1]
    assert batch.lengths.tolist() == [3, 0, 2, 4]
    expected = [t for g in two_groups() for r in g.rollouts for t in r.completion.token_ids]
    assert batch.token_ids.tolist() == expected
    assert [p.tolist() for p in batch.prompt_ids] == [[1, 2], [3, 4, 5]]


def test_staleness_is_the_version_of_the_step_less_that_of_the_token() -> None:
    mixed = Completion((7, 8, 9), (-1.0,) * 3, (3, 4, 5), FinishReason.EOS)
    batch = build_batch(
        [Group(Prompt(0, "", (1,)), [Rollout(mixed, "", reward=1.0), rollout(0.0, 1, 0)])], settings(), 5
    )
    assert batch.staleness.tolist() == [2, 1, 0, 5]


def test_tokens_of_gives_the_tokens_of_completions_in_the_order_asked_for() -> None:
    batch = build_batch(two_groups(), settings(), 0)
    assert batch.tokens_of([3, 1, 0]).tolist() == [5, 6, 7, 8, 0, 1, 2]
    assert batch.tokens_of([]).tolist() == []


@pytest.mark.parametrize("reward", [NAN, math.inf, -math.inf, 1e39])
def test_a_rollout_without_a_finite_reward_is_failed_and_outside_the_loss(reward: float) -> None:
    # 1e39 is infinite in float32, in which rewards are kept.
    batch = build_batch(with_rewards(0.0, reward, 1.0), settings(), 0)
    assert batch.lost_at == (None, "failed", None)
    assert batch.advantages.isfinite().all()
    assert batch.advantages[1] == 0
    assert batch.loss_mask.tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert batch.forwarded == (0, 2)


def test_the_only_finite_reward_of_a_group_has_nothing_to_be_compared_with() -> None:
    batch = build_batch(with_rewards(NAN, 3.0, NAN), settings(), 0)
    assert batch.lost_at == ("failed", "no_signal", "failed")
    assert batch.forwarded == ()


def test_all_rewards_missing_leaves_nothing_in_the_loss() -> None:
    batch = build_batch(with_rewards(NAN, NAN), settings(), 0)
    assert batch.lost_at == ("failed", "failed")
    assert not batch.loss_mask.any()
    assert batch.num_loss_completions == 0


def test_a_zero_advantage_is_in_the_loss_but_not_forwarded() -> None:
    # 0.5 is the mean of its group: no gradient, but one of the tokens that the loss is a mean of.
    batch = build_batch(with_rewards(0.0, 0.5, 1.0), settings(), 0)
    assert batch.lost_at == (None, "no_signal", None)
    assert batch.loss_mask.all()
    assert batch.num_loss_completions == 3
    assert batch.forwarded == (0, 2)


@pytest.mark.parametrize("objective", [{"beta": 0.1}, {"entropy_bonus": 0.1}])
def test_a_term_without_advantage_forwards_completions_without_signal(objective: dict[str, float]) -> None:
    batch = build_batch(with_rewards(0.0, 0.5, 1.0), settings(objective=objective), 0)
    assert batch.forwarded == (0, 1, 2)


def test_a_replaced_group_is_neither_in_the_loss_nor_forwarded() -> None:
    drawn = [group((1.0, 1.0), (2, 3), 1), *groups()]
    batch = build_batch(drawn, settings(objective={"beta": 0.1}), 0, replaced=frozenset({0}))
    assert batch.loss_mask[: 2 + 3].sum() == 0
    assert batch.loss_mask[2 + 3 :].all()
    assert 0 not in batch.forwarded


@pytest.mark.parametrize(
    ("finish", "trained"),
    [
        (FinishReason.LENGTH, False),
        (FinishReason.EOS, True),  # exactly at the limit of 16 tokens, and still a normal end
        (FinishReason.STOP, True),
    ],
)
def test_only_the_engines_word_makes_a_completion_truncated(finish: FinishReason, trained: bool) -> None:
    rollouts = [rollout(1.0, 16, 1, finish), rollout(0.0, 2, 2)]
    batch = build_batch([Group(Prompt(0, "", (1,)), rollouts)], settings(objective={"mask_truncated": True}), 0)
    assert batch.lost_at == (None if trained else "truncated", None)
    assert batch.loss_mask.tolist() == [trained] * 16 + [True] * 2
    assert (0 in batch.forwarded) is trained


def test_truncated_completions_train_unless_they_are_masked() -> None:
    rollouts = [rollout(1.0, 16, 1, FinishReason.LENGTH), rollout(0.0, 2, 2)]
    batch = build_batch([Group(Prompt(0, "", (1,)), rollouts)], settings(), 0)
    assert batch.lost_at == (None, None)


@pytest.mark.parametrize(("on_unscored", "trained"), [("on_policy", True), ("drop", False)])
def test_unscored_tokens_are_dropped_only_if_asked_for(on_unscored: str, trained: bool) -> None:
    scored = Completion((1, 2, 3), (-1.0, NAN, -1.0), (0, 0, 0), FinishReason.EOS)
    unscored = Completion((4,), (NAN,), (0,), FinishReason.EOS)
    made = [Group(Prompt(0, "", (1,)), [Rollout(scored, "", reward=0.0), Rollout(unscored, "", reward=1.0)])]
    batch = build_batch(made, settings(objective={"on_unscored": on_unscored}), 0)
    assert batch.rollout_logprobs.isnan().tolist() == [False, True, False, True]
    assert batch.loss_mask.tolist() == [True, trained, True, trained]
    assert batch.forwarded == ((0, 1) if trained else (0,))


def test_a_row_holds_each_completion_behind_its_prompt_without_its_last_token() -> None:
    batch = build_batch(two_groups(), settings(), 0)
    row = pack(batch, [2, 0])
    first, second = batch.token_ids[3:5].tolist(), batch.token_ids[0:3].tolist()
    assert row.input_ids.tolist() == [[3, 4, 5, first[0], 1, 2, second[0], second[1]]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert row.predicts.tolist() == [2, 3, 5, 6, 7]
    assert row.token_ids.tolist() == first + second
    assert [piece.tolist() for piece in row.pieces()] == [first, second]


def test_the_completions_of_a_group_stand_behind_one_copy_of_their_prompt() -> None:
    batch = build_batch(two_groups(), settings(), 0)
    row = pack(batch, [0, 2, 3])
    alone, first, second = (batch.token_ids[a:b].tolist() for a, b in ((0, 3), (3, 5), (5, 9)))
    assert row.input_ids.tolist() == [[1, 2, *alone[:-1], 3, 4, 5, *first[:-1], *second[:-1]]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 3, 4, 5]]
    assert row.predicts.tolist() == [1, 2, 3, 6, 7, 6, 8, 9, 10]  # the prompt's last token predicts both first tokens
    assert row.spans == (Span((0, 2), ((2, 4),)), Span((4, 7), ((7, 8), (8, 11))))
    assert row.token_ids.tolist() == alone + first + second


def test_a_row_may_hold_a_completion_without_tokens() -> None:
    batch = build_batch(two_groups(), settings(), 0)
    row = pack(batch, [1, 2])
    assert row.lengths == [0, 2]
    assert row.predicts.tolist() == [2 + 2, 2 + 3]


def test_micro_batches_hold_at_most_so_many_tokens_each_groups_prompt_counted_once() -> None:
    batch = build_batch(groups(), settings(), 0)
    lengths = batch.lengths.tolist()

    def cost(micro: Sequence[int]) -> int:
        prompts = {int(batch.group_of_completion[c]) for c in micro}
        return sum(len(batch.prompt_ids[g]) for g in prompts) + sum(lengths[c] for c in micro)

    for limit in (19, 22, 30, 45, 1000):
        micros = list(micro_batches(batch, batch.forwarded, limit))
        assert sorted(c for micro in micros for c in micro) == list(batch.forwarded)
        assert all(cost(micro) <= limit for micro in micros)


def test_a_group_that_fits_is_whole_and_micro_batches_are_of_about_equal_size() -> None:
    # Groups of 21, 21, 24 and 26 tokens with their prompts. Filled up one after the other they would be 21 + 21, 24 and 26.
    drawn = [group((0.0, 1.0, 0.3), (5, 5, 5), 1), group((0.0, 1.0, 0.3), (5, 5, 4), 2), *groups()[2:]]
    batch = build_batch(drawn, settings(), 0)
    micros = list(micro_batches(batch, batch.forwarded, 48))
    assert len(micros) == 2
    sizes = []
    for micro in micros:
        owners = {int(batch.group_of_completion[c]) for c in micro}
        members = [c for c in range(batch.num_completions) if int(batch.group_of_completion[c]) in owners]
        assert list(micro) == members
        sizes.append(sum(len(batch.prompt_ids[g]) for g in owners) + int(batch.lengths[members].sum()))
    assert max(sizes) - min(sizes) <= 5


def test_a_completion_longer_than_a_micro_batch_has_one_of_its_own() -> None:
    batch = build_batch(groups(), settings(), 0)
    assert list(micro_batches(batch, [0, 1, 2], 1)) == [(0,), (1,), (2,)]


def test_minibatches_share_out_the_groups_and_every_loss_token_once() -> None:
    batch = build_batch(groups(), settings(), 0)
    parts = list(minibatches(batch, 2))
    assert [{int(batch.group_of_completion[c]) for c in part.forwarded} for part in parts] == [{0, 1}, {2, 3}]
    assert sum(part.num_loss_tokens for part in parts) == int(batch.loss_mask.sum())
    assert tuple(c for part in parts for c in part.forwarded) == batch.forwarded


def test_minibatches_share_out_the_groups_that_are_in_the_loss() -> None:
    # Two barren groups were replaced by two later draws: two optimizer steps still see two groups each.
    drawn = [group((1.0, 1.0), (2, 3), 8), group((NAN, NAN), (2, 3), 9), *groups()]
    batch = build_batch(drawn, settings(), 0, replaced=frozenset({0, 1}))
    parts = list(minibatches(batch, 2))
    assert [{int(batch.group_of_completion[c]) for c in part.forwarded} for part in parts] == [{2, 3}, {4, 5}]
    assert sum(part.num_loss_tokens for part in parts) == int(batch.loss_mask.sum())


def test_minibatches_of_a_batch_with_nothing_in_the_loss_are_empty() -> None:
    batch = build_batch(with_rewards(NAN, NAN), settings(), 0)
    assert [(part.forwarded, part.num_loss_tokens) for part in minibatches(batch, 2)] == [((), 0), ((), 0)]
