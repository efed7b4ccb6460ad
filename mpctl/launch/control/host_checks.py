"""What would keep hosts from running a plan together, from what each says of itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from mpctl.errors import Issue
from mpctl.launch.node.facts import ABSENT, NO_RUN_DIR, HostFacts
from mpctl.launch.node.machine import Machine

SHOWN = 4
VERSIONS = ("mpctl", "torch", "python")


def unshared_issue(host: str, said: str) -> Issue | None:
    """The issue of a host whose agent said that it cannot read the launcher's key; None when it
    said nothing of that. said: what it wrote to stderr."""
    why = next(
        (line.partition(NO_RUN_DIR)[2] for line in said.splitlines() if NO_RUN_DIR in line), None
    )
    if why is None:
        return None
    hint = "use a --run-dir on a file system that all hosts mount at the same path, and that this "
    return Issue("run-dir-not-shared", host, NO_RUN_DIR + why, f"{hint}user may read there")


def doubled_hosts(hosts: Sequence[HostFacts]) -> list[Issue]:
    """Hosts of different names that are one machine, so that their ranks would share its GPUs."""
    by_boot: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        by_boot[host.boot].append(host.name)
    return [
        Issue(
            "host-doubled",
            shown(names),
            f"are names of one machine ({boot.partition(' ')[0]}), whose GPUs would be used by the "
            f"ranks of {len(names)} nodes",
            "name each machine once, with all its GPUs",
        )
        for boot, names in by_boot.items()
        if boot and len(names) > 1
    ]


def differing_hosts(hosts: Sequence[HostFacts]) -> list[Issue]:
    """Versions that differ between hosts; torch that is absent."""
    return [issue for name in VERSIONS for issue in _differing(name, hosts)]


def _differing(name: str, hosts: Sequence[HostFacts]) -> Iterator[Issue]:
    by_version: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        version = getattr(host, name)
        by_version[_minor(version) if name == "python" else version].append(host.name)
    if ABSENT in by_version:
        yield Issue(
            f"host-{name}",
            shown(by_version[ABSENT]),
            f"{name} is not installed for the Python that runs there ({hosts[0].executable})",
            "install it there, or name the Python that has it",
        )
    elif len(by_version) > 1:
        words = [f"{version} on {shown(names)}" for version, names in by_version.items()]
        message = f"hosts have different versions of {name}: {', '.join(words)}"
        hint = "install the same version on every host, or use one environment that they share"
        yield Issue(f"host-{name}", shown([host.name for host in hosts]), message, hint)


def common_machine(hosts: Sequence[HostFacts]) -> Machine:
    """The least that every one of these hosts has."""
    machines = [host.machine for host in hosts]
    return Machine(
        cores=min(machine.cores for machine in machines),
        gpus=min(machine.gpus for machine in machines),
        memory_bytes=min(machine.memory_bytes for machine in machines),
        hosts=max(machine.hosts for machine in machines),
    )


def shown(names: Sequence[str]) -> str:
    """Names of hosts; of many the first ones and how many more."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _minor(version: str) -> str:
    """3.11.4 -> 3.11: patch releases work together."""
    return ".".join(version.split(".")[:2])
