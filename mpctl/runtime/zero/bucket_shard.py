"""A bucket of parameters (layout/buckets.py) as one rank of its replicas has it.

ZeRO cuts a bucket's elements, laid one parameter after the other and padded, into one slice a
replica (arXiv 1910.02054, section 5). Slices cut through parameters: AdamW treats each element
alone.

By hand, parameters of 64 and 40 elements over 2 replicas: 64 elements a slice; rank 0 has the first
parameter, rank 1 the second and 24 elements of padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from mpctl.layout.buckets import Bucket
from mpctl.transport.group import Group


class ParameterSlice(NamedTuple):
    """Elements of one parameter that lie on this rank. parameter: None for padding; start: number
    of the first of them in the flattened parameter; values: the elements, flat or in the
    parameter's shape."""

    parameter: nn.Parameter | None
    start: int
    values: Tensor


@dataclass(frozen=True)
class BucketShard:
    """A bucket as one rank of its replicas has it.

    replicas: the group over which the bucket's gradients are reduced; stages: the group of the
    pipeline stages that hold copies of these parameters, None where no other does.
    """

    bucket: Bucket
    parameters: tuple[nn.Parameter, ...]
    replicas: Group
    stages: Group | None = None

    @property
    def decayed(self) -> set[nn.Parameter]:
        """The parameters that weight decay applies to (ParameterSpec.decays)."""
        named = zip(self.bucket.names, self.parameters, strict=True)
        return {parameter for name, parameter in named if name not in self.bucket.undecayed}

    @property
    def local_numel(self) -> int:
        """Elements of this rank's slice, padding included."""
        return self.bucket.part

    @property
    def padded_numel(self) -> int:
        """Elements of all replicas' slices together."""
        return self.bucket.padded

    @property
    def local_range(self) -> slice:
        """This rank's slice of the padded bucket."""
        first = self.replicas.rank * self.local_numel
        return slice(first, first + self.local_numel)

    def views(self, full: Tensor) -> list[Tensor]:
        """Views of a flat tensor [numel or more], one for each parameter in its shape."""
        parts = full[: self.bucket.numel].split(self.bucket.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def parameter_slices(self, local: Tensor) -> Iterator[ParameterSlice]:
        """A tensor [local_numel], cut by the parameters whose elements it holds."""
        stop = 0
        for number, start, offset, length in self.bucket.pieces(self.replicas.rank):
            stop = offset + length
            yield ParameterSlice(self.parameters[number], start, local[offset:stop])
        if stop < len(local):
            yield ParameterSlice(None, 0, local[stop:])
