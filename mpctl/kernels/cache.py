"""Keys and values of earlier positions, so that text is extended without computing it again.

Incremental decoding: the keys and values of a position never change once they are computed, so a
forward pass over s new positions needs the queries of those alone, and reads the rest from here. A
rank keeps its own key-value heads, rotated already. Bytes a layer: 2 * b * (k/t) * n * d * bytes of
the dtype. By hand, Llama 3 8B (k=8, d=128, 32 layers), one text of n=8192 in bf16: 1 GiB.

Letters: b batch, k key-value heads, t tp, n capacity in positions, s new positions, d head size.
"""

from __future__ import annotations

from torch import Tensor


class KeyValueCache:
    """Room for `capacity` positions of one attention layer; memory is taken at the first use.

    length: the positions that are held.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.held: Tensor | None = None

    def extended(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add key and value [b, k/t, s, d]; those of all positions so far, [b, k/t, length, d].

        Raises ValueError where the new positions exceed the capacity.
        """
        start, stop = self.length, self.length + key.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions for a cache of {self.capacity}")
        if self.held is None:
            shape = (2, *key.shape[:-2], self.capacity, key.shape[-1])
            self.held = key.new_empty(shape)
        self.held[0, ..., start:stop, :] = key
        self.held[1, ..., start:stop, :] = value
        self.length = stop
        return self.held[0, ..., :stop, :], self.held[1, ..., :stop, :]


class ContextCache:
    """Keys and values of an encoder's result in one cross-attention layer, computed once: 2 of
    [b, a/t, s, d], None before the first use."""

    def __init__(self) -> None:
        self.held: tuple[Tensor, Tensor] | None = None
