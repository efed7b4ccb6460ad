"""Systems: a software on a device in a cluster, and what is assumed of one that was never measured.

A profile's figures hold where its software was measured: on this device, in this cluster, and over
links of the same bandwidth (a copy of a preset with another bandwidth is another cluster). Runs
that vendors publish are tuned; those of everybody else are slower in ways that no datasheet shows:
clocks, containers, neighbours on the network, ranks that wait for the slowest. A system that was
never measured therefore takes a typical `factor` more seconds for everything, kernels, messages and
host alike, so that no layout gains on another by it. Own runs replace it (`cluster.step_factor`,
`mpctl calibrate`).

By hand, shift_apart 1.18: a step of 2 s takes 2.36 s.

Own runs also tell what layers of one shape on a rank take, such as micro batches of 2 at tp 4,
beside what the figures say of them: a kernel library picks another tile, a message another
protocol. Layouts of that shape share it, whatever their pipeline and replicas (`layer_factor`).
"""

from __future__ import annotations

from typing import NamedTuple

from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile

SPREAD = 0.12  # of log(measured / estimated); benchmarks/results/measurements.md, "Systems that no preset knows"
NETWORK = 1.35  # one standard deviation of messages' seconds between nodes that nobody measured


class System(NamedTuple):
    """Assumptions about a job's software, device and cluster together.

    is_measured: whether runs of this system were fitted. factor: ratio of all seconds to those from the
    presets' figures.
    """

    is_measured: bool = True
    factor: float = 1.0


MEASURED = System()


def find_system(cluster: ClusterSpec, profile: RuntimeProfile) -> System:
    """The system of a job on this cluster under this profile."""
    is_measured = not unknown_parts(cluster, profile)
    if cluster.step_factor is not None:
        return System(is_measured, cluster.step_factor)
    if not is_measured:
        return System(is_measured, profile.shift_apart)
    factors = profile.seen.step_factors
    return System(is_measured, factors.get(cluster.name or "", _factor_alone(cluster, profile) or 1.0))


def _factor_alone(cluster: ClusterSpec, profile: RuntimeProfile) -> float | None:
    """What runs on one such device found, for a cluster of one: none of its links is used."""
    if cluster.device is None or cluster.nodes != 1 or cluster.gpus_per_node != 1:
        return None
    return profile.seen.step_factors.get(cluster.device.name)


def layer_shape(job: JobSpec) -> str:
    """Describe a rank's layers in words: layouts with the same text have equal layers.

    `2 x 1024 x 2048, tp 4`: micro batches of 2 samples of 1,024 tokens, hidden 2048.
    """
    model, parallel, training = job.model, job.parallel, job.training
    if model is None:
        return ""
    sizes = training.micro_batch_size, model.seq_length, model.hidden
    parts = [" x ".join(map(str, sizes)), f"tp {parallel.tp}"]
    parts += [f"cp {parallel.cp}"] if parallel.cp > 1 else []
    parts += [f"ep {parallel.ep}"] if parallel.ep > 1 else []
    parts += [f"recompute {training.recompute}"] if training.recompute != "none" else []
    return ", ".join([*parts, training.chosen_dtype])


def layer_factor(job: JobSpec, profile: RuntimeProfile, system: System) -> float:
    """Seconds of a layer of this job over those of the presets' figures: what own runs of its shape
    found on its cluster, else 1."""
    found = profile.seen.layer_factors.get(job.cluster.name or "")
    if not found or not (system.is_measured or job.cluster.step_factor is not None):
        return 1.0
    return found.get(layer_shape(job), 1.0)


def own_spread(cluster: ClusterSpec, profile: RuntimeProfile) -> float | None:
    """The spread that `mpctl bench machine` measured on this cluster, for plans of mpctl's runtime;
    None without one."""
    return cluster.spread if profile.runs.launched else None


def unknown_parts(cluster: ClusterSpec, profile: RuntimeProfile) -> tuple[str, ...]:
    """Return the reasons why this system counts as never measured, in words; empty if it was measured."""
    seen, device = profile.seen, cluster.device
    if own_spread(cluster, profile) is not None:
        return ()
    name = cluster.name or "this cluster"
    reasons = []
    if device is not None and device.name not in seen.devices:
        reasons.append(f"{profile.name} was never measured on {device.name}")
    if _factor_alone(cluster, profile) is not None:
        return ()
    if cluster.name not in seen.clusters:
        reasons.append(f"{profile.name} was never measured on {name}")
    elif cluster.step_factor is None and cluster.bandwidths != seen.links.get(cluster.name, cluster.bandwidths):
        reasons.append(f"{name} was measured over links of another bandwidth")
    return tuple(reasons)
