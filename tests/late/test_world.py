"""What a late world shows: each fault by the smallest code that has it."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.train.transport.group import Group
from tests.late.ranks import run_late_ranks
from tests.late.world import LateWorld


def world_group(rank: int, size: int) -> Group:
    return Group(rank, size, dist.group.WORLD, "tp")


def samples_at_a_time(group: Group, x: Tensor) -> dict[str, Tensor]:
    with patch("mpctl.train.transport.group.SLICE_BYTES", 1):
        return {"samples": group.all_gather(x, 1), "sums": group.reduce_scatter(x, 1)}


def every_collective(rank: int, size: int, world: LateWorld) -> dict[str, list[float]]:
    group, x = world_group(rank, size), torch.arange(4.0) + 10 * rank
    target = group.start_reduce(x.clone(), 0).wait()
    into = torch.zeros(8)
    into[4 * rank : 4 * rank + 4] = x
    results = {
        "all_reduce": group.all_reduce(x.clone()),
        "max": group.all_reduce(x.clone(), "max"),
        "all_gather": group.all_gather(x, 0),
        "into": group.start_all_gather_into(into, into[4 * rank : 4 * rank + 4]).wait(),
        "reduce_scatter": group.reduce_scatter(x, 0),
        **samples_at_a_time(group, x.view(2, 2)),
        "in_place": group.start_reduce_scatter_in_place(x.clone()).wait(),
        "all_to_all": group.all_to_all(x, 0),
        "rows": group.all_to_all_rows(x, [1, 3], [[1, 1], [3, 3]][rank]),
        "broadcast": group.broadcast(x.clone(), 1),
        "reduce": target if rank == 0 else x,
    }
    return {name: result.tolist() for name, result in results.items()}


def test_results_are_those_of_the_ordinary_world():
    for rank, results in enumerate(run_late_ranks(every_collective, 2)):
        both = {"all_gather": [0, 1, 2, 3, 10, 11, 12, 13]}
        half = [[10, 12], [14, 16]][rank]
        assert results == {
            "all_reduce": [10, 12, 14, 16],
            "max": [10, 11, 12, 13],
            **both,
            "samples": [[0, 1, 10, 11], [2, 3, 12, 13]],
            "sums": [[[10], [14]], [[12], [16]]][rank],
            "into": both["all_gather"],
            "reduce_scatter": half,
            "in_place": half,
            "all_to_all": [[0, 1, 10, 11], [2, 3, 12, 13]][rank],
            "rows": [[0, 10], [1, 2, 3, 11, 12, 13]][rank],
            "broadcast": [10, 11, 12, 13],
            "reduce": [[10, 12, 14, 16], [10, 11, 12, 13]][rank],
        }


def read_before_wait(group: Group, x: Tensor) -> None:
    pending = group.start_all_reduce(x)
    x + 1
    pending.wait()


def write_what_is_sent(group: Group, x: Tensor) -> None:
    pending = group.start_all_gather(x, 0)
    x.zero_()
    pending.wait()


def release_what_is_gathered(group: Group, x: Tensor) -> None:
    whole = torch.empty(2 * len(x))
    pending = group.start_all_gather_into(whole, x)
    torch.ops.inductor.resize_storage_bytes_(whole, 0)
    pending.wait()


def write_rows_that_are_sent(group: Group, x: Tensor) -> None:
    pending = group.start_all_to_all_rows(x, [4, 0], [4 - 4 * group.rank] * 2)
    x.zero_()
    pending.wait()


def write_samples_that_are_sent(group: Group, x: Tensor) -> None:
    samples = x.view(2, 2).clone()
    with patch("mpctl.train.transport.group.SLICE_BYTES", 1):
        pending = group.start_all_gather(samples, 1)
    samples.zero_()
    pending.wait()


def read_sums_of_samples_before_wait(group: Group, x: Tensor) -> None:
    with patch("mpctl.train.transport.group.SLICE_BYTES", 1):
        pending = group.start_reduce_scatter(x.view(2, 2), 1)
    pending.result + 1
    pending.wait()


def forget_to_wait(group: Group, x: Tensor) -> None:
    group.start_all_reduce(x)


def read_number_before_wait(group: Group, x: Tensor) -> None:
    pending = group.start_all_reduce(x)
    x.tolist()
    pending.wait()


def read_whole_in_inference_mode(group: Group, x: Tensor) -> None:
    with torch.inference_mode():
        pending = group.start_all_gather(x.clone().view(2, 2), 1)
        pending.result.movedim(0, 1).flatten(1, 2)
        pending.wait()


def receive_into_memory_of_another_stream(group: Group, x: Tensor, world: LateWorld) -> None:
    stream = world.make_stream(x.device)
    buffer = torch.empty_like(x)  # may have been a tensor that the main stream still reads
    with stream.running():
        pending = group.start_all_gather_into(buffer.repeat(2), x)
    pending.wait()


def free_for_the_wrong_stream(group: Group, x: Tensor, world: LateWorld) -> None:
    stream, own = world.make_stream(x.device), x.clone()
    stream.follow()
    with stream.running():
        copy = own * 2
    del own
    torch.empty(1).add_(1)
    stream.join()
    copy.add_(1)


FAULTS = {
    read_before_wait: "Race: aten.add.Tensor reads what all_reduce 0 over .* writes",
    write_what_is_sent: "Race: aten.zero_.default writes what all_gather 0 over .* reads",
    release_what_is_gathered: "Race: inductor.resize_storage_bytes_.* writes what all_gather",
    write_rows_that_are_sent: "Race: aten.zero_.default writes what all_to_all 0 over .* reads",
    write_samples_that_are_sent: "Race: aten.zero_.default writes what all_gather 0 over .* reads",
    read_sums_of_samples_before_wait: "Race: aten.add.* reads what reduce_scatter 0 over .* writes",
    forget_to_wait: "TooEarly: nobody waits for all_reduce",
    read_number_before_wait: "Race: tolist reads what all_reduce",
    read_whole_in_inference_mode: "Race: aten.clone.* reads what all_gather",
    receive_into_memory_of_another_stream: "Race: .* does not wait for the main stream",
    free_for_the_wrong_stream: "TooEarly: memory taken on the main stream is freed while aten.mul",
}


def commit(rank: int, size: int, world: LateWorld, name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.__name__ == name)
    more = (world,) if "stream" in name else ()
    fault(world_group(rank, size), torch.ones(4), *more)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_named(fault) -> None:
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        run_late_ranks(commit, 2, fault.__name__)


def order_of_messages(rank: int, size: int, world: LateWorld, is_crossed: bool) -> list[float]:
    """Both ranks send first; with one communicator neither send ends."""
    groups = [world_group(rank, size)] * 2
    if not is_crossed:
        groups = [Group(rank, size, dist.new_group([0, 1]), name) for name in ("there", "back")]
    out, back, buffer = groups[rank], groups[1 - rank], torch.zeros(2)
    sending = out.start_send(torch.full((2,), float(rank)), 1 - rank)
    receiving = back.start_receive(buffer, 1 - rank)
    sending.wait()
    return receiving.wait().tolist()


@pytest.mark.slow
def test_an_unbatched_send_holds_up_the_receive_behind_it():
    assert run_late_ranks(order_of_messages, 2, False) == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(AssertionError, match="does not come to an end"):
        run_late_ranks(order_of_messages, 2, True, timeout=6)


def returns_before_peers(rank: int, size: int, world: LateWorld) -> bool:
    """Rank 0 starts and waits before rank 1 has begun: the host goes on."""
    group, store = world_group(rank, size), dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 went on"])
    total = group.all_reduce(torch.ones(2))
    if rank == 0:
        was_over = world.works[-1].is_completed()
        store.set("rank 0 went on", "")
        return not was_over and total.tolist() == [2, 2]
    return total.tolist() == [2, 2]


def test_a_collective_returns_before_its_peers_have_come():
    assert all(run_late_ranks(returns_before_peers, 2))
