"""Keys and values of earlier positions, so that text is extended without computing it again.

Incremental decoding: the keys and values of a position never change once they are computed, so a
forward pass over s new positions needs the queries of those alone, and reads the rest from here. A
rank keeps its own key-value heads, rotated already. Bytes a layer: 2 * b * (k/t) * n * d * bytes of
the dtype. By hand, Llama 3 8B (k=8, d=128, 32 layers), one text of n=8192 in bf16: 1 GiB.

Letters: b batch, k key-value heads, t tp, n capacity in positions, s new positions, d head size.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KeyValueCache:
    """Keys and values of up to `capacity` positions of one attention layer.

    length: how many positions are stored. Memory is allocated at the first `append`.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._stored: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [b, k/t, s, d]; returns those of all positions, [b, k/t, length, d].

        Raises ValueError where the new positions exceed the capacity.
        """
        start, stop = self.length, self.length + key.shape[-2]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions for a cache of {self.capacity}")
        if self._stored is None:
            shape = (2, *key.shape[:-2], self.capacity, key.shape[-1])
            self._stored = key.new_empty(shape)
        self._stored[0, ..., start:stop, :] = key
        self._stored[1, ..., start:stop, :] = value
        self.length = stop
        return self._stored[0, ..., :stop, :], self._stored[1, ..., :stop, :]


class ContextCache:
    """Keys and values of an encoder's output in one cross-attention layer, computed once.

    keys_values: 2 of [b, a/t, s, d]; None before the first use.
    """

    def __init__(self) -> None:
        self.keys_values: tuple[Tensor, Tensor] | None = None


class DecoderCaches(NamedTuple):
    """What incremental decoding keeps of a decoder layer; None keeps nothing."""

    own: KeyValueCache | None = None
    cross: ContextCache | None = None
