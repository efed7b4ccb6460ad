"""Seconds of single kernels on one device: matrix products, attention, what memory bounds.

A product Y[m, n] = X[m, k] W[k, n] is cut into tiles, and each of the device's processors takes one
at a time: ceil(tiles / processors) waves, of which the last may be nearly empty; few tiles of a
long k are cut along k as well. A tile costs (k + depth) x its size: its pipeline fills first.
Smaller tiles fill the processors better and run slower. Sides that are no multiples of 64 elements
cost a part of the rate, no multiples of 8 a larger one. No product is faster than its operands are
read and written.

By hand, 1024^3 at 1 TFLOP/s on 1 processor, depth 0, nothing bound by memory: 2.147 ms. On 3
processors of as much together, in tiles of 256 x 128: 32 tiles are 10.67 waves, so 11: 2.214 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from mpctl.core.units import PRODUCT_BYTES
from mpctl.spec.base import DType
from mpctl.spec.cluster import ClusterSpec, Kernels
from mpctl.spec.runtime import MemoryPasses

# rows, columns, rate relative to the largest; smaller ones reload their operands more often
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.68), (64, 128, 0.68), (64, 64, 0.5))
TYPICAL = {
    "cuda": Kernels(
        processors=108,
        products=0.75,
        depth=130,
        waves=0.5,
        misaligned=0.92,
        unaligned=0.5,
        memory=0.8,
        flash=0.5,
        flash_backward=0.45,
        launch=3e-6,
        source="between those of the A100 and the H100",
    ),
    "cpu": Kernels(
        products=0.9, memory=0.8, flash=0.4, flash_backward=0.4, source="a core of the machine behind the cpu preset"
    ),
}

Shape = tuple[int, int, int]
"""Rows, contraction and columns of a matrix product: m, k, n."""


class ProductTimes(NamedTuple):
    """Seconds of one matrix product on a rank: Y = X W, dX = dY W^T and dW = X^T dY; the ones that
    backward does not compute take 0."""

    forward: float
    inputs: float
    weights: float


class Rates(NamedTuple):
    """The rates that kernels of a device reach at one dtype."""

    flops: float
    processors: int
    depth: float
    waves: float
    misaligned: float
    unaligned: float
    bandwidth: float
    launch: float


@dataclass(frozen=True)
class Speed:
    """The rates of a device at a training dtype.

    linear, other: products of linear layers and all others; flash, flash_backward, own_flash:
    FLOP/s of fused attention, forward and backward, and of mpctl's own kernels; bandwidth: bytes/s
    of its memory; peak: FLOP/s of its datasheet. waits: whether the host that launches a kernel
    waits for it, as on a CPU. host: multiplier of the host seconds that profiles state. notes: what
    is assumed because the preset does not say it. integers: operations
    on 32-bit integers a second, 0 where unknown: half of fp32's lanes, whose FMA counts as two
    (NVIDIA's Hopper tuning guide: 64 and 128 a clock of a multiprocessor).
    """

    linear: Rates
    other: Rates
    flash: float
    flash_backward: float
    bandwidth: float
    peak: float
    waits: bool
    host: float
    notes: tuple[str, ...]
    integers: float = 0.0
    own_flash: float = inf


class MissingFigure(LookupError):
    """A figure that an estimate needs is not in the preset; the message names it."""


def device_speed(cluster: ClusterSpec, dtype: DType, factor: float = 1.0) -> Speed:
    """The speed of the cluster's device at a dtype; with fp8, mxfp8 and nvfp4 only the products of
    linear layers use it, the rest is bf16. factor: by which everything takes longer (system.py).
    Raises MissingFigure where the preset has no rate."""
    device, slowdown = cluster.device, cluster.slowdown * factor
    if device is None:
        raise MissingFigure("no cluster.device is named")
    peak = device.peak_flops.get(dtype)
    if peak is None:
        raise MissingFigure(f"{device.name} has no {dtype} rate in its preset")
    kernels = device.kernels or TYPICAL["cpu" if device.is_cpu else "cuda"]
    launch = kernels.launch * factor
    notes = []
    if device.kernels is None:
        notes.append(f"{device.name}: its kernels were never measured, typical ones are assumed")
    if device.memory_bandwidth is None:
        notes.append(f"{device.name}: no memory bandwidth, what it bounds takes no time")
    bandwidth = (device.memory_bandwidth or inf) * kernels.memory / slowdown
    rest = device.peak_flops.get("bf16", peak) if dtype in PRODUCT_BYTES else peak
    part = kernels.narrow.find(dtype) or kernels.products
    reached = (peak * part / slowdown, rest * kernels.products / slowdown)
    linear, other = (_rates(kernels, rate, bandwidth, launch) for rate in reached)
    flash, back = (rest * part / slowdown for part in (kernels.flash, kernels.flash_backward))
    return Speed(
        linear,
        other,
        flash,
        back,
        bandwidth,
        peak,
        device.is_cpu,
        kernels.host * factor,
        tuple(notes),
        device.peak_flops.get("fp32", 0.0) / 4 / slowdown,
        flash * kernels.triton,
    )


def _rates(kernels: Kernels, flops: float, bandwidth: float, launch: float) -> Rates:
    return Rates(
        flops,
        kernels.processors,
        kernels.depth,
        kernels.waves,
        kernels.misaligned,
        kernels.unaligned,
        bandwidth,
        launch,
    )


@lru_cache(maxsize=1 << 16)
def product_seconds(rates: Rates, m: int, k: int, n: int, width: float, out: float, batch: int = 1) -> float:
    """Seconds of `batch` products of m x k by k x n elements. width, out: bytes of an element of
    the operands and of the result."""
    if not (m and k and n):
        return 0.0
    moved = batch * (width * k * (m + n) + out * m * n) / rates.bandwidth
    rate = rates.flops * _alignment(rates, m, k, n)
    if rates.processors == 1:
        return max(batch * 2 * m * n * (k + rates.depth) / rate, moved) + rates.launch
    best = min(_tiled(rates, rate, m, k, n, batch, *tile) for tile in TILES)
    return max(best, moved) + rates.launch


def _tiled(
    rates: Rates, rate: float, m: int, k: int, n: int, batch: int, rows: int, columns: int, speed: float
) -> float:
    """Return the seconds in tiles of this size; cut along k if there are fewer tiles than processors."""
    tiles = batch * -(-m // rows) * -(-n // columns)
    parts, summed = 1, 0.0
    while tiles * parts * 2 <= rates.processors and k >= 512 * parts:
        parts *= 2
        summed = parts * 8 * batch * m * n / rates.bandwidth  # float32 partial sums, there and back
    filled = tiles * parts / rates.processors
    waves = filled + rates.waves * (-(-tiles * parts // rates.processors) - filled)
    tile = 2 * rows * columns * (k / parts + rates.depth)
    return max(waves, 1.0) * tile * rates.processors / (rate * speed) + summed


def _alignment(rates: Rates, *sides: int) -> float:
    least = min((side & -side for side in sides if side > 1), default=64)
    return 1.0 if least >= 64 else rates.misaligned if least >= 8 else rates.unaligned


# ------------------------------------------------------------------------------
# Fused attention, which keeps no scores: the one law of the plan and of an audit.
#
# A library's kernel computes 2 products forward and 5 backward, which computes the scores again
# (arXiv 2307.08691, section 3.1), at the rates of the device's preset. Ours (kernels/triton) has a
# kernel for the gradients of queries and one for those of keys and values, which both compute
# scores and gradients of the shares, so that no sum depends on an order: 7 products. It runs all at
# `kernels.triton` of the rate of the library's forward. On an H100, causal, heads of 128, 2,048 to
# 16,384 positions, Triton's forward is at 0.67 to 0.70 of cuDNN's (FlashAttention-3, arXiv
# 2407.08608, figure 5: 323 of 484, 378 of 539 TFLOP/s). docs/design/gpu_speed.md has what that
# gives backward, beside what others measured.
#
# Dropout costs integer operations for each pair in each kernel that needs the mask, of which our
# backward has two. Ours takes HASH (train/kernels/triton/jit/bits.py, `keeps`: xor, product, shift, xor,
# product, xor, comparison, choice); Philox, which the libraries draw by, is taken for PHILOX. They
# are added to the products' seconds: nothing is known of how much runs beside them.
#
# By hand, 1e9 pairs, heads of 128: 512e9 FLOP forward; at 400 TFLOP/s 1.28 ms, and ours at 0.67 of
# it 1.91 ms. Backward 1.28e12 FLOP, ours 1.79e12: at 335 and 268 TFLOP/s 3.82 and 6.69 ms. A mask
# takes 8e9 operations a kernel, at 16.7e12 a second 0.48 ms.


PRODUCTS, OWN_PRODUCTS = (2, 5), (2, 7)  # forward, backward
BACKWARD = PRODUCTS[1] / PRODUCTS[0]
HASH, PHILOX = 8, 11


class AttentionWork(NamedTuple):
    """Fused attention in one pass. pairs: of a query and a key that it may see, of one head and all
    samples; columns: of all heads on this rank; heads: on this rank. is_own: in mpctl's kernels
    rather than a library's. dropout: whether shares are dropped."""

    pairs: float
    columns: int
    heads: float
    backward: bool
    is_own: bool = False
    dropout: bool = False

    @property
    def products(self) -> int:
        """How many matrix products over all pairs and columns the kernel makes."""
        return (OWN_PRODUCTS if self.is_own else PRODUCTS)[self.backward]

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.products * self.pairs * self.columns

    @property
    def hashes(self) -> float:
        """Integer operations that draw the mask."""
        kernels = 2 if self.is_own and self.backward else 1
        return self.dropout * kernels * (HASH if self.is_own else PHILOX) * self.pairs * self.heads


def attention_seconds(speed: Speed, work: AttentionWork, relative: float = 1.0, launches: int = 1) -> float:
    """Seconds of a pass of fused attention. relative: a runtime's speed at it, as a part of the
    device's; launches: kernels of the pass."""
    library = speed.flash_backward if work.backward else speed.flash
    rate = speed.own_flash if work.is_own else library
    seconds = (work.flops / rate + launches * speed.other.launch) / relative
    return seconds + (work.hashes / speed.integers if speed.integers else 0.0)


# ------------------------------------------------------------------------------
# The seconds of one micro batch in a layer or in one of a model's ends, by pass.
#
# A kernel is launched by a host thread, which takes time too: the slower of the two sets the pace.
#
# By hand, two layers of 1 s forward and an end of 3 s: 2 x 1 + 3 = 5 s forward.


SHARPNESS = 6  # of the passage from a pace set by kernels to one set by their host


@dataclass(slots=True)
class OpTimes:
    """Seconds of a micro batch by pass: kernels (forward, gradients of inputs and of weights),
    messages over tp, cp and the ranks of experts (ep) that nothing hides, and the host's launches.
    dgrad, wgrad: gradients of inputs, with what is computed again, and of weights."""

    forward: float = 0.0
    dgrad: float = 0.0
    wgrad: float = 0.0
    tp_forward: float = 0.0
    tp_backward: float = 0.0
    cp_forward: float = 0.0
    cp_backward: float = 0.0
    ep_forward: float = 0.0
    ep_backward: float = 0.0
    host_forward: float = 0.0
    host_backward: float = 0.0

    def add(self, other: OpTimes, times: int = 1) -> None:
        """Add the seconds of `times` equal layers or ends."""
        self.forward += times * other.forward
        self.dgrad += times * other.dgrad
        self.wgrad += times * other.wgrad
        self.tp_forward += times * other.tp_forward
        self.tp_backward += times * other.tp_backward
        self.cp_forward += times * other.cp_forward
        self.cp_backward += times * other.cp_backward
        self.ep_forward += times * other.ep_forward
        self.ep_backward += times * other.ep_backward
        self.host_forward += times * other.host_forward
        self.host_backward += times * other.host_backward

    def times(self, factor: float) -> OpTimes:
        """The same taking so many times as long."""
        return OpTimes(*(factor * getattr(self, name) for name in self.__slots__))

    def pass_over(self, passes: MemoryPasses, size: float, bandwidth: float, *, backward: bool) -> None:
        """Add passes over a tensor of `size` bytes at bytes/s of memory, of backward where there
        is one."""
        self.forward += passes.forward * size / bandwidth
        if backward:
            self.dgrad += passes.backward * size / bandwidth

    def again(self, forward: OpTimes) -> None:
        """Kernels and launches of this forward once more in backward; its messages are listed."""
        self.dgrad += forward.forward
        self.host_backward += forward.host_forward


def pace(seconds: tuple[float, float]) -> float:
    """The slower of kernels and their host, and somewhat more where they are near each other."""
    faster, slower = sorted(seconds)
    if not faster:
        return slower
    return float(slower * (1 + (faster / slower) ** SHARPNESS) ** (1 / SHARPNESS))


def cover_backwards(pp: int, chunks: int) -> float:
    """Number of backwards of a stage that its gradient reduction and parameter gathering may
    overlap: the last one; with several chunks, all but one chunk are done while the last pp micro
    batches pass the others. By hand, 4 stages of 2 chunks: 1 + 3 / 2."""
    return 1 + (pp - 1) * (1 - 1 / chunks)
