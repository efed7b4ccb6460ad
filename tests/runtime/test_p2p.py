"""Links between stages: who shares a group with whom, and what no longer waits for what."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from mpctl.layout.topology import job_topology
from mpctl.runtime.mesh import Mesh, build_mesh
from mpctl.runtime.p2p import StageLinks, link_rounds, stage_links
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job, parse
from mpctl.transport.streams import HOST_STREAM
from tests.late.ranks import run_late_ranks
from tests.late.world import MAIN, LateWorld
from tests.ranks import run_ranks
from tests.runtime.test_pipeline import layout
from tests.runtime.tiny import settings

CPU, STAGES = torch.device("cpu"), 3


@given(stages=st.integers(2, 40), chunks=st.integers(1, 3))
def test_every_link_is_made_once_and_no_stage_twice_at_a_time(stages: int, chunks: int) -> None:
    rounds = link_rounds(stages=stages, chunks=chunks)
    ring = {(stage, (stage + 1) % stages) for stage in range(stages)}
    line = {pair for pair in ring if pair != (stages - 1, 0)}
    made = [pair for pairs in rounds for pair in pairs]
    assert len(made) == len(set(made)) and set(made) == (ring if chunks > 1 else line)
    for pairs in rounds:
        assert len({stage for pair in pairs for stage in pair}) == 2 * len(pairs)
    assert len(rounds) <= 3


def test_by_hand() -> None:
    assert link_rounds(stages=2, chunks=1) == [[(0, 1)]]
    assert link_rounds(stages=2, chunks=2) == [[(0, 1)], [(1, 0)]]
    assert link_rounds(stages=3, chunks=2) == [[(0, 1)], [(1, 2)], [(2, 0)]]


def pipeline_mesh(rank: int, raw: dict) -> Mesh:
    job: JobSpec = parse(raw)
    return build_mesh(job_topology(job), rank, CPU, launch=job.launch)


def raw_job() -> dict:
    how = layout(STAGES) | {"model__layers": STAGES, "launch__shared_memory": False}
    return load_job(None, settings(**how)).model_dump(mode="json")


def groups_of_gloo(rank: int, size: int, raw: dict) -> bool:
    links = stage_links(pipeline_mesh(rank, raw), chunks=1)
    return not links.alone and links.stream is HOST_STREAM


def test_gloo_needs_no_groups_of_two() -> None:
    assert all(run_ranks(groups_of_gloo, STAGES, raw_job()))


def described(rank: int, size: int, world: LateWorld, raw: dict) -> dict[str, str]:
    links = stage_links(pipeline_mesh(rank, raw), chunks=1, make_stream=world.make_stream)
    return {
        f"{direction} {pair}": group.group_desc for (direction, pair), group in links.alone.items()
    }


def test_groups_are_named_as_the_logs_name_messages() -> None:
    """The sender first, as rundir/collective_log.py names the two ranks of a message: what NCCL
    writes of a time-out leads to them (launch/verdict.py)."""
    assert run_late_ranks(described, STAGES, raw_job()) == [
        {"forward (0, 1)": "pp forward 0-1", "backward (1, 0)": "pp backward 1,0"},
        {"forward (0, 1)": "pp forward 0-1", "backward (1, 0)": "pp backward 1,0",
         "forward (1, 2)": "pp forward 1-2", "backward (2, 1)": "pp backward 2,1"},
        {"forward (1, 2)": "pp forward 1-2", "backward (2, 1)": "pp backward 2,1"},
    ]  # fmt: skip


def pass_on(rank: int, size: int, world: LateWorld, raw: dict, is_alone: bool) -> list[float]:
    """Stage 1 starts to receive from stage 0, then sends to stage 2; stage 0 sends when stage 2 has
    what it waits for."""
    mesh = pipeline_mesh(rank, raw)
    links = stage_links(mesh, chunks=1, make_stream=world.make_stream)
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


def test_a_receive_does_not_hold_up_the_send_behind_it() -> None:
    assert run_late_ranks(pass_on, STAGES, raw_job(), True) == [[0, 0], [0, 0], [1, 1]]
    with pytest.raises(AssertionError, match=r"does not come to an end|hung"):
        run_late_ranks(pass_on, STAGES, raw_job(), False, timeout=4)


def known_of_compute(rank: int, size: int, world: LateWorld, raw: dict) -> list[bool]:
    """Whether each message waits for the operation before it on the stream that computes."""
    mesh = pipeline_mesh(rank, raw)
    links = stage_links(mesh, chunks=1, make_stream=world.make_stream)
    x = torch.ones(2)
    for _ in range(3):
        x.add_(1)
    computed = world.order.clock(MAIN)[MAIN]
    if rank == 2:
        pending = links.start_receive("forward", (2,), x, 1)
    elif rank == 1:
        pending = links.start_send("forward", x, 2)
    else:
        return []
    waits = [world.works[-1].known.get(MAIN, 0) >= computed]
    pending.wait().add_(1) if rank == 2 else pending.wait()
    return waits


def test_a_receive_does_not_wait_for_what_is_computed_and_a_send_does() -> None:
    assert run_late_ranks(known_of_compute, STAGES, raw_job()) == [[], [True], [False]]
