"""How a job computes its cross entropy under its runtime: as it says, else as the runtime does.

A way that is the runtime's own has the figures of its profile (memory.logit_bytes, operators.logits).
Another way holds what its kernels hold (model/operators/kernel_sets.py, loss_bytes), and moves so many
bytes more or fewer, counted from kernels (WAYS):

    unfused, Megatron    vocab_parallel_cross_entropy: a cast, the maximum, the difference, exp, the sum, the
                         quotient, each over float32; backward in place and a cast
    fused                fused_vocab_parallel_cross_entropy: the same in three kernels
    te                   Transformer Engine: reads bf16 logits twice and stores the gradient in float32
    linear               fused kernels over each chunk (Liger, Megatron, mpctl)

Linear makes the head's logits again in backward, or both gradients in forward (memory.loss_gradients).

By hand, profile fused with 13 bytes forward: unfused moves 13 x 38 / 14 = 35, as Megatron's profile of 2021.
"""

from __future__ import annotations

from mpctl.model.operators.kernel_sets import KernelSet
from mpctl.model.operators.loss import LossChunks
from mpctl.spec.runtime import MemoryPasses, RuntimeProfile
from mpctl.spec.training import CrossEntropy, TrainingSpec

WAYS: dict[CrossEntropy, tuple[float, float]] = {
    "unfused": (38.0, 18.0),
    "fused": (14.0, 10.0),
    "te": (8.0, 8.0),
    "linear": (14.0, 10.0),
}
"""Bytes moved for a 16-bit logit, forward and backward, relative to each other."""
TE_GRADIENT = 4.0
"""Bytes of the gradient of a logit that Transformer Engine stores in forward."""


def loss_way(training: TrainingSpec, profile: RuntimeProfile) -> CrossEntropy:
    """The way of a job: its own, or its runtime's."""
    return training.cross_entropy or profile.memory.cross_entropy


def loss_chunks(training: TrainingSpec, profile: RuntimeProfile) -> LossChunks | None:
    """How linear cuts the tokens; None in the other ways, which hold all logits."""
    if loss_way(training, profile) != "linear":
        return None
    memory = profile.memory
    chunks = training.cross_entropy_chunks or memory.loss_chunks
    return LossChunks(chunks, memory.loss_chunk_tokens, memory.loss_gradients == "backward")


def logit_bytes(training: TrainingSpec, profile: RuntimeProfile, kernels: KernelSet) -> float:
    """Bytes held for each logit during the loss, besides it."""
    way, own = loss_way(training, profile), profile.memory.cross_entropy
    if way == own:
        return profile.memory.logit_bytes
    unfused, fused = kernels.loss_bytes
    return {"unfused": unfused, "te": TE_GRADIENT}.get(way, fused)


def loss_passes(passes: MemoryPasses, way: CrossEntropy, own: CrossEntropy) -> MemoryPasses:
    """The passes of `way`. passes: those of the runtime's own way; a runtime whose own way is linear runs the
    kernels of an unfused loss over each chunk (torchtitan), and its figures are theirs."""
    if way == own:
        return passes
    base: CrossEntropy = "unfused" if own == "linear" else own
    forward, backward = (mine / theirs for mine, theirs in zip(WAYS[way], WAYS[base], strict=True))
    return MemoryPasses(forward=passes.forward * forward, backward=passes.backward * backward)
