"""A plan as Colossal-AI's HybridParallelPlugin, or as its legacy config in 2D, 2.5D and 3D.

Spelling and limits: colossalai 0.5.0, booster/plugin/hybrid_parallel_plugin.py and
legacy/context/parallel_context.py. dp_outside decides whether dp or pp varies slowest; sequences
are split over tp (`split_gather`) or over separate ranks (`ring_attn`), not both; ZeRO 0 to 2, at
most 1 in a pipeline. The legacy config numbers ranks tp, pp, dp. Models with experts have a plugin
of their own, MoeHybridParallelPlugin (moe_hybrid_parallel_plugin.py): ep divides dp, each expert is
cut as tp is, and tokens are not split over tp.

By hand, tp 4 in mode 2d and pp 2: parallel = dict(pipeline=dict(size=2),
tensor=dict(size=4, mode="2d")).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Value, python_call
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, find_order, refused, splits_sequence, uneven_refusals
from mpctl.model.layout.topology import job_grid, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec

INSIDE, OUTSIDE = "tp-cp-dp-pp", "tp-cp-pp-dp"
LIMITS = LauncherLimits(
    "Colossal-AI",
    cp_comm=("p2p", "a2a"),
    orders=(INSIDE, OUTSIDE),
    zero=(0, 1, 2),
    zero_in_pipeline=(0, 1),
    recompute=("none", "full"),
    tensor_modes=("1d", "2d", "2.5d", "3d"),
    ep=True,
)
MOE = replace(LIMITS, orders=(INSIDE,), cp=False, zero=(0, 1))
LEGACY = replace(
    LIMITS,
    launcher="Colossal-AI's legacy API",
    orders=(OUTSIDE,),
    cp=False,
    zero=(0,),
    zero_in_pipeline=(0,),
    recompute=("none",),
    dtypes=("fp32", "fp16"),
)


def _is_grid(plan: Plan) -> bool:
    return plan.job.parallel.tensor_mode != "1d"


def _refusals(plan: Plan) -> Iterator[Issue]:
    p, t = plan.job.parallel, plan.job.training
    yield from _limits(plan).refusals(plan)
    if plan.job.has_experts:
        yield from _expert_refusals(plan.job)
    if p.cp > 1 and splits_sequence(plan.job):
        message = "Colossal-AI splits sequences over cp or over tp, not over both"
        yield refused("parallel.sequence_parallel", "true", message, "use --no-sequence-parallel, or cp 1")
    if p.vpp > 1 or _is_grid(plan):
        message = "Colossal-AI takes the layers of a stage for one chunk a rank alone"
        yield from uneven_refusals(plan, message)
    if not _is_grid(plan) and t.reduced_dtype not in ("fp32", t.dtype):
        message = "Colossal-AI reduces gradients in fp32 or in the data type"
        yield refused("training.gradient_dtype", t.reduced_dtype, message, "use fp32")


def _limits(plan: Plan) -> LauncherLimits:
    if _is_grid(plan):
        return LEGACY
    return MOE if plan.job.has_experts else LIMITS


def _expert_refusals(job: JobSpec) -> Iterator[Issue]:
    p, dp = job.parallel, job.sizes["dp"]
    if p.tp > 1:
        message = "Colossal-AI's experts are cut as tp is, and get the same tokens on each rank"
        yield refused("parallel.tp", p.tp, message, "use tp 1")
    if dp % p.ep:
        message = f"Colossal-AI deals experts to replicas, which are {dp}"
        yield refused("parallel.ep", p.ep, message, "use an ep that divides dp")
    if p.ep > 1 and p.pp == 1 and zero_stage(job) == 0:
        message = "Colossal-AI reduces gradients of experts with ZeRO, or in a pipeline"
        yield refused("parallel.zero", 0, message, "use zero 1")
    if job.training.dtype == "fp32" and zero_stage(job):
        yield refused("training.dtype", "fp32", "Colossal-AI's ZeRO with experts takes fp16 or bf16", "use dtype bf16")
    if job.model is not None and job.model.router_bias:
        yield refused("model.router_bias", "true", "Colossal-AI does not change biases of a router", "use false")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Colossal-AI", schedules=("1f1b", "interleaved"))
    if _is_grid(plan):
        yield (
            f"tensor_mode {job.parallel.tensor_mode} is in colossalai.legacy alone, whose layers "
            "(colossalai.legacy.nn) the model must be made of; launch with "
            "colossalai.legacy.launch_from_torch(config=FILE)"
        )
        return
    yield _batch_advice(job)
    if job.has_experts:
        yield (
            "experts are those of Hugging Face's Mixtral or DeepSeek models, router and auxiliary "
            "losses too; the plugin overlaps no gradients of experts"
        )
    if job.training.recompute == "full":
        yield "recompute full: model.gradient_checkpointing_enable() before booster.boost"
    if job.parallel.cp > 1:
        yield "approximated: ring attention in zigzag order, over tp's neighbours"


def _batch_advice(job: JobSpec) -> str:
    size, count = job.training.micro_batch_size, job.num_microbatches
    if job.parallel.pp > 1:
        return f"give each booster.execute_pipeline {size * count} samples of a replica"
    return f"batches of {size}, and an optimizer step after {count} backward passes"


def _body(plan: Plan) -> str:
    if _is_grid(plan):
        return "\n".join(_legacy_lines(plan.job))
    name = f"{'Moe' * plan.job.has_experts}HybridParallelPlugin"
    call = python_call(name, dict(_arguments(plan)))
    imports = f"from colossalai.booster.plugin import {name}"
    needs_torch = "torch." in call
    return "\n".join([*(["import torch"] if needs_torch else []), imports, "", f"plugin = {call}"])


def _arguments(plan: Plan) -> Iterator[tuple[str, Value]]:
    job, p, t = plan.job, plan.job.parallel, plan.job.training
    yield from (("tp_size", p.tp), ("pp_size", p.pp))
    if job.has_experts:
        yield "ep_size", p.ep
    if p.cp > 1:
        yield from (("sp_size", p.cp), ("enable_sequence_parallelism", True))
        yield "sequence_parallelism_mode", "all_to_all" if p.cp_comm == "a2a" else "ring_attn"
    elif splits_sequence(job):
        yield from (("sp_size", 1), ("enable_sequence_parallelism", True))
        yield "sequence_parallelism_mode", "split_gather"
    yield from (("precision", t.dtype), ("zero_stage", zero_stage(job)))
    if p.pp > 1:
        yield from _pipeline(plan)
    if job.model is not None:
        yield "enable_flash_attention", job.model.attention == "flash"
        yield "make_vocab_size_divisible_by", job.model.vocab_divisor
    yield "max_norm", t.clip_norm
    if t.dtype == "fp16":
        yield from (("initial_scale", t.loss_scale), ("min_scale", t.min_loss_scale))
        yield "growth_interval", t.loss_scale_window
    yield "overlap_communication", p.overlap_gradients and not job.has_experts
    if job.has_experts:
        yield "moe_dp_outside", False
    else:
        yield "dp_outside", find_order(job, (INSIDE, OUTSIDE)) == OUTSIDE


def _pipeline(plan: Plan) -> Iterator[tuple[str, Value]]:
    p = plan.job.parallel
    yield "pp_style", "interleaved" if p.vpp > 1 else "1f1b"
    yield "num_model_chunks", p.vpp
    yield "microbatch_size", plan.job.training.micro_batch_size
    if p.vpp == 1 and plan.stages is not None:
        yield "num_layers_per_stage", [stop - start for ((start, stop),) in plan.stages]


def _legacy_lines(job: JobSpec) -> Iterator[str]:
    p, t = job.parallel, job.training
    depth = job_grid(job).axes.get("depth")
    more = f", depth={depth}" if depth else ""
    yield "parallel = dict("
    yield f"    pipeline=dict(size={p.pp}),"
    yield f'    tensor=dict(size={p.tp}, mode="{p.tensor_mode}"{more}),'
    yield ")"
    yield f"BATCH_SIZE = {t.micro_batch_size * (job.num_microbatches if p.pp > 1 else 1)}"
    if p.pp > 1:
        yield f"NUM_MICRO_BATCHES = {job.num_microbatches}"
    elif job.num_microbatches > 1:
        yield f"gradient_accumulation = {job.num_microbatches}"
    if p.vpp > 1:
        yield f"model = dict(num_chunks={p.vpp})"
    if t.dtype == "fp16":
        yield "from colossalai.legacy.amp import AMP_TYPE"
        yield "fp16 = dict(mode=AMP_TYPE.NAIVE)"
    yield f"clip_grad_norm = {t.clip_norm}"


LAUNCHER = ForeignLauncher("colossalai", "Colossal-AI 0.5", "python", _refusals, _notes, _body)
