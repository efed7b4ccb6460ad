"""The default process group, in which all ranks of a job meet.

Ranks start seconds apart (imports, a loaded machine), while a collective of a running job may only
wait `launch.timeout_seconds`, and RANK_MARGIN_SECONDS more (spec/launch.py). So all ranks meet at
the key-value store first, with a separate timeout.

They also leave through the store. If torchrun does not host it, rank 0 does (store.py), and a rank
that saves may query it up to half a second after rank 0 has published the checkpoint
(train/checkpoint/writer.py): if rank 0 had exited by then, a finished training would fail.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from mpctl.spec.job import JobSpec
from mpctl.train.runtime.device import select_device
from mpctl.train.runtime.store import environment_store
from mpctl.train.transport.group import Group

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


LEAVE_SECONDS = 300.0
"""Time that rank 0 waits for the other ranks before it leaves without them: as long as they wait for
a save without progress."""


def init_process_group(job: JobSpec, *, rank: int, local_rank: int, world_size: int) -> None:
    """Create torch's default process group at the address in MASTER_ADDR and MASTER_PORT; a world
    of one rank needs none. Raises torch's DistStoreError if a rank does not join in time."""
    if world_size == 1:
        return
    device = select_device(job.launch.device, local_rank)
    # Twice, since the supervisor, which knows who is missing, ends a start that hangs before that.
    patience = timedelta(seconds=2 * job.launch.start_seconds)
    store = environment_store(rank, patience)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{peer}" for peer in range(world_size)], patience)
    dist.init_process_group(
        BACKENDS[device.type],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=job.launch.rank_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def everyone() -> Group:
    """All ranks of torch's default process group, for messages before the mesh exists, which are
    neither counted nor logged; without that group, this rank alone."""
    if not dist.is_initialized():
        return Group()
    return Group(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, "world")


def leave_process_group(rank: int, world_size: int, seconds: float = LEAVE_SECONDS) -> None:
    """End torch's default process group; rank 0 returns when all ranks have left, or after
    `seconds`. The group and its store must not be used afterwards."""
    if world_size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    with suppress(dist.DistError):  # a rank died and never leaves: the launcher knows
        store.set(f"gone/{rank}", "")
        if rank == 0:
            peers = [f"gone/{peer}" for peer in range(world_size)]
            store.wait(peers, timedelta(seconds=seconds))
