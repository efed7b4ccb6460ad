"""What a host says of itself before ranks are started there.

Versions are read from the metadata of installed packages, which imports nothing.
"""

from __future__ import annotations

import platform
import socket
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mpctl import __version__
from mpctl.launch.node.machine import Machine, this_machine

ABSENT = "not installed"
NO_RUN_DIR = "does not see the run directory of the launcher"
"""What a node agent writes to stderr that cannot read the key there, after the name of its host."""
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class HostFacts:
    """A host as it can be compared with others. python, mpctl, torch: versions; executable: the
    interpreter that runs ranks; boot: the kernel's name for this start of the machine, with the
    host name; two hosts with the same one are one machine; processor: its name."""

    name: str
    machine: Machine
    python: str
    mpctl: str
    torch: str
    executable: str
    boot: str = ""
    processor: str = ""


def host_facts() -> HostFacts:
    """The facts of this host."""
    return HostFacts(
        name=socket.gethostname(),
        machine=this_machine(),
        python=platform.python_version(),
        mpctl=__version__,
        torch=_version_of("torch"),
        executable=sys.executable,
        boot=_boot(),
        processor=processor_name(),
    )


def _boot() -> str:
    """The host name and the kernel's boot id; empty where the kernel tells none."""
    boot = _text(BOOT)
    return f"{socket.gethostname()} {boot}" if boot else ""


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def processor_name() -> str:
    """The processor's name as Linux gives it, elsewhere the platform's."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
