"""Where the store of the ranks listens."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from mpctl.run.hosts.network import free_port
from mpctl.train.runtime.store import create_rendezvous, environment_store, open_store

PATIENCE = timedelta(seconds=20)


def refuses(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


def test_the_store_listens_at_the_master_address_alone() -> None:
    port = free_port()
    host = open_store("127.0.0.1", port, is_host=True, timeout=PATIENCE)
    peer = open_store("127.0.0.1", port, is_host=False, timeout=PATIENCE)
    peer.set("key", "value")
    assert host.get("key") == b"value"
    assert refuses("127.0.0.2", port)


def test_a_taken_port_is_named_as_torch_names_it() -> None:
    """torchrun ends with this error as its code, and the supervisor tries another port."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="EADDRINUSE"):
        open_store("127.0.0.1", taken.getsockname()[1], is_host=True, timeout=PATIENCE)


def test_ranks_of_a_world_without_torchrun_meet_at_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    first, second = environment_store(0, PATIENCE), environment_store(1, PATIENCE)
    second.set("here/1", "yes")
    assert first.get("here/1") == b"yes"
    assert refuses("127.0.0.2", port)


def test_the_rendezvous_of_torchrun_hosts_such_a_store() -> None:
    port = free_port()
    rendezvous = [
        create_rendezvous(RendezvousParameters("mpctl", f"127.0.0.1:{port}", "run", 2, 2, rank=str(rank)))
        for rank in range(2)
    ]
    places = [each.next_rendezvous() for each in rendezvous]
    assert [(place.rank, place.world_size) for place in places] == [(0, 2), (1, 2)]
    places[1].store.set("key", "value")
    assert places[0].store.get("key") == b"value"
    assert places[0].bootstrap_store_info.master_port == port
    assert refuses("127.0.0.2", port)
