"""Helpers for the probes of a host: a thread with a time limit for each, tools such as nvidia-smi, and readers of their
reports.

A probe may hang in the kernel (a network file system or a driver that does not answer); its thread
is then left behind, and the process exits without it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mpctl.core.errors import MpctlError
from mpctl.run.hosts.modules import run_module

TOOL_SECONDS = 15.0
UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
"""nvidia-smi's name of the ECC errors since the driver was loaded that were not corrected."""
Result = TypeVar("Result")
Size = Annotated[int, Field(ge=0)]


@dataclass
class RunningProbe(Generic[Result]):
    """A probe in a separate thread. result: None until it has ended, and where it failed."""

    name: str
    probe: Callable[[], Result]
    limit: float
    result: Result | None = None
    error: str | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)

    def start(self) -> RunningProbe[Result]:
        """Start the probe; the thread does not keep the process alive."""
        self.thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self.thread.start()
        return self

    def wait(self) -> None:
        """Wait until the probe has ended or its time is over."""
        self.thread.join(max(0.0, self.began + self.limit - time.monotonic()))
        if self.thread.is_alive():
            self.error = f"no answer within {self.limit:g} s"

    def _run(self) -> None:
        try:
            self.result = self.probe()
        except Exception as error:  # any failure of a probe is a result about the host
            self.error = str(error) or type(error).__name__
        self.seconds = time.monotonic() - self.began


def write_probe(folder: Path, count: int) -> None:
    """Write `count` bytes to the disk of a folder, in a file without a name. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as probe:
        probe.write(bytes(count))
        probe.flush()
        os.fsync(probe.fileno())


def run_tool(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a tool; one that times out gets exit code 1."""
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=TOOL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The first line of what a tool said that failed."""
    words = (done.stderr or done.stdout).strip().splitlines()
    return words[0] if words else f"exit code {done.returncode}"


class ReportModel(BaseModel):
    """Base of what hosts are asked and report: types are strict; keys that a newer version adds are
    ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())


Report = TypeVar("Report", bound=ReportModel)


class NoAnswer(MpctlError):
    """A host gave no answer, or one that cannot be read."""


@dataclass(frozen=True)
class HostAnswer:
    """The output of a module on one host. code: its exit code, None after a time-out or if the host
    was lost; sent, received: by the launcher's clock (seconds since 1970)."""

    code: int | None
    output: str
    errors: str
    sent: float
    received: float

    @classmethod
    def of(cls, answer: object, sent: float) -> HostAnswer:
        """Return the answer of a host to `run_module`, or one made from the exception."""
        if not isinstance(answer, dict) or not {"code", "output", "errors"} <= answer.keys():
            is_error = isinstance(answer, Exception)
            return cls(None, "", str(answer) if is_error else "its answer has another form", sent, time.time())
        return cls(answer["code"], str(answer["output"]), str(answer["errors"]), sent, time.time())

    def read(self, model: type[Report]) -> Report:
        """Parse the answer as `model`. Raises NoAnswer with the reason if there is none."""
        lines = self.output.splitlines()
        if self.code is None:
            raise NoAnswer(self.errors or "no answer in time")
        if self.code:
            words = [line.strip() for line in self.errors.splitlines() if line.strip()]
            if self.code < 0:
                raise NoAnswer(f"the process was ended by signal {-self.code}")
            raise NoAnswer(words[-1] if words else f"exit code {self.code}")
        try:
            return model.model_validate_json(lines[-1] if lines else "")
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "no JSON"
            raise NoAnswer(f"its answer has another form ({where}): another mpctl?") from None


def run_here(module: str, request: str, seconds: float) -> HostAnswer:
    """Run a module on this host."""
    sent = time.time()
    return HostAnswer.of(run_module(module, request, seconds), sent)


GPU_FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "mig.mode.current", UNCORRECTED)
MIB = 1 << 20


class Gpu(ReportModel):
    """A GPU as nvidia-smi, or the driver amdgpu, describes it."""

    index: int
    name: str
    memory_total: Size
    memory_used: Size
    driver: str
    mig: bool
    uncorrected_errors: int | None = Field(description="ECC errors since the driver was loaded")
    processes: int = Field(description="processes that compute on it now")


def nvidia_gpus(tool: str) -> list[Gpu]:
    """The GPUs that nvidia-smi lists. Raises OSError with what it said where it fails."""
    query = run_tool(tool, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    if query.returncode:
        raise OSError(complaint(query))
    applications = run_tool(tool, "--query-compute-apps=gpu_uuid", "--format=csv,noheader")
    return parse_gpus(query.stdout, applications.stdout)


def parse_gpus(listing: str, applications: str) -> list[Gpu]:
    """The GPUs of a listing with GPU_FIELDS as columns; applications: a line with the GPU's uuid
    for each process that computes. Lines of another form are left out."""
    users = [line.strip() for line in applications.splitlines()]
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines()]
    return [
        Gpu(
            index=int(index),
            name=name,
            memory_total=(_integer(total) or 0) * MIB,
            memory_used=(_integer(used) or 0) * MIB,
            driver=driver,
            mig=mig == "Enabled",
            uncorrected_errors=_integer(errors),
            processes=users.count(uuid),
        )
        for index, uuid, name, total, used, driver, mig, errors in (
            row for row in rows if len(row) == len(GPU_FIELDS) and row[0].isdecimal()
        )
    ]


def _integer(text: str) -> int | None:
    return int(text) if text.isdecimal() else None
