"""Running one module of mpctl on several hosts at once, and what each answered.

A request is one JSON document on stdin (a token in it does not show in a list of processes), the
answer one on stdout. `LocalHosts` does it on this host; a launcher's node agents do it on theirs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from pydantic import ValidationError

from mpctl.doctor.documents import ReportModel
from mpctl.errors import MpctlError
from mpctl.launch.node.processes import run_module

Report = TypeVar("Report", bound=ReportModel)


class NoAnswer(MpctlError):
    """A host gave no answer, or one that cannot be read."""


@dataclass(frozen=True)
class HostAnswer:
    """What a module printed on one host. code: its exit code, None where its time ran out or the
    host was lost; sent, received: when, by the launcher's clock (seconds since 1970)."""

    code: int | None
    output: str
    errors: str
    sent: float
    received: float

    def read(self, model: type[Report]) -> Report:
        """The answer as `model`. Raises NoAnswer with the reason where there is none."""
        lines = self.output.splitlines()
        if self.code is None:
            raise NoAnswer(self.errors or "no answer in time")
        if self.code or not lines:
            words = [line.strip() for line in self.errors.splitlines() if line.strip()]
            raise NoAnswer(words[-1] if words else f"exit code {self.code}")
        try:
            return model.model_validate_json(lines[-1])
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"]))
            raise NoAnswer(f"its answer has another form ({where}): another mpctl?") from None


class Hosts(Protocol):
    """The hosts that are looked at, in order."""

    @property
    def names(self) -> Sequence[str]:
        """How the launcher calls each host."""
        ...

    @property
    def addresses(self) -> Sequence[str]:
        """Where the other hosts reach each host."""
        ...

    @property
    def connect_seconds(self) -> Sequence[float]:
        """How long each host took to be there; empty where nothing had to be connected."""
        ...

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run `python -m module` on every host at the same time, each with its own request; an
        answer a host, in order."""
        ...


@dataclass(frozen=True)
class LocalHosts:
    """This host, as often as it has names: several are several processes that take it for
    theirs."""

    names: Sequence[str]

    @property
    def addresses(self) -> Sequence[str]:
        """The loopback address, for each."""
        return ["127.0.0.1"] * len(self.names)

    @property
    def connect_seconds(self) -> Sequence[float]:
        """Nothing has to be connected."""
        return ()

    def run(self, module: str, requests: Sequence[ReportModel], seconds: float) -> list[HostAnswer]:
        """Run a process a request, all at the same time. Ctrl-C does not wait for them: they end
        with this process."""
        return [answer.result() for answer in [_started(module, r, seconds) for r in requests]]


def _started(module: str, request: ReportModel, seconds: float) -> Future[HostAnswer]:
    """The answer to come, of a module that runs in a thread of its own."""
    answer: Future[HostAnswer] = Future()

    def work() -> None:
        try:
            answer.set_result(run_here(module, request.model_dump_json(), seconds))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer


def run_here(module: str, request: str, seconds: float) -> HostAnswer:
    """Run a module on this host."""
    sent = time.time()
    answer = run_module(module, request, seconds)
    return HostAnswer(answer["code"], answer["output"], answer["errors"], sent, time.time())
