"""Warnings before a start: layers that are compiled in pieces, kernels that hold what the plan does
not count."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.preflight import kernel_warnings, launch_warnings
from mpctl.spec.load import load_job
from tests.jobs import job_of
from tests.train.runtime.tiny import SETTINGS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"parallel.tp": 2, "cluster.gpus_per_node": 2}, "with parallel.tp 2 layers are"),
        (
            {"parallel.cp": 2, "parallel.tp": 2, "cluster.gpus_per_node": 4},
            "with parallel.tp 2 and parallel.cp 2 layers are",
        ),
        ({"training.dtype": "fp8"}, "with training.dtype fp8 layers are"),
        ({"model.experts": 4, "model.experts_per_token": 2}, "with model.experts layers are"),
        ({"training.recompute": "full", "training.dropout": 0.2}, ""),
        ({"training.recompute": "selective", "training.attention_dropout": 0.1}, ""),
    ],
)
def test_layers_compiled_in_pieces_are_reported(changes: dict[str, Any], says: str) -> None:
    for on in (True, False):
        job = load_job(
            None, {**SETTINGS, "cluster.gpus_per_node": 1, "launch.device": "cpu", **changes, "launch.compile": on}
        )
        words = " ".join(launch_warnings(job, Machine(8, 0, 2**40)))
        assert ("launch.compile:" in words) == (on and bool(says))
        assert not on or says in words


def test_spare_hosts_without_restarts_are_reported() -> None:
    for restarts in (0, 1):
        job = job_of({"launch.spare_nodes": 2, "launch.max_restarts": restarts})
        words = " ".join(launch_warnings(job, Machine(8, 0, 2**40)))
        assert ("launch.max_restarts 0: 2 spare hosts can take over at" in words) == (not restarts)


def test_attention_dropout_without_triton_holds_scores() -> None:
    dropped, plain = (job_of({"training.attention_dropout": p}) for p in (0.1, 0.0))
    (warning,) = kernel_warnings(dropped, has_triton=False)
    assert "scores are held" in warning and "pip install triton" in warning
    assert not list(kernel_warnings(dropped, has_triton=True))
    assert not list(kernel_warnings(plain, has_triton=False))
