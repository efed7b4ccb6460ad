"""Which part of a layer's forward full recomputation runs again in backward.

Backward asks for every tensor of the forward up to a last one. With dropout, or with a norm behind
the layer's last product, that is the last tensor of the layer, and all of it is run again. Without
either, a runtime may stop early, before the last product (`operators.stops_early` of its profile):
backward then needs a second forward only where the last product's input has a gradient or its
weight is trained. On a grid of tensor-parallel ranks (2d, 2.5d, 3d) a product and its messages are
one operation, which is repeated whole, so that the last one is too.

By hand, a GPT layer without dropout under a runtime that stops early: attention.qkv,
attention.output and mlp.up run again, mlp.down does not.
"""

from __future__ import annotations

from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import MatMul
from mpctl.spec.runtime import RuntimeProfile


def repeats_last_product(layout: JobLayout, profile: RuntimeProfile) -> bool:
    """Whether full recomputation runs a layer's last product again."""
    needs_result = layout.job.training.dropout > 0 or layout.model.norm_order != "pre"
    needs_result |= layout.grid.mode != "1d"
    return needs_result or not profile.operators.stops_early


def is_repeated(layout: JobLayout, profile: RuntimeProfile, flow: GradFlow) -> bool:
    """Whether full recomputation runs the forward of this layer again in its backward."""
    if layout.job.training.recompute != "full":
        return False
    if repeats_last_product(layout, profile):
        return flow.after
    last = flow.needs[flow.part.products[-1].name]
    return last.x or last.w


def repeated_products(
    layout: JobLayout, profile: RuntimeProfile, flow: GradFlow
) -> tuple[MatMul, ...]:
    """The matrix products of a layer that full recomputation runs again in its backward."""
    if not is_repeated(layout, profile, flow):
        return ()
    products = flow.part.products
    return products if repeats_last_product(layout, profile) else products[:-1]
