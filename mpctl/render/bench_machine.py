"""A machine report as text: what the machine reaches, and how well its plans say what runs take."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mpctl.bench.machine import MachineCheck, MachineFindings, MachineReport
from mpctl.bench.report import load_warnings
from mpctl.bench.verify import BUSY
from mpctl.render.console import get_console, plain_table
from mpctl.units import plural, rate_text, seconds_text

LEGEND = (
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
ERRORS = {"measured": "measured", "fitted": "fitted", "left_out": "left out"}


def print_machine(report: MachineReport, folder: Path) -> None:
    """The verdict, the figures, a row for each layout that was trained, and how to plan on them.
    folder: of the report and its presets."""
    console, findings = get_console(), report["findings"]
    if findings["files"]:
        console.print(Text(_verdict(findings), style="bold"), "", _figures(findings))
    else:
        console.print(Text("too little was measured for a preset", style="bold"))
    if findings["checks"]:
        console.print("", _checks(findings["checks"]), Text(LEGEND, style="dim"))
    for name in findings["files"]:
        if "clusters/" in name:
            told = f"plan on it: mpctl plan JOB --cluster {shlex.quote(str(folder / name))}"
            console.print(Text(told), soft_wrap=True)
    where = report["environment"]
    console.print(Text(f"{where['host']}, {where['machine']}, {plural(where['cores'], 'core')}, "
                       f"{plural(where['gpus'], 'GPU')}, torch {where['torch']}, {where['date']}",
                       style="dim"))  # fmt: skip
    for warning in _warnings(report):
        console.print(Text.assemble(("! ", "bold yellow"), warning))


def _verdict(findings: MachineFindings) -> str:
    """`mine: plans of 11 layouts are off by 8.1% (measured), 3.0% (fitted) on average`."""
    errors = findings["errors"]
    if not errors:
        return f"{findings['name']}: measured, and not held against any run"
    told = ", ".join(f"{errors[key]:.1%} ({name})" for key, name in ERRORS.items() if key in errors)
    layouts = plural(len(findings["checks"]), "layout")
    spread = findings["spread"]
    tail = "" if spread is None else f"; spread {spread:.3f}"
    return f"{findings['name']}: plans of {layouts} are off by {told} on average{tail}"


def _figures(findings: MachineFindings) -> Table:
    table = plain_table("", ("figure", "value"), left=("figure",))
    for name, value in (*_device(findings["device"]), *_link(findings["cluster"])):
        table.add_row(name, value)
    return table


def _device(device: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kernels = device.get("kernels", {})
    for dtype, rate in device.get("peak_flops", {}).items():
        yield f"peak of products, {dtype}", rate_text(rate)
    if bandwidth := device.get("memory_bandwidth"):
        yield "memory", _bandwidth(bandwidth)
    for key, name in REACHED.items():
        if key in kernels:
            yield name, f"{kernels[key]:.0%}"
    if "host" in kernels:
        yield "host time, times that of the runtime's profile", f"{kernels['host']:.2f}"


def _link(cluster: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if link := cluster.get("intra_node"):
        yield "link", _bandwidth(link["bandwidth"] * link.get("efficiency", 1.0))
        yield "latency of each step of a ring", seconds_text(link["latency"])
        yield "start of a collective", seconds_text(link.get("start", 0.0))


def _bandwidth(per_second: float) -> str:
    return f"{per_second / 1e9:.2f} GB/s"


def _checks(checks: list[MachineCheck]) -> Table:
    errors = (f"error, {name}" for name in ERRORS.values())
    columns = ("layout", "ranks", "run", "planned", *errors)
    table = plain_table("", columns, left=("layout",))
    for check in checks:
        planned = (check["measured_seconds"], check["fitted_seconds"], check["left_out_seconds"])
        errors = ("" if s is None else f"{s / check['seconds'] - 1:+.1%}" for s in planned)
        table.add_row(
            check["layout"], str(check["ranks"]), seconds_text(check["seconds"]),
            seconds_text(check["fitted_seconds"]), *errors,
        )  # fmt: skip
    return table


def _warnings(report: MachineReport) -> Iterator[str]:
    findings = report["findings"]
    if not report["is_complete"]:
        yield "not complete: fewer rounds than wanted, or none, of some stage were run"
    if findings["files"] and findings["spread"] is None:
        yield "fewer than three layouts were trained: bands are those of a cluster never measured"
    for name in findings["wrong"]:
        yield f"{name}: the result is wrong"
    if names := findings["disturbed"]:
        yield (f"the rank of layout {', '.join(names)} had a core for less than {BUSY:.0%} of a "
               "step: other programs ran, and moved figures are theirs too")  # fmt: skip
    yield from load_warnings(report["environment"])
