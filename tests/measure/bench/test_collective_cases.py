"""Options as nccl-tests has them, and the cases that they ask for along the axes of a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.measure.bench.collective_cases import (
    KINDS,
    CollectiveCases,
    CollectiveFlags,
    CollectiveOptions,
    collective_cases,
    parse_dtype,
    parse_size,
    plan_collectives,
    read_options,
    sent_over,
)
from mpctl.plan.planning.plan import load_plan
from mpctl.run.hosts.machine import Machine

FLAGS = CollectiveFlags()


def sizes(**changes: Any) -> tuple[int, ...]:
    return read_options(replace(FLAGS, **changes)).sizes


def issues(**changes: Any) -> dict[str, str]:
    """Where each issue is, by rule."""
    with pytest.raises(InputError) as caught:
        read_options(replace(FLAGS, **changes))
    return {issue.where: issue.rule for issue in caught.value.issues}


def test_sizes_are_in_powers_of_1024() -> None:
    texts = ["8", "1K", "1.5k", "16M", "2G", "1T"]
    sizes = [parse_size(text, "--minbytes") for text in texts]
    assert sizes == [8, 1024, 1536, 16 << 20, 2 << 30, 1 << 40]
    for text in ("", "x", "-8", "0", "1KB", "1 K", "2T", "1e3", "nan", "٣", "0.1"):
        with pytest.raises(InputError, match="--minbytes"):
            parse_size(text, "--minbytes")


def test_sizes_grow_by_a_factor_or_by_a_step() -> None:
    assert sizes(minbytes="1K", maxbytes="20K") == (1024, 4096, 16384)
    assert sizes(minbytes="1", maxbytes="9", stepfactor=2.0) == (1, 2, 4, 8)
    assert sizes(minbytes="1", maxbytes="4", stepfactor=1.1) == (1, 2, 3, 4)
    assert sizes(minbytes="8", maxbytes="20", stepbytes="6") == (8, 14, 20)
    assert sizes(minbytes="8", maxbytes="8") == (8,)


def test_every_issue_is_reported_together() -> None:
    assert issues(minbytes="x", maxbytes="y", stepfactor=1.0, kinds="all", transports="tcp", datatype="quad") == {
        "--minbytes": "bad-size",
        "--maxbytes": "bad-size",
        "--stepfactor": "bad-step",
        "--kinds": "unknown-word",
        "--transports": "unknown-word",
        "--datatype": "bad-datatype",
    }
    assert issues(minbytes="2K", maxbytes="1K") == {"--minbytes": "bad-size"}
    assert issues(stepfactor=2.0, stepbytes="8") == {"--stepbytes": "bad-step"}
    assert issues(minbytes="8", stepbytes="8") == {"--stepbytes": "bad-step"}
    assert issues(stepfactor=float("nan")) == {"--stepfactor": "bad-step"}


def test_kinds_keep_their_order_once_each() -> None:
    chosen = read_options(replace(FLAGS, kinds="broadcast, all-reduce,broadcast")).kinds
    assert chosen == ("all_reduce", "broadcast")
    assert read_options(FLAGS).kinds == KINDS


def test_only_the_all_reduce_finds_a_maximum() -> None:
    kinds = read_options(replace(FLAGS, op="max")).kinds
    assert "all_reduce" in kinds and "broadcast" in kinds
    assert not {"reduce", "reduce_scatter"} & set(kinds)
    assert issues(op="max", kinds="reduce") == {"--op": "no-such-op"}


def test_types_have_the_names_of_nccl_tests_and_ours() -> None:
    assert {parse_dtype(name) for name in ("float", "fp32", "float32")} == {"float32"}
    assert parse_dtype("half") == parse_dtype("fp16") == "float16"


TWO_CORES = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)
SMALL = CollectiveOptions(sizes=(64, 1000))


def cases(options: CollectiveOptions = SMALL, machine: Machine = TWO_CORES, **settings: Any) -> CollectiveCases:
    named = {key.replace("__", "."): value for key, value in settings.items()}
    return collective_cases(load_plan(None, {"launch.device": "cpu", **named}), options, machine)


def refused(options: CollectiveOptions = SMALL, **settings: Any) -> set[str]:
    with pytest.raises(InputError) as caught:
        cases(options, **settings)
    return {issue.rule for issue in caught.value.issues}


def test_all_kinds_and_ways_along_every_axis_of_several_ranks() -> None:
    made = cases(parallel__tp=2, parallel__pp=2).cases
    assert {(c["axis"], c["transport"]) for c in made} == {
        (axis, way) for axis in ("tp", "pp") for way in ("gloo", "shared")
    }
    ways = {c["transport"] for c in made if c["kind"] == "sendrecv"}
    assert ways == {"gloo"}  # messages between two ranks
    assert len(made) == 2 * (6 * 2 + 1) * 2


def test_ranks_of_several_nodes_share_no_memory() -> None:
    made = cases(parallel__tp=2, parallel__dp=2, cluster__nodes=2, cluster__gpus_per_node=2)
    ways = {axis: {c["transport"] for c in made.cases if c["axis"] == axis} for axis in ("tp", "dp_cp")}
    assert ways == {"tp": {"gloo", "shared"}, "dp_cp": {"gloo"}}
    assert sent_over(made, "all_reduce", "tp") == "shared"
    assert sent_over(made, "all_reduce", "dp_cp") == sent_over(made, "sendrecv", "tp") == "gloo"
    alone = cases(parallel__tp=2, launch__shared_memory=False)
    assert {c["transport"] for c in alone.cases} == {"gloo"}


def test_sizes_and_counts_of_three_ranks_by_hand() -> None:
    """1000 bytes of float32 are 250 elements, or 83 for each of 3 ranks, 996 bytes."""
    made = {c["kind"]: c for c in cases(parallel__dp=3).cases if c["bytes"] > 900}
    assert (made["all_reduce"]["bytes"], made["all_reduce"]["count"]) == (1000, 250)
    assert (made["all_gather"]["bytes"], made["all_gather"]["count"]) == (996, 83)
    assert {made[kind]["op"] for kind in ("all_reduce", "reduce", "reduce_scatter")} == {"sum"}
    assert {made[kind]["op"] for kind in ("all_to_all", "broadcast", "sendrecv")} == {"none"}


def test_sizes_below_an_element_a_rank_are_rounded_up_and_timed_once() -> None:
    options = CollectiveOptions((1, 2, 3), kinds=("all_to_all",), transports=("gloo",))
    assert [(c["bytes"], c["count"]) for c in cases(options, parallel__tp=2).cases] == [(8, 1)]


def test_dp_cp_is_all_replicas_and_a_grid_has_its_axes() -> None:
    made = cases(parallel__cp=2, parallel__dp=2)
    assert (made.sizes["cp"], made.sizes["dp_cp"]) == (2, 4)
    assert refused(replace(SMALL, axes=("dp",)), parallel__cp=2, parallel__dp=2) == {"unknown-axis"}
    assert {c["axis"] for c in cases(replace(SMALL, axes=("dp",)), parallel__dp=2).cases} == {"dp_cp"}
    assert {c["axis"] for c in cases(parallel__cp=2).cases} == {"cp"}
    grid = cases(parallel__tp=4, parallel__tensor_mode="2d", training__micro_batch_size=2)
    assert {axis for axis, ranks in grid.sizes.items() if ranks == 2} == {"row", "col"}


def test_the_groups_of_experts_are_axes_too() -> None:
    made = cases(parallel__ep=2, parallel__dp=4)
    assert {c["axis"] for c in made.cases} == {"dp_cp", "ep", "edp"}
    both = cases(parallel__tp=2, parallel__dp=2, parallel__ep=2, parallel__etp=2)
    assert {c["axis"]: both.sizes[c["axis"]] for c in both.cases} == {
        "tp": 2,
        "dp_cp": 2,
        "etp": 2,
        "ep": 2,
        "etp_ep": 4,
    }


def test_more_ranks_than_cores_are_a_rehearsal() -> None:
    assert cases(parallel__tp=4).is_rehearsal and not cases(parallel__tp=2).is_rehearsal
    four = replace(TWO_CORES, cores=4)
    assert not cases(parallel__tp=4).on_hosts(four).is_rehearsal


def test_axes_ways_roots_and_sizes_that_cannot_be_timed() -> None:
    assert refused() == {"axis-of-one-rank"}
    assert refused(replace(SMALL, axes=("dp", "xp")), parallel__tp=2) == {"axis-of-one-rank", "unknown-axis"}
    assert refused(replace(SMALL, transports=("nccl",)), parallel__tp=2) == {"no-such-transport"}
    assert refused(replace(SMALL, root=2), parallel__tp=2) == {"no-such-root"}
    assert refused(replace(SMALL, root=-1), parallel__tp=2) == {"no-such-root"}
    assert refused(CollectiveOptions((2**30,)), parallel__tp=2) == {"size-beyond-memory"}
    only = replace(SMALL, kinds=("sendrecv",), transports=("shared",))
    assert refused(only, parallel__tp=2) == {"no-collective"}


def test_on_gpus_messages_go_over_nccl() -> None:
    plan = load_plan(None, {"parallel.tp": 2, "launch.device": "cuda"})
    made = collective_cases(plan, SMALL, Machine(cores=2, gpus=2, memory_bytes=2**30))
    assert {c["transport"] for c in made.cases} == {"nccl"} and not made.is_rehearsal


def test_without_a_layout_tp_is_over_the_cores() -> None:
    def ranks(cores: int, **settings: Any) -> int:
        machine = Machine(cores=cores, gpus=0, memory_bytes=2**33)
        named = {key.replace("__", "."): value for key, value in settings.items()}
        planned = plan_collectives(None, {"launch.device": "cpu", **named}, CollectiveFlags(), machine)
        assert planned.plan.job.launch.threads_per_rank == 1
        return planned.topology.world_size

    assert (ranks(4), ranks(1), ranks(4, parallel__dp=3)) == (4, 2, 3)
    assert (ranks(1, parallel__ep=4), ranks(8, parallel__ep=2, parallel__etp=2)) == (4, 4)


def test_options_and_layout_are_refused_together() -> None:
    with pytest.raises(InputError) as caught:
        plan_collectives(None, {"parallel.tp": 3, "cluster.gpus_per_node": 2}, CollectiveFlags("x"), TWO_CORES)
    assert {issue.rule for issue in caught.value.issues} == {"bad-size", "world-size"}
