import pytest
import torch

from leadline.objective.chunks import Seen

CONTEXTS = [([3, 5], [5, 1, 0, 1]), ([], [2, 2]), ([6, 6], []), ([0], [6])]
"""Prompt and completion; the vocabulary is 0 to 6."""
VOCABULARY = 7


def expected() -> list[list[bool]]:
    """By token, which entries its prompt and the completion before it hold."""
    return [
        [entry in (*prompt, *completion[:place]) for entry in range(VOCABULARY)]
        for prompt, completion in CONTEXTS
        for place in range(len(completion))
    ]


@pytest.mark.parametrize("tokens", [slice(0, 7), slice(2, 5), slice(4, 4), slice(6, 7)], ids=str)
@pytest.mark.parametrize("entries", [slice(0, 7), slice(1, 4), slice(6, 7)], ids=str)
def test_a_token_sees_its_prompt_and_the_completion_before_it(tokens: slice, entries: slice) -> None:
    seen = Seen.in_contexts(CONTEXTS)
    block = seen.block(tokens, entries)
    assert block.tolist() == [row[entries] for row in expected()[tokens]]
    token, entry = seen.places(tokens, entries)
    assert sorted(zip(token.tolist(), entry.tolist(), strict=True)) == [tuple(at) for at in block.nonzero().tolist()]


def test_without_tokens_nothing_is_seen() -> None:
    seen = Seen.in_contexts([])
    assert seen.block(slice(0, 0), slice(0, 7)).shape == (0, 7)
    assert torch.equal(torch.cat(seen.places(slice(0, 0), slice(0, 7))), torch.tensor([], dtype=torch.int64))
