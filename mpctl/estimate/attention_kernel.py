"""Which kernel computes an attention in the plan, and so what it keeps and what runs again.

Of our own runtime: on CUDA any variant is one kernel without scores (operators/fused_attention.py),
plain attention torch's. On a CPU dropout is computed step by step, and a bias, a window or slopes
make torch's fused kernel keep a mask of all pairs; that is what selective recomputation spares.

Of other runtimes flash attention draws dropout inside the kernel and keeps the generator's state in
place of a mask: FlashAttention 2 and cuDNN's fused attention both do, and Transformer Engine takes
one of them (dot_product_attention/utils.py turns FlashAttention 3 alone off for dropout;
fused_attn_f16_arbitrary_seqlen.cu gives cuDNN a seed and an offset). Selective recomputation
repeats every attention there.

By hand, causal bf16 without dropout: nothing is repeated; with dropout, on a CPU alone.
"""

from __future__ import annotations

from mpctl.layout.job_layout import JobLayout
from mpctl.operators.fused_attention import refusal
from mpctl.operators.kernel_sets import KernelSet, kernel_set
from mpctl.operators.layer import AttentionOp


def kernels_of(layout: JobLayout) -> KernelSet:
    """The kernel set of the job's runtime."""
    return kernel_set(layout.profile.memory.kernels, layout.job.training.runtime)


def fuses_variants(layout: JobLayout) -> bool:
    """Whether any attention of the job, with dropout too, is one kernel that keeps no scores."""
    job, width = layout.job, layout.job.training.value_bytes
    can_fuse = kernels_of(layout).fuses_variants and job.device_kind != "cpu"
    return can_fuse and refusal(width, layout.model.head_size) is None


def keeps_no_scores(layout: JobLayout) -> bool:
    """Whether the attentions of the job form their scores block by block."""
    if kernels_of(layout).attention == "torch" and layout.job.training.attention_dropout:
        return fuses_variants(layout)
    return layout.model.attention == "flash"


def repeats_core(layout: JobLayout, core: AttentionOp) -> bool:
    """Whether selective recomputation runs this attention again in backward."""
    if layout.job.training.recompute != "selective":
        return False
    if kernels_of(layout).attention != "torch" or layout.model.attention != "flash":
        return True
    makes_pairs = bool(core.has_bias or core.has_slopes or core.window)
    keeps_pairs = layout.job.training.attention_dropout > 0 or makes_pairs
    return keeps_pairs and not fuses_variants(layout)
