"""Keys and values of the completions in flight, in storage that grows in place."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

ROOM = 1024
"""Most columns added at once: longer completions than this cost a copy of everything every so many tokens."""


class RowLayer(DynamicLayer):  # type: ignore[misc]
    """One layer: `keys` and `values` [row, head, column, dim] are views of the part of the storage that is in use."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """An empty layer for tensors like these [1, head, column, dim]."""
        super().__init__()
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
        return self.keys, self.values

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
    """The cache of all rows. Rows are right-aligned: the last column is the newest token of every row.

    Queries attend to the columns of their own row by the mask; keys carry their rotary position, so where a token is
    stored does not matter, only the distance between columns does (sliding windows), and that is the true one.
    """

    def __init__(self) -> None:
        self.cache = Cache(layers=[])
        self.lengths: list[int] = []
        """Tokens stored of each row."""
        self._columns = 0
        self._capacity = 0
        self._room = 1
        self._mask = torch.zeros(0, 0, dtype=torch.long)

    def admit(self, prompts: Sequence[tuple[DynamicCache, int, int]], longest: int) -> None:
        """New rows at the end: for each (cache of one prompt, its length, n), `n` rows that start with that prompt.

        They grow by at most `longest` tokens, for which there is room at once. Rows that left have made room already:
        then nothing is copied but the prompts.
        """
        if not self.cache.layers:
            self.cache.layers.extend(RowLayer(x.keys, x.values) for x in prompts[0][0].layers)
        self._room = min(ROOM, max(self._room, longest))
        rows = len(self.lengths) + sum(n for _, _, n in prompts)
        columns = max([*self.lengths, *(length for _, length, _ in prompts)])
        fits = columns <= self._columns and self._columns + min(ROOM, longest) <= self._capacity
        if rows > len(self._mask) or not fits:
            self._resize(max(rows, len(self._mask)), columns)
        columns = self._columns
        for cache, length, n in prompts:
            new = slice(len(self.lengths), len(self.lengths) + n)
            for layer, x in zip(self.cache.layers, cache.layers, strict=True):
                layer.put(x.keys, x.values, new, columns)
            self._mask[new] = 0
            self._mask[new, columns - length : columns] = 1
            self.lengths += [length] * n
        self._show()

    def extend(self) -> Tensor | None:
        """Room for one more token in every row. The attention mask [row, column] with that token; None = no padding."""
        if self._columns == self._capacity:
            self._resize(len(self.lengths), max(self.lengths))
            self._show()
        self._columns += 1
        self._mask[: len(self.lengths), self._columns - 1] = 1
        self.lengths = [length + 1 for length in self.lengths]
        padded = min(self.lengths) < self._columns
        return self._mask[: len(self.lengths), : self._columns] if padded else None

    def remove(self, row: int) -> None:
        """The last row takes the place of `row`."""
        last = len(self.lengths) - 1
        if row != last:
            for layer in self.cache.layers:
                layer.move(last, row)
            self._mask[row] = self._mask[last]
        self.lengths[row] = self.lengths[last]
        self.lengths.pop()
        self._show()

    def _resize(self, rows: int, columns: int) -> None:
        """New storage for `rows` rows with room for more columns; columns that no row uses any more are gone."""
        used, old = max(self.lengths, default=0), len(self.lengths)
        self._capacity = columns + self._room
        mask = torch.zeros(rows, self._capacity, dtype=torch.long, device=self.cache.layers[0].keys.device)
        mask[:old, columns - used : columns] = self._mask[:old, self._columns - used : self._columns]
        for layer in self.cache.layers:
            layer.resize(rows, columns, used, self._capacity)
        self._mask, self._columns = mask, columns

    def _show(self) -> None:
        for layer in self.cache.layers:
            layer.show(len(self.lengths), self._columns)
