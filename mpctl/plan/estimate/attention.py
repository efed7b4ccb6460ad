"""Kernel of each attention in the plan: it decides what is saved and what is recomputed.

In mpctl's runtime on CUDA every variant is one kernel without scores
(model/operators/fused_attention.py); plain attention uses torch's kernel. On a CPU dropout is computed
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

from mpctl.core.units import PRODUCT_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.fused_attention import refusal
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.kernel_sets import KernelSet, kernel_set
from mpctl.model.operators.layer import AttentionOp
from mpctl.plan.estimate.communication import Sizes
from mpctl.plan.estimate.kernels import AttentionWork, OpTimes, Speed, attention_seconds, product_seconds
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
# Which kernel computes it, and whether it draws a dropout mask, decides the rest (kernels.py).
# Whether other software's draws theirs at what the estimate takes was not measured.
#
# By hand, 8 queries and keys, causal, a window of 2: 14 of 64 pairs, and 32 without the window.


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
            ahead = AttentionWork(
                batch * fused_pairs(layout, core, queries, keys),
                int(heads * (model.qk_size + model.v_size) / 2),
                heads,
                backward=False,
                is_own=self._is_own(core),
                dropout=layout.job.training.attention_dropout > 0,
            )
            own = self.profile.operators
            narrow = own.flash_narrow if layout.job.training.dtype in PRODUCT_BYTES else 1.0
            work.forward += attention_seconds(self.speed, ahead, own.flash * narrow)
            if gradients:
                back = ahead._replace(backward=True)
                work.dgrad += attention_seconds(self.speed, back, own.flash_backward * narrow)
        else:
            self._held_scores(work, int(batch * heads), queries, keys, gradients, flow)

    def _held_scores(self, work: OpTimes, heads: int, queries: int, keys: int, gradients: int, flow: GradFlow) -> None:
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


def fused_pairs(layout: JobLayout, core: AttentionOp, queries: int, keys: int) -> float:
    """Pairs of a query and a key that a fused kernel computes for one sample."""
    makes_mask = bool(core.window or core.has_slopes or core.has_sample_mask) and not fuses_variants(layout)
    if makes_mask and kernels_of(layout).attention == "torch":
        return float(queries * keys)
    return core.seen_pairs(queries, keys)
