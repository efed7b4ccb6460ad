"""Sets of kernels, one row each: the tensors they save for backward, and the temporary ones of a
backward.

A runtime's preset names a row as memory.kernels. `mpctl` is this project's set, which rehearsals
measure tensor by tensor (train/runtime/memory.py). `megatron` is Megatron-LM with Transformer Engine,
Korthikanti et al., arXiv 2205.05198, section 4.1. `eager` is the same with a gated activation of
two kernels, the first of which saves its result as well. `second-products` is torchtitan's, whose
selective recomputation keeps every second product.
"""

from __future__ import annotations

from typing import NamedTuple

from mpctl.core.errors import InputError
from mpctl.spec.presets import get_file

COPIES_IN_FLIGHT = 2
"""Offloaded inputs that mpctl's workers hold on the device until they are copied to the host. Two:
while a layer is computed, its own input and that of the layer before it."""

ROWS_BLOCK = 1 << 20
"""Elements that mpctl's lookups convert at a time on a CPU before they add them to the gradient of
a word table (train/kernels/rows.py)."""


def row_sums_bytes(elements: float, *, width: int, wide: int) -> float:
    """Bytes of the vectors of equal words, summed on a GPU before they are added to the gradient of
    a word table, and converted if that is wider. width, wide: bytes of an element of the vectors
    and
    of the gradient. Where the table has fewer bytes of `width`, its own gradient is made."""
    return elements * (width if width == wide else width + wide)


class KernelSet(NamedTuple):
    """One set of kernels.

    Saved from forward to backward: keeps_narrow: fp8 products save their 8-bit operands.
    keeps_shards: a column product under sequence parallelism saves only this rank's shard of its
    input, which backward gathers again. relu_by_result: relu's gradient follows from its result, so
    that its input is not kept. keeps_gate: a gated activation's first kernel keeps its result.
    keeps_turned: saves queries and keys after rotary positions. gathers_keys: under cp saves keys
    and values of the full sequence, which others pass round a ring. shares_masks: masks and biases
    that all layers read are kept once. keeps_second_products: selective recomputation keeps a
    layer's input and every second product in place of attention's scores. weighs_combined: the
    router's weights apply to the experts' results at the token's side, which are kept for the
    weights' gradient; others apply them to the activation before the last product. attention:
    whether a core saves the tensors of torch's kernels and mpctl's, or the queries, keys, values
    and result of the papers.

    Temporary in a backward, number of tensors: gate_gradients: of the inner size, for a gated
    activation on CUDA; five on CPUs and in other sets. score_copies: of the scores, (with a mask of
    each sample, without). loss: whether the loss works on blocks of rows or on all logits at once.
    loss_bytes: held for each logit besides it by an unfused loss, and by a fused one, where the job asks
    for another than its runtime's. casts: whether a cast of dY to fp8 is counted. spared_gradients: hidden
    states that the peak of a layer without recomputation holds fewer of; fitted, not derived: with 0, the
    published run of Llama 3 405B on 16,384 H100s would not fit by 23 MiB.

    Of a rank: keeps_tables: tables of rotary positions. fetches_ahead: offloaded inputs come back
    before they are needed, on CUDA. repeats_modules: selective recomputation may take other parts
    of a layer than attention's scores (training.recompute_modules). slices_buckets: ZeRO shares
    flat buckets in padded slices, others divide states evenly. fuses_variants: every variant of
    attention is one kernel on CUDA. adds_products: products of 16 bits add to the gradients of a
    step on CUDA. adds_rows: lookups add the gradients of their vectors to the gradient of the word
    table, and heads of 1d their products, where the sum has the dtype of the operands or a product
    can add to it.
    """

    keeps_narrow: bool = False
    keeps_shards: bool = False
    relu_by_result: bool = False
    keeps_gate: bool = False
    keeps_turned: bool = False
    gathers_keys: bool = False
    shares_masks: bool = False
    keeps_second_products: bool = False
    weighs_combined: bool = False
    attention: str = "papers"
    gate_gradients: int = 5
    score_copies: tuple[int, int] = (3, 3)
    loss: str = "logits"
    loss_bytes: tuple[float, float] = (12.0, 2.0)
    casts: bool = False
    spared_gradients: int = 0
    keeps_tables: bool = False
    fetches_ahead: bool = False
    repeats_modules: bool = False
    slices_buckets: bool = False
    fuses_variants: bool = False
    adds_products: bool = False
    adds_rows: bool = False


KERNEL_SETS = {
    "mpctl": KernelSet(
        keeps_narrow=True,
        keeps_shards=True,
        relu_by_result=True,
        keeps_turned=True,
        gathers_keys=True,
        shares_masks=True,
        weighs_combined=True,
        attention="torch",
        gate_gradients=3,
        score_copies=(2, 1),
        loss="blocks",
        casts=True,
        keeps_tables=True,
        fetches_ahead=True,
        slices_buckets=True,
        fuses_variants=True,
        adds_products=True,
        adds_rows=True,
    ),
    "megatron": KernelSet(keeps_narrow=True, repeats_modules=True, loss_bytes=(4.0, 4.0)),
    "eager": KernelSet(keeps_gate=True),
    "second-products": KernelSet(keeps_second_products=True, spared_gradients=1),
}


def kernel_set(name: str, runtime: str) -> KernelSet:
    """The kernel set that a runtime's preset names as memory.kernels; InputError with the preset's
    file where its saved activations are not known here."""
    if name not in KERNEL_SETS:
        file = get_file("runtimes", runtime, where="training.runtime")
        message = f"memory.kernels: the saved activations of kernels {name!r} are not known"
        hint = f"use one of {', '.join(KERNEL_SETS)}"
        raise InputError.of("bad-preset", str(file.path), message, hint)
    return KERNEL_SETS[name]
