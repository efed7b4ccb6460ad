"""Run directories written by hand: what a launch leaves, without launching."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpctl.records.rundir.launcher import this_launcher
from mpctl.spec.load import load_job

SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "cluster.nodes": 1,
    "cluster.gpus_per_node": 2,
    "cluster.device": "cpu",
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocab": 300,
    "model.seq_length": 32,
    "parallel.tp": 2,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": 20,
    "launch.device": "cpu",
    "launch.predicted_step_seconds": 0.2,
    "data.corpus": ["python-stdlib"],
}
BEGAN = 1_790_000_000.0


def record(step: int, **more: Any) -> dict[str, Any]:
    """Half a second and 256 tokens a step; the loss falls from 6 towards 2."""
    return {
        "step": step,
        "loss": 2 + 4 * math.exp(-step / 8),
        "tokens": 256 * step,
        "step_seconds": 0.5,
        "cpu_seconds": 0.4,
        "tokens_per_second": 512.0,
        "grad_norm": 1 + 1 / step,
        "learning_rate": 1e-4 * step,
        "memory_bytes": [2**20, 3 * 2**20],
        "predicted_step_seconds": 0.2,
        "time": BEGAN + 0.5 * step,
        **more,
    }


def records(steps: int) -> list[dict[str, Any]]:
    """Validated before training and after every tenth step."""
    first = {"initial_validation_loss": 6.25, "initial_validation_losses": {"old": 6.5}}
    found = [record(step, **(first if step == 1 else {})) for step in range(1, steps + 1)]
    for one in found[9::10]:
        one |= {"validation_loss": one["loss"] + 0.25, "validation_losses": {"old": 5.0}}
    return found


def rank(number: int, *, agrees: bool = True) -> dict[str, Any]:
    traffic = {"tp all_reduce": {"count": 8, "bytes": 2**20}}
    kinds = ("parameters", "gradients", "optimizer", "activations", "peak")
    return {
        "rank": number,
        "agrees": agrees,
        "peak_memory_bytes": 2**28,
        "parameters": {"planned": 5, "measured": 5},
        "step_traffic": {"planned": traffic, "measured": traffic},
        "memory": {kind: {"planned": 2**20, "measured": 2**20} for kind in kinds},
    }


def summary(status: str = "finished", **more: Any) -> dict[str, Any]:
    return {
        "schema": "mpctl.run/1",
        "status": status,
        "attempts": 1,
        "failure": None,
        "plan_beside_run": [rank(0), rank(1)] if status == "finished" else [],
        **more,
    }


FAILURE = {
    "rank": 1,
    "coords": {"tp": 1, "dp": 0},
    "error": "RuntimeError: out of memory",
    "doing": "step 5, forward",
    "log": "logs/rank-1.log",
    "last_lines": [],
}


def make_run(
    path: Path,
    *,
    steps: int = 20,
    ended: dict[str, Any] | None = None,
    checkpoints: tuple[int, ...] = (),
    **settings: Any,
) -> Path:
    """A run that reached `steps`; ended: its summary, of which a killed launcher leaves none."""
    (path / "logs").mkdir(parents=True)
    job = load_job(None, {**SETTINGS, **settings})
    (path / "job.json").write_text(job.model_dump_json())
    (path / "plan.json").write_text(json.dumps({"schema": "mpctl.plan/1"}))
    lines = [json.dumps(one) + "\n" for one in records(steps)]
    (path / "metrics.jsonl").write_text("".join(lines))
    if ended is not None:
        (path / "summary.json").write_text(json.dumps(ended))
    for step in checkpoints:
        make_checkpoint(path / "checkpoints" / f"step-{step}", step)
    return path


def make_checkpoint(folder: Path, step: int) -> None:
    """Its manifest and 1000 bytes of a shard."""
    folder.mkdir(parents=True)
    manifest = {"schema": "mpctl.checkpoint/1", "step": step, "shards": 2, "tp": 2}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "shard-0.safetensors").write_bytes(bytes(1000))


def launched(run: Path, **more: Any) -> Path:
    (run / "launcher.json").write_text(json.dumps({**asdict(this_launcher("local")), **more}))
    return run


def age(path: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(path, (then, then))
