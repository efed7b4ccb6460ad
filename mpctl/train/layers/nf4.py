"""Weights stored in nf4 (QLoRA, arXiv 2305.14314), by the package bitsandbytes.

A block of 64 weights has a scale, its largest absolute value, and 4 bits a weight. With double
quantisation the scales lose their mean and are stored in 8 bits, with a float32 for 256 of them. Blocks
run over the rows of a whole matrix, and over those of each expert's, so values do not depend on how
ranks share a model. A product makes W in the training dtype, forward and again backward, and keeps
nothing of it.

By hand, [64, 512] doubly quantised: 16,384 bytes of weights, 512 of scales, 2 x 4 of theirs, 4 of their
mean. bitsandbytes computes from 16 or 32 bits; a float64 weight is rounded to float32 first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK = 64


class Nf4Packer:
    """Packs weights. double: quantise scales too. The tables of the 16 and 256 values that bits stand for
    are kept once for all of them."""

    def __init__(self, *, double: bool) -> None:
        from bitsandbytes import functional  # optional, and slow to import

        self.functional, self.double = functional, double
        self.first: Any = None

    def pack(self, weight: Tensor) -> Nf4Weight:
        """A matrix [o, i], or experts' [E, .., i], on the device where it will be used."""
        matrices = weight.unbind(0) if weight.dim() > 2 else (weight,)
        return Nf4Weight([self._packed(each) for each in matrices], weight, self.functional.dequantize_4bit)

    def _packed(self, matrix: Tensor) -> tuple[Tensor, Any]:
        values = matrix.float() if matrix.dtype == torch.float64 else matrix
        packed, state = self.functional.quantize_4bit(
            values.contiguous(), blocksize=BLOCK, compress_statistics=self.double, quant_type="nf4"
        )
        self.first = self.first or state
        state.code = self.first.code
        if self.double:
            state.state2.code = self.first.state2.code
        return packed, state


class Nf4Weight:
    """A packed weight (`parameters.StoredWeight`). like: of its shape and data type."""

    def __init__(self, matrices: list[tuple[Tensor, Any]], like: Tensor, dequantize: Any) -> None:
        self.matrices, self.dequantize = matrices, dequantize
        self.shape, self.dtype = like.shape, like.dtype

    @torch.no_grad()
    def whole(self) -> Tensor:
        """The weight that the bits stand for, in its data type."""
        first, state = self.matrices[0]
        if len(self.shape) == 2:
            return self.dequantize(first, state).to(self.dtype)
        result = torch.empty(self.shape, dtype=self.dtype, device=first.device)
        for into, (packed, own) in zip(result, self.matrices, strict=True):
            into.copy_(self.dequantize(packed, own))
        return result

    @property
    def tensors(self) -> Iterator[Tensor]:
        """What is kept: weights and scales."""
        for packed, state in self.matrices:
            yield from (packed, state.absmax)
            if state.nested:
                yield from (state.state2.absmax, state.offset)
