"""Rows come and go, and those of a group stay together; what the cache is for is tested with the engine."""

import random
from itertools import groupby

import pytest
import torch

from leadline.engines.hf_cache import RowCache
from leadline.engines.hf_prompts import Group, PromptCache


def prefilled(mark: float, length: int) -> PromptCache:
    """The cache of a prompt whose keys are all `mark`, and its values -`mark`."""
    cache = PromptCache()
    for index in range(2):
        cache.update(torch.full((1, 2, length, 4), mark), torch.full((1, 2, length, 4), -mark), index)
    return cache


@pytest.mark.parametrize("seed", range(5))
def test_rows_leave_in_any_order_and_groups_stay_together_with_what_is_theirs(seed: int) -> None:
    draws, cache, rows = random.Random(seed), RowCache(), []
    for mark in range(1, 40):
        count, length, shared = draws.randint(1, 4), draws.randint(1, 9), draws.random() < 0.5
        prompt = prefilled(mark, length)
        group = Group(count, 0, length, prompt.layers) if shared else Group(count, length)
        cache.admit([(prompt, group)], longest=6)
        rows += [mark] * count
        for _ in range(draws.randint(1, 3)):
            mask = cache.extend()
            new = torch.tensor(rows, dtype=torch.float32)[:, None, None, None].expand(-1, 2, 1, 4)
            for index in range(2):
                keys, values = cache.cache.update(new, -new, index)
            assert_own(keys, values, mask, rows, cache)
        while len(rows) > 6:
            leaving = draws.randrange(len(rows))
            for source, target in cache.remove(leaving):
                rows[target] = rows[source]
            rows.pop()
        assert [mark for mark, _ in groupby(rows)] == list(dict.fromkeys(rows))
        assert [len(list(own)) for _, own in groupby(rows)] == [group.rows for group in cache.groups]


def assert_own(
    keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, rows: list[int], cache: RowCache
) -> None:
    """Each row shows the mask its own tokens, as many as its group has, and nothing else."""
    own = [group.own for group in cache.groups for _ in range(group.rows)]
    if mask is None:
        mask = torch.ones(len(rows), keys.shape[2])
    assert mask.sum(1).tolist() == own
    for row, mark in enumerate(rows):
        assert (keys[row, :, mask[row].bool()] == mark).all()
        assert (values[row, :, mask[row].bool()] == -mark).all()
