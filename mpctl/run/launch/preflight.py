"""Everything that would make a launch fail, found before a process is started.

The layout itself was checked by the plan. Here: what this version runs, whether the machine has the
GPUs and the memory, whether the disk has room for the checkpoints, whether data and initial weights
can be read (data_checks.py). All issues are reported at once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import bytes_text, plural
from mpctl.model.families import get_family
from mpctl.model.layout.job_layout import why_not_whole
from mpctl.plan.estimate.states import most_at_once
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.launched import not_launched, settings_not_launched
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.verify import checkpoint_bytes
from mpctl.records.rundir.directory import RunDir, cannot_write
from mpctl.records.rundir.metrics import missing_tensorboard
from mpctl.run.hosts.checks import Device, host_issues, named_device, rehearsal_warnings
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.data_checks import data_issues, initial_weight_issues, tokenizer_warnings
from mpctl.run.launch.elastic import elastic_issues
from mpctl.run.launch.environment import environment_issues
from mpctl.run.launch.monitoring import monitoring_issues
from mpctl.run.launch.resume import Resumption, job_before, model_issues
from mpctl.spec.base import rising_ranges
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import is_launched


def chosen_device(job: JobSpec, machine: Machine) -> Device:
    """The device of launch.device; for `auto` that of the job's cluster, or else a GPU where the
    machine has one. Raises InputError for a kind that mpctl only plans."""
    return named_device(job) or ("cuda" if machine.gpus else "cpu")


def check_launch(
    plan: Plan,
    lacking: Iterable[Issue],
    run: RunDir | None = None,
    *,
    resumption: Resumption | None = None,
    replaced: bool = False,
    is_elsewhere: bool = False,
) -> list[Issue]:
    """Every reason not to start; empty when the job can run.

    lacking: what its hosts lack, as far as they are known; run: the directory that will be written;
    resumption: the checkpoint from which a run is continued; replaced: whether the run that is in
    the directory will be removed; is_elsewhere: data, initial weights and the disk of the run are
    not on this machine and are not checked.
    """
    job = plan.job
    surroundings = list(environment_issues(job))
    if surroundings:  # data and weights could not be read with these
        return surroundings
    if job.launch.program:
        from mpctl.run.launch.program import program_issues

        issues = [*program_issues(plan, is_elsewhere=is_elsewhere), *lacking, *_tensorboard(job)]
        return [*issues, *(() if is_elsewhere else monitoring_issues(job))]
    if job.model is None:
        hint = "name a job (mpctl launch demo), or a model: --model gpt2"
        return [Issue("no-model", "model", "a launch needs a model", hint)]
    resumed = None if resumption is None else resumption.run
    checks = (
        _unsupported(job),
        _decoder_length(job.model),
        elastic_issues(job),
        lacking,
        packed_base_issues(job),
        data_issues(job, job.model, resumed, is_elsewhere=is_elsewhere),
        () if is_elsewhere else initial_weight_issues(job, job.model, resumed),
        _tensorboard(job),
        () if is_elsewhere else monitoring_issues(job),
        _profile_issues(job),
        () if run is None or is_elsewhere else _disk(plan, run, resumption, replaced=replaced),
        () if resumption is None else _resumption_issues(job, resumption),
    )
    return list(chain.from_iterable(checks))


def packed_base_issues(job: JobSpec) -> Iterator[Issue]:
    """Yield what a base in nf4 lacks: the package that packs it, or weights that it is made of."""
    adapter = job.training.adapter
    if adapter is None or adapter.stored_as != "nf4":
        return
    if find_spec("bitsandbytes") is None:
        message = "the package bitsandbytes is not installed, which packs a base in nf4"
        hint = "install it with pip install 'mpctl[quantized]', or use kind lora without base_precision"
        yield Issue("extra-missing", "training.adapter.base_precision", message, hint)
    if job.training.init_from is None:
        message = "a base in nf4 is not saved, so that a run needs weights to make it of again"
        yield Issue(
            "adapter-packed-base", "training.init_from", message, "name a run, an import or a Hugging Face folder"
        )


def runtime_issues(plan: Plan, resumption: Resumption | None = None) -> Iterator[Issue]:
    """Yield the issue of a job that is planned for other software, and names no program that is it. Not of a run
    that mpctl's own layers have trained under such a runtime so far."""
    job = plan.job
    if job.launch.program or job.model is None or is_launched(job.training.runtime):
        return
    before = None if resumption is None else job_before(resumption.run)
    if before and not before.launch.program and before.training.runtime == job.training.runtime:
        return
    from mpctl.interop.emitted import usual_program

    yield Issue(
        "runtime-needs-program",
        "training.runtime",
        f"the plan is for {job.training.runtime}, and no program is named that starts it",
        f'add --program "{usual_program(plan)}", or train with mpctl\'s own layers: --runtime mpctl',
    )


def not_of_program(job: JobSpec, what: str) -> list[Issue]:
    """The issue of a job with a program where mpctl's own workers are needed. what: `a bench
    measures`."""
    if not job.launch.program:
        return []
    message = f"{what} mpctl's own workers, and the job has a program"
    return [Issue("program-only-own", "launch.program", message, "leave the program out")]


def check_here(plan: Plan, machine: Machine) -> list[Issue]:
    """check_launch for all ranks on this machine."""
    device = chosen_device(plan.job, machine)
    return check_launch(plan, host_issues(plan, machine, device))


def check_ranks(plan: Plan, lacking: Iterable[Issue]) -> list[Issue]:
    """Every reason why the ranks of a plan could not be started, whatever they do then: no data and
    no weights are read, nothing is saved. lacking: as in check_launch."""
    missing = (issue for issue in packed_base_issues(plan.job) if issue.rule == "extra-missing")
    return [*environment_issues(plan.job), *_unsupported(plan.job), *lacking, *missing]


def check_run(job: JobSpec, run: RunDir, *, overwrite: bool, resume: bool) -> list[Issue]:
    """Return the issues of the run directory: neither free, nor to be overwritten or resumed by the options, or
    --overwrite would remove the weights that the run starts from."""
    issues, origin = [], job.training.init_from
    if overwrite and origin and Path(origin).resolve().is_relative_to(run.path.resolve()):
        message = f"{origin} is in the run that --overwrite removes"
        issues.append(Issue("init-from-replaced", "training.init_from", message, "use another --run-dir"))
    try:
        check_run_dir(run, overwrite=overwrite, resume=resume)
    except InputError as error:
        issues += error.issues
    return issues


def check_run_dir(run: RunDir, *, overwrite: bool, resume: bool) -> None:
    """Raises InputError unless the directory is free, or can be overwritten or resumed as the
    options say."""
    try:
        if resume:
            run.require_run()
        elif overwrite:
            run.require_replaceable()
        else:
            run.require_free()
    except OSError as error:
        raise cannot_write(run.path, error) from None


def launch_warnings(
    job: JobSpec, machine: Machine, *, resumption: Resumption | None = None, hosts: int = 1
) -> list[str]:
    """Warnings about a job that can start on so many hosts like this machine. A run that continues
    from a checkpoint does not read its initial weights."""
    is_on_cpu = chosen_device(job, machine) == "cpu"
    on_cpu = list(rehearsal_warnings(job, machine, hosts=hosts)) if is_on_cpu else []
    if job.launch.program:
        from mpctl.run.launch.program import program_warnings

        return [*program_warnings(job), *on_cpu]
    warnings = [*_compile_warnings(job), *_device_warnings(job), *_spare_warnings(job)]
    warnings += _profile_warnings(job, resumption)
    if not is_on_cpu:
        warnings += kernel_warnings(job, has_triton=find_spec("triton") is not None)
    if resumption is None or resumption.folder is None:
        warnings += tokenizer_warnings(job)
    return [*warnings, *on_cpu]


def _resumption_issues(job: JobSpec, resumption: Resumption) -> Iterator[Issue]:
    yield from resumption.issues
    yield from model_issues(job, job_before(resumption.run), resumption.run)


def _tensorboard(job: JobSpec) -> list[Issue]:
    return missing_tensorboard("launch.tensorboard") if job.launch.tensorboard else []


def _profile_issues(job: JobSpec) -> Iterator[Issue]:
    ranges, steps = rising_ranges(job.launch.profile), job.training.steps
    if ranges and ranges[-1][1] > steps:
        yield Issue(
            "profile-steps",
            "launch.profile",
            f"step {ranges[-1][1]} is to be recorded, but the run has {plural(steps, 'step')}",
            f"name steps up to {steps}, or set training.steps",
        )


def _profile_warnings(job: JobSpec, resumption: Resumption | None) -> Iterator[str]:
    """A run that is continued beyond the steps that it was to record records none."""
    ranges, done = rising_ranges(job.launch.profile), resumption.step if resumption else 0
    if ranges and ranges[-1][1] <= done:
        yield (f"launch.profile {job.launch.profile}: training goes on at step {done + 1}, so nothing more is recorded")


def _spare_warnings(job: JobSpec) -> Iterator[str]:
    if job.launch.spare_nodes and not job.launch.max_restarts:
        spares = plural(job.launch.spare_nodes, "spare host")
        yield f"launch.max_restarts 0: {spares} can take over at the start, not after a failure"


def _device_warnings(job: JobSpec) -> Iterator[str]:
    if job.device_kind == "rocm" and job.cluster.device is not None:
        yield (
            f"{job.cluster.device.name}: torch's ROCm builds run what is written for CUDA, but "
            "no run of mpctl on them is known"
        )
    if job.training.dtype == "tf32":
        device = job.cluster.device
        if job.launched_kind == "cpu":
            yield "training.dtype tf32: on CPU products are computed in fp32"
        elif device is not None and "tf32" not in device.peak_flops:
            yield f"training.dtype tf32: {device.name} has no TF32, products are computed in fp32"


def kernel_warnings(job: JobSpec, *, has_triton: bool) -> Iterator[str]:
    """Warnings when kernels of a GPU lack a package and so use memory that no plan counts."""
    if job.training.attention_dropout and not has_triton:
        yield (
            "training.attention_dropout: without triton scores are held in memory, which the plan "
            "does not count (use pip install triton, or training.attention_dropout 0)"
        )


def _compile_warnings(job: JobSpec) -> Iterator[str]:
    """Warn about layers compiled in pieces: torch.compile gets only the operations between messages."""
    reasons = list(why_not_whole(job))
    if job.launch.compile and reasons:
        yield (
            f"launch.compile: with {' and '.join(reasons)} layers are compiled in pieces (dropout, "
            "activation, rotary positions), not whole: less is gained than on a single rank"
        )


def _unsupported(job: JobSpec) -> Iterator[Issue]:
    """Settings that the planner knows and mpctl's own runtime does not run."""
    for check in (*settings_not_launched(job), *not_launched(job)):
        yield Issue("not-run-yet", check.where, check.message, check.hint)


def _decoder_length(model: ModelSpec) -> Iterator[Issue]:
    """The decoder must have room for the targets of its family's samples."""
    target_length = get_family(model.family).target_length
    if target_length is None:
        return
    least = target_length(model.seq_length)
    if (model.decoder_seq_length or 0) < least:
        yield Issue(
            "decoder-holds-targets",
            "model.decoder_seq_length",
            f"{model.decoder_seq_length} tokens, but inputs of {model.seq_length} have {least} targets",
            f"use {least} or more",
        )


def _disk(plan: Plan, run: RunDir, resumption: Resumption | None, *, replaced: bool) -> Iterator[Issue]:
    """The checkpoints that are on the disk at the same time must fit there."""
    if plan.estimate is None or not is_launched(plan.job.training.runtime):
        return
    job, size, done = plan.job, plan.estimate.checkpoint_bytes, resumption.step if resumption else 0
    copies = most_at_once(job.checkpoint, job.training.steps, done=done)
    paths = (run.path, *run.path.parents)
    existing = next((path for path in paths if os.path.exists(path)), Path("/"))  # noqa: PTH110
    usage = shutil.disk_usage(existing)
    free = usage.free
    if replaced and existing == run.path:
        free += sum(checkpoint_bytes(path) for _, path in list_checkpoints(run.checkpoints))
    if copies * size <= free or not usage.total:  # 0: a file system that does not report it
        return
    fewer = "checkpoint.keep_last 1, " if copies > 2 else ""
    yield Issue(
        "disk-holds-checkpoints",
        "--run-dir",
        f"{plural(copies, 'checkpoint')} of {bytes_text(size)} will be in {run.path} at once, "
        f"{bytes_text(copies * size)}, but {bytes_text(free)} are free there",
        f"use {fewer}a larger checkpoint.interval, or a --run-dir on a larger disk",
    )
