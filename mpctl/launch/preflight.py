"""Everything that would make a launch fail, found before a process is started.

The layout itself was checked by the plan. Here: what this version runs, whether the machine carries
the world, whether the data are there. All issues at once, as everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mpctl.errors import InputError, Issue
from mpctl.launch.machine import Machine
from mpctl.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.units import bytes_text

Device = Literal["cpu", "cuda"]
RUNNABLE_DTYPES = ("fp32", "bf16", "fp64")
# What the planner knows and the runtime does not run yet: setting, its value that runs.
NOT_RUN_YET = (
    ("parallel.pp", 1), ("parallel.cp", 1), ("parallel.vpp", 1), ("parallel.zero", 0),
    ("parallel.sequence_parallel", False), ("parallel.tensor_mode", "1d"),
    ("training.recompute", "none"), ("model.family", "gpt"), ("model.position", "learned"),
    ("model.norm", "layernorm"),
)  # fmt: skip


def chosen_device(job: JobSpec, machine: Machine) -> Device:
    """What the job asks for; `auto` follows its cluster's device, else what is present."""
    if job.launch.device != "auto":
        return job.launch.device
    if job.cluster.device is not None:
        return job.cluster.device.kind
    return "cuda" if machine.gpus else "cpu"


def check_launch(plan: Plan, machine: Machine) -> list[Issue]:
    """Every reason not to start; empty when the job can run here."""
    job = plan.job
    if job.model is None:
        return [Issue("no-model", "model", "a launch needs a model", "use --model gpt2, say")]
    return [*_unsupported(job), *_world(plan, machine), *_data(job)]


def launch_warnings(job: JobSpec, machine: Machine) -> list[str]:
    device, world = chosen_device(job, machine), job.world_size
    if device == "cpu" and world > machine.cores:
        return [
            f"{world} ranks share {machine.cores} cores: a rehearsal, its speed says nothing about "
            "the real cluster"
        ]
    return []


def _unsupported(job: JobSpec) -> Iterator[Issue]:
    for where, runs in NOT_RUN_YET:
        table, key = where.split(".")
        value = getattr(getattr(job, table), key)
        if value != runs:
            yield Issue("not-run-yet", where, f"{value!r} is planned but not run by this version",
                        f"use {runs!r}; `mpctl plan` takes it as it stands")  # fmt: skip
    assert job.model is not None
    if job.model.gated:
        yield Issue("not-run-yet", "model.activation", f"{job.model.activation} is planned but not "
                    "run by this version", "use gelu, gelu_tanh or relu")  # fmt: skip
    if job.model.kv_heads % job.parallel.tp:
        yield Issue("not-run-yet", "model.kv_heads", f"{job.model.kv_heads} kv heads copied to "
                    f"{job.parallel.tp} ranks are planned but not run by this version",
                    f"use at most tp {job.model.kv_heads}")  # fmt: skip
    if job.training.dtype not in RUNNABLE_DTYPES:
        yield Issue("not-run-yet", "training.dtype", f"{job.training.dtype} is planned but not run "
                    "by this version", f"use {', '.join(RUNNABLE_DTYPES)}")  # fmt: skip


def _world(plan: Plan, machine: Machine) -> Iterator[Issue]:
    job, world = plan.job, plan.job.world_size
    if chosen_device(job, machine) == "cuda":
        if world > machine.gpus:
            yield Issue("world-fits-machine", "cluster", f"{world} ranks need {world} GPUs, this "
                        f"machine shows {machine.gpus}", "use fewer ranks, or --device cpu to "
                        "rehearse the same ranks on its cores")  # fmt: skip
        return
    if plan.estimate is None or not plan.estimate.memory:
        return
    need = world * max(s.total_bytes - s.activation_bytes for s in plan.estimate.memory)
    if need > machine.memory_bytes:
        yield Issue("world-fits-memory", "cluster", f"weights, gradients and optimizer of {world} "
                    f"ranks take {bytes_text(need)}, this machine has "
                    f"{bytes_text(machine.memory_bytes)}",
                    "use a smaller model or fewer replicas")  # fmt: skip


def _data(job: JobSpec) -> Iterator[Issue]:
    if job.data.path is not None:
        yield from _prepared(job, Path(job.data.path))
    elif job.data.corpus is None:
        yield Issue("no-data", "data", "neither data.path nor data.corpus says what to train on",
                    "use --set 'data.corpus=[\"python-stdlib\"]', or `mpctl data prepare` and "
                    "--set data.path=FOLDER")  # fmt: skip
    else:
        yield from _corpus(job)


def _prepared(job: JobSpec, path: Path) -> Iterator[Issue]:
    from mpctl.data.manifest import open_prepared

    assert job.model is not None
    try:
        prepared = open_prepared(path)
    except InputError as error:
        yield from error.issues
        return
    if prepared.tokenizer_vocab_size > job.model.vocab:
        yield Issue("vocabulary-fits-model", "model.vocab", f"{job.model.vocab} rows, but the "
                    f"tokenizer of {path} has {prepared.tokenizer_vocab_size} pieces",
                    f"use model.vocab {prepared.tokenizer_vocab_size} or more")  # fmt: skip
    for split in (prepared.train, prepared.validation):
        is_needed = split is prepared.train or job.training.eval_samples > 0
        if is_needed and split.tokens <= job.model.seq_length:
            yield Issue("too-few-tokens", "model.seq_length", f"{split.prefix} holds "
                        f"{split.tokens} tokens, fewer than one sequence of "
                        f"{job.model.seq_length} and its last target",
                        "prepare more text, or use a shorter sequence")  # fmt: skip


def _corpus(job: JobSpec) -> Iterator[Issue]:
    from mpctl.data.corpus import find_documents

    try:
        find_documents(job.data.corpus or [], max_bytes=job.data.max_bytes)
    except InputError as error:
        yield from error.issues
    if job.data.tokenizer is not None and not Path(job.data.tokenizer).is_file():
        yield Issue("no-such-file", "data.tokenizer", f"{job.data.tokenizer} is not a file")
