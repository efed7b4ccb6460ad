"""One layout by hand, and properties that only depend on the job."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.core.sharding import DENSE, EXPERTS
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import find_topology
from tests.jobs import job_of

GPT: dict[str, Any] = {
    "model.layers": 4,
    "model.hidden": 8,
    "model.heads": 2,
    "model.seq_length": 4,
    "model.vocab": 64,
    "parallel.tp": 2,
    "parallel.pp": 2,
    "parallel.dp": 4,
    "training.micro_batch_size": 3,
}


def test_a_layout_by_hand() -> None:
    layout = JobLayout.of(job_of(GPT))
    assert layout.stages == (((0, 2),), ((2, 4),))
    assert (layout.dense.replicas, layout.dense.zero, layout.last_stage) == (4, 0, 1)
    assert layout.shared_parameters == {"embedding.word.weight": (0, 1)}
    assert layout.group_sizes == {"tp": 2, "cp": 1, "dp": 4, "dp_cp": 4, "pp": 2, "world": 16}
    assert (layout.global_batch_size, layout.tokens_per_step) == (12, 48)
    (first,), (last,) = layout.stage_slices(0), layout.stage_slices(1)
    assert (first.layers, first.has_entry, first.has_exit) == (range(2), True, False)
    assert (last.layers, last.has_entry, last.has_exit) == (range(2, 4), False, True)


def test_chunks_are_slices_of_their_stage() -> None:
    layout = JobLayout.of(job_of({**GPT, "parallel.vpp": 2, "training.global_batch_size": 24}))
    assert layout.stages == (((0, 1), (2, 3)), ((1, 2), (3, 4)))
    chunks = [part for chunk in (0, 1) for part in layout.chunk_slices(0, chunk)]
    assert chunks == layout.stage_slices(0)
    assert layout.layer_units(1, 1) == {"layers.3": 1}


def test_frozen_patterns_are_part_of_the_table() -> None:
    layout = JobLayout.of(job_of({**GPT, "training.freeze": ["layers.0.*"]}))
    assert layout.table.freeze == ("layers.0.*",)
    (first,) = layout.stage_slices(0)
    assert [(count, bool(flow.trained)) for count, flow in first.blocks] == [(1, False), (1, True)]


@pytest.mark.parametrize(("parallel", "zero"), [({"parallel.dp": 1}, 0), ({}, 2)])
def test_a_single_replica_shares_nothing(parallel: dict[str, int], zero: int) -> None:
    assert JobLayout.of(job_of({**GPT, "parallel.zero": 2, **parallel})).dense.zero == zero


@pytest.mark.parametrize(
    ("order", "first", "equal"),
    [
        ("tp-cp-dp-pp", [0, 2, 4, 6], [0, 8]),
        ("tp-dp-cp-pp", [0, 2, 4, 6], [0, 8]),
        ("tp-pp-cp-dp", [0, 4, 8, 12], [0, 16]),
        ("cp-dp-pp-tp", [0, 1, 2, 3], [0, 4]),
    ],
)
def test_states_are_shared_by_neighbours_of_a_group_of_replicas(order: str, first: list[int], equal: list[int]) -> None:
    settings = {**GPT, "parallel.cp": 2, "parallel.zero": 1, "parallel.zero_size": 4}
    layout = JobLayout.of(job_of({**settings, "parallel.order": order}))
    topology = layout.topology
    assert layout.dense.zero_size == 4 and layout.dense.copies == 2
    assert [list(topology.group(0, name)) for name in ("zero", "zero_replicas")] == [first, equal]
    for whole in topology.groups("dp_cp"):
        runs = [list(topology.group(rank, "zero")) for rank in whole]
        assert runs == [sorted(whole)[at : at + 4] for at in (0, 4) for _ in range(4)]
    assert {"zero": 4, "zero_replicas": 2}.items() <= layout.group_sizes.items()


@pytest.mark.parametrize(
    ("size", "ep", "dense", "experts"),
    [
        (8, 1, (1, 2), (1, 2)),
        (8, 4, (1, 2), (1, 2)),
        (4, 8, (1, 4), (0, 1)),
        (4, 4, (1, 4), (0, 1)),
        (16, 2, (1, 1), (1, 1)),
        (None, 2, (1, 1), (1, 1)),
        (1, 2, (0, 1), (0, 1)),
    ],
)
def test_states_of_experts_exist_as_often_as_those_of_dense_layers(
    size: int | None, ep: int, dense: tuple[int, int], experts: tuple[int, int]
) -> None:
    """(ZeRO in effect, copies), dp 16: 16 / size copies of dense states; the 16 / ep replicas of
    the experts have the divisor of both, and nothing to share where each is a copy."""
    settings = {
        **GPT,
        "parallel.tp": 1,
        "parallel.pp": 1,
        "parallel.dp": 16,
        "parallel.ep": ep,
        "parallel.zero": 1,
        "model.experts": 8,
        "model.experts_per_token": 2,
    }
    job = job_of({**settings, "parallel.zero_size": size})
    views = JobLayout.of(job).views
    assert [(views[n].zero, views[n].copies) for n in (DENSE, EXPERTS)] == [dense, experts]


def test_a_layout_needs_a_model() -> None:
    job = job_of({}).model_copy(update={"model": None})
    with pytest.raises(InputError, match="a layout needs a model"):
        JobLayout.of(job)


def test_an_order_that_names_no_axes_has_no_topology() -> None:
    job = job_of(GPT)
    assert find_topology(job) == JobLayout.of(job).topology
    parallel = job.parallel.model_copy(update={"order": "tp-xp"})
    assert find_topology(job.model_copy(update={"parallel": parallel})) is None


def test_stages_that_are_alike_are_asked_once() -> None:
    """12 layers on 4 stages with tied embeddings: the first, the two between, the last."""
    layout = JobLayout.of(job_of({"parallel.pp": 4, "cluster.gpus_per_node": 4}))
    first, *between, last = layout.stage_classes
    assert between[0] == between[1] not in (first, last) and first != last
    assert first.chunks[0].layers == ((0, 3),) and last.has_loss
    asked: list[int] = []

    def find(stage: int) -> int:
        asked.append(stage)
        return stage

    assert layout.of_stages(find) == [0, 1, 1, 3] and asked == [0, 1, 3]


def test_a_stage_of_which_fewer_layers_are_trained_is_another() -> None:
    frozen = {"parallel.pp": 4, "cluster.gpus_per_node": 4, "training.freeze": ["layers.[0-3].*"]}
    kinds = [alike.chunks[0].layers for alike in JobLayout.of(job_of(frozen)).stage_classes]
    assert kinds[1] != kinds[2] == kinds[3]
