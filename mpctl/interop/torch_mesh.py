"""A plan as a snippet of plain torch: the device mesh with every group, batch and schedule.

torch.distributed.device_mesh lists the axes slowest first and numbers ranks with the last one
fastest, so that any order of axes can be said. Spelling: torch 2.13, torch.distributed.device_mesh,
.pipelining.schedules and .fsdp.

By hand, tp 4, cp 2, dp 2 and pp 4 in the default order: shape (4, 2, 2, 4) of (pp, dp, cp, tp). A
job with experts has a second mesh of the same ranks, (pp, edp, ep, etp).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.axes import AXIS_NAMES, dense_order, expert_order
from mpctl.interop.emitted import EmitTarget, plan_notes
from mpctl.interop.limits import LauncherLimits
from mpctl.layout.topology import zero_stage
from mpctl.planning.plan import Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "torch", orders=None, dtypes=("fp64", "fp32", "bf16", "fp16"), offload=True, partition=True,
    ep=True, etp=True,
)  # fmt: skip
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
}  # fmt: skip
TORCH_TYPES = {"rocm": "cuda", "tpu": "xla"}
"""torch's name of a kind of device, where it is another; its ROCm builds answer to cuda."""
ZERO = {
    1: "ZeRO 1: torch.distributed.optim.ZeroRedundancyOptimizer over dp_cp",
    2: "ZeRO 2: fully_shard(layer, mesh=dp_cp, reshard_after_forward=False)",
    3: "ZeRO 3: fully_shard(layer, mesh=dp_cp, reshard_after_forward=True)",
}


def _notes(plan: Plan) -> Iterator[str]:
    job, t = plan.job, plan.job.training
    yield from plan_notes(plan, "torch")
    yield f"axes slowest first; rank order {job.parallel.order}, fastest first"
    if stage := zero_stage(job):
        yield ZERO[stage]
    if t.recompute != "none":
        how = {"full": "around each layer", "selective": "around attention's scores"}[t.recompute]
        yield f"recompute {t.recompute}: torch.utils.checkpoint.checkpoint {how}"
    if job.parallel.sequence_parallel and job.parallel.tp > 1:
        yield "sequence parallelism: SequenceParallel in the plan of parallelize_module over tp"
    if t.partition_activations or t.offload_activations:
        yield "approximated: splitting or moving saved activations is for your checkpoint function"
    if t.freeze:
        yield f"frozen parameters: requires_grad_(False) on {', '.join(t.freeze)}"
    if job.parallel.schedule == "zero-bubble" and job.parallel.pp > 1:
        yield "approximated: torch's nearest schedule to ZB-H1 is the interleaved zero bubble"


def _body(plan: Plan) -> str:
    return "\n".join([*_mesh_lines(plan.job), *_batch_lines(plan.job), *_stage_lines(plan)])


def _mesh_lines(job: JobSpec) -> Iterator[str]:
    axes = mesh_axes(job)
    device = job.cluster.device
    kind = "cuda" if device is None else TORCH_TYPES.get(device.kind, device.kind)
    shape = ", ".join(str(job.sizes[axis]) for axis in axes)
    names = ", ".join(f'"{axis}"' for axis in axes)
    replica = ", ".join(f'"{axis}"' for axis in axes if axis in ("dp", "cp"))
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield ""
    yield f'mesh = init_device_mesh("{kind}", ({shape}), mesh_dim_names=({names}))'
    yield f'dp_cp = mesh[{replica}]._flatten("dp_cp")  # gradients and ZeRO'
    if job.has_experts:
        yield from _expert_lines(job, kind)


def _expert_lines(job: JobSpec, kind: str) -> Iterator[str]:
    """The same ranks as experts see them; rows of tokens go over etp and ep together."""
    axes = expert_order(job.parallel.order)[::-1]
    shape = ", ".join(str(job.expert_sizes[axis]) for axis in axes)
    names = ", ".join(f'"{axis}"' for axis in axes)
    cut = ", ".join(f'"{axis}"' for axis in axes if axis in ("etp", "ep"))
    yield ""
    yield "# expert j at ep index j // (experts / ep); gradients of experts over edp"
    yield f'experts = init_device_mesh("{kind}", ({shape}), mesh_dim_names=({names}))'
    yield f'etp_ep = experts[{cut}]._flatten("etp_ep")  # rows of tokens'


def mesh_axes(job: JobSpec) -> tuple[str, ...]:
    """The axes of the mesh, slowest first: all of them, as torch names every dimension."""
    named = dense_order(job.parallel.order).split("-")
    return (*(axis for axis in AXIS_NAMES if axis not in named), *reversed(named))


def _batch_lines(job: JobSpec) -> Iterator[str]:
    t = job.training
    yield ""
    yield f"micro_batch_size = {t.micro_batch_size}"
    yield f"num_microbatches = {job.num_microbatches}  # of a step, on each replica"
    yield f"global_batch_size = {t.global_batch_size}"
    yield f"param_dtype, reduce_dtype = torch.{DTYPES[t.dtype]}, torch.{_reduced(job)}"


def _reduced(job: JobSpec) -> str:
    return DTYPES.get(job.training.reduced_dtype, "float32")


def _stage_lines(plan: Plan) -> Iterator[str]:
    p = plan.job.parallel
    if p.pp == 1:
        return
    schedule = SCHEDULES["interleaved" if p.vpp > 1 and p.schedule == "1f1b" else p.schedule]
    yield f'schedule = "{schedule}"  # torch.distributed.pipelining.Schedule{schedule}'
    if plan.stages is None:
        return
    yield "layers_of_stage = ["
    for stage, chunks in enumerate(plan.stages):
        ranges = ", ".join(f"range({start}, {stop})" for start, stop in chunks)
        yield f"    [{ranges}],  # stage {stage}"
    yield "]"


TARGET = EmitTarget("torch", "torch 2.13 (DeviceMesh)", "python", LIMITS.refusals, _notes, _body)
