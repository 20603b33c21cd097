import torch

from leadline.objective.chunks import Seen


def test_the_place_of_an_entry_says_who_sees_it() -> None:
    # Prompt 5, completion 7 5 7 8: the second token sees 5 and 7, the first only 5, none sees 8.
    first = torch.full((1, 9), 4)
    first[0, 5], first[0, 7], first[0, 8] = -1, 0, 3
    seen = Seen(first, torch.zeros(4, dtype=torch.long), torch.arange(4))
    assert [row.nonzero().flatten().tolist() for row in seen.block(slice(None), slice(None))] == [
        [5],
        [5, 7],
        [5, 7],
        [5, 7],
    ]
    assert seen.block(torch.tensor([1]), slice(6, 9)).tolist() == [[False, True, False]]
