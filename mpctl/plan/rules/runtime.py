"""Rules of the software that runs a job: what it cannot run, and what its startup checks refuse.

A setting that the runtime's profile does not list under [runs] is planned as if it ran there, and a
warning says so. By hand, nanotron on 8 stages: its 1F1B needs 7 micro batches, one for each stage
before the last.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.axes import AXES, EXPERT_AXES, Axis, find_order
from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.topology import replicas, zero_copies
from mpctl.model.pipeline.filled import is_filled, job_cut
from mpctl.plan.rules.check import Check, refusal
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeProfile


def runtime_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The job's runtime supports its settings; the estimate assumes that it supports the others
    too. mpctl's runtime has a separate rule for each of its limits."""
    job = draft.job
    runtime = job.training.runtime
    profile = draft.profile
    missing = [] if profile.runs.launched else list(not_run(job, profile))
    if not missing:
        return
    where, _ = missing[0]
    named = ", ".join(text for _, text in missing)
    message = f"{profile.name} does not run {named}: planned as if it did"
    hint = f"`mpctl presets runtimes {runtime}` lists under [runs] what it runs"
    yield Check("runtime-runs", "warning", where, message, hint)


def not_run(job: JobSpec, profile: RuntimeProfile) -> Iterator[tuple[str, str]]:
    """Each setting of the job, by key and in words, that the profile's [runs] leaves out."""
    p, training, runs = job.parallel, job.training, profile.runs
    mode, zero = p.tensor_mode, p.zero if replicas(job) > 1 else 0
    sizes = {**job.expert_sizes, **job.sizes}

    def has_axis(axis: Axis) -> bool:
        return runs.has_axis(axis) or (axis.name == "cp" and p.stated_cp_comm in runs.cp_comm)

    settings = (
        *(
            (f"parallel.{axis.name}", f"{axis.name} {sizes[axis.name]}", sizes[axis.name] == 1 or has_axis(axis))
            for axis in (*AXES, *EXPERT_AXES)
        ),
        ("parallel.tensor_mode", f"tensor_mode {mode}", p.tp == 1 or not runs.tensor or mode in runs.tensor_modes),
        ("parallel.vpp", f"vpp {p.vpp}", p.vpp == 1 or runs.chunks),
        ("parallel.pipeline_layout", "pipeline_layout", p.pipeline_layout is None or runs.layouts),
        ("parallel.sequence_parallel", "sequence parallelism", p.tp == 1 or not p.sequence_parallel or runs.sequence),
        ("parallel.schedule", f"schedule {p.schedule}", p.pp == 1 or runs.has_schedule(p.schedule, p.vpp)),
        ("parallel.order", f"order {p.order}", not runs.orders or find_order(p.order, runs.orders, sizes) is not None),
        ("parallel.zero", f"zero {zero}", zero in (0, *runs.zero)),
        ("parallel.zero_size", f"zero_size {p.zero_size}", zero_copies(job) == 1 or runs.zero_sizes),
        ("training.recompute", f"recompute {training.recompute}", training.recompute in ("none", *runs.recompute)),
        ("training.moe_overlap", "moe_overlap", not training.moe_overlap or runs.expert_overlap),
        (
            "training.cross_entropy",
            f"cross_entropy {training.cross_entropy}",
            training.cross_entropy in (None, *runs.cross_entropy),
        ),
        ("training.tiled_mlp", "tiled_mlp", training.tiled_mlp is None or runs.tiled_mlp),
        ("training.optimizer", "optimizer muon", training.optimizer != "muon" or runs.muon),
        ("training.dtype", f"dtype {training.dtype}", not runs.dtypes or training.dtype in runs.dtypes),
    )
    return ((where, text) for where, text, is_run in settings if not is_run)


def start_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Micro batches for every stage before the last where the runtime's 1F1B asks for them, and a
    parameter on every stage whose replicas torch's DDP would wrap."""
    job = draft.job
    p, micro_batches = job.parallel, job.num_microbatches
    if p.pp == 1 or not draft.profile.runs.needs_full_pipeline:
        return
    if micro_batches < p.pp - 1:
        per_micro_batch = job.training.micro_batch_size * job.sizes["dp"]
        setting, least = "training.global_batch_size", (p.pp - 1) * per_micro_batch
        sizes = tuple(size for size in divisors(p.pp) if size - 1 <= micro_batches)
        message = (
            f"{plural(micro_batches, 'micro batch', 'micro batches')} on {p.pp} stages: "
            f"{job.training.runtime}'s 1f1b refuses fewer than {p.pp - 1}, one for each stage "
            "before the last"
        )
        yield refusal(
            "pipeline-is-full",
            "parallel.pp",
            message,
            Offer("parallel.pp", sizes, "pp"),
            Offer(setting, (least,), setting),
        )
    if job.model is not None and is_filled(job) and replicas(job) > 1:
        used = job_cut(job.model, p.pp).loss_stage + 1
        if used < p.pp:
            message = (
                f"{job.training.runtime} needs {used} of {p.pp} stages for the model, and torch's "
                "DDP refuses a stage without parameters"
            )
            yield refusal("stages-hold-something", "parallel.pp", message, more=f"use pp {used} or less")
