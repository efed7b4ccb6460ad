"""Exchange through shared memory: the bits of gloo, several operations under way."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import tempfile
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.core.topology import Topology
from mpctl.spec.launch import LaunchSpec
from mpctl.train.runtime.mesh import Mesh, build_mesh
from mpctl.train.transport import shared
from mpctl.train.transport.group import Group
from mpctl.train.transport.shared import NoSegment
from mpctl.train.transport.timing import Collective
from tests import ranks
from tests.ranks import grouped, run_each
from tests.train.layers.oracle import logged
from tests.train.runtime.tiny import make_data, tiny_job, train
from tests.train.transport.shared_ranks import all_full, sharing

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SHAPES = ((1, 4), (3, 4), (5, 1, 12), (173, 12), (751, 12), (0, 4))
Results = dict[str, list[Any]]
KINDS = ("all_reduce", "max", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, shape, generator=draw)
    return (torch.randn(*shape, generator=draw, dtype=torch.float64) * 1000).to(dtype)


def collective(kind: str, group: Group, x: Tensor) -> Tensor:
    """Along the last dimension; broadcast from the last rank."""
    return {
        "all_reduce": lambda: group.all_reduce(x),
        "max": lambda: group.all_reduce(x, "max"),
        "all_gather": lambda: group.all_gather(x, -1),
        "reduce_scatter": lambda: group.reduce_scatter(x, -1),
        "all_to_all": lambda: group.all_to_all(x, -1),
        "broadcast": lambda: group.broadcast(x, group.size - 1),
    }[kind]()


def arrangements(x: Tensor) -> list[Tensor]:
    """x whole, and the same numbers lying apart in memory."""
    return [x.clone(), x.movedim(0, -1).contiguous().movedim(-1, 0)]


def bits(x: Tensor) -> bytes:
    return x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _beside_gloo(rank: int, size: int) -> list:
    logs: tuple[list[Collective], list[Collective]] = ([], [])
    ours, gloo, wrong = sharing(rank, size, logs[0]), grouped(rank, size, logs[1]), []
    for kind in KINDS:
        for dtype in DTYPES:
            for shape in SHAPES[:-1]:
                x = values(rank, shape, dtype)
                pairs = zip(arrangements(x), arrangements(x), strict=True)
                for left, right in pairs:
                    made, wanted = collective(kind, ours, left), collective(kind, gloo, right)
                    in_place = made.data_ptr() == left.data_ptr()
                    same = made.shape == wanted.shape and bits(made) == bits(wanted)
                    if not same or in_place != (wanted.data_ptr() == right.data_ptr()):
                        wrong.append(f"{kind} {dtype} {shape}")
    return [wrong, logged(logs[0]) == logged(logs[1]), len(logs[0])]


def test_two_ranks_get_the_bits_of_gloo_and_record_the_same(on_two: Results) -> None:
    for wrong, same_log, count in on_two["beside gloo"]:
        assert wrong == [] and same_log
        assert count == len(KINDS) * len(DTYPES) * (len(SHAPES) - 1) * 2


def _several(rank: int, size: int) -> list[str]:
    group, wrong = sharing(rank, size), []
    for kind in KINDS:
        for dtype in DTYPES:
            for shape in SHAPES:
                every = [values(r, (*shape[:-1], shape[-1] * 3), dtype) for r in range(size)]
                total = reduce(torch.add, every)
                own = slice(*(shape[-1] * 3 // size * r for r in (rank, rank + 1)))
                wanted = {
                    "all_reduce": total,
                    "max": reduce(torch.maximum, every),
                    "all_gather": torch.cat(every, -1),
                    "reduce_scatter": total[..., own],
                    "all_to_all": torch.cat([x[..., own] for x in every], -1),
                    "broadcast": every[-1],
                }[kind]
                if bits(collective(kind, group, every[rank].clone())) != bits(wanted):
                    wrong.append(f"{kind} {dtype} {shape}")
    return wrong


def test_every_rank_gets_the_sum_in_rank_order(on_two: Results, on_three: Results) -> None:
    """Zero-size messages among them."""
    assert on_two["several"] == [[]] * 2 and on_three["several"] == [[]] * 3


def _in_place(rank: int, size: int, way: str) -> list[bool]:
    """More than slots hold; the third rank's own part comes last in the sum."""
    group = {"shared": sharing, "gloo": grouped}[way](rank, size)
    whole = values(rank, (size * 4000,), torch.float32)
    apart = group.reduce_scatter(whole.clone(), 0)
    part = group.start_reduce_scatter_in_place(whole).wait()
    own = whole.view(size, -1)[rank]
    return [part.data_ptr() == own.data_ptr(), torch.equal(own, apart)]


def test_a_sum_scattered_in_place_has_the_same_bits(on_three: Results) -> None:
    assert on_three["in place, shared"] == on_three["in place, gloo"] == [[True, True]] * 3


def _many(rank: int, size: int) -> int:
    group, x = sharing(rank, size), torch.zeros(3, dtype=torch.int64)
    for turn in range(3_000):
        x[0], x[1], x[2] = turn, rank, turn * rank
        got = group.all_reduce(x.clone()) if turn % 3 else group.all_gather(x, 0)
        wanted = [2 * turn, 1, turn] if turn % 3 else [turn, 0, 0, turn, 1, turn]
        if got.tolist() != wanted:
            return turn
    return -1


def test_thousands_of_operations(on_two: Results) -> None:
    assert on_two["many"] == [-1, -1]


def _out_of_order(rank: int, size: int, order: list[int], elements: int) -> list[str]:
    """Rank 1 waits in the opposite order; between the two rounds nothing is left over."""
    group, wrong, t = sharing(rank, size), [], size
    for turn in range(3):
        every = [values(10 * turn + r, (elements, t), torch.float64) for r in range(size)]
        inputs = [every[rank].clone() for _ in range(4)]
        pending = [
            group.start_all_gather(inputs[0], 0),
            group.start_all_reduce(inputs[1]),
            group.start_reduce_scatter(inputs[2], 1),
            group.start_all_reduce(inputs[3], "max"),
        ]
        total = reduce(torch.add, every)
        wanted = [torch.cat(every), total, total[:, rank : rank + 1], reduce(torch.maximum, every)]
        for which in order if rank == 0 else order[::-1]:
            if not torch.equal(pending[which].wait(), wanted[which]):
                wrong.append(f"turn {turn}, operation {which}")
        if not torch.equal(group.all_reduce(torch.ones(2)), torch.full((2,), float(t))):
            wrong.append(f"turn {turn}, after")
    return wrong


ORDERS = {
    f"{order} {elements}": (_out_of_order, order, elements)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2])
    for elements in (2, 2000)
}


@pytest.mark.parametrize("order", ORDERS)
def test_waits_in_any_order(on_two: Results, order: str) -> None:
    assert on_two[order] == [[], []]


def _late(rank: int, size: int) -> Tensor:
    """Rank 1 joins once rank 0 has come back from all its starts: one that waits would hang."""
    group, go, x = sharing(rank, size), torch.zeros(1), torch.full((2, 4), rank + 1.0)
    if rank == 1:
        dist.recv(go, 0)
    pending = [
        group.start_all_reduce(x.clone()),
        group.start_all_gather(x, 1),
        group.start_reduce_scatter(x, 1),
        *(group.start_all_reduce(torch.ones(9000)) for _ in range(2)),  # more than slots hold
    ]
    if rank == 0:
        dist.send(go, 1)
    assert [p.wait().unique().tolist() for p in pending[3:]] == [[2.0], [2.0]]
    return torch.cat([p.wait().flatten() for p in pending[:3]])


def test_start_does_not_wait_for_the_other_ranks(on_two: Results) -> None:
    ones = torch.ones(8)
    gathered = torch.tensor([1.0] * 4 + [2.0] * 4).repeat(2)
    for result in on_two["late"]:
        assert torch.equal(result, torch.cat([3 * ones, gathered, 3 * ones[:4]]))


def _with_grad(rank: int, size: int) -> bool:
    """A leaf summed outside no_grad, as gloo takes it; the graph does not reach the slots."""
    group, x = sharing(rank, size), torch.ones(3, requires_grad=True)
    group.all_reduce(x)
    y = group.all_reduce(x * 2)
    return x.is_leaf and not group.shared.segment.data.requires_grad and y.tolist() == [8.0] * 3


def test_autograd_does_not_see_the_memory(on_two: Results) -> None:
    assert on_two["with grad"] == [True, True]


def ended(function: Callable[..., Any], n: int, *args: Any) -> list[tuple[int | None, str]]:
    """Like run_ranks, but a rank that fails does not end the others: exit code and traceback of
    each; what still runs 10 s later is killed."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        started = [
            ranks.CONTEXT.Process(target=ranks._rank, args=(function, rank, n, args, folder, 30, ranks.join_gloo))
            for rank in range(n)
        ]
        for process in started:
            process.start()
        started[0].join(10)
        for process in started:
            process.kill()
            process.join()
        words = [Path(folder, f"{rank}.txt") for rank in range(n)]
        told = [file.read_text() if file.exists() else "" for file in words]
        return [(process.exitcode, text) for process, text in zip(started, told, strict=True)]


def _leaves(rank: int, size: int, number: int) -> None:
    group = sharing(rank, size, timeout=1)
    group.all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), number)
    group.all_reduce(torch.ones(2))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (
            signal.SIGKILL,
            r"PeerLost: tp operation 2 \(all_reduce of 8 bytes\): "
            r"connection closed by peer: rank 1 ended",
        ),
        (
            signal.SIGSTOP,
            r"PeerLost: tp operation 2 \(all_reduce of 8 bytes\): timed out "
            r"after 1 s of waiting for rank 1 ",
        ),
    ],
)
def test_a_rank_that_waits_in_vain_says_for_whom(number: int, words: str) -> None:
    (code, told), _ = ended(_leaves, 2, number)
    assert code == 1 and re.search(words, told), told


def _posts_and_leaves(rank: int, size: int) -> None:
    group = sharing(rank, size)
    pending = group.start_all_reduce(torch.ones(2))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not group.shared.segment.lost():
        pass
    assert pending.wait().tolist() == [2.0, 2.0]


def test_what_a_rank_posted_before_its_end_still_counts() -> None:
    (code, told), _ = ended(_posts_and_leaves, 2)
    assert code == 1 and "AssertionError" not in told  # gloo's last barrier misses rank 1


def _starts_and_leaves(rank: int, size: int) -> None:
    group = sharing(rank, size)
    pending = group.start_all_reduce(torch.ones(9000))  # 36,000 bytes, of which slots hold 16,384
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pending.wait()


def test_a_rank_that_leaves_amid_a_message_is_named() -> None:
    (code, told), _ = ended(_starts_and_leaves, 2)
    assert code == 1
    where = "tp operation 1 (all_reduce of 4096 bytes)"
    assert f"{where}: connection closed by peer: rank 1 ended" in told


def _differ(rank: int, size: int) -> str:
    group = sharing(rank, size)
    try:
        group.all_reduce(torch.ones(2)) if rank == 0 else group.all_gather(torch.ones(3), 0)
    except RuntimeError as error:
        return str(error)
    return "silently wrong"


def test_ranks_that_do_different_things_are_told(on_two: Results) -> None:
    first, second = on_two["differ"]
    assert "tp operation 1 (all_reduce of 8 bytes): rank 1 came with all_gather of 12" in first
    assert "tp operation 1 (all_gather of 12 bytes): rank 0 came with all_reduce of 8" in second


def _nowhere(path: str, name: str, size: int) -> None:
    raise OSError(f"{path} is not here")


def _refused(rank: int, size: int, failing: int) -> str:
    layout: dict[str, Any] = {"reserve": all_full} if failing == 0 else {}
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing > 0:
            patch.setattr(shared, "_map", _nowhere)
        return _why_not(rank, size, **layout)


def _why_not(rank: int, size: int, **layout: Any) -> str:
    try:
        sharing(rank, size, **layout)
    except NoSegment as error:
        return str(error)
    return "shared"


def test_all_ranks_share_or_none_does(on_three: Results) -> None:
    told = on_three["nobody"]
    assert "no space left" in told[0]
    assert told[1:] == ["the first rank of the group could not make it"] * 2
    told = on_three["not one"]
    assert told[:2] == ["another rank of the group could not map it"] * 2
    assert "is not here" in told[2]


def _traces(rank: int, size: int) -> list:
    group = sharing(rank, size)
    group.all_reduce(torch.ones(2))
    links = list(Path("/proc/self/fd").iterdir())  # the listing's own handle is closed by now
    open_files = [str(link.readlink()) for link in links if link.is_symlink()]
    lines = Path("/proc/self/maps").read_text().splitlines()
    kept = [file for file in open_files if "memfd" in file or "pidfd" in file]
    return [kept, [line.split(maxsplit=5)[-1] for line in lines if "mpctl-" in line]]


def test_the_memory_has_no_name(on_two: Results) -> None:
    """So whoever is killed leaves nothing behind. Open are the mapping's own handle (Python keeps
    one) and one on the peer's process."""
    for kept, mapped in on_two["traces"]:
        assert len(mapped) == 1 and re.fullmatch(r"/memfd:mpctl-\w{16} \(deleted\)", mapped[0])
        assert sorted(kept) == [mapped[0], "anon_inode:[pidfd]"]


def _elsewhere(rank: int, size: int) -> str:
    """The path leads to another file, as it may on another host."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(shared, "_name", lambda number: "mpctl-other")
        return _why_not(rank, size)


def test_another_file_at_the_same_place_is_not_opened(on_two: Results) -> None:
    told = on_two["elsewhere"]
    assert told[0] == "another rank of the group could not map it"
    assert "not mpctl-other: not the same host?" in told[1]


@pytest.mark.parametrize(("system", "machine"), [("linux", "aarch64"), ("darwin", "x86_64")])
def test_other_machines_go_by_gloo(system: str, machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    with pytest.raises(OSError, match=f"this is {system} on {machine}"):
        shared._make(4096, all_full)


def _meshes(rank: int, size: int, gpus_per_node: int, full: bool) -> list:
    topology = Topology.of({"tp": 2, "dp": size // 2}, gpus_per_node=gpus_per_node)
    mesh = partial(build_mesh, topology, rank, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as log:
        if full:
            patch.setattr(shared, "_reserve", all_full)
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


def test_groups_on_one_node_share(on_two: Results) -> None:
    found = run_each({str(node): (_meshes, node, False) for node in (4, 2, 1)}, 4)
    shared = {"4": ["tp", "dp_cp", "world"], "2": ["tp"], "1": []}
    for node, meshes in found.items():
        assert meshes == [[shared[node], [], ""]] * 4
    assert on_two["mesh"] == [[["tp", "world"], [], ""]] * 2


def test_without_memory_the_mesh_goes_by_gloo_and_says_so(on_two: Results) -> None:
    for rank, (on, _, log) in enumerate(on_two["mesh without memory"]):
        why = "no space left" if rank == 0 else "the first rank of the group could not make it"
        assert on == []
        assert log.startswith("world: no shared memory, messages go through gloo: ") and why in log


@pytest.fixture(scope="module")
def on_two() -> Results:
    return run_each(
        {
            "traces": (_traces,),
            "beside gloo": (_beside_gloo,),
            "several": (_several,),
            "many": (_many,),
            **ORDERS,
            "late": (_late,),
            "with grad": (_with_grad,),
            "elsewhere": (_elsewhere,),
            "mesh": (_meshes, 2, False),
            "mesh without memory": (_meshes, 2, True),
            "differ": (_differ,),
        },
        2,
    )


@pytest.fixture(scope="module")
def on_three() -> Results:
    return run_each(
        {
            "several": (_several,),
            "in place, shared": (_in_place, "shared"),
            "in place, gloo": (_in_place, "gloo"),
            "nobody": (_refused, 0),
            "not one": (_refused, 2),
        },
        3,
    )


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
