"""Products of 3d tensor parallelism: gather the inputs, multiply, scatter the sums.

On a cube of l^3 ranks (arXiv 2105.14450, section 3) every operand is cut l^3 ways. One product

    Y = X W^T      X [b, s, i],  W [o, i],  Y [b, s, o]

gathers X along the axis `source`, W along `weight`, and scatters the partial sums of Y along
`target`; each of the three gathered matrices has 1/l^2 of the whole:

    X  [b/l^2, s, i/l] -> [b/l, s, i/l]        samples gathered
    W  [o/l, i/l^2] -> [o/l, i/l]              columns gathered; of a table of words its rows
    Y  [b/l, s, o/l] -> [b/l^2, s, o/l]        summed, samples scattered

Outside X's samples are cut by (input, weight) and its hidden states by output; the product to the
inside has source = input and target = output, the one back source = output and target = input, so
that two of them bring the samples back (mpctl/tensor_grid.py). Backward mirrors it: dY is gathered
along target; dX = dY W is scattered along source, dW = dY^T X along weight. Its gathers start
together, and dX is summed while dW is computed. Only a rank's own parts are kept for backward.

By hand, l=2, b=8, s=1, i=o=4: a rank holds 2 samples of 2 columns, 2 x 1 of W, and computes 4 x 2
partial sums of 2 terms each.

Letters: b batch, s sequence, i in, o out, l side of the cube.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mpctl.kernels.product import save_operands
from mpctl.kernels.regions import SAMPLES
from mpctl.transport.group import Group


@dataclass(frozen=True)
class CubeGroups:
    """The groups of one product; weight_dim: the dimension of W along which its parts lie."""

    source: Group
    weight: Group
    target: Group
    weight_dim: int = 1


def cube_linear(x: Tensor, weight: Tensor, groups: CubeGroups) -> Tensor:
    """Y = X W^T: x [b/l^2, s, i/l], weight [o/l, i/l^2] (a table of words: [v/l^2, i/l]) ->
    [b/l^2, s, o/l]; differentiable."""
    result: Tensor = _Product.apply(x, weight, groups)
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: CubeGroups) -> Tensor:
        ctx.groups = groups
        save_operands(ctx, x, weight)
        inputs = groups.source.start_all_gather(x, SAMPLES)
        weights = groups.weight.start_all_gather(weight, groups.weight_dim)
        return groups.target.reduce_scatter(F.linear(inputs.wait(), weights.wait()), SAMPLES)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), groups = ctx.saved_tensors, ctx.groups
        grads = groups.target.start_all_gather(grad, SAMPLES)
        weights = (
            None if weight is None else groups.weight.start_all_gather(weight, groups.weight_dim)
        )
        inputs = None if x is None else groups.source.start_all_gather(x, SAMPLES)
        # [b/l, s, o/l] -> [n, o/l], n = b/l * s
        whole = grads.wait()
        rows, dx, dw = whole.flatten(0, -2), None, None
        if weights is not None:
            partial = (rows @ weights.wait()).view(*whole.shape[:-1], -1)
            dx = groups.source.start_reduce_scatter(partial, SAMPLES)
            weights = None  # before dW takes as much
        if inputs is not None:
            partial = rows.T @ inputs.wait().flatten(0, -2)
            dw = groups.weight.reduce_scatter(partial, groups.weight_dim)
        return None if dx is None else dx.wait(), dw, None
