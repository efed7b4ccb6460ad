"""Links between stages: who shares a group with whom, and what no longer waits for what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.pipeline.placement import StagePlacement
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.plan.estimate.memory import spare_bytes
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job, parse
from mpctl.train.runtime.mesh import Mesh, build_mesh
from mpctl.train.runtime.p2p import StageLinks, link_rounds, stage_links
from mpctl.train.transport.streams import HOST_STREAM
from tests.late.ranks import run_late_ranks
from tests.late.world import MAIN, LateWorld
from tests.ranks import run_ranks
from tests.train.runtime.test_pipeline import T5, layout
from tests.train.runtime.tiny import make_trainer, settings, tiny_job

CPU, STAGES = torch.device("cpu"), 3


@given(stages=st.integers(2, 40), chunks=st.integers(1, 3))
def test_every_link_is_made_once_and_no_stage_twice_at_a_time(stages: int, chunks: int) -> None:
    rounds = link_rounds(StagePlacement(stages, chunks))
    ring = {(stage, (stage + 1) % stages) for stage in range(stages)}
    line = {pair for pair in ring if pair != (stages - 1, 0)}
    made = [pair for pairs in rounds for pair in pairs]
    assert len(made) == len(set(made)) and set(made) == (ring if chunks > 1 else line)
    for pairs in rounds:
        assert len({stage for pair in pairs for stage in pair}) == 2 * len(pairs)
    assert len(rounds) <= 3


def test_by_hand() -> None:
    assert link_rounds(StagePlacement(2, 1)) == [[(0, 1)]]
    assert link_rounds(StagePlacement(2, 2)) == [[(0, 1)], [(1, 0)]]
    assert link_rounds(StagePlacement(3, 2)) == [[(0, 1)], [(1, 2)], [(2, 0)]]
    assert link_rounds(StagePlacement(3, 2, is_v=True)) == [[(0, 1)], [(1, 2)], [(2, 1)], [(1, 0)]]


def pipeline_mesh(rank: int, raw: dict) -> Mesh:
    job: JobSpec = parse(raw)
    return build_mesh(job_topology(job), rank, CPU, launch=job.launch)


def raw_job() -> dict:
    how = layout(STAGES) | {"model__layers": STAGES, "launch__shared_memory": False}
    return load_job(None, settings(**how)).model_dump(mode="json")


def groups_of_gloo(rank: int, size: int, raw: dict) -> bool:
    links = stage_links(pipeline_mesh(rank, raw), StagePlacement(STAGES))
    return not links.alone and links.stream is HOST_STREAM


def test_gloo_needs_no_groups_of_two() -> None:
    assert all(run_ranks(groups_of_gloo, STAGES, raw_job()))


def described(rank: int, size: int, world: LateWorld, raw: dict) -> dict[str, str]:
    links = stage_links(pipeline_mesh(rank, raw), StagePlacement(STAGES), make_stream=world.make_stream)
    return {f"{direction} {pair}": group.group_desc for (direction, pair), group in links.alone.items()}


def test_groups_are_named_as_the_logs_name_messages() -> None:
    """The sender first, as records/rundir/collective_log.py names the two ranks of a message: what NCCL
    writes of a time-out leads to them (run/launch/verdict.py)."""
    assert run_late_ranks(described, STAGES, raw_job()) == [
        {"forward (0, 1)": "pp forward 0-1", "backward (1, 0)": "pp backward 1,0"},
        {
            "forward (0, 1)": "pp forward 0-1",
            "backward (1, 0)": "pp backward 1,0",
            "forward (1, 2)": "pp forward 1-2",
            "backward (2, 1)": "pp backward 2,1",
        },
        {"forward (1, 2)": "pp forward 1-2", "backward (2, 1)": "pp backward 2,1"},
    ]


def pass_on(rank: int, size: int, world: LateWorld, raw: dict, is_alone: bool) -> list[float]:
    """Stage 1 starts to receive from stage 0, then sends to stage 2; stage 0 sends when stage 2 has
    what it waits for."""
    mesh = pipeline_mesh(rank, raw)
    links = stage_links(mesh, StagePlacement(STAGES), make_stream=world.make_stream)
    if not is_alone:
        links = StageLinks(mesh.pp, stream=links.stream)
    store = dist.distributed_c10d._get_default_store()
    x, pending = torch.full((2,), float(rank)), []
    if rank == 0:
        store.wait(["stage 2 has it"])
        pending = [links.start_send("forward", x, 1)]
    if rank == 1:
        pending = [links.start_receive("forward", (2,), x, 0), links.start_send("forward", x, 2)]
    if rank == 2:
        pending = [links.start_receive("forward", (2,), x, 1)]
    received = [one.wait() for one in pending]
    values = received[0].tolist()
    store.set(f"stage {rank} has it", "")
    return values


@pytest.mark.slow
def test_a_receive_does_not_hold_up_the_send_behind_it() -> None:
    assert run_late_ranks(pass_on, STAGES, raw_job(), True) == [[0, 0], [0, 0], [1, 1]]
    with pytest.raises(AssertionError, match=r"does not come to an end|hung"):
        run_late_ranks(pass_on, STAGES, raw_job(), False, timeout=4)


def known_of_compute(rank: int, size: int, world: LateWorld, raw: dict) -> list[bool]:
    """For each of two messages, whether it waits for what was computed before the first; and
    whether the second waits for what was computed since."""
    mesh = pipeline_mesh(rank, raw)
    links = stage_links(mesh, StagePlacement(STAGES), make_stream=world.make_stream)
    x, computed, pending = torch.ones(2), [], []
    for _ in range(2 if rank else 0):
        for _ in range(3):
            x.add_(1)
        computed.append(world.order.clock(MAIN)[MAIN])
        if rank == 2:
            pending.append(links.start_receive("forward", (2,), x, 1))
        else:
            pending.append(links.start_send("forward", x.clone(), 2))
    known = [work.known.get(MAIN, 0) for work in world.works]
    for one in pending:
        one.wait()
    return [one >= computed[0] for one in known] + [one >= computed[1] for one in known[1:]]


def test_a_receive_waits_for_its_buffer_alone_and_a_send_for_what_is_computed() -> None:
    """A receive's buffer was taken when the one before it was started."""
    assert run_late_ranks(known_of_compute, STAGES, raw_job()) == [[], [True, True, True], [True, True, False]]


def spares_of_training(rank: int, size: int, raw: dict, folder: str) -> int:
    trainer = make_trainer(parse(raw), Path(folder), rank)
    trainer.one_step()
    return sum(spare.buffer.nbytes for spare in trainer.pipeline.links.spares.values())


@pytest.mark.parametrize(
    "how",
    [
        {**layout(2, 2, "interleaved", tp=2), "parallel__sequence_parallel": True},
        pytest.param({**layout(2), **T5}, marks=pytest.mark.slow),
    ],
    ids=["interleaved, sp", "t5"],
)
def test_spare_buffers_are_as_planned(data: Path, tmp_path: Path, how: dict) -> None:
    job = tiny_job(data, **{"model__layers": 4, **how})
    plan = JobLayout.of(job)
    shapes = activation_shapes(plan)
    stages = [plan.topology.coords(rank)["pp"] for rank in range(job.world_size)]
    raw = job.model_dump(mode="json")
    found = run_ranks(spares_of_training, job.world_size, raw, str(tmp_path))
    assert found == [spare_bytes(plan, stage, shapes) for stage in stages] and all(found)


def spares(rank: int, size: int, world: LateWorld, raw: dict) -> list[int]:
    """Bytes of the spare buffers of the last stage: two messages of one kind, then one of a batch
    with fewer samples, one of another number, one of another shape of a sample."""
    links = StageLinks(pipeline_mesh(rank, raw).pp)
    shapes = [((4, 2), 0), ((4, 2), 0), ((3, 2), 0), ((4, 2), 1), ((4, 5), 0)]
    for shape, number in shapes if rank else []:
        if rank == 1:
            links.start_send("forward", torch.ones(shape), 2).wait()
        else:
            links.start_receive("forward", shape, torch.ones(0), 1, number=number).wait()
    return [spare.buffer.nbytes for spare in links.spares.values()]


def test_a_link_keeps_one_spare_buffer_for_each_kind_of_message() -> None:
    assert run_late_ranks(spares, STAGES, raw_job())[2] == [4 * 3 * 2, 4 * 4 * 2, 4 * 4 * 5]
