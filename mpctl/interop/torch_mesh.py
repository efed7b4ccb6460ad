"""A plan as a snippet of plain torch: the device mesh with every group, batch and schedule.

torch.distributed.device_mesh lists the axes slowest first and numbers ranks with the last one
fastest, so that any order of axes can be said. Spelling: torch 2.13, torch.distributed.device_mesh,
.pipelining.schedules and .fsdp.

By hand, tp 4, cp 2, dp 2 and pp 4 in the default order: shape (4, 2, 2, 4) of (pp, dp, cp, tp). A
job with experts has a second mesh of the same ranks, (pp, edp, ep, etp). Where zero_size cuts the
replicas, dp is dp_replicate and dp_shard, and states are split over dp_shard and cp (of experts edp
alike): with zero_size 2 above (pp, dp_replicate, dp_shard, cp, tp) is (4, 2, 1, 2, 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from mpctl.core.axes import AXIS_NAMES, dense_order, expert_order
from mpctl.core.errors import Issue
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, refused, splits_sequence
from mpctl.model.layout.topology import expert_view, zero_copies, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "torch",
    cp_comm=("p2p", "all_gather"),
    v_schedules=("zbv", "dualpipev"),
    orders=None,
    dtypes=("fp64", "fp32", "bf16", "fp16"),
    offload=True,
    partition=True,
    ep=True,
    etp=True,
    zero_size="dp",
)
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "zero-bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
TORCH_TYPES = {"rocm": "cuda", "tpu": "xla"}
"""torch's name of a kind of device, where it is another; its ROCm builds answer to cuda."""
ZERO = {
    1: "ZeRO 1: torch.distributed.optim.ZeroRedundancyOptimizer over {}",
    2: "ZeRO 2: fully_shard(layer, mesh={}, reshard_after_forward=False)",
    3: "ZeRO 3: fully_shard(layer, mesh={}, reshard_after_forward=True)",
}


def _refusals(plan: Plan) -> Iterator[Issue]:
    yield from LIMITS.refusals(plan)
    p, axes = plan.job.parallel, mesh_axes(plan.job)
    if zero_copies(plan.job) > 1 and p.cp > 1 and axes.index("cp") < axes.index("dp"):
        message = "the mesh divides states over cp before dp, which order has behind it"
        yield refused("parallel.zero_size", p.zero_size, message, "use order tp-cp-dp-pp")


def _notes(plan: Plan) -> Iterator[str]:
    job, t = plan.job, plan.job.training
    yield from plan_notes(plan, "torch")
    yield f"axes slowest first; rank order {job.parallel.order}, fastest first"
    if stage := zero_stage(job):
        over = "dp_cp" if zero_copies(job) == 1 else "zero" if stage == 1 else "hybrid"
        yield ZERO[stage].format(over)
    if t.recompute != "none":
        how = {"full": "around each layer", "selective": "around attention's scores"}[t.recompute]
        yield f"recompute {t.recompute}: torch.utils.checkpoint.checkpoint {how}"
    if splits_sequence(job):
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
    device, copies = job.cluster.device, zero_copies(job)
    kind = "cuda" if device is None else TORCH_TYPES.get(device.kind, device.kind)
    dims = list(_dims(mesh_axes(job), job.sizes, "dp", copies))
    names = [name for name, _ in dims if name == "cp" or name.startswith("dp")]
    yield "import torch"
    yield "from torch.distributed.device_mesh import init_device_mesh"
    yield ""
    yield f'mesh = init_device_mesh("{kind}", {_shape_and_names(dims)})'
    what = "gradients and ZeRO" if copies == 1 else "gradients"
    yield f'dp_cp = mesh[{_quoted(names)}]._flatten("dp_cp")  # {what}'
    if copies > 1:
        shared = "dp_shard"
        if job.parallel.cp > 1:
            names.remove("dp_replicate")
            yield f'mesh[{_quoted(names)}]._flatten("zero")'
            shared = "zero"
        yield f'zero = mesh["{shared}"]  # ZeRO\'s states'
        yield f'hybrid = mesh["dp_replicate", "{shared}"]  # whole over the first'
    if job.has_experts:
        yield from _expert_lines(job, kind)


def _expert_lines(job: JobSpec, kind: str) -> Iterator[str]:
    """The same ranks as experts see them; rows of tokens go over etp and ep together."""
    axes, copies = expert_order(job.parallel.order)[::-1], expert_view(job).copies
    dims = list(_dims(axes, job.expert_sizes, "edp", copies))
    cut = [axis for axis in axes if axis in ("etp", "ep")]
    over = "edp" if copies == 1 else "edp_replicate and edp_shard, states over edp_shard"
    yield ""
    yield f"# expert j at ep index j // (experts / ep); gradients of experts over {over}"
    yield f'experts = init_device_mesh("{kind}", {_shape_and_names(dims)})'
    yield f'etp_ep = experts[{_quoted(cut)}]._flatten("etp_ep")  # rows of tokens'


def _dims(axes: Iterable[str], sizes: Mapping[str, int], replicas: str, copies: int) -> Iterator[tuple[str, int]]:
    """The axes with their sizes; that of the replicas cut where ZeRO's shares exist several
    times."""
    for axis in axes:
        if axis == replicas and copies > 1:
            yield from ((f"{axis}_replicate", copies), (f"{axis}_shard", sizes[axis] // copies))
        else:
            yield axis, sizes[axis]


def _shape_and_names(dims: Iterable[tuple[str, int]]) -> str:
    names, sizes = zip(*dims, strict=True)
    return f"({', '.join(map(str, sizes))}), mesh_dim_names=({_quoted(names)})"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


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


LAUNCHER = ForeignLauncher("torch", "torch 2.13 (DeviceMesh)", "python", _refusals, _notes, _body)
