"""Hosts of a large training, as their agents report them."""

from __future__ import annotations

import time

from mpctl.records.rundir.breadcrumb import JOINED, BreadcrumbState
from mpctl.records.rundir.collective_log import CollectiveProgress, GroupProgress, Ranks, rank_ranges
from mpctl.records.rundir.step_log import ROWS, StepTimes
from mpctl.run.launch.attempt import NodeState, RankState

RANKS = 8
STAGES = 8


def rank_state(rank: int, world: int, step: int) -> RankState:
    """A rank that computes in a step of a training with tp 8, pp 8 and dp."""
    first, of_stage = rank // RANKS * RANKS, max(RANKS, world // STAGES)
    stage = rank // of_stage
    replicas = range(stage * of_stage + rank % RANKS, (stage + 1) * of_stage, RANKS)
    chain = range(rank % of_stage, world, of_stage)
    members: list[tuple[str, Ranks]] = [
        ("world", range(world)),
        ("tp", range(first, first + RANKS)),
        ("dp_cp", replicas),
    ]
    members += [("pp", chain)] if len(chain) > 1 else []
    for other in chain:
        if abs(other - rank) == of_stage:
            members += [("pp", (rank, other)), ("pp", (other, rank))]
    done = 40 * step
    groups = tuple(
        GroupProgress(name, rank_ranges(ranks), done, done, "all_reduce", 1 << 24) for name, ranks in members
    )
    each = (10_000,) * len(groups)
    times = StepTimes(step - 1, (500_000,) * ROWS, 1_000_000, 700_000, each, each)
    doing, now = f"step {step}, stage {stage}, forward of micro batch {rank % 3}", time.time()
    progress = CollectiveProgress(groups)
    shared_state = BreadcrumbState(doing, JOINED, 2 * step, now, now, progress, times)
    return RankState("running", 1.3 * step, shared_state)


def node_state(node: int, hosts: int, step: int = 100) -> NodeState:
    """The state of a host, as its agent reports it."""
    ranks = range(node * RANKS, (node + 1) * RANKS)
    states = {rank: rank_state(rank, hosts * RANKS, step) for rank in ranks}
    return NodeState(node=node, host=f"n{node}", torchrun="sleeping", ranks=states)
