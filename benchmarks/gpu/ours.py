"""A model as `mpctl launch` trains it, on one rank, which needs no process group.

Seconds are medians of the steps after the first `warm`; memory is that of the step that the run
watches, its second, in which nothing is compiled any more (train/runtime/memory.py). A save's stall is
that of the second one: the first allocates the pinned memory of all later ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.processes import run as run_whole
from benchmarks.gpu.shapes import Shape


def launch(
    shape: Shape,
    run: Path,
    data: Path,
    settings: Mapping[str, Any],
    *,
    device: str,
    steps: int,
    warm: int,
    seconds: float,
    preset: str | None = None,
) -> dict[str, float]:
    """Figures of a run in the folder `run`. seconds: timeout; preset: of this device, by which it
    is planned. Raises subprocess.SubprocessError where it fails or takes longer."""
    given = {**job_settings(shape, settings), "data.path": str(data), "training.steps": steps}
    if preset is not None:
        given["cluster.device"] = preset
    command = [
        "launch",
        "--nodes",
        "1",
        "--gpus-per-node",
        "1",
        "--device",
        device,
        "--run-dir",
        str(run),
        "--overwrite",
    ]
    for key, value in given.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    run_whole([sys.executable, "-m", "mpctl", *command], seconds)
    return figures(run, warm)


def job_settings(shape: Shape, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a case's job, but for its data and the number of its steps."""
    return {
        **shape.settings,
        "training.dtype": "bf16",
        "training.learning_rate": 1e-4,
        "training.eval_samples": 0,
        "checkpoint.at_end": False,
        **settings,
    }


def figures(run: Path, warm: int) -> dict[str, float]:
    """The figures of a run's steps, from its files; `agrees` is 1 where everything that a plan says
    exactly (parameters, states, messages) is what ran."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steady = lines[warm:]
    found = {"seconds": median(line["step_seconds"] for line in steady)}
    if (planned := lines[0].get("predicted_step_seconds")) is not None:
        found["planned_seconds"] = planned
    summary = json.loads((run / "summary.json").read_text())
    if saves := summary["saves"]:
        stalls = [line["save_stall_seconds"] for line in lines if "save_stall_seconds" in line]
        found |= {"save": saves["seconds"], "stall": stalls[1] if len(stalls) > 1 else stalls[0]}
    (rank,) = summary["plan_beside_run"]
    found["agrees"] = rank["agrees"]
    for name, to in (("peak", "bytes"), ("reserved", "reserved")):
        if name in rank["memory"]:
            found[to] = rank["memory"][name]["measured"]
            found[f"planned_{to}"] = rank["memory"][name]["planned"]
    return found
