"""Which kernel computes an attention in the plan, which decides what it saves and what is
recomputed.

In mpctl's runtime on CUDA every variant is one kernel without scores
(operators/fused_attention.py); plain attention uses torch's kernel. On a CPU dropout is computed
step by step, and a bias, a window or slopes make torch's fused kernel keep a mask of all pairs;
selective recomputation saves this memory.

In other runtimes flash attention draws dropout inside the kernel and saves the generator's state
instead of a mask: FlashAttention 2 and cuDNN's fused attention both do, and Transformer Engine
takes one of them (dot_product_attention/utils.py turns FlashAttention 3 alone off for dropout;
fused_attn_f16_arbitrary_seqlen.cu gives cuDNN a seed and an offset). Selective recomputation
repeats every attention there.

By hand, causal bf16 without dropout: nothing is repeated; with dropout, on a CPU alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpctl.estimate.communication import Sizes
from mpctl.estimate.kernels import OpTimes, Speed, flash_seconds, product_seconds
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.fused_attention import refusal
from mpctl.operators.grad_flow import GradFlow
from mpctl.operators.kernel_sets import KernelSet, kernel_set
from mpctl.operators.layer import AttentionOp
from mpctl.spec.runtime import RuntimeProfile
from mpctl.spec.training import CORE


def kernels_of(layout: JobLayout) -> KernelSet:
    """The kernel set of the job's runtime."""
    return kernel_set(layout.profile.memory.kernels, layout.job.training.runtime)


def fuses_variants(layout: JobLayout) -> bool:
    """Whether any attention of the job, with dropout too, is one kernel that keeps no scores."""
    job, width = layout.job, layout.job.training.value_bytes
    model, can_fuse = layout.model, kernels_of(layout).fuses_variants and job.device_kind != "cpu"
    return can_fuse and refusal(width, max(model.qk_size, model.v_size)) is None


def keeps_no_scores(layout: JobLayout) -> bool:
    """Whether the attentions of the job form their scores block by block."""
    if kernels_of(layout).attention == "torch" and layout.job.training.attention_dropout:
        return fuses_variants(layout)
    return layout.model.attention == "flash"


def repeats_core(layout: JobLayout, core: AttentionOp) -> bool:
    """Whether selective recomputation runs this attention again in backward."""
    if CORE not in layout.job.training.repeated_modules:
        return False
    if kernels_of(layout).attention != "torch" or layout.model.attention != "flash":
        return True
    makes_pairs = bool(core.has_bias or core.has_slopes or core.window)
    keeps_pairs = layout.job.training.attention_dropout > 0 or makes_pairs
    return keeps_pairs and not fuses_variants(layout)


# ------------------------------------------------------------------------------
# Seconds of attention on one rank: fused, or with the scores written to memory.
#
# Sliding windows shorten fused attention to the pairs that may be seen. ALiBi costs a fused kernel
# nothing: it adds the slope to each score that it forms. On a CPU our runtime gives torch's kernel
# a window or slopes as a mask of values, and every pair is computed.
#
# Our kernel on CUDA runs backward in two parts, which both compute scores and gradients of the
# probabilities: 7 products where FlashAttention has 5. A dropout mask costs HASH_OPERATIONS a pair
# in each of the three kernels: xor, three shifts with xor, two products, comparison and choice, as
# counted in the hash of kernels/counter_rng.py. Neither was measured on a device. Other software's
# kernels, one forward and one backward, draw theirs by Philox (FlashAttention 2, cuDNN) at a cost
# of the same order; the estimate takes ours. That was not measured either.
#
# By hand, 8 queries and keys, causal, a window of 2: 14 of 64 pairs, and 32 without the window.


HASH_OPERATIONS = 11  # 1 + 3 x 2 + 2 + 1 + 1
OWN_BACKWARD = 7 / 5


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
        if keeps_no_scores(layout):
            pairs = batch * fused_pairs(layout, core, queries, keys)
            columns = int(heads * (model.qk_size + model.v_size) / 2)
            own = self.profile.operators
            work.forward += flash_seconds(self.speed, pairs, columns, backward=False) / own.flash
            work.forward += self._mask_seconds(pairs * heads)
            if gradients:
                seconds = flash_seconds(self.speed, pairs, columns, backward=True)
                is_own = self._is_own(core)
                repeated = OWN_BACKWARD if is_own else 1
                work.dgrad += seconds * repeated / own.flash_backward
                work.dgrad += (1 + is_own) * self._mask_seconds(pairs * heads)
        else:
            self._held_scores(work, int(batch * heads), queries, keys, gradients, flow)

    def _held_scores(
        self, work: OpTimes, heads: int, queries: int, keys: int, gradients: int, flow: GradFlow
    ) -> None:
        rates, model, w = self.speed.other, self.layout.model, self.width
        scores = product_seconds(rates, queries, model.qk_size, keys, w, w, heads)
        context = product_seconds(rates, queries, keys, model.v_size, w, w, heads)
        work.forward += scores + context
        work.dgrad += gradients * (scores + context)
        size = heads * queries * keys * w
        passes = self.profile.operators.scores
        work.pass_over(passes, size, self.speed.bandwidth, backward=flow.after)

    def _is_own(self, core: AttentionOp) -> bool:
        """Whether mpctl's kernel computes it rather than torch's."""
        has_dropout = self.layout.job.training.attention_dropout > 0
        return fuses_variants(self.layout) and (has_dropout or not core.is_plain)

    def _mask_seconds(self, pairs: float) -> float:
        """Seconds to compute the dropout mask of `pairs` pairs once inside a kernel."""
        if not self.layout.job.training.attention_dropout or not self.speed.integers:
            return 0.0
        return HASH_OPERATIONS * pairs / self.speed.integers


def fused_pairs(layout: JobLayout, core: AttentionOp, queries: int, keys: int) -> float:
    """Pairs of a query and a key that a fused kernel computes for one sample."""
    makes_mask = bool(core.window or core.has_slopes) and not fuses_variants(layout)
    if makes_mask and kernels_of(layout).attention == "torch":
        return float(queries * keys)
    return core.seen_pairs(queries, keys)
