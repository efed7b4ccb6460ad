"""Reports of benches in a terminal, and text that their pages share: where figures were measured,
and warnings about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from mpctl.core.units import plural, seconds_text
from mpctl.measure.bench.collective_cases import CollectiveCases
from mpctl.measure.bench.compare import Comparison
from mpctl.measure.bench.report import BenchEnvironment, BenchName, BenchReport, load_warnings
from mpctl.measure.bench.tensor_modes import ModeCases
from mpctl.render.bench_parts import HEADS, REHEARSAL, BenchLine, BenchTable, Column, Part, Row, Style
from mpctl.render.bench_ranks import WAYS, collectives_parts, kernels_parts, modes_parts, refusal
from mpctl.render.bench_runs import machine_commands, machine_parts, scaling_parts, trace_parts, verify_parts
from mpctl.render.console import get_console, plain_table

BENCHES: Mapping[BenchName, Callable[[Any], Iterator[Part]]] = {
    "scaling": scaling_parts,
    "collectives": collectives_parts,
    "kernels": kernels_parts,
    "machine": machine_parts,
    "verify": verify_parts,
    "tensor-modes": modes_parts,
    "trace": trace_parts,
}


MARKS: Mapping[Style, tuple[str, str]] = {
    "passed": ("✓ ", "bold green"),
    "failed": ("✗ ", "bold red"),
    "refused": ("✗ ", "bold red"),
    "warning": ("! ", "bold yellow"),
}
STYLES: Mapping[Style, str] = {"head": "bold", "passed": "bold", "failed": "bold", "note": "dim"}


def print_report(report: BenchReport, folder: Path, *, more: Iterable[str] = ()) -> None:
    """Print a report on stdout. folder: where it was written; more: further warnings."""
    _print_parts([*report_parts(report, folder), *(BenchLine(text, "warning") for text in more)])


def _print_parts(parts: Iterable[Part]) -> None:
    """A blank line before each table and after a head."""
    console, before = get_console(), None
    for part in parts:
        if before is not None and (isinstance(part, BenchTable) or before == "head"):
            console.print()
        if isinstance(part, BenchTable):
            console.print(_rich_table(part))
            before = "table"
        else:
            mark, text = MARKS.get(part.style, ("", "")), (part.text, STYLES.get(part.style, ""))
            console.print(Text.assemble(mark, text), soft_wrap=part.style == "plain")
            before = "head" if part.style in HEADS else "line"


def _rich_table(part: BenchTable) -> Table:
    left = [column.title for column in part.columns if column.left]
    table = plain_table(part.title, [column.title for column in part.columns], left=left)
    table.columns[0].no_wrap = part.keeps_first
    for cells in part.cells():
        is_heading = len(cells) < len(part.columns)
        table.add_row(*(Text(cell, "bold" if is_heading else "") for cell in cells))
    return table


def report_parts(report: BenchReport, folder: Path) -> Iterator[Part]:
    """The parts of a report. folder: where it was written."""
    yield from BENCHES[report["bench"]](report)
    if report["bench"] == "machine":
        yield from machine_commands(cast(Any, report), folder)
    if report["bench"] != "trace":
        yield BenchLine(_measured(report), "note")
    for warning in report_warnings(report):
        yield BenchLine(warning, "warning")


def report_warnings(report: BenchReport) -> Iterator[str]:
    """Reasons why figures of a report are not those of the undisturbed machine."""
    if not report["is_complete"] and report["bench"] != "trace":
        yield "not complete: the bench was interrupted, or its budget ended before every round"
    rows: Sequence[Row] = report["results"]
    findings = _findings(report)
    ranks = [row.get("world_size") or row["ranks"] for row in rows if row.get("is_rehearsal")]
    if findings.get("is_rehearsal"):
        ranks = [findings["ranks"]]
    if ranks:
        units = findings.get("units", report["environment"]["cores"])
        shared = plural(units, findings.get("unit", "core"))
        yield (
            f"{REHEARSAL} rehearsal, not a measurement: {plural(max(ranks), 'rank')} share "
            f"{shared}, so that times say nothing of ranks that have one each"
        )
    yield from load_warnings(report["environment"])


def _findings(report: BenchReport) -> Mapping[str, Any]:
    return cast(Mapping[str, Any], report["findings"])


def _measured(report: BenchReport) -> str:
    """`medians of 3 rounds of 8 steps; laptop, AMD EPYC, 2 cores, torch 2.11, mpctl 0.9, ...`."""
    found = _findings(report)
    rounds = plural(max((row["rounds"] for row in report["results"]), default=0), "round")
    if steps := found.get("steps_timed", found.get("steps")):
        rounds += f" of {plural(steps, 'step')}"
    if "iterations" in found:
        rounds += f" of {plural(found['iterations'], 'call')} after {found['warm_up']} to warm up"
    if "threads" in found:
        rounds += f", {plural(found['threads'], 'thread')} a rank"
    return f"medians of {rounds}; {where_measured(report['environment'])}"


def where_measured(where: BenchEnvironment) -> str:
    """`laptop, AMD EPYC, 2 cores, torch 2.11, mpctl 0.9, 2026-01-02`."""
    hardware = [where["host"], where["machine"], plural(where["cores"], "core")]
    if where["gpus"]:
        hardware.append(plural(where["gpus"], "GPU"))
    versions = [f"torch {where['torch']}", f"mpctl {where['mpctl']}", where["date"][:10]]
    return ", ".join([*hardware, *versions])


def print_collective_cases(cases: CollectiveCases) -> None:
    """The output of `--dry-run`: each collective with its sizes."""
    console, options = get_console(), cases.options
    console.print(
        f"would time {plural(len(cases.cases), 'case')} in {plural(options.rounds, 'round')} of "
        f"{plural(options.iterations, 'call')}, after {options.warm_up} to warm up:"
    )
    for (axis, kind, way), group in groupby(cases.cases, lambda case: (case["axis"], case["kind"], case["transport"])):
        sizes = [case["bytes"] for case in group]
        span = f"{sizes[0]:,} to {sizes[-1]:,} bytes, {plural(len(sizes), 'size')}"
        console.print(f"  {kind:<14} {axis}{cases.sizes[axis]}  {WAYS[way]:<14} {span}")


def print_mode_cases(cases: ModeCases, *, rounds: int, steps: int) -> None:
    """The output of `--dry-run`: the modes that would be timed, and those that would not."""
    model = cases.job.model
    assert model is not None, "a bench is of a model"
    lines = [
        BenchLine(
            f"would time one layer of {model.name or model.family} on "
            f"{plural(cases.ranks, 'rank')}: {plural(rounds, 'round')} of "
            f"{plural(steps, 'step')} in each of"
        )
    ]
    for case in cases.cases:
        lines.append(BenchLine(f"  {case.mode:<5} {' x '.join(map(str, case.axes.values()))}"))
    for mode, issue in cases.refused:
        lines.append(BenchLine(refusal(mode, issue.message, issue.hint), "refused"))
    _print_parts(lines)


# ---------------------------------------------------------------- two reports

VERDICTS = {"slower": "✗ slower", "faster": "✓ faster", "noise": "noise: rounds overlap", "same": "same"}
FEW_ROWS, FEW_NAMES = 20, 10
COMPARED = (
    Column("", "name", left=True),
    Column("A", "seconds_a", seconds_text),
    Column("B", "seconds_b", seconds_text),
    Column("B / A", "ratio", "{:.3f}".format),
    Column("verdict", "verdict", VERDICTS.__getitem__, left=True),
)


def print_bench_comparison(comparison: Comparison) -> None:
    """Print the rows of two reports, those that became slower first; rows of one report only;
    warnings; the verdict."""
    _print_parts(_compared(comparison))


def _compared(comparison: Comparison) -> Iterator[Part]:
    """If there are many rows, those beyond the threshold."""
    rows = sorted(comparison["rows"], key=lambda row: -row["ratio"])
    shown = [row for row in rows if len(rows) <= FEW_ROWS or row["verdict"] != "same"]
    if shown:
        yield BenchTable("", COMPARED, shown)
    if left_out := len(rows) - len(shown):
        within = f"within {comparison['threshold']:g} % of A"
        yield BenchLine(f"{plural(left_out, 'more row')} {within}, see --json", "note")
    for where in ("A", "B"):
        names = comparison["only_in_a"] if where == "A" else comparison["only_in_b"]
        more = f" and {len(names) - FEW_NAMES} more" if len(names) > FEW_NAMES else ""
        if names:
            yield BenchLine(f"only in {where}: {', '.join(names[:FEW_NAMES])}{more}")
    for warning in comparison["warnings"]:
        yield BenchLine(warning, "warning")
    count, all_rows = comparison["regressions"], plural(len(rows), "row")
    mean = f"B takes {comparison['ratio']:.3f} of A's time in the geometric mean"
    bound = f"slower by more than {comparison['threshold']:g} % and beyond the spread of both"
    if count:
        yield BenchLine(f"{count} of {all_rows} {bound}; {mean}", "failed")
    else:
        yield BenchLine(f"none of {all_rows} is {bound}; {mean}", "passed")
