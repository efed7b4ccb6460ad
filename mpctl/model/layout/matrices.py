"""The matrices that Muon updates: which parameters they are, which ranks complete them, what they cost.

Matrices of layers, those of multi-token prediction among them; word tables, heads, norms and biases are AdamW's.
Each expert is a matrix, as is each half of a gated product and, unless training.muon.split_qkv is false, each of
Q, K and V. An update needs complete matrices (arXiv 2502.16982, section 2.3). tp and etp cut them, and ZeRO's
slices cut buckets anywhere: a rank gathers every bucket with matrices over the replicas that share it, then over
tp (etp) those that its slice touches, one at a time, as large a message on every rank (`gathers`).

Newton-Schulz on m x n, m <= n: a step is X X^T and B X, 2 m^2 n each, and A A, 2 m^3.

A bucket of matrices of 6, 2 and 8 elements over 2 slices of 8: both touch two or one, the messages are of 8 and 2.

>>> touched((6, 2, 8), 8, [0, 1, 2]), gathers((6, 2, 8), 8, [0, 1, 2])
([[0, 1], [2]], [8, 2])
>>> newton_schulz_flops(4, 2, steps=5) == 5 * 2 * (2 * 2**2 * 4 + 2**3)
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heapify, heapreplace
from math import prod
from typing import NamedTuple

from mpctl.core.sharding import DENSE, Views
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.adapters import UP, fused_parts
from mpctl.model.operators.matmul import MatMul, ParameterSpec
from mpctl.spec.model import ModelSpec

MTP = "mtp."


class Matrix(NamedTuple):
    """A parameter as matrices. heights: rows of its fused parts, each orthogonalised by itself; columns: of all;
    number: of such matrices in the parameter, the experts and their halves."""

    heights: tuple[int, ...]
    columns: int
    number: int = 1

    def flops(self, steps: int) -> int:
        """Operations of so many Newton-Schulz steps of all of them."""
        return self.number * sum(newton_schulz_flops(rows, self.columns, steps=steps) for rows in self.heights)


def newton_schulz_flops(rows: int, columns: int, *, steps: int) -> int:
    """Return the operations of Newton-Schulz steps on a matrix, of which the shorter side is squared."""
    m, n = sorted((rows, columns))
    return steps * 2 * (2 * m * m * n + m**3)


def muon_matrices(layout: JobLayout) -> Mapping[str, Matrix]:
    """The parameters that Muon updates, by full name; none where the optimizer is another."""
    training = layout.job.training
    if training.optimizer != "muon":
        return {}
    splits = training.muon.split_qkv
    return layout.table.once(("muon", splits), lambda: dict(_matrices(layout, splits_qkv=splits)))


def _matrices(layout: JobLayout, *, splits_qkv: bool) -> Iterable[tuple[str, Matrix]]:
    model, is_frozen = layout.model, layout.table.is_frozen
    for stack in layout.table.stacks:
        blocks = [(f"{stack.prefix}.{layer}.", stack.block_of(layer).products) for layer in range(stack.layers)]
        blocks.append(("", tuple(p for p in stack.exit.products if p.name.startswith(MTP))))
        for prefix, products in blocks:
            for product in products:
                if product.weights and not (product.is_lookup or product.is_head):
                    name = f"{prefix}{product.matrix.name}"
                    if not is_frozen(name):
                        yield name, _matrix(product, model, splits_qkv=splits_qkv)


def _matrix(product: MatMul, model: ModelSpec, *, splits_qkv: bool) -> Matrix:
    *lead, rows, columns = product.matrix.shape
    within = product.name.split(".", 2)[2] if product.name.startswith(MTP) else product.name
    parts = {} if product.is_grouped else fused_parts(product._replace(name=within), model)
    heights = tuple(parts.values())
    if within.endswith(".key_value"):
        heights = (rows // 2, rows // 2)
    if sum(heights) != rows or not (splits_qkv or parts.keys() == set(UP)):
        heights = (rows,)
    return Matrix(heights, columns, prod(lead))


def is_cut(weight: ParameterSpec, views: Views) -> bool:
    """Whether ranks of tp, or of etp those of experts, each hold a part of a parameter's matrices."""
    return views[weight.view].grid.weight_parts(weight.dims[-2:]) > 1


def gather_axis(view: str) -> str:
    """The group whose ranks complete matrices of a view."""
    return "tp" if view == DENSE else "etp"


def touched(sizes: Sequence[int], part: int, chosen: Iterable[int]) -> list[list[int]]:
    """Return for each slice of `part` elements of a bucket the chosen parameters that it has elements of.

    sizes: of all parameters of the bucket, in order."""
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += size
    slices: list[list[int]] = [[] for _ in range(-(-at // part))]
    for number in chosen:
        for index in range(starts[number] // part, -(-(starts[number] + sizes[number]) // part)):
            slices[index].append(number)
    return slices


def gathers(sizes: Sequence[int], part: int, chosen: Iterable[int]) -> list[int]:
    """Return the elements of each message in which ranks of tp complete the chosen matrices that their slice of a
    bucket touches: of the largest first, second, .. of any slice, so that all ranks send alike."""
    slices = touched(sizes, part, chosen)
    most = max(map(len, slices), default=0)
    return [max(sizes[found[k]] for found in slices if k < len(found)) for k in range(most)]


def largest_load(loads: Iterable[int], ranks: int) -> int:
    """Return the load of the fullest of `ranks` to which complete matrices are dealt, largest first, each to the
    emptiest (LPT), as a layer-wise optimizer does.

    >>> largest_load([3, 5, 4, 4], 2), largest_load([5, 1], 4)
    (8, 5)
    """
    filled = [0] * ranks
    heapify(filled)
    for load in sorted(loads, reverse=True):
        heapreplace(filled, filled[0] + load)
    return max(filled)
