"""Process groups: the same number on every rank, made by all their members at once, as planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpctl.model.layout.groups import device_groups
from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.rehearsal.fake_backend import fake_world
from mpctl.train.runtime import mesh as meshes
from mpctl.train.runtime.mesh import build_mesh, stage_groups
from mpctl.train.runtime.p2p import link_rounds, stage_links

DEVICE = torch.device("meta")  # in place of a GPU: groups are those of an accelerator
MODEL = {
    "model.family": "gpt",
    "model.layers": 6,
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocab": 64,
    "model.seq_length": 16,
    "training.global_batch_size": 24,
}
EXPERTS = {"model.experts": 4, "model.experts_per_token": 2, "parallel.ep": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 3, tied table": {"parallel.pp": 3},
    "pp 4 in chunks": {"model.layers": 8, "parallel.pp": 4, "parallel.vpp": 2},
    "pp 3 as a V": {"parallel.pp": 3, "parallel.vpp": 2, "parallel.schedule": "zbv"},
    "tp 2 dp 2 pp 3": {"parallel.tp": 2, "parallel.dp": 2, "parallel.pp": 3},
    "cp 2 dp 2": {"parallel.cp": 2, "parallel.dp": 2},
    "zero 3 over 2 of 4": {"parallel.dp": 4, "parallel.zero": 3, "parallel.zero_size": 2},
    "experts": {**EXPERTS, "parallel.dp": 4, "parallel.tp": 2},
    "grid": {"parallel.tp": 4, "parallel.tensor_mode": "2d", "parallel.dp": 2},
}


def groups_made(job: JobSpec, rank: int) -> list[tuple[int, ...]]:
    """The ranks of every group that a rank makes before training, in order."""
    layout = JobLayout.of(job)
    with fake_world(rank, job.world_size):
        mesh = build_mesh(layout.topology, rank, DEVICE, launch=job.launch, views=layout.views)
        stage_links(mesh, layout.placement)
        stage_groups(mesh, layout.shared_parameters.values())
        made = [group for group in dist.distributed_c10d._world.pg_names if group is not dist.group.WORLD]
        return [tuple(dist.get_process_group_ranks(group)) for group in made]


def job_of(name: str) -> JobSpec:
    return load_job(None, {**MODEL, "launch.device": "cuda", **LAYOUTS[name]})


def at_odds(job: JobSpec) -> list[str]:
    """What would hang a split of NCCL's communicators, in which all ranks of the world take part:
    numbers of groups, and members that make other groups at the same time."""
    every = [groups_made(job, rank) for rank in range(job.world_size)]
    if len({len(made) for made in every}) > 1:
        return [f"groups by rank: {[len(made) for made in every]}"]
    return [
        f"split {number}: rank {rank} makes {mine}, rank {other} {every[other][number]}"
        for rank, made in enumerate(every)
        for number, mine in enumerate(made)
        for other in mine
        if every[other][number] != mine or rank not in mine
    ]


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_make_the_same_groups_at_the_same_time(name: str) -> None:
    assert at_odds(job_of(name)) == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_rank_0_makes_the_groups_that_are_planned(name: str) -> None:
    job = job_of(name)
    layout = JobLayout.of(job)
    planned = [tuple(ranks) for key, ranks in device_groups(layout.topology, layout.views).items() if key != "world"]
    pp = layout.topology.group(0, "pp")
    for pairs in link_rounds(layout.placement):
        planned += [tuple(sorted(pp[s] for s in pair)) for pair in pairs if 0 in pair for _ in "fb"]
    shared = {stages for stages in layout.shared_parameters.values() if 0 in stages}
    planned += [tuple(pp[stage] for stage in s) for s in shared if len(s) < len(pp)]
    made = [tuple(sorted(ranks)) for ranks in groups_made(job, 0) if len(ranks) > 1]
    assert sorted(made) == sorted(planned)


def test_a_stage_outside_of_a_pair_that_makes_no_group_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a world that does not split communicators lets pass."""
    make = meshes.new_process_group

    def only_pairs(ranks: Any, name: str, *rest: Any, **how: Any) -> Any:
        return None if len(ranks) == 1 else make(ranks, name, *rest, **how)

    monkeypatch.setattr(meshes, "new_process_group", only_pairs)
    (found,) = at_odds(job_of("pp 3, tied table"))
    assert found.startswith("groups by rank: [")
