"""Which rank writes what: each distinct part of each parameter once, in each view of the ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.topology import Topology
from mpctl.records.checkpoint.replicas import Replicas, shard_files

SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in ("tp", "cp", "dp", "pp")})
ORDERS = st.sampled_from(["tp-cp-dp-pp", "tp-pp-cp-dp", "pp-dp-cp-tp"])


@given(SIZES, ORDERS)
def test_shards_are_numbered_by_stage_and_tp_rank(sizes: dict[str, int], order: str) -> None:
    """As version 2 numbered them, in every order of the axes."""
    topology = Topology.of(sizes, order=order)
    files = shard_files([Replicas(topology)])
    expected = {
        topology.rank(tp=tp, pp=pp): (f"shard-{pp * sizes['tp'] + tp}", {"tp": tp, "pp": pp})
        for tp in range(sizes["tp"])
        for pp in range(sizes["pp"])
    }
    assert {rank: (file.name, file.coords) for rank, file in files.items()} == expected
    assert len(files) == topology.world_size // topology.group_size("cp", "dp")
    assert {rank for rank in range(topology.world_size) if Replicas(topology).is_first(rank)} == (files.keys())


def test_a_grid_of_tp_ranks_counts_as_tp() -> None:
    grid = Topology.of({"tp": 4, "dp": 2}).factored("tp", {"col": 2, "row": 2})
    files = shard_files([Replicas(grid)])
    assert [file.coords for file in files.values()] == [{"tp": tp, "pp": 0} for tp in range(4)]
    assert list(files) == [0, 1, 2, 3]


def test_experts_that_other_ranks_hold_are_written_too() -> None:
    """8 ranks, tp 2 and dp 4 of dense layers; of experts tp 1, ep 4 and edp 2. Dense parts lie on
    ranks 0 and 1, experts on 0 to 3: ranks 2 and 3 write a shard of experts alone."""
    dense = Topology.of({"tp": 2, "dp": 4})
    experts = dense.view({"etp": 1, "ep": 4, "edp": 2, "pp": 1}, order="etp-ep-edp-pp")
    views = [Replicas(dense), Replicas(experts, ("edp",))]
    files = shard_files(views)
    assert list(files) == [0, 1, 2, 3]
    assert [view.is_first(2) for view in views] == [False, True]
    assert [file.name for file in files.values()] == [f"shard-{k}" for k in range(4)]
    assert [file.coords["ep"] for file in files.values()] == [0, 1, 2, 3]
    for view in views:
        parts = {tuple(sorted(_split(view, rank).items())) for rank in range(8)}
        assert {tuple(sorted(_split(view, rank).items())) for rank in view.writers} == parts
        assert len(view.writers) == len(parts)


def _split(view: Replicas, rank: int) -> dict[str, int]:
    coords = view.topology.coords(rank)
    return {axis: at for axis, at in coords.items() if axis not in view.axes}
