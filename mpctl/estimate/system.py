"""Systems: a software on a device in a cluster, and what is assumed of one that was never measured.

A profile's figures hold where its software was measured: on this device, in this cluster, and over
links of the same bandwidth (a copy of a preset with another bandwidth is another cluster). Runs
that vendors publish are tuned; those of everybody else are slower in ways that no datasheet shows:
clocks, containers, neighbours on the network, ranks that wait for the slowest. A system that was
never measured therefore takes a typical `factor` more seconds for everything, kernels, messages and
host alike, so that no layout gains on another by it. Own runs replace it (`cluster.step_factor`,
`mpctl calibrate`).

By hand, shift_apart 1.18: a step of 2 s takes 2.36 s.
"""

from __future__ import annotations

from typing import NamedTuple

from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.runtime import RuntimeProfile

SPREAD = 0.12  # of log(measured / estimated); docs/measurements.md, "Systems that no preset knows"
NETWORK = 1.35  # one standard deviation of messages' seconds between nodes that nobody measured


class System(NamedTuple):
    """What is assumed of a job's software, device and cluster together.

    is_measured: whether runs of this very system were fitted. factor: seconds of everything over
    those of the presets' figures.
    """

    is_measured: bool = True
    factor: float = 1.0


MEASURED = System()


def find_system(cluster: ClusterSpec, profile: RuntimeProfile) -> System:
    """The system of a job on this cluster under this profile."""
    is_measured = not unknown_parts(cluster, profile)
    if cluster.step_factor is not None:
        return System(is_measured, cluster.step_factor)
    found = profile.seen.step_factors.get(cluster.name or "", 1.0)
    return System(is_measured, found if is_measured else profile.shift_apart)


def own_spread(cluster: ClusterSpec, profile: RuntimeProfile) -> float | None:
    """The spread that `mpctl bench machine` measured on this cluster, for plans of mpctl's runtime;
    None without one."""
    return cluster.spread if profile.runs.launched else None


def unknown_parts(cluster: ClusterSpec, profile: RuntimeProfile) -> tuple[str, ...]:
    """In words, why this system counts as never measured; empty where it was."""
    seen, device = profile.seen, cluster.device
    if own_spread(cluster, profile) is not None:
        return ()
    name = cluster.name or "this cluster"
    reasons = []
    if device is not None and device.name not in seen.devices:
        reasons.append(f"{profile.name} was never measured on {device.name}")
    if cluster.name not in seen.clusters:
        reasons.append(f"{profile.name} was never measured on {name}")
    elif cluster.step_factor is None and cluster.bandwidths != seen.links.get(
        cluster.name, cluster.bandwidths
    ):
        reasons.append(f"{name} was measured over links of another bandwidth")
    return tuple(reasons)
