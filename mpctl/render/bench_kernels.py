"""A report of `mpctl bench kernels` as a table for each data type: times, rates, and the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from mpctl.bench.kernel_list import case_sizes
from mpctl.bench.kernels import KernelRow, KernelsReport
from mpctl.bench.report import load_warnings
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, rate_text, seconds_text

TITLES = {
    "matmul": "matrix products",
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
    "layer": "a whole layer, and a tiny one",
}
PARTS = {"backward_input": "dX", "backward_weight": "dW", "both": "both ways", "update": ""}
SHOWN = {
    "attention": ("batch", "heads", "queries", "head_dim"),
    "unfused_attention": ("batch", "heads", "queries", "head_dim"),
    "heads": ("batch", "positions", "heads", "head_dim"),
    "layer": ("micro_batch_size", "seq_length", "hidden"),
}  # sizes that a cell has room for
LAW = (
    "G/s: GFLOP/s of products, attention and layers, GB/s of the others. This, the share of the "
    "peak and what is off (measured over planned, less 1) are of the most ranks at once. Kernels "
    "above 100 % of the memory's bandwidth find their operands in a cache."
)


def print_kernels(report: KernelsReport) -> None:
    """The table of each data type, what shares are of, and where it was measured, on stdout."""
    console, rows = get_console(), report["results"]
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        own = [row for row in rows if row["dtype"] == dtype]
        console.print(_table(f"Kernels of {report['job']} in {dtype}", own), "")
    console.print(Text(LAW, style="dim"))
    for line in _peaks(report):
        console.print(Text(line, style="dim"))
    where = report["environment"]
    rounds = max((row["rounds"] for row in rows), default=0)
    note = (f"medians of {plural(rounds, 'round')}, "
            f"{plural(report['findings']['threads'], 'thread')} a rank; "
            f"{plural(where['cores'], 'core')}, {plural(where['gpus'], 'GPU')}")  # fmt: skip
    console.print(Text(f"{note}, torch {where['torch']}, {where['date']}", style="dim"))
    for warning in _warnings(report):
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _table(title: str, rows: Sequence[KernelRow]) -> Table:
    counts = sorted({row["ranks"] for row in rows})
    times = [plural(n, "rank") for n in counts]
    table = plain_table(title, ("", "size", *times, "G/s", "peak", "planned", "off"),
                        left=("", "size"))  # fmt: skip
    table.columns[0].no_wrap = True
    before = ""
    for kernel, timed in _by_kernel(rows):
        if kernel != before:
            table.add_row(Text(TITLES.get(kernel, kernel), style="bold"))
        before = kernel
        table.add_row(*_cells(timed, counts))
    return table


def _by_kernel(rows: Sequence[KernelRow]) -> Iterator[tuple[str, dict[int, KernelRow]]]:
    """The rows of each kernel by their number of ranks, kernels of a kind beside each other."""
    for kind in (kind for kind in TITLES if any(row["kernel"] == kind for row in rows)):
        found: dict[str, dict[int, KernelRow]] = {}
        for row in rows:
            if row["kernel"] == kind:
                name = row["name"].removesuffix(f" x{row['ranks']}")
                found.setdefault(name, {})[row["ranks"]] = row
        for timed in found.values():
            yield kind, timed


def _cells(timed: dict[int, KernelRow], counts: Sequence[int]) -> Iterator[str]:
    row = timed[max(timed)]
    yield f"  {row['site']} {PARTS.get(row['part'], row['part'])}".rstrip()
    shown = SHOWN.get(row["kernel"], tuple(row["shape"]))
    yield case_sizes({name: row["shape"][name] for name in shown})
    yield from (seconds_text(timed[n]["seconds"]) if n in timed else "" for n in counts)
    share, rate = row["share_of_peak"], row["flops_per_second"] or row["bytes_per_second"]
    yield f"{rate / 1e9:,.1f}"
    yield "" if share is None else f"{share:.0%}"
    planned = row["predicted_seconds"]
    yield "" if planned is None else seconds_text(planned)
    yield "" if planned is None else f"{row['seconds'] / planned - 1:+.0%}"


def _peaks(report: KernelsReport) -> Iterator[str]:
    """What the shares are of."""
    found = report["findings"]
    dtypes = {row["dtype"] for row in report["results"]}
    peaks = [f"{dtype} {rate_text(rate)}" for dtype, rate in found["peak_flops"].items()
             if dtype in dtypes]  # fmt: skip
    if found["memory_bandwidth"]:
        peaks.append(f"memory {found['memory_bandwidth'] / 1e9:.1f} GB/s")
    if found["device"] and peaks:
        yield f"peaks of {found['device']}: {', '.join(peaks)}"


def _warnings(report: KernelsReport) -> Iterator[str]:
    if not report["is_complete"]:
        yield "stopped early: of some kernels fewer rounds, or none, were timed"
    cores = plural(report["environment"]["cores"], "core")
    for ranks in sorted({row["ranks"] for row in report["results"] if row["is_rehearsal"]}):
        yield (f"rehearsal: {plural(ranks, 'rank')} share {cores}, so that their times say nothing "
               "of ranks that have a core each")  # fmt: skip
    yield from load_warnings(report["environment"])
