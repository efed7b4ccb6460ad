"""Kernels in ranks: every maker runs; rounds end when their time is over, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.measure.bench.kernel_cases import THIS_MACHINE, kernel_cases
from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.requests import KernelCase, KernelRequest
from mpctl.run.hosts.machine import Machine
from mpctl.spec.load import load_job
from mpctl.train.runtime.mesh import build_mesh
from mpctl.train.runtime.probes.kernels import probe_kernels
from tests.ranks import run_ranks

PRODUCT: KernelCase = {
    "kernel": "matmul",
    "part": "forward",
    "dtype": "fp32",
    "shape": {"m": 4, "k": 4, "n": 4},
    "copies": 3,
}
COPY: KernelCase = {"kernel": "copy", "part": "update", "dtype": "fp32", "shape": {"elements": 8}, "copies": 1}
JOB: dict[str, Any] = {"model": "demo-gpt", "launch.device": "cpu"}


def request_of(cases: list[KernelCase], **changes: Any) -> KernelRequest:
    request: KernelRequest = {
        "task": "kernels",
        "cases": cases,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "ranks": [1],
        "rounds": 1,
        "seconds": None,
        "least_seconds": 1e-6,
    }
    return {**request, **changes}  # type: ignore[typeddict-item]


def probed(rank: int, size: int, request: Any, settings: dict[str, Any]) -> Any:
    job = load_job(None, {**settings, "parallel.dp": size, "cluster.gpus_per_node": size})
    mesh = build_mesh(job_topology(job), rank, torch.device("cpu"), launch=job.launch)
    return list(probe_kernels(request, job, mesh))


def test_a_round_has_every_case_by_every_number_of_ranks() -> None:
    request = request_of([PRODUCT, COPY], ranks=[1, 2], rounds=2)
    results = run_ranks(probed, 2, request, JOB)
    assert results[0] == results[1]
    order = [(a["round"], a["case"], a["ranks"]) for a in results[0]]
    assert order == [(r, c, n) for r in (0, 1) for c in (0, 1) for n in (1, 2)]
    assert all(a["seconds"] > 0 and a["cpu_seconds"] >= 0 for a in results[0])


def test_no_round_begins_once_the_time_is_over() -> None:
    """The first is completed, however long it takes."""
    answers = probed(0, 1, request_of([PRODUCT, COPY], rounds=5, seconds=0.0), JOB)
    assert [(a["round"], a["case"]) for a in answers] == [(0, 0), (0, 1)]


def test_a_short_kernel_is_repeated_for_as_long_as_was_asked() -> None:
    """A product of 4 x 4 takes microseconds: many fit 50 ms, and every round has as many."""
    answers = probed(0, 1, request_of([PRODUCT], rounds=2, least_seconds=50e-3), JOB)
    assert answers[0]["repeats"] == answers[1]["repeats"] > 10


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "demo-llama"},
        {"model": "demo-t5"},
        {"model": "demo-glm"},
        {"model": "demo-bert"},
        {"parallel.cp": 2},
        {"model.attention_window": 4},
        {"training.dropout": 0.1, "training.attention_dropout": 0.1},
        {"training.dtype": "bf16", "model.position": "alibi"},
        {"parallel.tp": 2, "parallel.sequence_parallel": True, "model.norm_order": "sandwich"},
    ],
    ids=str,
)
def test_every_kernel_of_a_model_runs(settings: dict[str, Any]) -> None:
    """Each case that the bench lists for a model, at sizes of a few elements."""
    tiny = {
        "model.layers": 2,
        "model.hidden": 32,
        "model.heads": 4,
        "model.ffn": 64,
        "model.vocab": 128,
        "model.seq_length": 16,
        "training.micro_batch_size": 2,
    }
    if settings.get("model") == "demo-llama":
        tiny["model.kv_heads"] = 2
    if settings.get("model") == "demo-t5":
        tiny |= {"model.decoder_layers": 2, "model.decoder_seq_length": 8}
    job = load_job(None, {**THIS_MACHINE, **tiny, **settings})
    few = Machine(cores=2, gpus=0, memory_bytes=2**22)
    kernels = kernel_cases(job, few, ranks=(1,), device="cpu").kernels
    training = job.training
    request = request_of(
        [kernel.case for kernel in kernels], dropout=training.dropout, attention_dropout=training.attention_dropout
    )
    model = {k: v for k, v in {**THIS_MACHINE, **tiny, **settings}.items() if "parallel" not in k}
    answers = probed(0, 1, request, {**model, "launch.device": "cpu"})
    assert [a["case"] for a in answers] == list(range(len(kernels)))
    kinds = {kernel.case["kernel"] for kernel in kernels}
    assert {"matmul", "branch", "layer", "triad"} < kinds
