"""Keys and values of the completions in flight, in storage that grows in place."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from leadline.engines.hf_prompts import Group, MarkedLayer, PromptCache

ROOM = 1024
"""Most columns added at once: longer completions than this cost a copy of everything every so many tokens."""


class RowLayer(MarkedLayer):
    """One layer: `keys` and `values` [row, head, column, dim] are views of the part of the storage that is in use."""

    def __init__(self, keys: Tensor, values: Tensor, index: int, groups: Sequence[Group]) -> None:
        """An empty layer for tensors like these [1, head, column, dim], of rows in `groups`."""
        super().__init__()
        self.index = index
        self.groups = groups
        self.prompts_read = False
        """Whether the newest token has attended to the prompts that are shared."""
        self.lazy_initialization(keys, values)
        self.stored = tuple(x.new_zeros(0, x.shape[1], 0, x.shape[3]) for x in (keys, values))
        self.show(0, 0)

    def show(self, rows: int, columns: int) -> None:
        self.keys, self.values = (x[:rows, :, :columns] for x in self.stored)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Called by the attention: the keys and values of the new token go into the next column."""
        self.show(keys.shape[0], self.keys.shape[2] + keys.shape[2])
        self.keys[:, :, -keys.shape[2] :] = keys
        self.values[:, :, -values.shape[2] :] = values
        self.prompts_read = False
        return self.marked(self.keys), self.values

    def shares_prompts(self) -> bool:
        return any(group.prompt for group in self.groups)

    def resize(self, rows: int, columns: int, used: int, capacity: int) -> None:
        """Storage for `rows` x `capacity`; the newest `used` columns of what is there end at column `columns`."""
        old = (self.keys[:, :, self.keys.shape[2] - used :], self.values[:, :, self.values.shape[2] - used :])
        # Zeros, not empty: a masked column has weight 0, but 0 times NaN is NaN.
        self.stored = tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in old)
        for new, x in zip(self.stored, old, strict=True):
            new[: x.shape[0], :, columns - used : columns] = x

    def put(self, keys: Tensor, values: Tensor, rows: slice, columns: int) -> None:
        """Keys and values of one prompt [1, head, column, dim], for each of `rows`, ending at column `columns`."""
        for stored, x in zip(self.stored, (keys, values), strict=True):
            stored[rows, :, columns - x.shape[2] : columns] = x

    def move(self, source: int, target: int) -> None:
        for x in self.stored:
            x[target] = x[source]


class RowCache:
    """The cache of all rows, group after group. Rows are right-aligned: the last column is the newest token of every row.

    Queries attend to the columns of their own row by the mask; keys carry their rotary position, so where a token is
    stored does not matter, only the distance between columns does (sliding windows), and that is the true one.
    """

    def __init__(self) -> None:
        self.cache = Cache(layers=[])
        self.groups: list[Group] = []
        self._columns = 0
        self._capacity = 0
        self._room = 1
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, its prompt among them."""
        return [group.length for group in self.groups for _ in range(group.rows)]

    def admit(self, prompts: Sequence[tuple[PromptCache, Group]], longest: int) -> None:
        """New groups at the end, each with the cache of its prompt, which is copied to the rows unless it is shared.

        They grow by at most `longest` tokens, for which there is room at once. Rows that left have made room already:
        then nothing is copied but the prompts.
        """
        if not self.cache.layers:
            layers = enumerate(prompts[0][0].layers)
            self.cache.layers.extend(RowLayer(x.keys, x.values, i, self.groups) for i, x in layers)
        self._room = min(ROOM, max(self._room, longest))
        rows = self._rows() + sum(group.rows for _, group in prompts)
        columns = max(group.own for group in [*self.groups, *(group for _, group in prompts)])
        fits = columns <= self._columns and self._columns + min(ROOM, longest) <= self._capacity
        if rows > len(self._mask) or not fits:
            self._resize(max(rows, len(self._mask)), columns)
        for cache, group in prompts:
            self._put(cache, group)
        self._show()

    def _put(self, cache: PromptCache, group: Group) -> None:
        columns, old = self._columns, self._rows()
        new = slice(old, old + group.rows)
        if group.own:
            for layer, x in zip(self.cache.layers, cache.layers, strict=True):
                layer.put(x.keys, x.values, new, columns)
        self._mask[new] = 0
        self._mask[new, columns - group.own : columns] = 1
        self.groups.append(group)

    def extend(self) -> Tensor | None:
        """Room for one more token in every row. The attention mask [row, column] with that token; None = no padding."""
        if self._columns == self._capacity:
            self._resize(self._rows(), max(group.own for group in self.groups))
            self._show()
        self._columns += 1
        rows = self._rows()
        self._mask[:rows, self._columns - 1] = 1
        for group in self.groups:
            group.own += 1
        padded = min(group.own for group in self.groups) < self._columns
        return self._mask[:rows, : self._columns] if padded else None

    def remove(self, row: int) -> list[tuple[int, int]]:
        """`row` leaves. What moves, (source, target) in order: the last row of its group and of each later one.

        So the rows of a group stay together, at the price of one move a group.
        """
        stops = list(accumulate(group.rows for group in self.groups))
        mine = bisect_right(stops, row)
        places = [row, *(stop - 1 for stop in stops[mine:])]
        moves = [(source, target) for target, source in pairwise(places) if source != target]
        for source, target in moves:
            self._mask[target] = self._mask[source]
            for layer in self.cache.layers:
                layer.move(source, target)
        self.groups[mine].rows -= 1
        if not self.groups[mine].rows:
            del self.groups[mine]  # and its prompt, if that was shared
        self._show()
        return moves

    def prompts_read(self) -> bool:
        """Whether the newest token has attended in each layer to the prompts that are shared, if any are."""
        return all(layer.prompts_read or not layer.shares_prompts() for layer in self.cache.layers)

    def _resize(self, rows: int, columns: int) -> None:
        """New storage for `rows` rows with room for more columns; columns that no row uses any more are gone."""
        used, old = max((group.own for group in self.groups), default=0), self._rows()
        self._capacity = columns + self._room
        mask = torch.zeros(rows, self._capacity, dtype=torch.long, device=self.cache.layers[0].keys.device)
        mask[:old, columns - used : columns] = self._mask[:old, self._columns - used : self._columns]
        for layer in self.cache.layers:
            layer.resize(rows, columns, used, self._capacity)
        self._mask, self._columns = mask, columns

    def _rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def _show(self) -> None:
        for layer in self.cache.layers:
            layer.show(self._rows(), self._columns)
