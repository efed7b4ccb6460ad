"""Tables of benches that train: scaling, a measured machine, plans and runs, profiled steps."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from mpctl.core.units import (
    MFU_CONVENTION,
    bytes_text,
    plural,
    ranges_text,
    ranks_text,
    rate_text,
    seconds_span_text,
    seconds_text,
)
from mpctl.measure.bench.machine import MachineFindings, MachineReport
from mpctl.measure.bench.scaling import ScalingReport, ScalingRow
from mpctl.measure.bench.trace import STEP, TraceReport, TraceRow
from mpctl.measure.bench.verify import ALL, BUSY, GROUPS, VerifyReport, VerifyRow, disturbed
from mpctl.render.bench_ranks import bandwidth_text, collective_tables, kernel_tables, percent, signed_error
from mpctl.render.parts import Column, DataTable, Facts, Lines, Part, Row, Sentence, Style

# ---------------------------------------------------------------- scaling

EFFICIENCY = (
    "efficiency = (tokens/s of N ranks / tokens/s of the smallest N0) / (N / N0). The same form "
    "gives Megatron-LM's published 76 %: 15.1 PFLOP/s on 512 GPUs against 39 TFLOP/s on one, "
    "15100 / (512 x 39) (arXiv 1909.08053). at best: what {units} could "
    "reach if nothing but work took time."
)
MODES = {
    "strong": "Strong scaling: the same global batch, shared by more ranks",
    "weak": "Weak scaling: the global batch grows with the ranks",
}
RATES_TITLE = (
    f"Model FLOP/s of a rank ({MFU_CONVENTION}), processor time of rank 0, and what a rank waits in collectives; "
    "both as shares of a step"
)


REHEARSAL = "*"  # marks a layout with more ranks than cores, or GPUs
CHECK = {True: "✓", False: "✗"}


def _half_spread(row: ScalingRow) -> float | None:
    half = (row["seconds_max"] - row["seconds_min"]) / 2 / row["seconds"]
    return half if row["rounds"] > 1 else None


HEAD = (
    Column("ranks", "world_size"),
    Column("layout", lambda row: row["layout"] + REHEARSAL * row["is_rehearsal"], left=True),
    Column("batch", "global_batch_size"),
)
SCALING = (
    *HEAD,
    Column("step", "seconds", seconds_text),
    Column("±", _half_spread, percent),
    Column("plan's step", "predicted_seconds", seconds_text),
    Column("tokens/s", "tokens_per_second", "{:,.0f}".format),
    Column("speed-up", "speed_up", "{:.2f}".format),
    Column("efficiency", "efficiency", percent),
    Column("plan's", "predicted_efficiency", percent),
    Column("at best", "perfect_efficiency", percent),
)
RATES = (
    *HEAD,
    Column("FLOP/s a rank", "flops_per_second", rate_text),
    Column("MFU", "mfu", percent),
    Column("HFU", "hfu", percent),
    Column("processor", lambda row: row["cpu_seconds"] / row["seconds"], percent),
    Column("waiting", "communication_share", percent),
    Column("plan's wait", "predicted_communication_share", percent),
)


def scaling_parts(report: ScalingReport) -> Iterator[Part]:
    for mode, title in MODES.items():
        if rows := [row for row in report["results"] if row["mode"] == mode]:
            yield DataTable(title, SCALING, rows)
    timed = {(row["layout"], row["global_batch_size"]): row for row in report["results"]}
    if timed:
        yield DataTable(RATES_TITLE, RATES, list(timed.values()))
    units = plural(report["findings"]["units"], report["findings"]["unit"])
    yield Sentence(EFFICIENCY.format(units=units), "note")


# ---------------------------------------------------------------- machine

CHECKS_LEGEND = (
    "Errors are planned / run - 1 of the step time: planned from kernels and collectives alone "
    "(measured), on the preset as it is written (fitted), and by a fit that did not see the layout "
    "(left out). Spread: nine of ten runs lie within exp(1.645 x spread) of their plan."
)
REACHED = {
    "products": "of the peak, large products reach",
    "flash": "of the peak, attention forward reaches",
    "flash_backward": "of the peak, attention backward reaches",
    "memory": "of the memory, norms, losses and the optimizer reach",
}
DRIFTED = 0.1  # what a page says of a machine's pace
ERRORS = {"measured": "measured", "fitted": "fitted", "left_out": "left out"}


def _off(key: str) -> Callable[[Row], float | None]:
    return lambda check: None if check[key] is None else check[key] / check["seconds"] - 1


CHECKS = (
    Column("layout", "layout", left=True),
    Column("ranks", "ranks"),
    Column("run", "seconds", seconds_text),
    Column("planned", "fitted_seconds", seconds_text),
    *(Column(f"error, {name}", _off(f"{key}_seconds"), signed_error) for key, name in ERRORS.items()),
)


def machine_parts(report: MachineReport) -> Iterator[Part]:
    """The verdict, the figures, and a row for each layout that was trained."""
    findings = report["findings"]
    if findings["files"]:
        yield Sentence(_machine_verdict(findings), "head")
        yield Facts(list(_figures(findings)))
    else:
        yield Sentence("too little was measured for a preset", "head")
    if findings["checks"]:
        yield DataTable("Layouts that were trained", CHECKS, findings["checks"])
        yield Sentence(CHECKS_LEGEND, "note")
    if findings["files"] and findings["spread"] is None:
        text = "fewer than three layouts were trained: bands are those of a cluster never measured"
        yield Sentence(text, "warning")
    if (drift := findings.get("drift", 0.0)) > DRIFTED:
        text = f"the machine was up to {drift:.0%} slower at times: figures are of its usual pace"
        yield Sentence(text, "note")
    for name in findings["wrong"]:
        yield Sentence(f"{name}: the result is wrong", "warning")
    if findings["disturbed"]:
        yield Sentence(_disturbed(findings["disturbed"], "moved figures are theirs too"), "warning")


def _machine_verdict(findings: MachineFindings) -> str:
    """`mine: plans of 11 layouts are off by 8.1% (measured), 3.0% (fitted) on average`."""
    errors = findings["errors"]
    if not errors:
        return f"{findings['name']}: measured, and not compared with any run"
    off = ", ".join(f"{errors[key]:.1%} ({name})" for key, name in ERRORS.items() if key in errors)
    layouts = plural(len(findings["checks"]), "layout")
    tail = "" if findings["spread"] is None else f"; spread {findings['spread']:.3f}"
    return f"{findings['name']}: plans of {layouts} are off by {off} on average{tail}"


def _figures(findings: MachineFindings) -> Iterator[tuple[str, str]]:
    device, link = findings["device"], findings["cluster"].get("intra_node")
    kernels = device.get("kernels", {})
    for dtype, rate in device.get("peak_flops", {}).items():
        yield f"peak of products, {dtype}", rate_text(rate)
    if bandwidth := device.get("memory_bandwidth"):
        yield "memory", bandwidth_text(bandwidth)
    for key, name in REACHED.items():
        if key in kernels:
            yield name, percent(kernels[key])
    if "host" in kernels:
        yield "host time, times that of the runtime's profile", f"{kernels['host']:.2f}"
    if link:
        yield "link", bandwidth_text(link["bandwidth"] * link.get("efficiency", 1.0))
        yield "latency of each step of a ring", seconds_text(link["latency"])
        yield "start of a collective", seconds_text(link.get("start", 0.0))


def machine_commands(report: MachineReport, folder: Path) -> Iterator[Lines]:
    """Commands that plan with the presets. folder: where they were written."""
    paths = [str(folder / name) for name in report["findings"]["files"] if "clusters/" in name]
    if paths:
        lines = [f"mpctl plan JOB --cluster {shlex.quote(path)}" for path in paths]
        yield Lines("Plan on it", lines, are_commands=True)


def machine_rows(report: MachineReport) -> Iterator[DataTable | Sentence]:
    """The tables of the kernels and collectives that were measured on a machine."""
    rows: Sequence[Row] = report["results"]
    tables = kernel_tables([row for row in rows if "kernel" in row], report["job"] or "a model")
    for part in (*tables, *collective_tables([row for row in rows if "kind" in row], {})):
        yield part._replace(fold="both", on="page") if isinstance(part, DataTable) else part._replace(on="page")


def _disturbed(names: Sequence[str], whose: str) -> str:
    return (
        f"the rank of layout {', '.join(names)} had a core for less than {BUSY:.0%} of a step: "
        f"other programs ran, and {whose}"
    )


# ---------------------------------------------------------------- verify

VERIFY_LEGEND = (
    "error = predicted / measured - 1; band: where the plan puts nine of ten runs, ✓ if it holds "
    "the measured step; memory: of the fullest rank in one step; sent: by a rank in a step, ✓ if "
    "parameters, states and messages of every rank equal the plan"
)


def _correlation(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


ACCURACY = (
    Column("", lambda group: group[0], left=True),
    Column("layouts", lambda group: group[1]["layouts"]),
    Column("mean error", lambda group: group[1]["mape"], "{:.1%}".format),
    Column("bias", lambda group: group[1]["bias"], signed_error),
    Column("worst", lambda group: group[1]["worst"], signed_error),
    Column("at", lambda group: group[1]["worst_name"], left=True),
    Column("rank correlation", lambda group: _correlation(group[1]["spearman"])),
    Column("in band", lambda group: group[1]["coverage"], percent),
)


def _band(row: VerifyRow) -> str:
    span = seconds_span_text(row["low_seconds"], row["high_seconds"])
    return f"{CHECK[row['is_inside']]} {span}"


def _memory(row: VerifyRow) -> str | None:
    """`61.2 GiB`, on GPUs `61.2 GiB of 64.0 GiB reserved`."""
    if row["memory_bytes"] is None:
        return None
    reserved = row.get("reserved_bytes")
    more = f" of {bytes_text(reserved)} reserved" if reserved else ""
    return bytes_text(row["memory_bytes"]) + more


LAYOUTS = (
    Column("layout", lambda row: row["name"] + REHEARSAL * row["is_rehearsal"], left=True),
    Column("measured", "seconds", seconds_text),
    Column("predicted", "predicted_seconds", seconds_text),
    Column("error", "error", signed_error),
    Column("band", _band, left=True),
    Column("memory", _memory),
    Column("error", "memory_error", signed_error),
    Column("sent", lambda row: f"{bytes_text(row['sent_bytes'])} {CHECK[row['agrees']]}"),
)


def verify_parts(report: VerifyReport) -> Iterator[Part]:
    """The verdict, a row for each group of layouts, and a row for each layout."""
    rows, findings = report["results"], report["findings"]
    yield _verdict(report)
    if rows:
        groups, judged = findings["groups"], findings["judged"]
        compared = [
            (f"step time, {name}", groups[name]) for name in GROUPS if name == judged or groups[name] != groups[judged]
        ]
        compared.append(("memory", findings["memory"]))
        yield DataTable("Accuracy of the plan", ACCURACY, [pair for pair in compared if pair[1]["layouts"]])
        yield DataTable("Plan and run of each layout", LAYOUTS, rows)
    yield Sentence(VERIFY_LEGEND, "note")
    for row in rows:
        if row["differs"]:
            yield Sentence(f"{row['name']} did not run as planned: {row['differs']}", "warning")
    left_out = findings["left_out"]
    for reason in dict.fromkeys(left_out.values()):
        layouts = ", ".join(name for name, why in left_out.items() if why == reason)
        yield Sentence(f"left out {layouts}: {reason}", "warning")
    if busy := disturbed(rows):
        yield Sentence(_disturbed(busy, "these errors are theirs too"), "warning")


def _verdict(report: VerifyReport) -> Sentence:
    """`✓ step time 6.1% off on average over 9 layouts within cores (at most 10% wanted), ...`."""
    findings = report["findings"]
    judged = findings["groups"][findings["judged"]]
    if judged["mape"] is None:
        return Sentence("nothing was measured", "head")
    group = "" if findings["judged"] == ALL else f" {findings['judged']}"
    wanted = f" (at most {findings['within']:.0%} wanted)" if findings["within"] is not None else ""
    parts = [
        f"step time {judged['mape']:.1%} off on average over {plural(judged['layouts'], 'layout')}{group}{wanted}",
        f"worst {judged['worst_name']} {judged['worst']:+.1%}",
        f"rank correlation {_correlation(judged['spearman'])}",
        f"{judged['coverage'] or 0:.0%} inside the band",
    ]
    styles: Mapping[bool | None, Style] = {True: "passed", False: "failed", None: "head"}
    return Sentence(", ".join(parts), styles[findings["passed"]])


# ---------------------------------------------------------------- trace

TRACE_NOTE = (
    "Means of a stage's ranks, medians of the steps. Parts overlap: a pass contains the "
    "collectives of its layers; `in AXIS` is where a rank is in collectives along an axis and "
    "computes nothing."
)


def _planned_over_measured(row: TraceRow) -> float | None:
    planned = row["predicted_seconds"]
    return None if planned is None or not row["seconds"] else planned / row["seconds"]


TRACE = (
    Column("stage", lambda row: row["stage"] if row["part"] == STEP else None),
    Column("part", "part", left=True),
    Column("measured", "seconds", seconds_text),
    Column("from", "seconds_min", seconds_text),
    Column("to", "seconds_max", seconds_text),
    Column("of the step", "share", percent),
    Column("planned", "predicted_seconds", seconds_text),
    Column("planned / it", _planned_over_measured, "{:.2f}".format),
)


def trace_parts(report: TraceReport) -> Iterator[Part]:
    findings = report["findings"]
    steps = f"step{'s' * (len(findings['steps']) > 1)} {ranges_text(findings['steps'])}"
    title = f"{report['job']}: {steps} of {plural(findings['ranks'], 'rank')}"
    yield DataTable(title, TRACE, report["results"])
    yield Sentence(TRACE_NOTE, "note")
    if findings["missing"]:
        text = f"{ranks_text(findings['missing'])} recorded not every step, or none"
        yield Sentence(text, "warning")
    if contention := findings["planned_contention"]:
        text = (
            f"ranks share cores: {seconds_text(contention)} of the planned step are waiting for a "
            "core, which measured passes contain and planned ones do not"
        )
        yield Sentence(text, "warning")
    if len(findings["clock_offsets"]) > 1:
        text = (
            f"clocks of {plural(len(findings['clock_offsets']), 'host')} are aligned by the end of "
            "each step: as exact as a small all-reduce is fast"
        )
        yield Sentence(text, "warning")
    yield Lines("To open in ui.perfetto.dev", [findings["file"]], are_commands=True)
