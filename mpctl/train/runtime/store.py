"""The store in which ranks meet: torch's TCPStore, listening at one address instead of all of them.

torch's TCPStore binds to every interface and has no authentication: anyone who can reach it can
read and change its keys. It accepts a listener that is already bound, so one is opened at the
master address alone: the loopback for the ranks of one host.

torchrun creates its store in its static rendezvous. `BoundRendezvous` is that rendezvous with such
a listener; train/runtime/torchrun.py registers it as `--rdzv-backend=mpctl`.
"""

from __future__ import annotations

import errno
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKLOG = 4096


def open_store(address: str, port: int, *, is_host: bool, timeout: timedelta) -> TCPStore:
    """The store at an address and a port; the process that hosts it listens there alone. Raises
    OSError when the port is taken, torch's DistStoreError when the host does not answer in time."""
    listener = _listen(address, port) if is_host else None
    return TCPStore(
        address,
        port,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(address: str, port: int) -> socket.socket | None:
    """A listener at an address of this host; None if the address is not one of this host's, for
    example behind address translation (NAT): torch then listens on every interface."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    try:
        return socket.create_server(place[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return None
        name = errno.errorcode.get(error.errno or 0, "")
        raise OSError(error.errno, f"{name}: {error.strerror}") from None


def environment_store(rank: int, timeout: timedelta) -> Store:
    """The store at MASTER_ADDR and MASTER_PORT, where the ranks of this process's world meet: under
    torchrun, torchrun's store, otherwise one that rank 0 hosts. Raises as `open_store`."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_store(address, port, is_host=rank == 0 and not is_hosted, timeout=timeout)
    return PrefixStore("ranks", store)


class BoundRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous with `open_store`."""

    def get_backend(self) -> str:
        """The name of this rendezvous in torchrun's flags."""
        return "mpctl"

    def next_rendezvous(self) -> RendezvousInfo:
        """The store and the rank of this node, as in StaticTCPRendezvous."""
        store = open_store(self.master_addr, self.master_port, is_host=self.rank == 0, timeout=self.timeout)
        place = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, store), self.rank, self.world_size, place)


def create_rendezvous(params: RendezvousParameters) -> BoundRendezvous:
    """The rendezvous of torchrun's flags."""
    address, port = parse_rendezvous_endpoint(params.endpoint, -1)
    rank, timeout = int(params.config["rank"]), int(params.config.get("timeout", 600))
    return BoundRendezvous(address, port, rank, params.max_nodes, params.run_id, timeout)
