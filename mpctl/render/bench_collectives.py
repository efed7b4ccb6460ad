"""A report of `mpctl bench collectives` as nccl-tests prints one: a table for each collective."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from statistics import fmean

from rich.table import Table
from rich.text import Text

from mpctl.bench.collective_cases import NCCL_NAMES, CollectiveCases
from mpctl.bench.collectives import CollectiveFit, CollectiveRow, CollectivesReport
from mpctl.bench.report import load_warnings
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, seconds_text

COLUMNS = ("size", "count", "type", "redop", "time", "least", "most", "algbw", "busbw", "#wrong")
PLANNED = "planned"  # where the cluster has such a link
UNITS = " (bytes, us, GB/s)"
WAYS = {"gloo": "gloo", "nccl": "NCCL", "shared": "shared memory"}
DEFINITION = (
    "size, count, algbw and busbw as in nccl-tests: algbw = size / time; busbw = algbw x 2(n-1)/n "
    "for all_reduce, (n-1)/n for all_gather, reduce_scatter and all_to_all, 1 for the others"
)
REHEARSAL = "a rehearsal: {ranks} share {cores}, so that times say little of ranks with a core each"
TYPES = {ours: theirs for theirs, ours in NCCL_NAMES.items()}


def print_cases(cases: CollectiveCases) -> None:
    """What `--dry-run` says: each collective with its sizes."""
    console, options = get_console(), cases.options
    console.print(
        f"would time {plural(len(cases.cases), 'case')} in {plural(options.rounds, 'round')} of "
        f"{plural(options.iterations, 'call')}, after {options.warm_up} to warm up:"
    )
    for (axis, kind, way), group in groupby(
        cases.cases, lambda case: (case["axis"], case["kind"], case["transport"])
    ):
        sizes = [case["bytes"] for case in group]
        span = f"{sizes[0]:,} to {sizes[-1]:,} bytes, {plural(len(sizes), 'size')}"
        console.print(f"  {kind:<14} {axis}{cases.sizes[axis]}  {WAYS[way]:<14} {span}")


def print_collectives(report: CollectivesReport) -> None:
    """A table for each kind, axis and way to send, with the line that fits it, on stdout."""
    console, findings = get_console(), report["findings"]
    fits = {_key(fit): fit for fit in findings["fits"]}
    for key, rows in groupby(report["results"], _key):
        _print_one(list(rows), fits.get(key))
    if fits:
        console.print(_summary(report), "")
    console.print(Text(DEFINITION, style="dim"))
    where = report["environment"]
    calls = f"{plural(findings['iterations'], 'call')} after {findings['warm_up']} to warm up"
    rounds = max((row["rounds"] for row in report["results"]), default=0)
    machine = f"{plural(where['cores'], 'core')}, {plural(where['gpus'], 'GPU')}"
    note = f"medians of {plural(rounds, 'round')} of {calls}; {machine}, torch {where['torch']}"
    console.print(Text(f"{note}, {where['date']}", style="dim"))
    for warning in _warnings(report):
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _summary(report: CollectivesReport) -> Table:
    """A line for each kind, axis and way to send: what its fit says, and the best that was seen."""
    columns = ("", "ranks", "over", "latency", "bandwidth", "best busbw")
    table = plain_table("fitted latency and bus bandwidth (GB/s)", columns, left=("", "over"))
    for fit in report["findings"]["fits"]:
        best = max(row["busbw"] for row in report["results"] if _key(row) == _key(fit))
        rate = "" if fit["bandwidth"] is None else _rate(fit["bandwidth"])
        table.add_row(
            f"{fit['kind']} {fit['axis']}", str(fit["ranks"]), WAYS[fit["transport"]],
            seconds_text(fit["latency"]), rate, _rate(best),
        )  # fmt: skip
    return table


def _print_one(rows: list[CollectiveRow], fit: CollectiveFit | None) -> None:
    console, first = get_console(), rows[0]
    title = f"{first['kind']} over {first['axis']}, {plural(first['ranks'], 'rank')}, "
    columns = COLUMNS if first["predicted_seconds"] is None else (*COLUMNS, PLANNED)
    table = plain_table(
        f"{title}{WAYS[first['transport']]}{UNITS}", columns, left=("type", "redop")
    )
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    average = fmean(row["busbw"] for row in rows)
    line = f"avg bus bandwidth {_rate(average)} GB/s{'' if fit is None else _fitted(fit)}"
    console.print(Text(line, style="dim"), "")


def _fitted(fit: CollectiveFit) -> str:
    """The line through the sizes, in words; no bandwidth where small messages tell none."""
    latency, off = seconds_text(fit["latency"]), f"off by {fit['error']:.0%} on the average"
    if fit["bandwidth"] is None:
        return f"; fit: {latency} whatever the size, {off}: too small to tell a bandwidth"
    return f"; fit: {latency} + bus bytes / {_rate(fit['bandwidth'])} GB/s, {off}"


def _cells(row: CollectiveRow) -> Iterator[str]:
    yield from (f"{row['bytes']}", f"{row['count']}", TYPES[row["dtype"]], row["op"])
    yield from map(_micro, (row["seconds"], row["seconds_min"], row["seconds_max"]))
    yield from (_rate(rate) for rate in (row["algbw"], row["busbw"]))
    yield "N/A" if row["wrong"] < 0 else f"{row['wrong']}"
    if row["predicted_seconds"] is not None:
        yield _micro(row["predicted_seconds"])


def _rate(per_second: float) -> str:
    """GB/s: three decimals, or three digits where those would be zeros."""
    rate = per_second / 1e9
    return f"{rate:.3f}" if rate >= 0.0995 else f"{rate:.3g}"


def _micro(seconds: float) -> str:
    return f"{1e6 * seconds:.1f}"


def _key(entry: CollectiveRow | CollectiveFit) -> tuple[str, str, str]:
    return entry["kind"], entry["axis"], entry["transport"]


def _warnings(report: CollectivesReport) -> list[str]:
    findings, where = report["findings"], report["environment"]
    warnings = load_warnings(where)
    for way in findings["absent"]:
        warnings.insert(
            0, f"{way['axis']} has no {WAYS[way['transport']]}: nothing was timed there"
        )
    if findings["is_rehearsal"]:
        ranks, cores = plural(findings["ranks"], "rank"), plural(where["cores"], "core")
        warnings.insert(0, REHEARSAL.format(ranks=ranks, cores=cores))
    if not report["is_complete"]:
        warnings.insert(0, "of some collectives fewer rounds than asked for, or none, were timed")
    if wrong := sum(row["wrong"] > 0 for row in report["results"]):
        warnings.insert(0, f"{plural(wrong, 'row')} with wrong results: see #wrong")
    return warnings
