"""From a job and a rank to everything that trains: mesh, model, gradients, optimizer, data.

A stage that keeps slices of its parameters (ZeRO) is never in memory unsharded: modules are made
without memory, then each bucket is allocated, initialized and sliced before the next one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from mpctl.core.errors import RunFailed
from mpctl.core.sharding import EXPERTS
from mpctl.model.layout.job_layout import JobLayout, compiles_whole_layers
from mpctl.model.layout.matrices import muon_matrices
from mpctl.plan.estimate.states import checkpoint_bytes
from mpctl.records.checkpoint.folder import DOCUMENTS, list_checkpoints
from mpctl.records.checkpoint.replicas import layout_replicas, shard_files
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.origin import Origin
from mpctl.spec.job import JobSpec
from mpctl.spec.schedules import SCHEDULES
from mpctl.train.checkpoint.saver import Saver
from mpctl.train.checkpoint.snapshot import HostCopies
from mpctl.train.checkpoint.writer import PATIENCE, CheckpointWriter, StoreBarrier
from mpctl.train.families.implementation import FamilyModule, build_module
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import StepKeys
from mpctl.train.layers.compiled import compile_layers, with_compiled_pieces
from mpctl.train.layers.fp8 import CastsToFp8, Fp8Product, Fp8Scales, HeldWeights
from mpctl.train.layers.grid.tensor_parallel import tensor_parallel_of
from mpctl.train.layers.parameters import DeferredWgrad, DefersWgrad
from mpctl.train.layers.recompute import HostOffload
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ALL_EXPERTS, ShardContext
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.mesh import Mesh, build_mesh, checkpoint_store, stage_groups
from mpctl.train.runtime.model_weights import resume_from, start_from, start_lengths
from mpctl.train.runtime.optimizer import TORCH_DTYPES, Optimizer
from mpctl.train.runtime.p2p import stage_links
from mpctl.train.runtime.packed_base import pack_base, stored_parameters
from mpctl.train.runtime.partition import PipelinePartition, stage_model
from mpctl.train.runtime.pass_listener import OffloadPasses, PassListener, watch_layers
from mpctl.train.runtime.pipeline import PipelineRunner
from mpctl.train.runtime.routing import StepRouting
from mpctl.train.runtime.step_guard import recent_losses
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.zero.gather import ParameterArrival, ParameterGatherer
from mpctl.train.runtime.zero.gradients import ALONE, GradientBuffer
from mpctl.train.runtime.zero.overlap import GradientOverlap
from mpctl.train.runtime.zero.param_store import (
    BucketShard,
    ParamStore,
    Zero3ParamStore,
    allocate,
    make_param_store,
    without_memory,
)


def build_trainer(run_dir: Path, layout: JobLayout, rank: int, environment: RuntimeEnvironment) -> Trainer:
    """The trainer of one rank, resumed from the checkpoint that the attempt starts from, if any.

    Every rank calls it, after `init_process_group` where there are several. Raises InputError if
    the data, a checkpoint or the initial weights cannot be read, RunFailed if ranks were started
    with different checkpoints or jobs.
    """
    job = layout.job
    torch.set_num_threads(job.launch.threads_per_rank or 1)
    mesh = build_mesh(
        layout.topology,
        rank,
        environment.device,
        launch=job.launch,
        views=layout.views,
        loss_stage=layout.placement.last.stage,
        record=environment.traffic.record,
        log=environment.log,
        timer=environment.communication,
    )
    trainer = _assemble(run_dir, PipelinePartition(layout, mesh.pp.rank), mesh, environment)
    origin, root = environment.origin, trainer.saver.root
    if origin is not None and (step := agreed_step(origin, root, mesh)):
        resume_from(trainer, origin.find_checkpoint(root, step))
        _restore_guard(trainer, RunDir(run_dir))
    elif job.training.init_from is not None:
        start_from(trainer, Path(job.training.init_from))
    else:
        start_lengths(trainer)
    pack_base(trainer.model, layout.table, mesh.device)
    return trainer


def agreed_step(origin: Origin, root: Path, mesh: Mesh) -> int:
    """The step of the checkpoint that all ranks resume from, 0 for none. If no launcher chose one,
    it is the newest that rank 0 sees in `root`. Raises RunFailed on a rank that was started with a
    step or job different from rank 0's."""
    newest = max((step for step, _ in list_checkpoints(root)), default=0)
    step = newest if origin.step is None else origin.step
    job = int((origin.job or "0")[:15], 16)
    mine = torch.tensor([step, job], device=mesh.device)
    first, first_job = mesh.world.broadcast(mine, 0).tolist()
    if first_job != job or (origin.step is not None and first != step):
        raise RunFailed(
            f"rank {mesh.rank} is to resume job {job:015x} from step {step}, rank 0 job "
            f"{first_job:015x} from step {first}: they were started by different launches"
        )
    return int(first)


def _restore_guard(trainer: Trainer, run: RunDir) -> None:
    """Give the step guard the losses from before the resumption. Rank 0 reads them and broadcasts
    them, since ranks that decide from different losses would diverge permanently."""
    guard, step = trainer.guard, trainer.step
    if not guard.remembers:
        return
    message = torch.full((guard.training.spike_window + 1,), math.nan, dtype=torch.float64)
    if trainer.mesh.rank == 0:
        records = [record for record in run.records() if record["step"] <= step]
        losses, message[-1] = recent_losses(records, guard.training.spike_window)
        message[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
    *losses, skipped = trainer.mesh.world.broadcast(message.to(trainer.mesh.device), 0).tolist()
    guard.restore([loss for loss in losses if not math.isnan(loss)], int(skipped))


def _assemble(run_dir: Path, partition: PipelinePartition, mesh: Mesh, environment: RuntimeEnvironment) -> Trainer:
    job, layout, device = partition.job, partition.layout, mesh.device
    offload = None
    if job.training.offload_activations:
        offload = HostOffload.of(environment.make_stream(device), device)
    routing = routing_log(layout, device)
    with without_memory():
        chunks = build_chunks(partition, mesh, environment.kernels, offload, routing)
    links = stage_links(mesh, partition.layout.placement, make_stream=environment.make_stream)
    model, deferred_wgrad = stage_model(chunks), _deferred_wgrad(partition, chunks)
    parameters, is_frozen = dict(model.named_parameters()), layout.table.is_frozen
    for name, parameter in parameters.items():
        parameter.requires_grad_(not is_frozen(name))
    shards = _bucket_shards(partition, mesh, parameters)
    stores = list(_initialized_stores(parameters, shards, layout, environment))
    buffer = GradientBuffer(
        [shard for shard in shards if shard.bucket.is_trained],
        TORCH_DTYPES[job.training.reduced_dtype],
        device,
        mesh.groups,
        views=layout.views,
        norm_block=environment.norm_block,
        kernels=environment.kernels,
    )
    actions = [step.action for step in partition.program if step.peer is None]
    overlap = GradientOverlap(buffer, actions, early=job.parallel.overlap_gradients)
    listeners = _layer_listeners(partition, chunks, overlap, stores)
    if offload is not None:
        listeners = [OffloadPasses(offload), *listeners]
    if environment.profile.steps:
        listeners = [environment.profile, *listeners]
    pipeline = PipelineRunner(
        partition,
        chunks,
        links,
        dtype=TORCH_DTYPES[job.training.dtype],
        device=device,
        activity=environment.activity,
        listeners=listeners,
        keys=_step_keys(chunks, job, device),
        deferred_wgrad=deferred_wgrad,
    )
    sends_beside = all(mesh.groups[view.zero_group].sends_beside for view in layout.views.values())
    copies = HostCopies(environment.make_stream(device))
    optimizer = Optimizer(
        buffer,
        [store for store in stores if store.shard.bucket.is_trained],
        job.training,
        [store for store in _gathered(stores) if not store.shard.bucket.is_trained],
        publishes_ahead=job.parallel.overlap_gradients and sends_beside,
        before_step=copies.join,
        kernels=environment.kernels,
        matrices=muon_matrices(layout),
        groups=mesh.groups,
        is_saved=layout.is_saved,
    )
    scales = fp8_scales(layout, chunks, device)
    saver = Saver(
        _checkpoint_writer(run_dir, layout, mesh),
        copies if job.checkpoint.asynchronous else None,
        on_change=environment.activity.on_change,
    )
    return Trainer(
        mesh=mesh,
        model=model,
        pipeline=pipeline,
        gradients=overlap,
        optimizer=optimizer,
        batches=environment.open_batches(job, dp=mesh.dp, cp=mesh.cp, device=device),
        saver=saver,
        environment=environment,
        fp8=scales,
        fp8_weights=held_weights(layout, chunks),
        routing=StepRouting(
            routing,
            mesh.world,
            job.training.global_batch_size or 1,
            job.parallel.ep,
            keeps_counts=job.training.moe_load_balancing == "global",
        ),
    )


def _gathered(stores: Iterable[ParamStore]) -> list[Zero3ParamStore]:
    return [store for store in stores if isinstance(store, Zero3ParamStore)]


def _checkpoint_writer(run_dir: Path, layout: JobLayout, mesh: Mesh) -> CheckpointWriter:
    """The writer of this rank's part of checkpoints. Rank 0 reads the run's documents now, to copy
    them into every checkpoint."""
    job, store = layout.job, checkpoint_store(mesh.rank, mesh.world.size)
    paths = [run_dir / name for name in DOCUMENTS] if mesh.rank == 0 else []
    return CheckpointWriter(
        run_dir / "checkpoints",
        mesh.rank,
        shard_files(layout_replicas(layout, mesh.topology)),
        StoreBarrier(store, patience=max(PATIENCE, job.launch.longest_wait_seconds)),
        {path.name: path.read_text("utf-8") for path in paths if path.is_file()},
        checkpoint_bytes(layout),
        job.checkpoint.keep_last,
        job.checkpoint.keep_every,
    )


def _deferred_wgrad(partition: PipelinePartition, chunks: Sequence[FamilyModule]) -> DeferredWgrad | None:
    """Give the modules a queue for deferred weight gradients; None if the schedule defers none."""
    if not SCHEDULES[partition.schedule].splits_backward:
        return None
    deferred = DeferredWgrad()
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, DefersWgrad):
            module.defer_wgrad(deferred)
    return deferred


def build_chunks(
    partition: PipelinePartition,
    mesh: Mesh,
    kernels: KernelBackend,
    offload: HostOffload | None = None,
    routing: RoutingLog | None = None,
) -> list[FamilyModule]:
    """The uninitialized modules of this rank's stage, one per chunk, on the mesh's device. kernels:
    compute their operations (environment.machine_kernels). offload:
    keeps inputs that are saved for backward in host memory, if the job asks for it. routing: what
    routers write to, and read their biases from; by default a new one."""
    job = partition.job
    is_whole = compiles_whole_layers(job)
    if job.launch.compile and not is_whole:
        kernels = with_compiled_pieces(kernels)
    shard_context = ShardContext(
        mesh.tp,
        mesh.cp,
        job.parallel.sequence_parallel,
        dtype=TORCH_DTYPES[job.training.dtype],
        device=mesh.device,
        backend=kernels,
        tensor_parallel=tensor_parallel_of(mesh.grid.mode),
        grid=mesh.grid,
        groups=mesh.groups,
        fp8=job.training.dtype == "fp8",
        offload=offload or HostOffload(),
        expert_view=partition.layout.views.get(EXPERTS, ALL_EXPERTS),
        routing=routing or routing_log(partition.layout, mesh.device),
        overlaps_gathers=bool(job.parallel.tp_comm_overlap),
        exchanges_heads=job.parallel.head_parts > 1,
    )
    chunks = [build_module(partition.model, job.training, shard_context, slices) for slices in partition.chunks]
    if job.launch.compile and is_whole:
        compile_layers(module for chunk in chunks for module in chunk.modules())
    return chunks


def _step_keys(chunks: Sequence[FamilyModule], job: JobSpec, device: torch.device) -> StepKeys | None:
    """Random keys as tensors on the device, for accelerators, which would otherwise wait for the
    host, and for compiled layers; None on a CPU, which computes keys when they are needed."""
    if device.type == "cpu" and not job.launch.compile:
        return None
    sites: dict[str, tuple[str, ...]] = {}
    for chunk in chunks:
        sites |= chunk.rng_sites()
    return StepKeys(sites, job.training.seed, device)


def _bucket_shards(
    partition: PipelinePartition, mesh: Mesh, parameters: Mapping[str, nn.Parameter]
) -> list[BucketShard]:
    holders, stage = partition.layout.shared_parameters, partition.stage
    groups = stage_groups(mesh, holders.values())
    copies = {name: groups[stages] for name, stages in holders.items() if stage in stages}
    return [
        BucketShard(
            bucket,
            tuple(parameters[name] for name in bucket.names),
            mesh.groups[bucket.view.zero_group],
            copies.get(bucket.names[0]),
            mesh.groups.get(bucket.view.copies_group, ALONE),
        )
        for bucket in partition.layout.buckets(stage)
    ]


def _initialized_stores(
    parameters: Mapping[str, nn.Parameter],
    shards: Sequence[BucketShard],
    layout: JobLayout,
    environment: RuntimeEnvironment,
) -> Iterator[ParamStore]:
    """The store of each bucket, its parameters initialized; parameters in no bucket (frozen, below
    ZeRO 3) are initialized first. Each bucket is sliced before the next one gets memory."""

    packed = {name for name, _ in stored_parameters(parameters, layout.table)}

    def initialize(names: Iterable[str]) -> None:
        for name in names:
            if name in packed:  # in host memory until then
                parameters[name].data = torch.empty_like(parameters[name], device="cpu")
            else:
                allocate(parameters[name])
            environment.initialize(parameters[name], name, layout.job.training.seed)

    in_buckets = {name for shard in shards for name in shard.bucket.names}
    initialize(parameters.keys() - in_buckets)
    for shard in shards:
        initialize(shard.bucket.names)
        yield make_param_store(shard, has_masters=layout.job.training.master_weights is not False)


def _layer_listeners(
    partition: PipelinePartition, chunks: Sequence[FamilyModule], overlap: GradientOverlap, stores: Sequence[ParamStore]
) -> list[PassListener]:
    """The listeners for actions and layers: they start reductions, and wait for parameters or, at
    ZeRO 3, gather them."""
    listeners: list[PassListener] = [overlap]
    if gathered := _gathered(stores):
        # first, so that a gather that backward waits for does not queue behind a reduction
        listeners.insert(0, ParameterGatherer(gathered))
    layers = [partition.layout.layer_units(partition.stage, n) for n in range(len(chunks))]
    if any(store.shard.bucket.view.zero in (1, 2) for store in stores):
        listeners.append(ParameterArrival(stores, [units.values() for units in layers]))
    for chunk, units in zip(chunks, layers, strict=True):
        watch_layers(chunk, units, listeners)
    return listeners


def routing_log(layout: JobLayout, device: torch.device) -> RoutingLog:
    """The record of the unsharded model's routers; one without layers if it has no experts."""
    training, model = layout.job.training, layout.model
    rate = training.moe_bias_update_rate if model.router_bias else None
    names = layout.table.routed_layers
    return RoutingLog(names, model.experts or 1, bias_rate=rate, device=device)


def fp8_scales(layout: JobLayout, chunks: Iterable[nn.Module], device: torch.device) -> Fp8Scales:
    """The table of delayed scaling for the unsharded model, bound to the layers of these chunks; an
    empty table if the job has no delayed scaling."""
    training = layout.job.training
    if training.dtype != "fp8" or training.fp8_recipe != "delayed":
        return Fp8Scales((), 1, device)
    scales = Fp8Scales(layout.table.narrowed_layers, training.fp8_amax_history_len, device)
    products = fp8_products(layout, chunks)
    scales.bind({name: product.operands for name, product in products.items()})
    return scales


def held_weights(layout: JobLayout, chunks: Iterable[nn.Module]) -> HeldWeights:
    """The memory of weights that are cast to fp8 once a step; nothing where they are cast for each
    product (JobLayout.holds_fp8_weights). The weights have memory by now."""
    if not layout.holds_fp8_weights:
        return HeldWeights()
    return HeldWeights(fp8_products(layout, chunks).values())


def fp8_products(layout: JobLayout, chunks: Iterable[nn.Module]) -> dict[str, Fp8Product]:
    """The products in fp8 of these chunks, by global name. Raises ValueError if a linear layer of
    theirs has none: it would train by another recipe than the job's."""
    chunks = list(chunks)
    products = {
        name + rest: product
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(module, CastsToFp8)
        for rest, product in module.fp8_products().items()
    }
    weights = {name for chunk in chunks for name, _ in chunk.named_parameters()}
    linear = [name for name in layout.table.narrowed_layers if f"{name}.weight" in weights]
    if missing := sorted(set(linear) - products.keys()):
        raise ValueError(
            f"{len(missing)} of {len(linear)} linear layers of this rank cast no operands to fp8: "
            f"{', '.join(missing)} (give each module the method fp8_products)"
        )
    return products
