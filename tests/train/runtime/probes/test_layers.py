"""One layer in several tensor modes, on ranks of this machine: what is sent, held and timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpctl.core.tensor_grid import TensorGrid
from mpctl.model.layout.topology import job_topology
from mpctl.model.operators.matmul import GradNeeds, MatMul
from mpctl.model.operators.tensor_messages import ProductSize, norm_messages, product_messages
from mpctl.records.rundir.requests import LayerCase, LayerRequest
from mpctl.spec.load import load_job
from mpctl.train.runtime.mesh import build_mesh
from mpctl.train.runtime.probes.layers import probe_layers
from tests.ranks import run_ranks

HIDDEN, FFN, SEQ, BATCH = 32, 128, 8, 4
JOB: dict[str, Any] = {
    "model.family": "gpt",
    "model.layers": 2,
    "model.hidden": HIDDEN,
    "model.heads": 8,
    "model.ffn": FFN,
    "model.vocab": 64,
    "model.seq_length": SEQ,
    "launch.device": "cpu",
    "training.micro_batch_size": BATCH,
    "training.dtype": "fp32",
}
SQUARE: list[LayerCase] = [{"mode": "1d", "depth": None}, {"mode": "2d", "depth": None}]
CUBES: list[LayerCase] = [{"mode": "1d", "depth": None}, {"mode": "2.5d", "depth": 2}, {"mode": "3d", "depth": None}]


def probed(rank: int, size: int, cases: list[LayerCase], settings: dict[str, Any]) -> Any:
    job = load_job(None, {**settings, "parallel.tp": size})
    mesh = build_mesh(job_topology(job), rank, torch.device("cpu"), launch=job.launch)
    request: LayerRequest = {"task": "layers", "cases": cases, "rounds": 2, "steps": 1, "seconds": None}
    return list(probe_layers(request, job, mesh))


def expected_traffic(grid: TensorGrid) -> dict[str, int]:
    """Bytes by axis and kind, from the list of messages of products and norms."""
    needs, rows = GradNeeds(), BATCH * SEQ
    up, down = ("hidden", "ffn"), ("ffn", "hidden")
    products = [(up, HIDDEN, 3 * HIDDEN), (down, HIDDEN, HIDDEN), (up, HIDDEN, FFN), (down, FFN, HIDDEN)]
    messages = [
        message
        for (reads, writes), inputs, outputs in products
        for message in product_messages(
            grid,
            MatMul("m", "mlp", ("batch", "seq", reads), (reads, writes), ("batch", "seq", writes)),
            ProductSize(rows, inputs, outputs),
            needs,
        )
    ]
    messages += 2 * norm_messages(grid, "layernorm", rows, goes_back=True)
    sent: dict[str, int] = {}
    for message in messages:
        name = f"{message.axis} {message.kind}"
        sent[name] = sent.get(name, 0) + 4 * message.elements * message.count
    return sent


def check(ranks: int, cases: list[LayerCase]) -> None:
    results = run_ranks(probed, ranks, cases, JOB)
    assert all(answer[: len(cases)] != [] for answer in results)
    sizes = {answer["case"]: answer for answer in results[0] if answer["event"] == "sizes"}
    whole = sizes.pop(None)
    matrices, vectors = 12 * HIDDEN**2, 13 * HIDDEN
    assert whole["parameter_bytes"] == 4 * (matrices + vectors) and whole["traffic"] == {}
    for number, case in enumerate(cases):
        grid, own = TensorGrid.of(case["mode"], ranks, case["depth"]), sizes[number]
        sent = {name: entry["bytes"] for name, entry in own["traffic"].items()}
        assert sent == expected_traffic(grid)
        parts = grid.weight_parts(("ffn", "hidden"))
        assert 4 * matrices // parts < own["parameter_bytes"] <= 4 * (matrices // parts + vectors)
        assert own["saved_bytes"] < whole["saved_bytes"]
        if case["mode"] != "1d":  # statistics of the norms are not cut over the hidden states
            law = whole["saved_bytes"] / ranks
            assert law <= own["saved_bytes"] < 1.1 * law
    timed = [(a["round"], a["case"]) for a in results[0] if a["event"] == "timing"]
    assert timed == [(turn, case) for turn in range(2) for case in range(len(cases))]
    assert all(a["seconds"] > 0 and a["cpu_seconds"] > 0 for a in results[0] if a["event"] == "timing")


def test_one_layer_on_four_ranks_in_a_row_and_in_a_square() -> None:
    check(4, SQUARE)


@pytest.mark.slow
def test_one_layer_on_eight_ranks() -> None:
    check(8, CUBES)
