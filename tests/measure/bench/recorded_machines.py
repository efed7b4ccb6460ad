"""Measurements of machines as `mpctl bench machine` took them, fitted and planned on again.

tests/recorded/machines.json, by name: `source`; `cores`; `kernels`: seconds of a run with all cores
busy, by the kernel's name; `collectives`: [kind, bytes, seconds] of all cores together over shared
memory; `runs`: seconds of a step by layout, of the job `demo` as the bench trains it. Nothing is
timed here.

    python -m tests.measure.bench.recorded_machines NAME REPORT.json     # adds a bench's report to the file
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from mpctl.measure.bench.collectives import CollectiveRow
from mpctl.measure.bench.kernels import KernelRow
from mpctl.measure.bench.layouts import layout_name
from mpctl.measure.bench.machine import MachineCheck, machine_checks, mean_errors
from mpctl.measure.bench.machine_fit import busy_rows, fit_device, fit_link, training_rows, undisturbed
from mpctl.measure.bench.machine_preset import MachinePreset, machine_preset
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.calibrate.own import MACHINE, fit_own
from mpctl.measure.calibrate.own_fit import OwnFit
from mpctl.measure.calibrate.runs import Run
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.layout_settings import layout_of
from mpctl.run.hosts.machine import Machine
from mpctl.spec.runtime import get_profile
from tests.measure.bench.reports import ENVIRONMENT
from tests.measure.bench.test_machine_plan import work

FILE = Path(__file__).parents[2] / "recorded" / "machines.json"
Record = Mapping[str, Any]


class Replay(NamedTuple):
    """What a record gives. preset: of kernels and collectives alone; checks: a row a layout."""

    preset: MachinePreset
    fit: OwnFit
    checks: list[MachineCheck]

    @property
    def errors(self) -> Mapping[str, float]:
        """Means of |planned / measured - 1|: measured, fitted, left_out."""
        return mean_errors(self.checks)


def records() -> Mapping[str, Record]:
    found: Mapping[str, Record] = json.loads(FILE.read_text("utf-8"))
    return found


def replay(record: Record) -> Replay:
    """Fit the device, the link and then both to the runs of a record."""
    found = work(Machine(record["cores"], 0, 2**34))
    device = fit_device(
        kernel_rows(record), found.base, dtype="fp32", name="recorded", memory_bytes=2**33, source="recorded"
    )
    link = fit_link(collective_rows(record), name="shared memory")
    environment = cast(BenchEnvironment, ENVIRONMENT)
    preset = machine_preset("recorded", device, link, environment, per_node=record["cores"])
    runs = []
    for case in found.cases(preset.settings()):
        job = case.make_plan().job
        title = layout_name(layout_of(job))
        parts = {"devices": "recorded", "clusters": "recorded", "runtimes": "mpctl"}
        if title in record["runs"]:
            seconds = {"step_seconds": record["runs"][title]}
            runs.append(Run(title, "", JobLayout.of(job), get_profile("mpctl"), parts, seconds))
    fit = fit_own(runs, MACHINE)
    return Replay(preset, fit, machine_checks(runs, fit))


def kernel_rows(record: Record) -> list[KernelRow]:
    cases = work(Machine(record["cores"], 0, 2**34)).kernels.kernels
    rows = []
    for kernel in cases:
        if (seconds := record["kernels"].get(kernel.name)) is not None:
            rows.append(
                cast(
                    KernelRow,
                    {
                        **kernel.case,
                        "name": kernel.name,
                        "site": kernel.site,
                        "ranks": record["cores"],
                        "is_rehearsal": False,
                        "seconds": seconds,
                        "cpu_seconds": seconds,
                        "flops_per_second": kernel.flops / seconds,
                        "bytes_per_second": kernel.bytes / seconds,
                        "predicted_seconds": kernel.predicted_seconds,
                    },
                )
            )
    return rows


def collective_rows(record: Record) -> list[CollectiveRow]:
    return [
        cast(
            CollectiveRow,
            {"kind": kind, "bytes": size, "seconds": seconds, "ranks": record["cores"], "transport": "shared"},
        )
        for kind, size, seconds in record["collectives"]
    ]


def record_of(report: Mapping[str, Any]) -> Record:
    """The record of a report, four digits of each figure."""
    where, rows = report["environment"], report["results"]
    kernels = busy_rows([row for row in rows if "kernel" in row])
    sent = training_rows([row for row in rows if "transport" in row])
    return {
        "source": f"{where['machine']}, {where['date'][:10]}, torch {where['torch']}, load "
        f"{where['load_at_start']:.2f}",
        "cores": where["cores"],
        "kernels": {row["name"].rsplit(" x", 1)[0]: _short(undisturbed(row)["seconds"]) for row in kernels},
        "collectives": [[row["kind"], row["bytes"], _short(row["seconds"])] for row in sent],
        "runs": {row["layout"]: _short(row["seconds"]) for row in report["findings"]["checks"]},
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.4g}")


if __name__ == "__main__":
    name, path = sys.argv[1:]
    kept = {**records(), name: record_of(json.loads(Path(path).read_text("utf-8")))}
    FILE.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print({key: round(error, 4) for key, error in replay(kept[name]).errors.items()})
