"""The cases of `mpctl bench kernels`: the kernels of a job's layout, and the ranks that run them.

Shapes are those of one rank of the job's layout (kernel_list.py), while the ranks that run them are
independent: a layout of 1024 GPUs can be measured on a laptop's cores. Operands are checked against
the free memory before anything starts.

On 2 cores: ranks (1, 2), and each of 31 kernels is timed on one rank and on both together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text, plural, seconds_text
from mpctl.measure.bench.kernel_list import KernelLister, PlannedKernel
from mpctl.measure.bench.probe import require_probes
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.system import MEASURED
from mpctl.plan.estimate.time import StepTimeModel, step_time_model
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.records.rundir.requests import KernelCase, dense_model
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.task import TaskOptions, task_plan
from mpctl.spec.base import DType
from mpctl.spec.cluster import DeviceSpec
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.load import load_job
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.runtime import launched_runtime

DEFAULT_JOB = {"model": "demo-gpt", "training.micro_batch_size": 8}
THIS_MACHINE = {**DEFAULT_JOB, "cluster": "this-machine"}
DTYPE = "training.dtype"  # the setting behind --dtype, which takes several here
DTYPES: dict[str, DType] = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp64": "fp64"}
STREAM_BYTES = 2**28  # of an array, several times a last-level cache
LONG_SECONDS = 60.0
MEMORY_SHARE = 0.5  # of the free memory that operands may take


@dataclass(frozen=True)
class KernelCases:
    """The kernels to time. job: the job of the command; device: the ranks' device as described by a
    cluster, None if unknown, which leaves out shares of a peak and estimates; plan: the launch of
    the ranks; ranks: numbers of ranks that run a kernel together, ascending; cores: of this machine
    (GPUs where those run the ranks); left_out: full layers whose weights leave too little
    memory."""

    job: JobSpec
    device: DeviceSpec | None
    plan: Plan
    kernels: tuple[PlannedKernel, ...]
    ranks: tuple[int, ...]
    cores: int
    left_out: tuple[PlannedKernel, ...] = ()

    def only(self, wanted: Callable[[KernelCase], bool]) -> KernelCases:
        """The same without kernels that are not wanted."""
        return replace(self, kernels=tuple(k for k in self.kernels if wanted(k.case)))

    @property
    def timings(self) -> int:
        """Timings of one round."""
        return len(self.kernels) * len(self.ranks)

    def units(self, machine: Machine) -> int:
        """The number of devices for one rank each: cores of a machine, or GPUs where those run the
        ranks."""
        is_cuda = _is_cuda(machine, self.plan.job.launch.device)
        return machine.gpus if is_cuda else machine.cores

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings before the timing: figures of another device, or of none, and kernels that take
        minutes by the plan."""
        warnings, named = [], self.job.cluster.device
        if self.device is None:
            why = f"{named.name} is not what runs the ranks" if named else "no device is named"
            warnings.append(f"{why} (--cluster names one): no shares of a peak and no estimates")
        warnings += [
            f"{kernel.name} is left out: {bytes_text(kernel.bytes)} on each rank leave too little "
            "of this machine's memory"
            for kernel in self.left_out
        ]
        least = len(self.ranks) * sum(kernel.predicted_seconds or 0.0 for kernel in self.kernels)
        if least > LONG_SECONDS:
            warnings.append(
                f"one run of every kernel takes {seconds_text(least)} by the plan; with a "
                "smaller --micro-batch-size or a larger --tp it takes less"
            )
        return tuple(warnings)

    @property
    def threads(self) -> int:
        return self.plan.job.launch.threads_per_rank or 1


def parse_ranks(text: str | None, machine: Machine, *, device: str) -> tuple[int, ...]:
    """Numbers of ranks such as `1,2`, ascending; by default 1 and one for each core, or GPU. Raises
    InputError for anything but a list of numbers from 1 on."""
    if text is None:
        most = machine.gpus if _is_cuda(machine, device) else machine.cores
        return tuple(sorted({1, max(1, most)}))
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise InputError.of(
            "bad-ranks",
            "--ranks",
            f"{text!r} is no list of numbers of ranks, each at least 1",
            "give them as in --ranks 1,2",
        )
    return tuple(sorted({int(word) for word in words}))


def parse_dtypes(text: str) -> tuple[DType, ...]:
    """Data types such as `fp32,bf16`. Raises InputError for one that torch has no kernels for."""
    dtypes = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    if wrong := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise InputError.of(
            "kernel-dtype",
            "--dtype",
            f"{wrong[0]!r} is no data type that kernels are timed in",
            f"use some of {','.join(DTYPES)}",
        )
    return tuple(DTYPES[dtype] for dtype in dtypes)


def kernel_cases(
    job: JobSpec, machine: Machine, *, ranks: Sequence[int], dtypes: Sequence[DType] = (), device: str | None = None
) -> KernelCases:
    """The kernels of a job's layout, to be timed on this machine.

    dtypes: to be timed in, the job's by default. device: auto, cpu or cuda, by default the job's. A
    job without a device is estimated on the preset this-machine where a CPU runs it. Raises
    InputError where the job has no model or no legal layout, and where ranks or operands do not fit
    this machine.
    """
    if job.model is None:
        raise InputError.of(
            "no-model", "model", "kernels are a model's", "leave JOB out, or name a model: --model demo-gpt"
        )
    where, most = device or job.launch.device, max(ranks)
    is_cuda, planned = _is_cuda(machine, where), _with_device(job)
    spec = planned.cluster.device
    known = spec if spec is not None and spec.is_cpu != is_cuda else None
    array = _stream_bytes(machine, most, is_cuda=is_cuda)
    chosen = tuple(dtypes) or parse_dtypes(job.training.chosen_dtype)
    kernels = [
        kernel if known else replace(kernel, predicted_seconds=None)
        for dtype in chosen
        for kernel in _list(planned, dtype, array)
    ]
    free = inf if is_cuda else MEMORY_SHARE * machine.memory_bytes
    large = [kernel for kernel in kernels if most * kernel.bytes > free]
    if refused := [kernel for kernel in large if not kernel.is_layer]:
        raise InputError([_too_large(refused, most, free)])
    sites = {kernel.site for kernel in large}
    timed = tuple(k for k in kernels if not (k.is_layer and k.site in sites))
    plan = _ranks_plan(job, TaskOptions(sizes={"dp": most}, device=where, dtype=chosen[0]))
    cores = machine.gpus if is_cuda else machine.cores
    return KernelCases(job, known, plan, timed, tuple(ranks), cores, tuple(large))


def _ranks_plan(job: JobSpec, options: TaskOptions) -> Plan:
    """The launch of the ranks: each runs the model separately, with one thread unless the job sets
    a number. Raises InputError where they cannot be started."""
    own = {"threads_per_rank": job.launch.threads_per_rank or 1}
    job = job.model_copy(update={"launch": job.launch.model_copy(update=own)})
    plan = task_plan(job, options)
    plan.require_legal()
    require_probes([plan])
    return plan


def _is_cuda(machine: Machine, device: str) -> bool:
    return device == "cuda" or (device == "auto" and machine.gpus > 0)


def _with_device(job: JobSpec) -> JobSpec:
    """The job with a legal layout, on the preset this-machine where it names no device."""
    make_plan(job).require_legal()
    if job.cluster.device is not None:
        return job
    return job.model_copy(update={"cluster": load_job(None, THIS_MACHINE).cluster})


def _list(job: JobSpec, dtype: DType, array: int) -> list[PlannedKernel]:
    """The kernels of mpctl's runtime in one dtype; without estimates where the device has no rate
    at it."""
    device = job.cluster.device
    assert device is not None, "_with_device has seen to it"
    if dtype not in device.peak_flops:
        peaks = {**device.peak_flops, dtype: max(device.peak_flops.values())}  # any: to list shapes
        cluster = job.cluster.model_copy(update={"device": device.model_copy(update={"peak_flops": peaks})})
        known = _list(job.model_copy(update={"cluster": cluster}), dtype, array)
        return [replace(kernel, predicted_seconds=None) for kernel in known]
    assert job.model is not None, "kernel_cases has seen to it"
    training = job.training.model_copy(update={"dtype": dtype, "runtime": launched_runtime(job.training.runtime)})
    model = job.model.model_copy(update={"attention": "flash"})  # our kernels keep no scores
    laid = job.model_copy(update={"training": training, "model": model})
    return KernelLister(_clock(laid), _clock(_alone(laid)), array).kernels()


def _clock(job: JobSpec) -> StepTimeModel:
    return step_time_model(JobLayout.of(job), system=MEASURED)  # kernels alone


def _alone(job: JobSpec) -> JobSpec:
    """The job's model with dense layers on one rank, without dropout, recomputation and
    freezing."""
    assert job.model is not None, "kernel_cases has seen to it"
    training = job.training.model_copy(
        update={
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "recompute": "none",
            "freeze": [],
            "partition_activations": False,
            "offload_activations": False,
            "global_batch_size": None,
        }
    )
    parallel = ParallelSpec(tp=1, pp=1, cp=1, dp=1)
    parts = {"parallel": parallel, "training": training, "model": dense_model(job.model)}
    return complete(job.model_copy(update=parts))


def _stream_bytes(machine: Machine, ranks: int, *, is_cuda: bool) -> int:
    """Bytes of an array of the streams, three of which fit on every rank: a power of two, so that
    names stay the same when slightly less memory is free."""
    if is_cuda:
        return STREAM_BYTES
    share = int(MEMORY_SHARE * machine.memory_bytes / (3 * ranks))
    return min(STREAM_BYTES, 1 << max(share.bit_length() - 1, 3))


def _too_large(kernels: Sequence[PlannedKernel], ranks: int, free: float) -> Issue:
    largest = max(kernels, key=lambda kernel: kernel.bytes)
    message = (
        f"{largest.name} moves {bytes_text(largest.bytes)} on each of "
        f"{plural(ranks, 'rank')}, and {bytes_text(free)} in all may be used of this "
        "machine's free memory"
    )
    return Issue(
        "kernels-memory", "--ranks", message, "use fewer --ranks, a smaller --micro-batch-size or a larger --tp"
    )
