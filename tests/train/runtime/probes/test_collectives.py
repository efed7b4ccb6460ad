"""Collectives on a bench: right on every axis and way to send; wrong ones are counted."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.requests import ADDING, SPLIT, CollectiveCase, CollectiveKind, CollectivesRequest
from mpctl.spec.load import load_job
from mpctl.train.runtime.mesh import build_mesh
from mpctl.train.runtime.probes.collectives import TimedCollective, probe_collectives
from mpctl.train.transport.group import Group
from tests.ranks import run_ranks

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
DTYPES = ("float32", "bfloat16", "int64", "int8")


def case(kind: CollectiveKind, axis: str, transport: Any, **more: Any) -> CollectiveCase:
    made: Any = {
        "kind": kind,
        "axis": axis,
        "transport": transport,
        "dtype": "float32",
        "op": "sum" if kind in ADDING else "none",
        "bytes": 4096,
        "count": 1024,
    } | more
    return made


def request(cases: list[CollectiveCase], **more: Any) -> CollectivesRequest:
    made: Any = {
        "task": "collectives",
        "cases": cases,
        "rounds": 2,
        "iterations": 2,
        "warm_up": 1,
        "root": 1,
        "check": True,
        "seconds": None,
    } | more
    return made


def probed(rank: int, size: int, asked: CollectivesRequest, settings: dict[str, Any]) -> Any:
    job = load_job(None, {**settings, "launch.device": "cpu"})
    mesh = build_mesh(job_topology(job), rank, torch.device("cpu"), launch=job.launch)
    return list(probe_collectives(asked, job, mesh))


def all_cases() -> list[CollectiveCase]:
    """Both ways along two axes; shared memory sends nothing from one rank to another."""
    return [
        case(kind, axis, transport, dtype=dtype, count=36)
        for kind in KINDS
        for transport in ("gloo", "shared")[: 1 if kind == "sendrecv" else 2]
        for axis, dtypes in (("tp", ("float32", "int64")), ("dp_cp", ("bfloat16", "int8")))
        for dtype in dtypes
    ]


@pytest.mark.slow
def test_every_kind_is_right_in_all_groups_of_an_axis() -> None:
    cases = all_cases()
    cases.append(case("all_reduce", "tp", "shared", op="max", count=5))
    results = run_ranks(probed, 4, request(cases), {"parallel.tp": 2, "parallel.dp": 2})
    assert all(result == results[0] for result in results)
    timings = results[0]
    assert [(t["round"], t["case"]) for t in timings] == [
        (turn, number) for turn in range(2) for number in range(len(cases))
    ]
    assert all(t["seconds"] > 0 for t in timings)
    assert [cases[t["case"]] for t in timings if t["wrong"]] == []


@pytest.mark.slow
def test_three_ranks_have_a_middle() -> None:
    cases = [case(kind, "tp", "gloo", count=33) for kind in KINDS]
    timings = run_ranks(probed, 3, request(cases, root=2), {"parallel.tp": 3})[0]
    assert [cases[t["case"]]["kind"] for t in timings if t["wrong"]] == []


def test_without_shared_memory_its_cases_are_left_out() -> None:
    cases = [case("all_reduce", "tp", way) for way in ("gloo", "shared")]
    settings = {"parallel.tp": 2, "launch.shared_memory": False}
    first, *timings = run_ranks(probed, 2, request(cases, check=False), settings)[0]
    assert first == {"event": "absent", "axis": "tp", "transport": "shared"}
    assert [(t["case"], t["wrong"]) for t in timings] == [(0, -1), (0, -1)]


def test_no_round_begins_after_the_budget() -> None:
    asked = request([case("broadcast", "tp", "gloo")], rounds=10**6, seconds=0.0)
    (only,) = run_ranks(probed, 2, asked, {"parallel.tp": 2})[0]
    assert only["round"] == 0


class Deaf(Group):
    """A group whose messages do not travel."""

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        return tensor

    def all_to_all(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "all_to_all"])
def test_a_wrong_result_is_counted(kind: Any, dtype: str) -> None:
    """Of the all-to-all rank 1 keeps its own block, which is right, and a wrong one of rank 0."""
    timed = TimedCollective.of(case(kind, "tp", "gloo", dtype=dtype, count=40), Deaf(1, 2), torch.device("cpu"))
    wrong, elements = timed.wrong(), 40 * (2 if kind in SPLIT else 1)
    assert elements // 3 < wrong <= elements
    assert not timed.buffer.any()
