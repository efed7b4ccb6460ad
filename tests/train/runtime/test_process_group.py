"""How ranks meet and leave where rank 0 hosts the store, as in a world with a process a rank."""

from __future__ import annotations

import os
import time

from mpctl.run.hosts.network import free_port
from mpctl.spec.load import load_job
from mpctl.train.runtime.mesh import checkpoint_store
from mpctl.train.runtime.process_group import init_process_group, leave_process_group
from tests.ranks import CONTEXT

SIZE = 2


def _rank(rank: int, port: int, asks_after: float, waits: float) -> None:
    """A rank that asks the store once more, so many seconds after the other one has left."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    job = load_job(None, {"launch.device": "cpu"})
    init_process_group(job, rank=rank, local_rank=rank, world_size=SIZE)
    store = checkpoint_store(rank, SIZE)
    if rank:
        time.sleep(asks_after)
        store.check(["1/published"])
    leave_process_group(rank, SIZE, waits)


def _exit_codes(asks_after: float, waits: float) -> list[int | None]:
    port = free_port()
    ranks = [CONTEXT.Process(target=_rank, args=(rank, port, asks_after, waits)) for rank in range(SIZE)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


def test_a_rank_may_ask_the_store_until_it_leaves_itself() -> None:
    """The last save of a training: rank 0 publishes and is done, another rank looks later."""
    assert _exit_codes(asks_after=1.5, waits=60.0) == [0, 0]


def test_rank_0_does_not_wait_for_ever_for_one_that_has_died() -> None:
    assert _exit_codes(asks_after=1.5, waits=0.2) == [0, 1]
