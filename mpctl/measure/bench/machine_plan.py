"""The measurements of `mpctl bench machine`, planned before anything runs.

Kernels are those of the job's model, alone and on all cores (or GPUs) at once. Collectives are of
all of them: in groups of two and of half of them, where they are even and more than two. Training
runs are the built-in layouts of `mpctl bench verify` in which every rank has one of them.

2 cores: ranks (1, 2) of each kernel; tp 2; 11 layouts. 8 GPUs: ranks (1, 8); tp 2 x dp 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.measure.bench.cases import TIMED_SETTINGS, RunCase
from mpctl.measure.bench.collective_cases import CollectiveCases, CollectiveFlags, plan_collectives
from mpctl.measure.bench.kernel_cases import KernelCases, kernel_cases
from mpctl.measure.bench.layouts import layout_overrides
from mpctl.measure.bench.machine_preset import check_name
from mpctl.measure.bench.report import BenchEnvironment
from mpctl.measure.bench.verify_cases import built_in_set, verify_cases
from mpctl.plan.planning.plan import Plan
from mpctl.run.hosts.machine import Machine
from mpctl.spec.base import DType
from mpctl.spec.cluster import DeviceSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.names import full_name

PlanWith = Callable[[Mapping[str, object]], Plan]
KINDS = "all_reduce,all_gather,reduce_scatter,sendrecv"  # those that training sends
ROUNDS, QUICK_ROUNDS = 3, 1
FURTHER: tuple[DType, ...] = ("fp32", "bf16")  # dtypes of products, after the job's
HERE = {"launch.on": "local"}  # also inside an allocation: the figures are of this machine
MEMORY_SHARE = 0.9  # of the free memory that ranks may take together


@dataclass(frozen=True)
class MachineWork:
    """All measurements, checked.

    name: of the presets; plan_with: the job's legal plan with other settings; devices: number of
    CPU cores, or GPUs, of this machine; dtype: of the training runs; base: the device from which
    the fit begins; memory_bytes: limit of a rank; rounds: of each stage.
    """

    name: str
    job_name: str | None
    plan_with: PlanWith
    machine: Machine
    devices: int
    kernels: KernelCases
    dtype: DType
    base: DeviceSpec
    memory_bytes: int
    rounds: int
    quick: bool

    def device_name(self, environment: BenchEnvironment) -> str:
        if not self.base.is_cpu:
            return self.base.name
        return f"one core of {self.devices}, {environment['machine']}"

    @property
    def link_name(self) -> str | None:
        """The link's name in pictures; None where it is not known."""
        return "shared memory" if self.base.is_cpu else None

    def kernel_cases(self, cluster: Mapping[str, Any]) -> KernelCases:
        """The kernels, planned on this cluster."""
        job = self.plan_with({"cluster": cluster, **layout_overrides({})}).job
        return _kernels(job, self.machine, self.devices, self.base.kind, quick=self.quick)

    def collectives(self, seconds: float | None, cluster: Mapping[str, Any] | None = None) -> CollectiveCases | None:
        """The collectives, None where there is a single device. seconds: that rounds may take;
        cluster: that they are planned on, none by default. Raises InputError where they cannot be
        timed."""
        if self.devices < 2:
            return None
        is_even = self.devices > 2 and self.devices % 2 == 0
        sizes = {"tp": 2, "dp": self.devices // 2} if is_even else {"tp": self.devices}
        settings = {
            **({} if cluster is None else {"cluster": cluster}),
            "cluster.gpus_per_node": self.devices,
            "launch.device": self.base.kind,
            **HERE,
            **{f"parallel.{axis}": size for axis, size in sizes.items()},
        }
        flags = CollectiveFlags(
            minbytes="4K",
            maxbytes="16M",
            stepfactor=16.0 if self.quick else 4.0,
            kinds=KINDS,
            iterations=5 if self.quick else 20,
            rounds=self.rounds,
            seconds=seconds,
        )
        return plan_collectives(None, settings, flags, self.machine)

    def cases(self, cluster: Mapping[str, Any] | None = None) -> list[RunCase]:
        """The training runs: the built-in layouts that the model can have, with a device for each
        rank. cluster: that they are planned on, the job's when None."""
        own = {} if cluster is None else {"cluster": cluster}

        def plan_with(settings: Mapping[str, object]) -> Plan:
            return self.plan_with({**own, **settings, **TIMED_SETTINGS})

        wanted, _ = built_in_set(plan_with, {}, self.machine, quick=self.quick)
        return verify_cases(
            [each for each in wanted if isinstance(each.plan, InputError) or each.plan.job.world_size <= self.devices]
        )


def plan_machine(
    plan_with: PlanWith,
    machine: Machine,
    *,
    name: str,
    given: Iterable[str] = (),
    rounds: int | None = None,
    quick: bool = False,
) -> MachineWork:
    """The work for a job. given: names of the settings on the command line. Raises InputError with
    every issue of the name, the settings, the kernels and the collectives; those of the training
    runs are found by `plan_cases`."""
    issues = list(_layout_issues(given))
    attempt(issues, lambda: check_name(name))

    def plan_here(settings: Mapping[str, object]) -> Plan:
        return plan_with({**settings, **HERE})

    job = plan_here(layout_overrides({})).job
    is_cpu = job.launched_kind != "cuda"
    devices = max(1, machine.cores if is_cpu else machine.gpus)
    kind = "cpu" if is_cpu else "cuda"
    kernels = attempt(issues, lambda: _kernels(job, machine, devices, kind, quick=quick))
    if issues or kernels is None or kernels.device is None:
        raise InputError(issues)
    base = kernels.device
    memory = int(MEMORY_SHARE * machine.memory_bytes / devices) if is_cpu else base.memory_bytes
    work = MachineWork(
        name,
        job.name or (job.model.name if job.model else None),
        plan_here,
        machine,
        devices,
        kernels,
        job.training.chosen_dtype,
        base,
        memory,
        rounds or (QUICK_ROUNDS if quick else ROUNDS),
        quick,
    )
    work.collectives(None)  # refused before anything runs
    return work


def _layout_issues(given: Iterable[str]) -> Iterator[Issue]:
    own = layout_overrides({})
    for name in map(full_name, given):
        if name in own or name == "parallel":
            yield Issue("layout-setting", name, "each layout that is trained has its own", "leave it out")


def _kernels(job: JobSpec, machine: Machine, devices: int, kind: str, *, quick: bool) -> KernelCases:
    """The kernels in the job's dtype, and of further ones where there is time the products, whose
    peak a device states. Raises InputError where the job's cluster does not describe the devices:
    nothing could be compared with it."""
    dtype = job.training.chosen_dtype
    dtypes = dict.fromkeys([dtype] if quick else [dtype, *FURTHER])
    ranks = sorted({1, devices})
    cases = kernel_cases(job, machine, ranks=ranks, dtypes=list(dtypes), device=kind)
    if cases.device is None:
        raise InputError.of(
            "machine-device",
            "--cluster",
            f"the job's cluster has no {kind} devices as this machine has",
            "name the preset of a cluster with the same devices, whose data sheet the fit begins from",
        )
    return cases.only(lambda case: case["dtype"] == dtype or case["kernel"] == "matmul")


def default_name(host: str) -> str:
    """The name of this host's presets: the part of its name that is allowed in a file name.

    >>> default_name("node-17.example.org"), default_name("...")
    ('node-17', 'my-machine')
    """
    return re.sub(r"[^A-Za-z0-9_-]", "-", host.split(".")[0]).strip("-_")[:63] or "my-machine"
