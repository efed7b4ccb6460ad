"""`mpctl launch` on a device, as a user types it: the run beside its plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mpctl.plan.estimate.flops import find_device_preset
from mpctl.train.runtime.device import device_name

MEMORY = {"cpu": 0.02, "cuda": 0.1}
"""How far the peak of a step may lie from its plan: on a GPU by the allocator's rounding, and by
what a version of torch gives its libraries, which weigh much beside a small model. The device is
named, since the workspaces of matrix products depend on it."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_launch_runs_as_planned(dtype: str, device: torch.device, data: Path, tmp_path: Path) -> None:
    settings = {
        "model.layers": 4,
        "model.hidden": 256,
        "model.heads": 4,
        "model.vocab": 300,
        "model.seq_length": 256,
        "training.micro_batch_size": 4,
        "training.steps": 6,
        "training.eval_samples": 0,
        "training.dtype": dtype,
        "data.path": str(data),
        "launch.threads_per_rank": 1,
        "checkpoint.interval": 3,
    }
    reported = device_name(device)
    preset = reported and find_device_preset(reported)
    if preset:
        settings["cluster.device"] = preset
    command = [
        sys.executable,
        "-m",
        "mpctl",
        "launch",
        "--device",
        device.type,
        "--nodes",
        "1",
        "--gpus-per-node",
        "1",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    (rank,) = summary["plan_beside_run"]
    assert rank["agrees"] and summary["final_loss"] < 5.9
    peak = rank["memory"]["peak"]
    if reported and not preset:
        pytest.skip(f"no preset of {reported}: its workspaces are not known")
    assert peak["measured"] == pytest.approx(peak["planned"], rel=MEMORY[device.type])
    if device.type == "cuda":
        assert rank["device"] and rank["reserved_memory_bytes"] >= peak["measured"]
