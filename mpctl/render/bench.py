"""Reports of benches: what was measured, what follows from it, where, and warnings about it; two reports
against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mpctl.core.units import few_text, plural, rate_text, seconds_text
from mpctl.measure.bench.collective_cases import CollectiveCases
from mpctl.measure.bench.compare import Comparison
from mpctl.measure.bench.report import BenchEnvironment, BenchName, BenchReport, load_warnings
from mpctl.measure.bench.tensor_modes import ModeCases
from mpctl.render.bench_ranks import WAYS, collectives_parts, kernels_parts, modes_parts, refusal
from mpctl.render.bench_runs import (
    REHEARSAL,
    machine_commands,
    machine_parts,
    machine_rows,
    scaling_parts,
    trace_parts,
    verify_parts,
)
from mpctl.render.console import get_console
from mpctl.render.parts import Column, DataTable, Facts, Figures, Part, Row, Section, Sentence
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.render.charts import Chart

BENCHES: Mapping[BenchName, Callable[[Any], Iterator[Part]]] = {
    "scaling": scaling_parts,
    "collectives": collectives_parts,
    "kernels": kernels_parts,
    "machine": machine_parts,
    "verify": verify_parts,
    "tensor-modes": modes_parts,
    "trace": trace_parts,
}


LEAD: dict[BenchName, str] = {
    "scaling": "The same job at several world sizes and layouts, and how efficiently it scales.",
    "collectives": "Collectives along the axes of a layout, by size, as nccl-tests measures them.",
    "kernels": "The kernels of a model on this device, and what the planner estimates for each.",
    "machine": "Kernels and collectives of this machine, and the presets made of them.",
    "verify": "The plan against the run: step time, memory and bytes of a set of layouts.",
    "tensor-modes": "One layer in every mode of tensor parallelism, and its plan.",
    "trace": "Where the time of profiled steps of a run went, stage by stage, and its plan.",
}
PAGE = "report.html"


def print_report(report: BenchReport, folder: Path, *, more: Iterable[str] = ()) -> None:
    """Print a report on stdout. folder: where it was written; more: further warnings."""
    print_parts([*report_parts(report, folder), *(Sentence(text, "warning") for text in more)])


def write_bench_files(folder: Path, report: BenchReport) -> Iterator[Path]:
    """Write the page and the pictures of a report, and yield each path when it is written. Raises
    InputError where one cannot be written."""
    from mpctl.render.charts import write_chart
    from mpctl.render.markup import write_text

    write_text(folder / PAGE, bench_page(report, folder), option="--out")
    yield folder / PAGE
    for chart in report_charts(report):
        for suffix in (".svg", ".png"):
            path = folder / f"{chart.key}{suffix}"
            write_chart(path, chart, where_measured(report["environment"]))
            yield path


def bench_page(report: BenchReport, folder: Path) -> str:
    """The page as HTML. folder: where it is written."""
    from mpctl.render.page import page_text

    return page_text(report_parts(report, folder, is_page=True), command=report["command"], of_command="Measured by:")


def report_charts(report: BenchReport) -> list[Chart]:
    """The pictures of a report."""
    from mpctl.render.bench_charts import charts_of

    return charts_of(report)


def report_parts(report: BenchReport, folder: Path, *, is_page: bool = False) -> Iterator[Part]:
    """The parts of a report. folder: where it was written; is_page: with what only a page shows."""
    title = f"mpctl bench {report['bench']}" + (f": {report['job']}" if report["job"] else "")
    yield Sentence(title, "title", "page")
    yield Sentence(LEAD[report["bench"]], on="page")
    yield Figures(headline(report))
    for chart in report_charts(report) if is_page else ():
        yield Section(chart.key, chart.title)
        yield chart
    yield Section("results", "Results")
    yield from BENCHES[report["bench"]](report)
    if report["bench"] == "machine":
        if is_page:
            yield from machine_rows(cast(Any, report))
        yield from machine_commands(cast(Any, report), folder)
    if report["bench"] != "trace":
        yield Sentence(_measured(report), "note")
    for warning in report_warnings(report):
        yield Sentence(warning, "warning")
    yield Section("machine", "Machine")
    facts = [(key.replace("_", " "), str(fact)) for key, fact in report["environment"].items()]
    yield Facts(facts, "Where it was measured", "page")


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
        Sentence(
            f"would time one layer of {model.name or model.family} on "
            f"{plural(cases.ranks, 'rank')}: {plural(rounds, 'round')} of "
            f"{plural(steps, 'step')} in each of"
        )
    ]
    for case in cases.cases:
        lines.append(Sentence(f"  {case.mode:<5} {' x '.join(map(str, case.axes.values()))}"))
    for mode, issue in cases.refused:
        lines.append(Sentence(refusal(mode, issue.message, issue.hint), "refused"))
    print_parts(lines)


def headline(report: Any) -> list[tuple[str, str]]:
    """The figures that a reader looks for first, with their names."""
    figures = {
        "scaling": (_efficiencies,),
        "collectives": (_fastest_collective,),
        "kernels": (_fastest_kernels,),
        "verify": (_accuracies,),
        "machine": (_left_out, _fastest_collective, _fastest_kernels),
    }
    return [pair for kind in figures.get(report["bench"], ()) for pair in kind(report)]


def _efficiencies(report: Any) -> Iterator[tuple[str, str]]:
    """The best efficiency of the most ranks that have a core each, by mode of scaling."""
    for mode in dict.fromkeys(row["mode"] for row in report["results"]):
        of_mode = [row for row in report["results"] if row["mode"] == mode]
        own = [row for row in of_mode if not row["is_rehearsal"]] or of_mode
        most = max(row["world_size"] for row in own)
        best = max(row["efficiency"] for row in own if row["world_size"] == most)
        yield f"{mode} scaling, {plural(most, 'rank')}", f"{best:.0%}"


def _accuracies(report: Any) -> Iterator[tuple[str, str]]:
    """How far plans were off, by group of layouts."""
    for name, group in report["findings"]["groups"].items():
        if name == "all" or not group["layouts"]:
            continue
        yield f"step time, {name}", f"{group['mape']:.1%} off"
        if group["spearman"] is not None:
            yield f"rank correlation, {name}", f"{group['spearman']:.2f}"
        if group["coverage"] is not None:
            yield f"inside of the band, {name}", f"{group['coverage']:.0%}"


def _left_out(report: Any) -> Iterator[tuple[str, str]]:
    if "left_out" in (errors := report["findings"]["errors"]):
        yield "step time, layout left out", f"{errors['left_out']:.1%} off"


def _fastest_collective(report: Any) -> Iterator[tuple[str, str]]:
    if rates := [row["busbw"] for row in report["results"] if "busbw" in row]:
        yield "largest bus bandwidth", f"{max(rates) / 1e9:.3g} GB/s"


def _fastest_kernels(report: Any) -> Iterator[tuple[str, str]]:
    kernels = [row for row in report["results"] if "kernel" in row]
    if products := [row["flops_per_second"] for row in kernels if row["kernel"] == "matmul"]:
        yield "fastest product", rate_text(max(products))
    if streams := [row["bytes_per_second"] for row in kernels if row["kernel"] == "triad"]:
        yield "triad of a rank", f"{max(streams) / 1e9:.3g} GB/s"


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
    print_parts(_compared(comparison))


def _compared(comparison: Comparison) -> Iterator[Part]:
    """Yield the compared rows; if there are many, only those beyond the threshold."""
    rows = sorted(comparison["rows"], key=lambda row: -row["ratio"])
    shown = [row for row in rows if len(rows) <= FEW_ROWS or row["verdict"] != "same"]
    if shown:
        yield DataTable("", COMPARED, shown)
    if left_out := len(rows) - len(shown):
        within = f"within {comparison['threshold']:g} % of A"
        yield Sentence(f"{plural(left_out, 'more row')} {within}, see --json", "note")
    for where in ("A", "B"):
        names = comparison["only_in_a"] if where == "A" else comparison["only_in_b"]
        if names:
            yield Sentence(f"only in {where}: {few_text(names, most=FEW_NAMES)}")
    for warning in comparison["warnings"]:
        yield Sentence(warning, "warning")
    count, all_rows = comparison["regressions"], plural(len(rows), "row")
    mean = f"B takes {comparison['ratio']:.3f} of A's time in the geometric mean"
    bound = f"slower by more than {comparison['threshold']:g} % and beyond the spread of both"
    if count:
        yield Sentence(f"{count} of {all_rows} {bound}; {mean}", "failed")
    else:
        yield Sentence(f"none of {all_rows} is {bound}; {mean}", "passed")
