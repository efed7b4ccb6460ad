"""How far a measured step lies from its estimate: nine of ten within a factor of it.

The factor is exp(1.645 s), s being a spread of the profile, made of the errors on runs that were
left out of its fit so that nine of ten lie within (calibrate/spread.py): `spread` where the cluster
is one of those measured, else `spread_apart`. Each further way in which a job lies outside the runs
of the fit multiplies it by the profile's `widening`, and is told. A cluster with a `spread` of its
own (`mpctl bench machine`) was measured by runs of mpctl: its device and as many ranks as it has
devices are then known.

By hand, a spread of 0.05: factor 1.09; with a widening of 1.5, at a dtype that the profile was
never measured at: 1.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp

from mpctl.estimate.kernels import Speed
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.table import OperatorTable
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile
from mpctl.units import count_text, plural

QUANTILE = 1.645  # of a normal: a twentieth lies above
BEYOND = 1.5  # times the largest seen that still count as seen


@dataclass(frozen=True, slots=True)
class Band:
    """How far measured steps may lie from an estimate.

    factor: nine of ten measured steps lie between estimate / factor and estimate x factor.
    extrapolates: in words, each way in which the job lies outside the measured runs.
    """

    factor: float
    extrapolates: tuple[str, ...]


def find_band(layout: JobLayout, profile: RuntimeProfile, speed: Speed) -> Band:
    """The band of a step's time, and each way in which the job lies outside the measured runs."""
    job = layout.job
    spread = _own_spread(job, profile)
    is_known = spread is not None or job.cluster.name in profile.seen.clusters
    if spread is None:
        spread = profile.spread if is_known else profile.spread_apart
    told = (*speed.notes, *beyond(job, layout.table, profile))
    here = () if is_known else (_where(job, profile),)
    return Band(exp(QUANTILE * spread * profile.widening ** len(told)), (*here, *told))


def _own_spread(job: JobSpec, profile: RuntimeProfile) -> float | None:
    """The spread of the cluster's own runs, where mpctl's are planned; None without."""
    return job.cluster.spread if profile.runs.launched else None


def _where(job: JobSpec, profile: RuntimeProfile) -> str:
    return f"{profile.name} was never measured on {job.cluster.name or 'this cluster'}"


def beyond(job: JobSpec, table: OperatorTable, profile: RuntimeProfile) -> Iterator[str]:
    """In words, each respect beside the cluster in which a job lies outside the measured runs.

    table: the operators of its model.
    """
    device, seen, dtype = job.cluster.device, profile.seen, job.training.dtype
    is_measured = _own_spread(job, profile) is not None
    if device is not None and device.name not in seen.devices and not is_measured:
        yield f"{profile.name} was never measured on {device.name}"
    if dtype not in seen.dtypes:
        yield f"{profile.name} was never measured at {dtype}"
    if (mode := job.parallel.tensor_mode) != "1d":
        yield f"tensor_mode {mode}: no run of it was measured"
    gpus = max(seen.gpus, _devices(job.cluster)) if is_measured else seen.gpus
    if job.world_size > BEYOND * gpus:
        yield f"{plural(job.world_size, 'rank')}, and the largest run measured has {gpus:,}"
    if table.numel > BEYOND * seen.parameters:
        yield (f"{count_text(table.numel)} parameters, and the largest model measured has "
               f"{count_text(seen.parameters)}")  # fmt: skip


def _devices(cluster: ClusterSpec) -> int:
    return cluster.nodes * (cluster.cores or cluster.gpus_per_node or 1)
