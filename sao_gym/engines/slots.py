"""Keys and values of the requests in flight: one row per request, one pair of tensors per layer.

The unmodified transformers model gets a `SlotWindow` where it expects a cache: it writes the new keys and values of
the fed tokens into their rows and hands back the rows' whole history. Rows 0..n-1 are the active ones, so that a
decoding step reads a view and copies nothing. Memory grows by doubling, up to `max_rows` x `context_length`.

Invariant: what a row holds beyond its own length is finite and masked; it never reaches a result.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST_LENGTH = 128
FIRST_ROWS = 4


@dataclass(frozen=True, slots=True)
class Prefix:
    """A row's keys and values taken out of the store, one pair [length, heads, dim] per layer."""

    layers: tuple[tuple[Tensor, Tensor], ...]


class SlotStore:
    """The tensors [rows, length, heads, dim] of every layer, made when the model first writes to them."""

    def __init__(self, max_rows: int, context_length: int) -> None:
        self.max_rows = max_rows
        self.context_length = context_length
        self._rows = 0
        self._length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def size_bytes(self) -> int:
        """Memory that the store holds now."""
        return sum(k.nbytes + v.nbytes for k, v in self._layers.values())

    @property
    def row_length(self) -> int:
        """Tokens that there is room for in each row."""
        return self._length

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens."""
        if rows <= self._rows and length <= self._length:
            return
        self._rows = _grown(self._rows or FIRST_ROWS, rows, self.max_rows)
        self._length = _grown(self._length or FIRST_LENGTH, length, self.context_length)
        self._layers = {layer: (self._wider(k), self._wider(v)) for layer, (k, v) in self._layers.items()}

    def _wider(self, old: Tensor) -> Tensor:
        new = self._zeros(old, old.shape[2])
        new[: old.shape[0], : old.shape[1]] = old
        return new

    def _zeros(self, like: Tensor, heads: int) -> Tensor:
        # zeros, not empty: a masked key still takes part as 0 x value, and 0 x NaN is NaN
        shape = (self._rows, self._length, heads, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a layer, shaped after the first keys and values [*, heads, *, dim] that it wrote."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(keys, keys.shape[1]), self._zeros(values, values.shape[1]))
        return self._layers[index]

    def take(self, row: int, length: int) -> Prefix:
        """A copy of the first `length` tokens of a row."""
        pairs = (self._layers[index] for index in sorted(self._layers))
        return Prefix(tuple((k[row, :length].clone(), v[row, :length].clone()) for k, v in pairs))

    def put(self, row: int, prefix: Prefix, length: int) -> None:
        """Write the first `length` tokens of a prefix into a row."""
        for (k, v), index in zip(prefix.layers, sorted(self._layers), strict=True):
            self._layers[index][0][row, :length] = k[:length]
            self._layers[index][1][row, :length] = v[:length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one row over another row."""
        for pair in self._layers.values():
            for tensor in pair:
                tensor[target, :length] = tensor[source, :length]


def _grown(current: int, wanted: int, limit: int) -> int:
    while current < wanted:
        current *= 2
    return min(current, limit)


class SlotWindow:
    """What the model takes for its cache during one forward pass over some rows.

    positions [M, Q] of the fed tokens; valid [M, Q], False at left padding, or None if there is none; `length` is
    the longest history of these rows, the fed tokens included.
    """

    is_compileable = False
    is_sliding = (False,)

    def __init__(
        self, store: SlotStore, rows: Sequence[int], positions: Tensor, valid: Tensor | None, length: int
    ) -> None:
        self._store = store
        self._valid = valid
        self._length = length
        self._rows = torch.tensor(rows, device=positions.device)
        self._is_run = list(rows) == list(range(rows[0], rows[0] + len(rows)))
        self._span = slice(rows[0], rows[0] + len(rows))
        places = self._rows[:, None] * store.row_length + positions
        self._places = places.flatten() if valid is None else places[valid]

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [M, heads, Q, dim]; return those of the whole history [M, heads, length, dim]."""
        stored = self._store.layer(layer_idx, keys, values)
        return self._write(stored[0], keys), self._write(stored[1], values)

    def _write(self, stored: Tensor, new: Tensor) -> Tensor:
        tokens = new.transpose(1, 2)
        flat = tokens.flatten(0, 1) if self._valid is None else tokens[self._valid]
        stored.flatten(0, 1).index_copy_(0, self._places, flat)
        rows = stored[self._span] if self._is_run else stored.index_select(0, self._rows)
        return rows[:, : self._length].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen before this pass; masks and positions are explicit, so that it is only asked for out of habit."""
        return self._length - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """As `get_seq_length`."""
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(length, offset) of the keys."""
        return self._length, 0
