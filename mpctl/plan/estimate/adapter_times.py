"""Seconds of what adapters and a frozen base move beside their products.

A product of rank r computes about r FLOP for each byte of its input or result, so that reading and
writing these decides (arXiv 2510.00206); the products themselves are an operator's (kernels.py).
Besides there are passes over input and result (`adapters` of the runtime's profile): the sum with the
result of the frozen product, dropout, dora's scaling. A quantised base is dequantised for each pass:
it reads the stored bits and writes the training dtype, 0.5 + 2 bytes a weight of nf4, whatever the
batch. Dora takes the norm of the rows of W + s B A in every forward: from B A I and a sum of
matrices, 2 r in (in + out) FLOP and 10 bytes a weight, or from W A^T and A A^T, 2 r in out FLOP and a
pass over W. With dropout the dropped input is multiplied by W once more, forward and backward.

By hand, nf4 without double quantisation, W [8, 64] in bf16 at 1,000 bytes/s: (288 + 1,024) bytes, 1.312 s
forward, as much for dX.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.matmul import MatMul
from mpctl.plan.estimate.base_weights import multiplies_narrow, stored_bits
from mpctl.plan.estimate.kernels import OpTimes, Shape, Speed, product_seconds
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.runtime import AdapterCosts, RuntimeProfile

FORMED = 10  # bytes moved for a weight in bf16 that W + BA is formed of: BA written, read with W; the sum
# written and read for its norm


@dataclass(frozen=True)
class AdapterTimer:
    """Adds the seconds of adapters and of a stored base under one layout and runtime profile."""

    layout: JobLayout
    speed: Speed
    profile: RuntimeProfile

    @property
    def costs(self) -> AdapterCosts:
        """What the software moves for them."""
        return self.profile.adapters

    @cached_property
    def adapter(self) -> AdapterSpec:
        """The job's adapter."""
        return self.layout.table.adapter or AdapterSpec()

    @cached_property
    def is_narrow(self) -> bool:
        """Whether frozen products are computed in fp8."""
        return multiplies_narrow(self.layout)

    @cached_property
    def _width(self) -> int:
        return self.layout.job.training.value_bytes

    def host(self, flow: GradFlow) -> float:
        """Seconds of the host in a layer's forward."""
        return self.costs.host * sum(1 for product in flow.part.products if product.adapts) / 2

    def add(self, work: OpTimes, product: MatMul, flow: GradFlow, shape: Shape) -> None:
        """Add what a frozen product or one of an adapter moves. shape: rows, contraction and columns; of
        experts, those of one."""
        experts = self._experts if product.is_grouped else 1
        m, k, n = shape
        if product.is_stored:
            self._base(work, product, flow, experts * k * n)
            return
        rows, bandwidth, costs = experts * m * self._width, self.speed.bandwidth, self.costs
        needs = flow.needs[product.name]
        if product.reads[-1] != "rank":
            work.pass_over(costs.inputs, rows * k, bandwidth, backward=needs.x)
            if self.adapter.dropout:
                work.pass_over(costs.dropout, rows * k, bandwidth, backward=needs.x)
            return
        work.pass_over(costs.results, rows * n, bandwidth, backward=needs.y)
        if self.adapter.kind == "dora":
            work.pass_over(costs.dora, rows * n, bandwidth, backward=needs.y)
            self._norm(work, product, flow, (m, k, n))

    @cached_property
    def _experts(self) -> int:
        return (self.layout.model.experts or 0) // self.layout.job.parallel.ep

    def _base(self, work: OpTimes, product: MatMul, flow: GradFlow, weights: int) -> None:
        """A copy of W in the training dtype, in each pass that needs one; of wider weights in forward alone."""
        stored, training = self.adapter.stored_as, self.layout.job.training
        bits = stored_bits(self.adapter, product.matrix.shape[-1], training.chosen_dtype)
        if not stored or self.is_narrow or bits == 8 * self._width:
            return
        reached = self.speed.bandwidth * self.costs.dequantize.get(stored, 1.0)
        seconds = (bits / 8 + self._width) * weights / reached
        work.forward += seconds
        if self.adapter.is_quantized and flow.needs[product.name].x:
            work.dgrad += seconds

    def _norm(self, work: OpTimes, product: MatMul, flow: GradFlow, shape: Shape) -> None:
        """The norm of the rows of W + s B A. product: B."""
        rates, width = self.speed.other, self._width
        first = next(one for one in flow.part.products if one.name == product.value)
        parts = self.layout.grid.feature_parts if first.matrix.is_split else 1
        m, rank, outputs = shape
        inputs = first.matrix.shape[-1] // parts
        if self.costs.dora_base:
            work.forward += product_seconds(rates, inputs, inputs, rank, width, width)
            work.forward += product_seconds(rates, inputs, rank, outputs, width, width)
            work.forward += FORMED / 2 * width * inputs * outputs / self.speed.bandwidth
        else:
            work.forward += product_seconds(rates, outputs, inputs, rank, width, width)
        if self.adapter.dropout:
            work.forward += product_seconds(rates, m, inputs, outputs, width, width)
            if flow.needs[first.name].x:
                work.dgrad += product_seconds(rates, m, outputs, inputs, width, width)
