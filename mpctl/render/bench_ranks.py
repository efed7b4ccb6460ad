"""Tables of benches in ranks: collectives, kernels, a layer in each tensor mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean

from mpctl.core.units import bytes_text, plural, rate_text, seconds_text
from mpctl.measure.bench.collective_cases import NCCL_NAMES
from mpctl.measure.bench.collectives import CollectiveFit, CollectiveRow, CollectivesReport
from mpctl.measure.bench.kernel_list import case_sizes
from mpctl.measure.bench.kernels import KernelRow, KernelsReport
from mpctl.measure.bench.tensor_modes import TensorModesReport
from mpctl.render.parts import Column, DataTable, Part, Row, Sentence


def percent(value: float) -> str:
    return f"{value:.0%}"


def signed_error(value: float) -> str:
    return f"{value:+.1%}"


def gigabytes(rate: float) -> str:
    """GB/s: three decimals, or three digits where those would be zeros."""
    rate /= 1e9
    return f"{rate:.3f}" if rate >= 0.0995 else f"{rate:.3g}"


def bandwidth_text(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s"


# ---------------------------------------------------------------- collectives

WAYS = {"gloo": "gloo", "nccl": "NCCL", "shared": "shared memory"}
DEFINITION = (
    "size, count, algbw and busbw as in nccl-tests: algbw = size / time; busbw = algbw x 2(n-1)/n "
    "for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for the others"
)
TYPES = {ours: theirs for theirs, ours in NCCL_NAMES.items()}


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


COLLECTIVES = (
    Column("size", "bytes"),
    Column("count", "count"),
    Column("type", "dtype", lambda dtype: TYPES.get(dtype, dtype), left=True),
    Column("redop", "op", left=True),
    Column("time", "seconds", _micro),
    Column("least", "seconds_min", _micro),
    Column("most", "seconds_max", _micro),
    Column("algbw", "algbw", gigabytes),
    Column("busbw", "busbw", gigabytes),
    Column("#wrong", "wrong", lambda wrong: "N/A" if wrong < 0 else str(wrong)),
)
PLANNED = Column("planned", "predicted_seconds", _micro)
FITS = (
    Column("", lambda fit: f"{fit['kind']} {fit['axis']}", left=True),
    Column("ranks", "ranks"),
    Column("over", "transport", WAYS.__getitem__, left=True),
    Column("latency", "latency", seconds_text),
    Column("bandwidth", "bandwidth", gigabytes),
    Column("best busbw", "best", gigabytes),
)


def collectives_parts(report: CollectivesReport) -> Iterator[Part]:
    """A table for each kind, axis and way to send, with the line that fits it."""
    fits = {_sent(fit): fit for fit in report["findings"]["fits"]}
    yield from collective_tables(report["results"], fits)
    if fits:
        ways = groupby(report["results"], _sent)
        best = {key: max(row["busbw"] for row in rows) for key, rows in ways}
        rows = [{**fit, "best": best[key]} for key, fit in fits.items() if key in best]
        yield DataTable("fitted latency and bus bandwidth (GB/s)", FITS, rows)
    yield Sentence(DEFINITION, "note")
    for way in report["findings"]["absent"]:
        text = f"{way['axis']} has no {WAYS[way['transport']]}: nothing was timed there"
        yield Sentence(text, "warning")
    if wrong := sum(row["wrong"] > 0 for row in report["results"]):
        yield Sentence(f"{plural(wrong, 'row')} with wrong results: see #wrong", "warning")


def _sent(entry: CollectiveRow | CollectiveFit) -> tuple[str, str, str]:
    return entry["kind"], entry["axis"], entry["transport"]


def collective_tables(
    results: Sequence[CollectiveRow], fits: Mapping[tuple[str, str, str], CollectiveFit]
) -> Iterator[DataTable | Sentence]:
    for key, own in groupby(results, _sent):
        first, *_ = rows = list(own)
        columns = COLLECTIVES if first["predicted_seconds"] is None else (*COLLECTIVES, PLANNED)
        ranks, way = plural(first["ranks"], "rank"), WAYS[first["transport"]]
        title = f"{first['kind']} over {first['axis']}, {ranks}, {way} (bytes, us, GB/s)"
        yield DataTable(title, columns, rows)
        average = gigabytes(fmean(row["busbw"] for row in rows))
        fitted = _fitted(fits[key]) if key in fits else ""
        yield Sentence(f"avg bus bandwidth {average} GB/s{fitted}", "note")


def _fitted(fit: CollectiveFit) -> str:
    """The line through the sizes, in words; no bandwidth if messages are too small."""
    latency, off = seconds_text(fit["latency"]), f"off by {fit['error']:.0%} on the average"
    if fit["bandwidth"] is None:
        return f"; fit: {latency} whatever the size, {off}: too small to tell a bandwidth"
    return f"; fit: {latency} + bus bytes / {gigabytes(fit['bandwidth'])} GB/s, {off}"


# ---------------------------------------------------------------- kernels

KERNELS = {
    "matmul": "matrix products",
    "grouped_matmul": "matrix products of experts",
    "attention": "attention, fused",
    "unfused_attention": "attention, step by step",
    "heads": "heads split, turned, joined",
    "branch": "norm, dropout and residual sum",
    "activation": "activation of the MLP",
    "cross_entropy": "cross entropy",
    "optimizer": "gradient norm, clipping, AdamW",
    "accumulate": "adding up gradients",
    "triad": "memory: a = b + s c",
    "copy": "memory: a = b",
    "layer": "a full layer, and a tiny one",
}
PASSES = {"backward_input": "dX", "backward_weight": "dW", "both": "both ways", "update": ""}
SIZES = {
    "attention": ("batch", "heads", "queries", "head_dim"),
    "unfused_attention": ("batch", "heads", "queries", "head_dim"),
    "heads": ("batch", "positions", "heads", "head_dim"),
    "layer": ("micro_batch_size", "seq_length", "hidden"),
}  # those that a cell has room for
KERNELS_LAW = (
    "G/s: GFLOP/s of products, attention and layers, GB/s of the others. This, the share of the "
    "peak and what is off (measured over planned, less 1) are of the most ranks at once. Kernels "
    "above 100 % of the memory's bandwidth find their operands in a cache."
)


def kernels_parts(report: KernelsReport) -> Iterator[Part]:
    """A table for each data type, and the peaks to which shares refer."""
    found = report["findings"]
    yield from kernel_tables(report["results"], report["job"] or "the model")
    yield Sentence(KERNELS_LAW, "note")
    dtypes = {row["dtype"] for row in report["results"]}
    peaks = [f"{d} {rate_text(rate)}" for d, rate in found["peak_flops"].items() if d in dtypes]
    if found["memory_bandwidth"]:
        peaks.append(f"memory {found['memory_bandwidth'] / 1e9:.1f} GB/s")
    if found["device"] and peaks:
        yield Sentence(f"peaks of {found['device']}: {', '.join(peaks)}", "note")


def kernel_tables(rows: Sequence[KernelRow], job: str) -> Iterator[DataTable]:
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        counts = sorted({row["ranks"] for row in own})
        times = [Column(plural(n, "rank"), f"seconds x{n}", seconds_text) for n in counts]
        columns = (
            Column("", _site, left=True),
            Column("size", _kernel_size, left=True),
            *times,
            Column("G/s", lambda row: row["flops_per_second"] or row["bytes_per_second"], _giga),
            Column("peak", "share_of_peak", percent),
            Column("planned", "predicted_seconds", seconds_text),
            Column("off", _kernel_off, "{:+.0%}".format),
        )
        title = f"Kernels of {job} in {dtype}"
        yield DataTable(title, columns, _by_kernel(own), lambda row: KERNELS[row["kernel"]], whole=1)


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.1f}"


def _by_kernel(rows: Sequence[KernelRow]) -> list[Row]:
    """One row for each kernel, that of the most ranks, with the seconds of every number of ranks as
    `seconds xRANKS`; kernels of a kind are adjacent."""
    found: dict[str, dict[int, KernelRow]] = {}
    for row in rows:
        found.setdefault(row["name"].removesuffix(f" x{row['ranks']}"), {})[row["ranks"]] = row
    kinds = list(KERNELS)
    merged = [
        {**timed[max(timed)], **{f"seconds x{n}": row["seconds"] for n, row in timed.items()}}
        for timed in found.values()
    ]
    return sorted(merged, key=lambda row: kinds.index(str(row["kernel"])))


def _site(row: KernelRow) -> str:
    return f"  {row['site']} {PASSES.get(row['part'], row['part'])}".rstrip()


def _kernel_size(row: KernelRow) -> str:
    shape = row["shape"]
    return case_sizes({n: shape[n] for n in SIZES.get(row["kernel"], tuple(shape)) if n in shape})


def _kernel_off(row: KernelRow) -> float | None:
    planned = row["predicted_seconds"]
    return None if planned is None else row["seconds"] / planned - 1


# ---------------------------------------------------------------- tensor modes

MODES_LAW = "law: a rank's bytes times the ranks, over those of the unsharded layer; 1 is a P-th"


def _seconds_range(row: Row) -> str:
    return f"{seconds_text(row['seconds_min'])} to {seconds_text(row['seconds_max'])}"


def _collectives_sent(row: Row) -> str:
    planned = row["planned_collectives"]
    same = row["collectives"] == planned
    return f"{row['collectives']}" if same else f"{row['collectives']} (planned {planned})"


def _planned_size(key: str) -> Callable[[Row], str]:
    def text(row: Row) -> str:
        measured, planned = row[key], row[f"planned_{key}"]
        if measured == planned:
            return "the same"
        return f"{bytes_text(planned)} ({measured / planned - 1:+.1%})"

    return text


def _sizes(title: str, key: str) -> tuple[Column, Column]:
    return Column(title, key, bytes_text), Column("  planned", _planned_size(key))


TENSOR_MODES = (
    Column("grid", lambda row: " x ".join(map(str, row["axes"].values()))),
    Column("time of a step", "seconds", seconds_text),
    Column("  least to most", _seconds_range),
    Column("processor time of a rank", "cpu_seconds", seconds_text),
    Column("collectives", _collectives_sent),
    *_sizes("sent by a rank", "sent_bytes"),
    *_sizes("parameters of a rank", "parameter_bytes"),
    *_sizes("saved activations of a rank", "saved_bytes"),
    Column("law, parameters", "parameters_law", "{:.3f}".format),
    Column("law, activations", "activations_law", "{:.3f}".format),
)
"""Figures of a mode, one per row: a column of the table is a mode."""


def modes_parts(report: TensorModesReport) -> Iterator[Part]:
    found, rows = report["findings"], report["results"]
    layer = ", ".join(f"{name} {size}" for name, size in found["layer"].items())
    if rows:
        figures = [{"": figure.title, **{row["name"]: figure.text(row) for row in rows}} for figure in TENSOR_MODES]
        modes = [Column(row["name"], row["name"]) for row in rows]
        title = f"One layer ({layer}), {plural(found['micro_batch_size'], 'sample')}"
        yield DataTable(title, (Column("", "", left=True), *modes), figures, whole=1)
    yield Sentence(MODES_LAW, "note")
    for refused in found["refused"]:
        issue = refused["issue"]
        yield Sentence(refusal(refused["mode"], issue["message"], issue["hint"]), "refused")


def refusal(mode: str, message: str, hint: str) -> str:
    return f"{mode}: {message}\n  → {hint}"
