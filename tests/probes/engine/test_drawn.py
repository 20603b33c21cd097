"""The flat layout of drawn tokens, and cutting it."""

import torch

from leadline.probes.engine.drawn import Drawn, drawn_from
from leadline.probes.engine.scoring import seen_before
from leadline.types import Completion, FinishReason, Prompt

DRAWN = Drawn(((1,), (2, 3), (4,)), ((5, 6), (7, 8, 9), (10,)), torch.arange(6.0), ages=torch.arange(6.0))


def test_tokens_know_their_completion_and_their_place() -> None:
    assert DRAWN.owner.tolist() == [0, 0, 1, 1, 1, 2]
    assert DRAWN.positions.tolist() == [0, 1, 0, 1, 2, 0]


def test_the_first_completions_are_kept_whole() -> None:
    part = DRAWN.first(3)
    assert part.completions == DRAWN.completions[:2] and part.prompts == DRAWN.prompts[:2]
    assert part.engine.tolist() == [0, 1, 2, 3, 4]
    assert part.ages is not None and part.ages.tolist() == [0, 1, 2, 3, 4]
    assert DRAWN.first(2).completions == DRAWN.completions[:1]
    assert DRAWN.first(99).completions == DRAWN.completions


def test_shortened_completions_keep_their_first_tokens() -> None:
    part = DRAWN.shortened(2)
    assert part.completions == ((5, 6), (7, 8), (10,))
    assert part.engine.tolist() == [0, 1, 2, 3, 5]


def test_an_empty_completion_is_left_out() -> None:
    prompt = Prompt(0, "", (1,))
    empty = Completion((), (), (), FinishReason.ABORT)
    one = Completion((4,), (-0.5,), (0,), FinishReason.EOS)
    drawn = drawn_from([(prompt, empty), (prompt, one)])
    assert drawn.completions == ((4,),) and drawn.engine.tolist() == [-0.5]


def test_seen_is_the_prompt_and_what_came_before() -> None:
    seen = seen_before((1, 2), (3, 4, 5), [0, 2], 7)
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [[1, 2], [1, 2, 3, 4]]
