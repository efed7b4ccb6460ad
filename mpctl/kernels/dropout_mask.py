"""A dropout mask as a function of global coordinates, computed where it is used.

Element (sample, row, column), of attention (sample, head, row, column), is kept where the hash of
its coordinates under the key is at least p 2^32 (counter_rng.py has the hash). A fused kernel
computes the same bits from the same five values without writing coordinates to memory.

By hand, p = 0 keeps all: no hash is below 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpctl.kernels.masks import Positions, numbers


@dataclass(frozen=True, eq=False)
class DropoutMask:
    """Which elements of a tensor are kept, and by what the kept ones are divided: 1 - p.

    key: 32 bits, as an integer or as a tensor of no dimensions, int32, on the device. samples: [b],
    global numbers, on the device of the tensor. heads: of attention probabilities [b, a, s, keys]
    the global numbers of the local heads; None for a tensor [b, s, h]. rows, columns: global
    numbers of the last two dimensions.
    """

    key: int | Tensor
    p: float
    samples: Tensor
    rows: Positions
    columns: Positions
    heads: Positions | None = None

    def coordinates(self) -> list[Tensor]:
        """One tensor for each dimension, which broadcast against each other; the last is
        one-dimensional."""
        device = self.samples.device
        inner = [positions for positions in (self.heads, self.rows) if positions is not None]
        tensors = [self.samples, *(numbers(each, device) for each in (*inner, self.columns))]
        dims = len(tensors)
        return [each.view(-1, *[1] * (dims - 1 - i)) for i, each in enumerate(tensors)]
