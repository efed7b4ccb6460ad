"""What the processes that measure read from stdin, one JSON document each."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpctl.doctor.documents import ReportModel


class PairAddress(ReportModel):
    """Where a host waits for the others during the test of pairs."""

    host: str
    address: str
    port: int


class PairRequest(ReportModel):
    """What `python -m mpctl.doctor.pairs` reads from stdin.

    me: this host's place in `hosts`. partners: the hosts to measure with, in order of rounds; of
    two hosts the one with the smaller place connects. token: a secret of this test, which both must
    know. seconds: that one pair may take.
    """

    me: int
    hosts: list[PairAddress]
    partners: list[int]
    token: str
    seconds: float = 1.5
    patience: float = Field(10.0, description="seconds that a host may start later than another")


class CollectiveRequest(ReportModel):
    """What `python -m mpctl.doctor.collectives` reads from stdin: which ranks to start here."""

    first_rank: int
    ranks: int
    world_size: int
    address: str
    port: int
    device: Literal["cpu", "cuda"]
    interface: str | None = Field(None, description="GLOO_ and NCCL_SOCKET_IFNAME of the ranks")
    seconds: float = 60.0


class ProbeRequest(ReportModel):
    """What `python -m mpctl.doctor.probe` reads from stdin.

    run_dir: the run directory to measure, None for none. towards: the address of the first host.
    nonce: what the launcher has written into the file `nonce_file` of the run directory, to see
    whether the host shares it. torch_seconds: time limit of the process that imports torch, 0 to
    leave torch out; probe_seconds: of each other probe. loopback: whether two processes of the host
    measure each other.
    """

    run_dir: str | None = None
    towards: str | None = None
    nonce_file: str | None = None
    nonce: str | None = None
    torch_seconds: float = 120.0
    loopback: bool = True
    probe_seconds: float = 20.0
