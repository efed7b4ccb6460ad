"""How much memory a rank takes while its host is far ahead of its device (order.py counts as the
allocators do): the same however many layers or micro batches the host queues, as planned; and with
Tensor.record_stream one tensor more for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mpctl.model.operators.kernel_sets import COPIES_IN_FLIGHT
from mpctl.spec.runtime import get_profile
from mpctl.train.layers.recompute import HostOffload
from mpctl.train.runtime.p2p import Direction, StageLinks
from mpctl.train.transport.group import Group, Pending
from mpctl.train.transport.streams import SideStream
from tests.late.order import HOST, StreamOrder
from tests.late.ranks import run_late_ranks
from tests.late.world import LateStream, LateWorld

CPU, SIZE = torch.device("cpu"), 4096


def test_freed_memory_is_taken_again_on_its_stream_at_once() -> None:
    order = StreamOrder()
    for number in range(9):
        order.take("A", number, "empty", SIZE)
        order.free(number)
    order.take("B", 9, "empty", SIZE)
    assert order.amounts["A"].most == order.amounts["B"].most == SIZE


def test_recorded_memory_is_taken_again_when_the_host_knows_of_its_users() -> None:
    """The host waits after the third: what was freed until then is free."""
    order, most = StreamOrder(), []
    for number in range(6):
        order.take("A", number, "empty", SIZE)
        order.wait("B", order.clock("A"))
        order.use("B", number, "copy", writes=False)
        order.keep(number, "B")
        order.free(number)
        most.append(order.amounts["A"].most // SIZE)
        if number == 2:
            order.wait(HOST, order.clock("B"))
    assert most == [1, 2, 3, 3, 3, 3]


class RecordedOffload(HostOffload):
    """Offload whose inputs are freed at once, and kept in mind by the allocator."""

    def _hold(self, tensor: Tensor) -> None:
        assert isinstance(self.stream, LateStream)
        self.stream.record(tensor)


class RecordedLinks(StageLinks):
    """Links whose buffers are of the receiving stream, and kept in mind for the computing one."""

    def start_receive(
        self, direction: Direction, shape: Sequence[int], like: Tensor, stage: int, *, number: int = 0
    ) -> Pending:
        with self.stream.running():
            buffer = torch.empty(shape)
            pending = self.group.start_receive(buffer, stage)
        assert isinstance(self.stream, LateStream)
        LateStream(self.stream.world, self.stream.world.current).record(buffer)
        return pending


def offloaded(make: Callable[[SideStream, torch.device], HostOffload], layers: int) -> int:
    """The most inputs of a layer in memory, over a forward and a backward of so many layers."""
    with LateWorld(0).entered() as world:
        offload, puts = make(world.make_stream(CPU), CPU), []
        x = torch.zeros(SIZE // 4)
        for _ in range(layers):
            puts.append(offload.put(x))
            x = x + 1
        while puts:
            x = x + offload.take(*puts.pop())
        assert x[0] == sum(range(layers)) + layers
        return world.reserved // SIZE


def test_what_is_offloaded_is_held_as_planned() -> None:
    """Beside a layer's input and result; in backward one that is fetched, and the next."""
    assert {offloaded(HostOffload.of, layers) for layers in (6, 12, 24)} == {2 + COPIES_IN_FLIGHT}
    by_record = [offloaded(RecordedOffload.of, layers) for layers in (6, 12, 24)]
    assert by_record[1] - by_record[0] == 6 and by_record[2] - by_record[1] == 12


def received(rank: int, size: int, world: LateWorld, is_recorded: bool, messages: int) -> int:
    """The most messages in memory, of those that one rank sends and the other computes with."""
    link = Group(rank, size, dist.group.WORLD, "pp")
    make = RecordedLinks if is_recorded else StageLinks
    links, like = make(link, stream=world.make_stream(CPU)), torch.zeros(0)
    sent = torch.ones(SIZE // 4)
    before = world.reserved
    for _ in range(messages):
        if rank == 0:
            links.start_send("forward", sent, 1).wait()
        else:
            links.start_receive("forward", (SIZE // 4,), like, 0).wait().mul_(2)
    return (world.reserved - before) // SIZE


@pytest.mark.parametrize(("is_recorded", "grows"), [(False, 0), (True, 4)])
def test_what_is_received_is_held_as_planned(is_recorded: bool, grows: int) -> None:
    few, many = (run_late_ranks(received, 2, is_recorded, n)[1] for n in (4, 8))
    assert many - few == grows
    assert is_recorded or few == 1 + get_profile("mpctl").memory.spare_receives
