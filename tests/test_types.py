import dataclasses
import math

import pytest

from leadline.types import Completion, FinishReason, Group, Prompt, Rollout


def completion(*versions: int, reason: FinishReason = FinishReason.EOS) -> Completion:
    return Completion((7,) * len(versions), (-0.5,) * len(versions), versions, reason)


@pytest.mark.parametrize(
    ("ids", "logprobs", "versions"), [((1, 2), (-0.5,), (0, 0)), ((1,), (-0.5, -0.5), (0,)), ((1,), (-0.5,), ())]
)
def test_a_completion_has_one_logprob_and_one_version_for_each_token(
    ids: tuple[int, ...], logprobs: tuple[float, ...], versions: tuple[int, ...]
) -> None:
    with pytest.raises(AssertionError, match=f"{len(ids)} tokens, {len(logprobs)} logprobs, {len(versions)} versions"):
        Completion(ids, logprobs, versions, FinishReason.EOS)


def test_only_the_token_limit_is_truncation() -> None:
    truncated = [reason for reason in FinishReason if completion(0, reason=reason).truncated]
    assert truncated == [FinishReason.LENGTH]


def test_a_finish_reason_is_written_as_a_plain_word() -> None:
    assert f"rollout/finish_{FinishReason.STOP}_fraction" == "rollout/finish_stop_fraction"


def test_a_rollout_has_no_reward_until_it_is_given_one() -> None:
    rollout = Rollout(completion(0), "x")
    assert math.isnan(rollout.reward) and rollout.rewards == {} and rollout.error is None


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = Group(Prompt(0, "", (1,)), [Rollout(completion(4, 5), ""), Rollout(completion(5, 3, 5), "")])
    assert group.policy_version == 3


def test_a_group_without_tokens_has_no_version() -> None:
    assert Group(Prompt(0, "", (1,)), [Rollout(completion(), "")]).policy_version is None


@pytest.mark.parametrize("noun", [Prompt(0, "", (1,)), completion(0), Rollout(completion(0), ""), Group(None, [])])  # type: ignore[arg-type]
def test_nouns_cannot_be_changed(noun: object) -> None:
    name = dataclasses.fields(noun)[0].name  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(noun, name, None)
