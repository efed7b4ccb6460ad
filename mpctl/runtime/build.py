"""From a job and a rank to everything that trains: process group, mesh, model, optimizer, data.

Ranks start seconds apart (imports, a loaded machine), while a collective of a running job may only
wait `timeout_seconds`. So all ranks meet at the store first, with patience of their own.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from mpctl.families.batch import FamilyModule
from mpctl.families.modules import build_module
from mpctl.kernels.layer import ResidualLayer
from mpctl.kernels.parameters import draw
from mpctl.operators.grad_flow import frozen_by
from mpctl.rundir.checkpoints import DOCUMENTS, list_checkpoints
from mpctl.runtime.batches import DatasetBatches
from mpctl.runtime.checkpointing.saver import Saver
from mpctl.runtime.checkpointing.store_barrier import PATIENCE, StoreBarrier
from mpctl.runtime.loss_scale import LossScale
from mpctl.runtime.memory_watch import MemoryWatch
from mpctl.runtime.mesh import Mesh, build_mesh, checkpoint_store, stage_groups
from mpctl.runtime.optimizer import TORCH_DTYPES, Optimizer
from mpctl.runtime.partition import Chunks, PipelinePartition
from mpctl.runtime.pass_listener import PassListeners
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.traffic import TrafficCounter
from mpctl.runtime.train import Trainer
from mpctl.runtime.zero.gather import ParameterGatherer
from mpctl.runtime.zero.gradients import BucketShard, GradientBuffer
from mpctl.runtime.zero.overlap import GradientOverlap
from mpctl.runtime.zero.param_store import (
    ParamStore,
    Zero3ParamStore,
    allocate,
    make_param_store,
    without_memory,
)
from mpctl.spec.job import JobSpec
from mpctl.topology import Topology

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def build_trainer(
    run_dir: Path, job: JobSpec, topology: Topology, *, rank: int, local_rank: int,
    stop_asked: Callable[[], bool],
) -> Trainer:  # fmt: skip
    """Called by every rank after `init_process_group`; resumes from the newest checkpoint where
    there is one."""
    torch.set_num_threads(job.launch.threads_per_rank or 1)
    device = select_device(job.launch.device, local_rank)
    traffic = TrafficCounter()
    mesh = build_mesh(topology, rank, device, launch=job.launch, record=traffic.record)
    cut = PipelinePartition.of(job, mesh.pp.rank)
    with without_memory():
        chunks = build_chunks(cut, mesh)
    model = chunks[0] if len(chunks) == 1 else Chunks(chunks)
    is_frozen = frozen_by(job.training.freeze)
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        parameter.requires_grad_(not is_frozen(name))
    blocks = _blocks(cut, mesh, named)
    zero, reduced = cut.layout.zero_stage, TORCH_DTYPES[job.training.reduced_dtype]
    values = list(_drawn(named, blocks, zero, job.training.seed))
    trained = [block for block in blocks if block.bucket.is_trained]
    buffer = GradientBuffer(
        trained, reduced, device, zero=zero, tp=mesh.tp, pp=mesh.pp, replicas=mesh.replicas
    )
    pipeline = PipelineRunner(
        cut, chunks, mesh.pp, dtype=TORCH_DTYPES[job.training.dtype], device=device
    )
    overlap = _overlap(cut, chunks, pipeline, buffer, values)
    trainer = Trainer(
        job=job, mesh=mesh, cut=cut, pipeline=pipeline, model=model, buffer=buffer,
        overlap=overlap, scale=LossScale.of(job.training),
        optimizer=Optimizer(
            buffer, [store for store in values if store.block.bucket.is_trained], job.training,
            frozen=[store for store in values if isinstance(store, Zero3ParamStore)
                    and not store.block.bucket.is_trained],
        ),
        batches=DatasetBatches(
            job, Path(job.data.path or run_dir / "data"), dp=mesh.dp, cp=mesh.cp, device=device
        ),
        saver=_saver(run_dir, job, mesh), stop_asked=stop_asked,
        peak_memory=_memory_reader(device), traffic=traffic,
        watch=MemoryWatch(is_on=_is_watched(job, device), device=device),
    )  # fmt: skip
    saved = list_checkpoints(trainer.saver.root)
    if saved:
        trainer.resume(saved[-1][1])
    elif job.training.init_from is not None:
        trainer.start_from(Path(job.training.init_from))
    return trainer


def _saver(run_dir: Path, job: JobSpec, mesh: Mesh) -> Saver:
    """What saves: rank 0 keeps the run's own documents as they are now, to copy them."""
    barrier = StoreBarrier(
        checkpoint_store(mesh.rank, mesh.world.size),
        patience=max(PATIENCE, job.launch.timeout_seconds),
    )
    paths = [run_dir / name for name in DOCUMENTS] if mesh.rank == 0 else []
    documents = {path.name: path.read_text("utf-8") for path in paths if path.is_file()}
    keep = {"keep_last": job.training.keep_last, "keep_every": job.training.keep_every}
    return Saver(run_dir / "checkpoints", mesh, barrier, documents, **keep)


def build_chunks(cut: PipelinePartition, mesh: Mesh) -> list[FamilyModule]:
    """The modules of this rank's stage, one a chunk, without values."""
    job = cut.job
    chunks = [
        build_module(
            cut.model, job.training, group=mesh.tp, cp=mesh.cp, device=mesh.device,
            dtype=TORCH_DTYPES[job.training.dtype], held=held,
            sequence_parallel=job.parallel.sequence_parallel,
        )
        for held in cut.chunks
    ]  # fmt: skip
    if job.launch.compile:
        for layer in (m for chunk in chunks for m in chunk.modules()):
            if isinstance(layer, ResidualLayer):  # its hooks stay outside, and are heard
                layer.forward = torch.compile(layer.forward)
    return chunks


def _is_watched(job: JobSpec, device: torch.device) -> bool:
    """On a CPU storages are counted operation by operation, which compiled layers have not."""
    return job.launch.track_memory and not (job.launch.compile and device.type == "cpu")


def _blocks(
    cut: PipelinePartition, mesh: Mesh, parameters: Mapping[str, nn.Parameter]
) -> list[BucketShard]:
    """The plan's buckets of this stage, with the parameters that they name."""
    groups = stage_groups(mesh, cut.holders.values())
    copies = {name: groups[stages] for name, stages in cut.holders.items() if cut.stage in stages}
    return [
        BucketShard(bucket, tuple(parameters[name] for name in bucket.names), mesh.replicas,
              copies.get(bucket.names[0]))
        for bucket in cut.layout.buckets(cut.stage)
    ]  # fmt: skip


def _drawn(
    named: Mapping[str, nn.Parameter], blocks: Sequence[BucketShard], zero: int, seed: int
) -> Iterator[ParamStore]:
    """Initial values: of what is in no bucket (frozen, below ZeRO 3), then bucket by bucket, each
    cut as ZeRO asks before the next one has memory."""

    def fill(names: Iterable[str]) -> None:
        for name in names:
            allocate(named[name])
            draw(named[name], name, seed)

    fill(named.keys() - {name for block in blocks for name in block.bucket.names})
    for block in blocks:
        fill(block.bucket.names)
        yield make_param_store(block, zero)


def _overlap(
    cut: PipelinePartition,
    chunks: Sequence[FamilyModule],
    pipeline: PipelineRunner,
    buffer: GradientBuffer,
    values: Sequence[ParamStore],
) -> GradientOverlap:
    """Tie reductions, and at ZeRO 3 the gathering of parameters, to the pipeline's actions."""
    zero = cut.layout.zero_stage
    actions = [step.action for step in pipeline.program if step.peer is None]
    overlap = GradientOverlap(
        buffer.stores, actions, each=zero >= 2, early=cut.job.parallel.overlap_gradients
    )
    gathered = [store for store in values if isinstance(store, Zero3ParamStore)]
    passes = PassListeners([overlap, *([ParameterGatherer(gathered)] if gathered else [])])
    for number, chunk in enumerate(chunks):
        passes.watch(chunk, cut.layout.layer_units(cut.stage, number))
    pipeline.listener = passes
    return overlap


def select_device(kind: str, local_rank: int) -> torch.device:
    """The device of a rank of this host, made the current one on CUDA."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def init_process_group(job: JobSpec, *, rank: int, local_rank: int, world_size: int) -> None:
    """The default process group; a world of one rank needs none."""
    if world_size == 1:
        return
    device = select_device(job.launch.device, local_rank)
    # Twice: the supervisor, which sees who is missing, ends a start that stands still before that.
    patience = timedelta(seconds=2 * job.launch.start_seconds)
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=patience))
    store.set(f"here/{rank}", "")
    store.wait([f"here/{peer}" for peer in range(world_size)], patience)
    dist.init_process_group(
        BACKENDS[device.type], store=store, rank=rank, world_size=world_size,
        timeout=timedelta(seconds=job.launch.timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip


def _memory_reader(device: torch.device) -> Callable[[], int]:
    """Peak bytes: what the allocator handed out on a GPU, what the process held on a CPU."""
    if device.type == "cuda":
        return lambda: torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes there, KiB on Linux
    return lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def stop_file_exists(run_dir: Path) -> Callable[[], bool]:
    """Whether the supervisor asked for a stop: one look at a file a step."""
    path = run_dir / "stop"
    return path.exists
