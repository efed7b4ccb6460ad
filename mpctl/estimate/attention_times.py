"""Seconds of attention on one rank: fused, or with the scores written to memory.

Sliding windows shorten fused attention to the pairs that may be seen. ALiBi costs a fused kernel
nothing: it adds the slope to each score that it forms. Our own kernels take a window or slopes as a
mask of values, and form every pair.

By hand, 8 queries and keys, causal, a window of 2: 14 of 64 pairs, and 32 without the window.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.estimate.communication import Sizes
from mpctl.estimate.kernels import Speed, flash_seconds, product_seconds
from mpctl.estimate.op_times import OpTimes
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.matmul import AttentionOp
from mpctl.spec.runtime import RuntimeProfile


@dataclass(frozen=True)
class AttentionTimer:
    """Seconds of a model's attentions under one layout.

    sizes: elements of one micro batch on one rank between the layers, by dimension; width: bytes of
    an element of activations.
    """

    layout: JobLayout
    speed: Speed
    profile: RuntimeProfile
    sizes: Sizes
    width: int

    def add(self, work: OpTimes, core: AttentionOp, flow: GradFlow) -> None:
        """Add softmax(Q K^T) V of one layer and micro batch, forward and backward."""
        layout, model = self.layout, self.layout.model
        gradients = flow.needs[core.query_product].y + flow.needs[core.key_product].y
        queries, keys = self.sizes[core.queries], self.sizes[core.keys] * layout.job.parallel.cp
        batch, heads = self.sizes["batch"], model.heads / layout.grid.feature_parts
        if model.attention == "flash" and not layout.job.training.attention_dropout:
            pairs = batch * fused_pairs(core, self.profile, queries, keys)
            columns = int(heads * model.head_size)
            own = self.profile.operators
            work.forward += flash_seconds(self.speed, pairs, columns, backward=False) / own.flash
            if gradients:
                seconds = flash_seconds(self.speed, pairs, columns, backward=True)
                work.dgrad += seconds / own.flash_backward
        else:
            self._held_scores(work, int(batch * heads), queries, keys, gradients, flow)

    def _held_scores(
        self, work: OpTimes, heads: int, queries: int, keys: int, gradients: int, flow: GradFlow
    ) -> None:
        rates, d, w = self.speed.other, self.layout.model.head_size, self.width
        scores = product_seconds(rates, queries, d, keys, w, w, heads)
        context = product_seconds(rates, queries, keys, d, w, w, heads)
        work.forward += scores + context
        work.dgrad += gradients * (scores + context)
        size = heads * queries * keys * w
        passes = self.profile.operators.scores
        work.pass_over(passes, size, self.speed.bandwidth, backward=flow.after)


def fused_pairs(core: AttentionOp, profile: RuntimeProfile, queries: int, keys: int) -> float:
    """Pairs of a query and a key that a fused kernel computes for one sample."""
    if (core.window or core.has_slopes) and profile.memory.kernels == "mpctl":
        return float(queries * keys)
    return core.seen_pairs(queries, keys)
