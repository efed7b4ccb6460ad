"""Which groups exchange through shared memory."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.runtime.mesh import Mesh, build_mesh
from mpctl.spec.launch import LaunchSpec
from mpctl.topology import Topology
from mpctl.transport import shared
from tests.ranks import run_ranks
from tests.runtime.tiny import make_data, tiny_job, train
from tests.transport.shared_ranks import all_full


def _meshes(rank: int, size: int, gpus_per_node: int, full: bool) -> list:
    topology = Topology.of({"tp": 2, "dp": size // 2}, gpus_per_node=gpus_per_node)
    mesh = partial(build_mesh, topology, rank, torch.device("cpu"))
    shared._reserve = all_full if full else shared._reserve
    with contextlib.redirect_stdout(io.StringIO()) as log:
        on, off = mesh(launch=LaunchSpec()), mesh(launch=LaunchSpec(shared_memory=False))
    for made in (on, off):
        assert made.tp.all_reduce(torch.tensor(1 << rank)).item() == 0b11 << rank // 2 * 2
        replicas = sum(1 << r for r in range(rank % 2, size, 2))
        assert made.dp_cp.all_reduce(torch.tensor(1 << rank)).item() == replicas
        assert made.world.all_reduce(torch.tensor(1 << rank)).item() == 2**size - 1
    return [_who(on), _who(off), log.getvalue()]


def _who(mesh: Mesh) -> list[str]:
    groups = {"tp": mesh.tp, "cp": mesh.cp, "dp_cp": mesh.dp_cp, "world": mesh.world}
    assert all(group.shared is None or group.name == name for name, group in groups.items())
    return [name for name, group in groups.items() if group.shared is not None]


@pytest.mark.parametrize(
    ("size", "gpus_per_node", "shared"),
    [(4, 4, ["tp", "dp_cp", "world"]), (4, 2, ["tp"]), (4, 1, []), (2, 2, ["tp", "world"])],
)
def test_groups_on_one_node_share(size: int, gpus_per_node: int, shared: list[str]) -> None:
    for on, off, log in run_ranks(_meshes, size, gpus_per_node, False):
        assert (on, off, log) == (shared, [], "")


def test_without_memory_the_mesh_goes_by_gloo_and_says_so() -> None:
    for rank, (on, _, log) in enumerate(run_ranks(_meshes, 2, 2, True)):
        why = "no space left" if rank == 0 else "the first rank of the group could not make it"
        assert on == []
        assert log.startswith("world: no shared memory, messages go through gloo: ") and why in log


def _run(data: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    keys = {"training__steps": 3, "checkpoint__interval": 0, **changes}
    sequence = {"parallel__sequence_parallel": True}
    return train(tiny_job(data, 2, 1, **sequence, **keys), folder)


def test_a_training_is_the_same_by_either_way(tmp_path: Path) -> None:
    """Under sequence parallelism, so by all kinds of collectives; two addends have one order."""
    data = make_data(tmp_path)
    memory = _run(data, tmp_path / "memory")
    gloo = _run(data, tmp_path / "gloo", launch__shared_memory=False)
    for ours, theirs in zip(memory, gloo, strict=True):
        losses = [[record["loss"] for record in rank["records"]] for rank in (ours, theirs)]
        assert losses[0] == losses[1] and len(losses[0]) == 3
        assert ours["traffic"] == theirs["traffic"] != {}
        for name, (*_, weights) in ours["weights"].items():
            assert torch.equal(weights, theirs["weights"][name][-1]), name
