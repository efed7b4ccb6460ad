"""A device and a link fitted to measured kernels and collectives.

**Device.** A product of m x k by k x n takes 2 m n (k + depth) / rate (plan/estimate/kernels.py): rate
and depth follow from all products of one dtype by the least relative error. Memory-bound kernels
are compared with the planner's estimate of the same kernel on a known device: the ratio of their
seconds is that of the bandwidths that kernels reach. The same is done for the host, with a layer so
small that only the host's time is left. In training both take longer than alone: other kernels
empty the caches, fresh memory has to be mapped, the host does more than layers. The profile of CPU
runs is therefore compared with measurements of kernels alone on the machine that it was fitted to
(ALONE). Only measurements with all cores busy count, as in training. On a CPU a kernel counts with
its processor time where that is less than the wall time, as other programs used the rest.

**Link.** A collective of n ranks in one node takes, of the message's bytes (plan/estimate/network.py),

    bus factor x bytes / bandwidth + start + phases (n - 1) x latency

with 2 phases for an all-reduce and one for the others, and an all-reduce may have a different
bandwidth. All four figures are fitted together to all kinds, sizes and numbers of ranks, by the
least relative error. `bandwidth` of the preset is the best measured bus bandwidth, `efficiency` the
part of it that large messages reach by the fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median

from mpctl.core.collectives import bus_factor, get_collective
from mpctl.core.errors import InputError
from mpctl.core.units import bytes_text, plural
from mpctl.measure.bench.collectives import CollectiveRow, fit_relative
from mpctl.measure.bench.kernels import KernelRow
from mpctl.plan.estimate.kernels import TYPICAL
from mpctl.spec.cluster import DeviceSpec, InnerLinkSpec, Kernels

STREAMS = ("triad", "copy")
BOUND = ("branch", "activation", "cross_entropy", "optimizer", "accumulate")
TINY = "tiny"  # site of the layer that takes only the host's time
# Contraction of a product's pass, and the other two sides: Y = X W, dX = dY W^T, dW = X^T dY.
SIDES = {"forward": ("k", "m", "n"), "backward_input": ("n", "m", "k"), "backward_weight": ("m", "k", "n")}
ALONE = {"memory": 0.75, "host": 0.29}
"""Measured over estimated seconds of kernels alone, on the CPU whose runs mpctl's profile was
fitted to: the median of memory-bound kernels; of the layer that takes only the host's time, at the
host that a fit to eleven layouts there finds."""
FEWEST = 0.01  # of a nominal rate: less is a mistake and no kernel's speed


@dataclass(frozen=True)
class DeviceFit:
    """The device, and by dotted path the source of its figures: comments of its preset."""

    device: DeviceSpec
    comments: Mapping[str, str]


def fit_device(
    rows: Sequence[KernelRow], base: DeviceSpec, *, dtype: str, name: str, memory_bytes: int, source: str
) -> DeviceFit:
    """The device whose kernels these rows measured.

    base: the device of their predicted seconds, which also supplies figures that were not measured.
    dtype: the one in which kernels other than products count. Raises InputError where no product in
    it or no stream was measured by ranks with a core each.
    """
    busy = busy_rows(rows)
    found = _Busy([undisturbed(row) for row in busy] if base.is_cpu else busy, base, dtype)
    found.require_complete()
    changes = {
        "name": name,
        "memory_bytes": memory_bytes,
        "memory_bandwidth": found.bandwidth,
        "peak_flops": found.peaks,
        "kernels": {**found.kernels.model_dump(exclude_none=True), "source": source},
        "source": source,
    }
    device = DeviceSpec.model_validate({**base.model_dump(exclude_none=True), **changes})
    return DeviceFit(device, found.comments())


def busy_rows(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The rows of the largest number of ranks that had a core each; none where there are none."""
    own = [row for row in rows if not row["is_rehearsal"]]
    most = max((row["ranks"] for row in own), default=0)
    return [row for row in own if row["ranks"] == most]


def undisturbed(row: KernelRow) -> KernelRow:
    """The row of a kernel on a CPU without the time in which other programs had its core."""
    share = min(row["cpu_seconds"] / row["seconds"], 1.0) or 1.0  # a clock may be too coarse
    return {
        **row,
        "seconds": row["seconds"] * share,
        "flops_per_second": row["flops_per_second"] / share,
        "bytes_per_second": row["bytes_per_second"] / share,
    }


@dataclass(frozen=True)
class _Busy:
    """Kernels of all cores at once. base, dtype: as for `fit_device`."""

    rows: Sequence[KernelRow]
    base: DeviceSpec
    dtype: str

    def require_complete(self) -> None:
        """Raises InputError where a figure that every device needs was not measured."""
        for what, kernels in ((f"product of {self.dtype}", "matmul"), ("stream", STREAMS)):
            wanted = kernels if isinstance(kernels, tuple) else (kernels,)
            if not self.of(*wanted, dtype=self.dtype):
                raise InputError.of(
                    "not-measured", "results", f"no {what} was measured", "measure again, with a longer --budget"
                )

    def of(self, *kernels: str, dtype: str | None = None) -> list[KernelRow]:
        """The rows of these kernels, at one dtype where it is given."""
        return [row for row in self.rows if row["kernel"] in kernels and dtype in (None, row["dtype"])]

    @cached_property
    def products(self) -> dict[str, tuple[float, float]]:
        """FLOP/s of an infinitely long contraction, and depth in elements, by dtype."""
        dtypes = dict.fromkeys(row["dtype"] for row in self.of("matmul"))
        return {dtype: _rate_and_depth(self.of("matmul", dtype=dtype)) for dtype in dtypes}

    @cached_property
    def part(self) -> float:
        """The part of its peak that large products reach: on a CPU the peak is the best measured
        rate, on an accelerator the data sheet's."""
        if not self.base.is_cpu:
            return _bounded(self.known.products * _speed(self.of("matmul", dtype=self.dtype)))
        rate, _ = self.products[self.dtype]
        best = max(row["flops_per_second"] for row in self.of("matmul", dtype=self.dtype))
        return _bounded(rate / max(rate, best))

    @cached_property
    def peaks(self) -> dict[str, float]:
        if self.base.is_cpu:
            return {dtype: rate / self.part for dtype, (rate, _) in self.products.items()}
        return {str(dtype): rate for dtype, rate in self.base.peak_flops.items()}

    @cached_property
    def bandwidth(self) -> float:
        """Bytes/s of memory: on a CPU the best stream, on an accelerator the data sheet's."""
        known = None if self.base.is_cpu else self.base.memory_bandwidth
        return known or max(row["bytes_per_second"] for row in self.of(*STREAMS))

    @property
    def known(self) -> Kernels:
        """Efficiencies of the device's kernels, known or assumed before the fit."""
        return self.base.kernels or TYPICAL["cpu" if self.base.is_cpu else "cuda"]

    @property
    def kernels(self) -> Kernels:
        """Measured efficiencies of the device's kernels."""
        known, bound = self.known, self.of(*BOUND, dtype=self.dtype)
        before = (self.base.memory_bandwidth or self.bandwidth) * known.memory
        tiny = [row for row in self.of("layer", dtype=self.dtype) if row["site"] == TINY]
        return known.model_copy(
            update={
                "products": self.part,
                "depth": self.products[self.dtype][1] if self.base.is_cpu else known.depth,
                "memory": _bounded(before * self._as_in_runs("memory", bound) / self.bandwidth),
                "host": known.host / self._as_in_runs("host", tiny),
                "flash": self._attention("forward") or known.flash,
                "flash_backward": self._attention("backward") or known.flash_backward,
            }
        )

    def _as_in_runs(self, figure: str, rows: Sequence[KernelRow]) -> float:
        """The speed of these kernels in training relative to the estimate; 1 where none was
        measured."""
        alone = ALONE[figure] if rows and self.base.is_cpu else 1.0
        return _speed(rows) * alone

    def _attention(self, part: str) -> float | None:
        own = [row for row in self.of("attention", dtype=self.dtype) if row["part"] == part]
        if not own:
            return None
        return _bounded(median(r["flops_per_second"] for r in own) / self.peaks[self.dtype])

    def comments(self) -> dict[str, str]:
        """The source of each figure, by its dotted path."""
        busy = f"{plural(max(row['ranks'] for row in self.rows), 'rank')} at once"
        comments = {
            f"peak_flops.{dtype}": f"{plural(len(own), 'product')}, {busy}: {_rates(own)} GFLOP/s"
            for dtype in self.peaks
            if (own := self.of("matmul", dtype=dtype))
        }
        streams = [row["bytes_per_second"] for row in self.of(*STREAMS)]
        return {
            **comments,
            "memory_bandwidth": f"triad and copy, {busy}: {_span(streams)} GB/s",
            "kernels.memory": "norms, activations, loss and optimizer against their estimates",
            "kernels.host": "a layer of hidden 64 against its estimate",
            "kernels.flash": "attention of the model, of the peak",
            "kernels.flash_backward": "attention of the model, of the peak",
        }


def _rate_and_depth(products: Sequence[KernelRow]) -> tuple[float, float]:
    """Both by the least relative error; where contractions are too short to separate them, the best
    rate and no depth."""
    seconds = [row["seconds"] for row in products]
    a_flop, an_area = fit_relative([_work(row) for row in products], seconds)
    if not a_flop:
        return max(row["flops_per_second"] for row in products), 0.0
    return 1 / a_flop, an_area / a_flop


def _work(row: KernelRow) -> tuple[float, float]:
    """FLOP of a product, and those of each element of its contraction."""
    depth, *sides = (row["shape"][side] for side in SIDES[row["part"]])
    area = 2.0 * sides[0] * sides[1]
    return area * depth, area


def _speed(rows: Sequence[KernelRow]) -> float:
    """The median speed of these kernels relative to the estimate; 1 where nothing was measured."""
    pairs = [(row["predicted_seconds"], row["seconds"]) for row in rows]
    return median([planned / found for planned, found in pairs if planned] or [1.0])


def _bounded(part: float) -> float:
    return min(max(part, FEWEST), 1.0)


def _rates(rows: Sequence[KernelRow]) -> str:
    return _span([row["flops_per_second"] for row in rows])


def _span(values: Sequence[float]) -> str:
    return f"{min(values) / 1e9:.3g} to {max(values) / 1e9:.3g}"


TRANSPORTS = ("nccl", "shared", "gloo")  # in the order in which a run chooses
SMALLEST = 1e3  # bytes/s that a preset may hold, and its reverse
REDUCING = (0.01, 100.0)  # an all-reduce's bandwidth over that of other kinds


@dataclass(frozen=True)
class LinkFit:
    """The link, the mean relative error of the fit, and comments of its preset by key."""

    link: InnerLinkSpec
    error: float
    comments: Mapping[str, str]


def training_rows(rows: Sequence[CollectiveRow]) -> list[CollectiveRow]:
    """The rows of the transport that runs use: for each kind the first of TRANSPORTS that was
    measured. Messages between two ranks over another transport than collectives are left out: they
    are few, and the node has one link."""
    kinds = {row["kind"] for row in rows}
    chosen = {
        kind: min((row["transport"] for row in rows if row["kind"] == kind), key=TRANSPORTS.index) for kind in kinds
    }
    first = min(chosen.values(), key=TRANSPORTS.index)
    if chosen.get("sendrecv") != first:
        chosen.pop("sendrecv", None)
    return [row for row in rows if row["transport"] == chosen.get(row["kind"])]


def fit_link(rows: Sequence[CollectiveRow], *, name: str | None) -> LinkFit:
    """The link that these collectives of ranks on one node crossed. rows: at least one, of two
    ranks or more. name: the link's name in pictures, None if unknown."""
    own = training_rows(rows)
    terms, seconds = [_terms(row) for row in own], [row["seconds"] for row in own]
    a_byte, a_reduced, start, latency = fit_relative(terms, seconds)
    a_byte = a_byte or a_reduced or 1 / SMALLEST
    ratio = a_byte / a_reduced if a_reduced else 1.0
    best = max(max(map(_bus_bandwidth, own)), 1 / a_byte)
    link = InnerLinkSpec(
        name=name,
        bandwidth=best,
        efficiency=1 / a_byte / best,
        latency=latency,
        start=start,
        all_reduce=min(max(ratio, REDUCING[0]), REDUCING[1]),
    )
    fitted = (_sum(term, (a_byte, a_byte / link.all_reduce, start, latency)) for term in terms)
    errors = [abs(a / b - 1) for a, b in zip(fitted, seconds, strict=True)]
    return LinkFit(link, fmean(errors), _comments(own, fmean(errors)))


def _terms(row: CollectiveRow) -> tuple[float, float, float, float]:
    """The coefficients of a byte, a byte of an all-reduce, the start and a latency."""
    kind = "send" if row["kind"] == "sendrecv" else row["kind"]
    sent, phases = bus_factor(kind, row["ranks"]) * row["bytes"], get_collective(kind).phases
    reduced = phases == 2
    steps = 1 if kind == "send" else phases * (row["ranks"] - 1)
    return (0.0 if reduced else sent), (sent if reduced else 0.0), 1.0, float(steps)


def _bus_bandwidth(row: CollectiveRow) -> float:
    plain, reduced, *_ = _terms(row)
    return (plain + reduced) / row["seconds"]


def _sum(terms: Sequence[float], figures: Sequence[float]) -> float:
    return sum(a * x for a, x in zip(terms, figures, strict=True))


def _comments(rows: Sequence[CollectiveRow], error: float) -> dict[str, str]:
    sizes, kinds = [row["bytes"] for row in rows], sorted({row["kind"] for row in rows})
    ways = ", ".join(sorted({row["transport"] for row in rows}))
    most = max(row["ranks"] for row in rows)
    return {
        "bandwidth": f"the best bus bandwidth of {', '.join(kinds)} over {ways}",
        "efficiency": f"what the fit of {bytes_text(min(sizes))} to {bytes_text(max(sizes))} by "
        f"up to {plural(most, 'rank')} reaches of it; its mean error {100 * error:.0f} %",
        "latency": "a step of the ring",
        "all_reduce": "its bandwidth over that of the others",
    }
