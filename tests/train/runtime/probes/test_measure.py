"""What ranks that measure together agree on: values of all, and whether one more round begins."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from mpctl.model.layout.topology import job_topology
from mpctl.spec.load import load_job
from mpctl.train.runtime.mesh import Mesh, build_mesh
from mpctl.train.runtime.probes.measure import agreed_rounds, begin_together, values_of_all
from tests.ranks import run_ranks


def mesh_of(rank: int, size: int) -> Mesh:
    job = load_job(None, {"parallel.tp": size, "launch.device": "cpu"})
    return build_mesh(job_topology(job), rank, torch.device("cpu"), launch=job.launch)


def _values(rank: int, size: int) -> Tensor:
    return values_of_all(mesh_of(rank, size), float(rank), 0.5)


def test_every_rank_has_the_values_of_all() -> None:
    for values in run_ranks(_values, 2):
        assert values.tolist() == [[0.0, 0.5], [1.0, 0.5]]


def _rounds(rank: int, size: int, seconds: float) -> list[int]:
    """Rank 1 would have time for more; a round takes rank 0 a tenth of a second."""
    mesh, done = mesh_of(rank, size), []
    for number in agreed_rounds(mesh, 5, seconds if rank == 0 else 1e6):
        done.append(number)
        begin_together(mesh)
        time.sleep(0.0 if rank else 0.1)
    return done


def test_rank_0_decides_by_its_longest_round() -> None:
    assert run_ranks(_rounds, 2, 0.15) == [[0], [0]]
    assert run_ranks(_rounds, 2, 60.0) == [[0, 1, 2, 3, 4]] * 2


def test_one_rank_alone_goes_on_without_a_limit() -> None:
    mesh = mesh_of(0, 1)
    assert list(agreed_rounds(mesh, 3, None)) == [0, 1, 2]
    assert values_of_all(mesh, 2.0).tolist() == [[2.0]]
