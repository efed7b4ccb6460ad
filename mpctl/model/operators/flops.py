"""FLOP of matrix products and of attention, counted from the operator table.

A product of m x k by k x n takes 2mnk FLOP forward, as many again for dX and for dW (Narayanan et
al., arXiv 2104.04473, appendix). Attention multiplies queries with keys and scores with values, 2
times their pairs times the width of all queries and of all values; causal scores count in full,
those of a window twice the ones that it sees. The caller decides how often each is done in a step:
the estimate counts passes of actions, the balance of stages those of a full micro batch. Counts are
of one rank times tp, so that they stay integers: work that every tp rank repeats counts tp times.
In every tensor mode a rank computes 1/tp of a product whose matrix is split: in 2.5d, whose depths
hold equal matrices, each depth for different samples. Of experts' matrices a row meets one, and the
rows of all tokens are counted as if they were even over the experts.

By hand, a product of 8 rows with a 4 x 16 matrix, three passes: 3 x 2 x 8 x 64 = 3072 FLOP. As a
product of 4 experts with 2 a token it has 16 rows, 6144 FLOP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import NamedTuple

from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.layer import AttentionOp
from mpctl.model.operators.matmul import GradNeeds, MatMul
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import ParallelSpec


def sequence_sizes(model: ModelSpec, *, batch: int, cp: int) -> dict[str, int]:
    """Elements of a micro batch of `batch` samples on one rank of cp, by dimension, before tp
    splits them: samples, positions, and of a model with experts the rows that they compute."""
    sizes = {"batch": batch, "seq": model.seq_length // cp, "decoder_seq": (model.decoder_seq_length or 0) // cp}
    if model.experts is not None:
        sizes["routed"] = model.experts_per_token * batch * sizes["seq"]
    return sizes


class FlopCounter(NamedTuple):
    """Counts one micro batch. sizes: elements on one rank of cp by dimension, before tp splits
    them; splits: whether tp ranks share the rows of products that they do not split (sequence
    parallelism); width: of queries and values of all heads together."""

    sizes: Mapping[str, int]
    tp: int
    cp: int
    splits: bool
    width: int

    @classmethod
    def of(cls, model: ModelSpec, parallel: ParallelSpec, sizes: Mapping[str, int]) -> FlopCounter:
        """The counter of a model's micro batches of these sizes."""
        width = model.heads * (model.qk_size + model.v_size)
        return cls(sizes, parallel.tp, parallel.cp, parallel.sequence_parallel, width)

    def products(self, flow: GradFlow, passes: Callable[[GradNeeds], int]) -> int:
        """FLOP x tp of the matrix products of a layer or an end, each `passes` times; looking up a
        table costs nothing."""
        return sum(
            self.product(product) * passes(flow.needs[product.name])
            for product in flow.part.products
            if not product.is_lookup
        )

    def product(self, product: MatMul) -> int:
        """FLOP x tp of one matrix product, once."""
        weight, rows = product.matrix, prod(self.sizes[dim] for dim in product.rows)
        alike = 1 if weight.is_split or self.splits else self.tp
        numel = weight.numel // (weight.shape[0] if product.is_grouped else 1)
        return 2 * rows * numel * alike

    def scores(self, core: AttentionOp, passes: int) -> int:
        """FLOP x tp of one attention, `passes` times; keys are those of the full sequence."""
        pairs = core.counted_pairs(self.sizes[core.queries], self.sizes[core.keys] * self.cp)
        return 2 * self.sizes["batch"] * pairs * self.width * passes
