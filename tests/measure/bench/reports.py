"""Reports of benches made by hand, for tests of their readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "date": "2026-01-02T03:04:05+00:00",
    "host": "laptop",
    "machine": "A processor",
    "cores": 2,
    "gpus": 0,
    "load_at_start": 0.5,
    "python": "3.12.1",
    "torch": "2.11",
    "mpctl": "0.9",
}


def row(name: str, seconds: float, *, spread: float = 0.05, **more: Any) -> dict[str, Any]:
    """A row of three rounds; spread: how far the shortest and the longest are from the median."""
    return {
        "name": name,
        "seconds": seconds,
        "seconds_min": seconds * (1 - spread),
        "seconds_max": seconds * (1 + spread),
        "rounds": 3,
        **more,
    }


def made_report(bench: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """A full report of these rows; more: other keys of the envelope."""
    return {
        "schema": "mpctl.bench/2",
        "bench": bench,
        "job": None,
        "is_complete": True,
        "environment": dict(ENVIRONMENT),
        "command": f"mpctl bench {bench}",
        "results": rows,
        "findings": {},
        **more,
    }


def write_report(folder: Path, document: Any) -> Path:
    """Write a document as FOLDER/report.json; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "report.json"
    file.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return file


def scaling_report() -> dict[str, Any]:
    """Strong and weak scaling to 4 ranks on 2 cores, along tp, dp and both."""
    layouts = [
        ("1 rank", {}),
        ("tp2", {"tp": 2}),
        ("dp2", {"dp": 2}),
        ("tp4", {"tp": 4}),
        ("dp4", {"dp": 4}),
        ("tp2 dp2", {"tp": 2, "dp": 2}),
    ]
    rows = []
    for mode in ("strong", "weak"):
        for at, (layout, sizes) in enumerate(layouts):
            world = {0: 1, 1: 2, 2: 2}.get(at, 4)
            perfect = min(world, 2) / world
            efficiency = perfect * (1 - 0.04 * at) if at else 1.0
            seconds = (0.2 if mode == "strong" else 0.2 * world) / efficiency / world
            rows.append(
                row(
                    f"{mode} {layout}",
                    seconds,
                    mode=mode,
                    layout=layout,
                    world_size=world,
                    sizes=sizes,
                    efficiency=efficiency,
                    perfect_efficiency=perfect,
                    speed_up=world * efficiency,
                    is_rehearsal=world > 2,
                    predicted_seconds=seconds * (0.9 + 0.05 * at),
                    low_seconds=None,
                    high_seconds=None,
                    tokens_per_second=4096 / seconds,
                    mfu=None,
                    hfu=None,
                    flops_per_second=1e11,
                    cpu_seconds=seconds,
                    global_batch_size=8,
                    predicted_efficiency=None,
                    communication_share=0.02 * at,
                    predicted_communication_share=None,
                )
            )
    findings = {
        "steps_timed": 10,
        "units": 2,
        "unit": "core",
        "baselines": {"strong": "strong 1 rank", "weak": "weak 1 rank"},
    }
    return made_report("scaling", rows, job="demo", findings=findings)


def collectives_report() -> dict[str, Any]:
    """Four collectives of two transports from 1 KiB to 16 MiB: a + b seconds a byte."""
    rows = []
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        for transport, start, rate in (("gloo", 2e-4, 1.5e9), ("shared", 2e-5, 6e9)):
            for power in range(10, 25, 2):
                size = 2**power
                seconds = start + size / rate
                rows.append(
                    row(
                        f"{kind} tp2 float32 {size} {transport}",
                        seconds,
                        kind=kind,
                        axis="tp",
                        ranks=2,
                        transport=transport,
                        dtype="float32",
                        bytes=size,
                        count=size // 4,
                        algbw=size / seconds,
                        busbw=size / seconds,
                        wrong=0,
                        op="none",
                        is_rehearsal=False,
                        predicted_seconds=None,
                    )
                )
    of_all = {
        "kind": "all_reduce",
        "axis": "tp",
        "ranks": 2,
        "dtype": "float32",
        "error": 0.0,
        "efficiency": [[1024, 0.01], [2**24, 0.99]],
    }
    fits = [
        of_all | {"transport": "gloo", "latency": 2e-4, "bandwidth": 1.5e9},
        of_all | {"transport": "shared", "latency": 2e-5, "bandwidth": 6e9},
    ]
    findings = {
        "layout": {"tp": 2},
        "ranks": 2,
        "is_rehearsal": False,
        "iterations": 20,
        "warm_up": 5,
        "root": 0,
        "fits": fits,
        "absent": [],
    }
    return made_report("collectives", rows, findings=findings)


def kernels_report() -> dict[str, Any]:
    """Products, an attention, a triad and a copy: 40 GFLOP/s and 10 GB/s at most."""
    rows = []
    for ranks, slower in ((1, 1.0), (2, 0.7)):
        for kernel, flops, size in (
            ("matmul", 1e9, 2e6),
            ("matmul", 1e8, 1e6),
            ("matmul", 1e7, 1e6),
            ("attention", 5e7, 4e6),
            ("optimizer", 1e7, 3e7),
            ("triad", 2e6, 2.4e7),
            ("copy", 0, 2e7),
            ("layer", 1e9, 3e7),
        ):
            seconds = max(flops / 32e9, size / 10e9) / slower
            peak = 40e9 if kernel == "matmul" else None
            rows.append(
                row(
                    f"{kernel} {flops:g} x{ranks}",
                    seconds,
                    kernel=kernel,
                    part="forward",
                    site="layers",
                    cpu_seconds=seconds,
                    is_rehearsal=False,
                    shape={"m": 512, "n": 512},
                    dtype="fp32",
                    ranks=ranks,
                    flops=flops,
                    bytes=size,
                    flops_per_second=flops / seconds,
                    bytes_per_second=size / seconds,
                    share_of_peak=flops / seconds / peak if peak else None,
                    predicted_seconds=seconds * 1.07,
                )
            )
    findings = {"device": "a core", "peak_flops": {"fp32": 40e9}, "memory_bandwidth": 10e9, "threads": 1}
    return made_report("kernels", rows, job="demo-gpt", findings=findings)


def verify_report() -> dict[str, Any]:
    """Twelve layouts whose predictions are from 10 % low to 12 % high, with bands of 15 %."""
    names = [
        "1 rank",
        "tp2",
        "pp2",
        "dp2",
        "dp2 zero1",
        "dp2 zero3",
        "cp2",
        "tp2 sp",
        "tp2 dp2",
        "pp2 dp2",
        "tp2 pp2",
        "pp4",
    ]
    rows = []
    for at, name in enumerate(names):
        seconds, error = 0.1 * (1 + 0.3 * at), -0.1 + 0.02 * at
        predicted = seconds * (1 + error)
        rows.append(
            row(
                name,
                seconds,
                layout=name,
                world_size=4 if at > 7 else 2,
                is_rehearsal=at > 7,
                predicted_seconds=predicted,
                low_seconds=predicted / 1.15,
                high_seconds=predicted * 1.15,
                error=error,
                is_inside=True,
                agrees=True,
                planned_memory_bytes=2**27,
                memory_bytes=2**27 + 2**20,
                sent_bytes=2**24,
                job="demo",
                device="cpu",
                cpu_seconds=seconds,
                memory_error=-0.01,
                reserved_bytes=None,
                differs="",
                planned_sent_bytes=2**24,
                communication_share=None,
                predicted_communication_share=0.0,
            )
        )
    groups = {
        "within cores": {
            "layouts": 8,
            "mape": 0.05,
            "worst": -0.1,
            "worst_name": "1 rank",
            "spearman": 0.99,
            "coverage": 1.0,
            "bias": 0.0,
        }
    }
    nothing = {**dict.fromkeys(groups["within cores"]), "layouts": 0}
    findings = {
        "groups": groups | {"beyond cores": nothing, "all": groups["within cores"]},
        "memory": nothing,
        "agreeing": 12,
        "left_out": {},
        "within": None,
        "judged": "within cores",
        "passed": None,
    }
    return made_report("verify", rows, job="demo-gpt", findings=findings)


def machine_report() -> dict[str, Any]:
    """All rows of kernels and collectives in one report."""
    rows = [*kernels_report()["results"], *collectives_report()["results"]]
    checks = [
        {
            "layout": layout,
            "ranks": 2,
            "seconds": seconds,
            "measured_seconds": seconds,
            "fitted_seconds": 1.05 * seconds,
            "left_out_seconds": 1.1 * seconds,
        }
        for layout, seconds in (("1 rank", 0.4), ("tp2", 0.3))
    ]
    findings = {
        "name": "mine",
        "files": ["presets/clusters/mine.toml"],
        "link_error": 0.1,
        "device": {"name": "laptop-core"},
        "cluster": {},
        "checks": checks,
        "spread": 0.1,
        "wrong": [],
        "disturbed": [],
        "errors": {"fitted": 0.05, "left_out": 0.1},
    }
    return made_report("machine", rows, findings=findings)


MADE = {
    "scaling": scaling_report,
    "collectives": collectives_report,
    "kernels": kernels_report,
    "verify": verify_report,
    "machine": machine_report,
}
