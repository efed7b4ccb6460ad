"""What the forward pass saves for the backward pass: tensors by named dimensions.

A layer's tensors follow from its attentions and its MLP (estimate/saved_activations.py). The ends
of a stack differ by family, so that a family lists theirs in its operator table
(`OperatorGroup.saved`), with the helpers below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal

Width = Literal["value", "operand", "float", "mask", "index"]
"""Bytes of an element: of activations, of a product's operands, of float32 at least, 1, 8."""


class SavedPart(Enum):
    """Which part of a layer a saved tensor belongs to, where the peak of memory depends on it."""

    MLP = "mlp"
    SCORES = "scores"
    """The softmax of the attention scores, as large as the scores' gradients."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that is kept from forward to backward.

    dims: names of its dimensions, sizes as this rank holds them. times: how many such tensors there
    are, a fraction for a part of one. is_outer: whether it lies outside the parallel regions of tp,
    where sequence parallelism leaves each rank 1/tp of it.
    """

    name: str
    dims: tuple[str, ...]
    width: Width = "value"
    times: float = 1
    is_outer: bool = False
    part: SavedPart = SavedPart.OTHER


def norm_saved(
    norm: str, rows: tuple[str, ...], name: str, part: SavedPart = SavedPart.OTHER
) -> Iterator[SavedTensor]:
    """What a norm saves: its input [rows, hidden] and statistics of each row.

    norm: `rmsnorm`, which has a scale a row, or another kind, which has a mean as well.
    """
    yield SavedTensor(f"{name} input", (*rows, "hidden"), is_outer=True, part=part)
    statistics = 1 if norm == "rmsnorm" else 2
    yield SavedTensor(f"{name} statistics", rows, "float", statistics, is_outer=True, part=part)


def hidden_saved(rows: tuple[str, ...], name: str) -> SavedTensor:
    """A tensor of hidden states [rows, hidden] outside the tensor-parallel regions: the input of a
    product or of an activation."""
    return SavedTensor(name, (*rows, "hidden"), is_outer=True)
