"""A plan as a config file of Hugging Face's accelerate: FSDP2 with tensor and context parallelism.

Spelling and limits: accelerate 1.15, parallelism_config.py and commands/config/config_args.py. Its
mesh is dp_replicate, dp_shard, cp, tp with tp fastest; states are sharded over dp_shard x cp. ZeRO
3 is `fsdp_reshard_after_forward: true`, ZeRO 2 is false. It has no pipeline, no sequence
parallelism, and no sharding of the optimizer alone.

By hand, tp 4, cp 2 and dp 8 with ZeRO 3 on 64 ranks: dp_shard_size 8, dp_replicate_size 1; with
zero_size 4 dp_shard_size 2, dp_replicate_size 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Tree, Value, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.from_accelerate import read_accelerate
from mpctl.interop.limits import LauncherLimits, dp_degrees, refused
from mpctl.interop.log_formats import BAR, LauncherLog
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "accelerate",
    cp_comm=("p2p", "all_gather"),
    pp=False,
    sequence_parallel=False,
    zero=(0, 2, 3),
    recompute=("none", "full"),
    zero_size="dp",
    host=("offload_optimizer", "offload_parameters"),
)
MIXED_PRECISION = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
DISTRIBUTED_TYPES = {"cuda": "MULTI_GPU", "rocm": "MULTI_GPU", "tpu": "XLA"}
"""Keys are kinds of device; others are MULTI_CPU, MULTI_XPU, ..., accelerate's utils/dataclasses.py."""


def _refusals(plan: Plan) -> Iterator[Issue]:
    yield from LIMITS.refusals(plan)
    sizes, stage = plan.job.sizes, zero_stage(plan.job)
    if stage == 0 and sizes["cp"] > 1:
        yield refused("parallel.zero", 0, "accelerate shards over cp wherever it is above 1", "use zero 2 or 3")
    elif stage == 0 and sizes["tp"] > 1 and sizes["dp"] > 1:
        message = "accelerate combines tp with replicas only where dp is sharded"
        yield refused("parallel.zero", 0, message, "use zero 2 or 3")
    if plan.job.training.recompute == "full" and not _is_sharded(plan.job):
        message = "accelerate's config recomputes only what FSDP wraps"
        yield refused("training.recompute", "full", message, "use recompute none, or zero 2 or 3")
    yield from host_refusals(plan.job, "accelerate")


def host_refusals(job: JobSpec, who: str) -> Iterator[Issue]:
    """Issues of what FSDP keeps in host memory: parameters and moments together, where it shards them."""
    t = job.training
    if t.offload_optimizer == t.offload_parameters and (_is_sharded(job) or not t.offload_optimizer):
        return
    key = "offload_optimizer" if t.offload_optimizer else "offload_parameters"
    message = f"{who} keeps parameters and moments together in host memory, where FSDP shards them"
    yield refused(f"training.{key}", "true", message, "use zero 2 or 3 with both, or --emit deepspeed")


def _is_sharded(job: JobSpec) -> bool:
    return zero_stage(job) > 0


def _notes(plan: Plan) -> Iterator[str]:
    job, t = plan.job, plan.job.training
    yield from plan_notes(plan, "accelerate", divisor=0)
    yield (
        f"in the script: batches of {t.micro_batch_size} a data-parallel rank, "
        f"Accelerator(gradient_accumulation_steps={job.num_microbatches}), and the model itself; "
        "accelerate's config has neither"
    )
    if zero_stage(job) == 2:
        yield "ZeRO 2: parameters stay whole after forward (fsdp_reshard_after_forward false)"
    if t.dtype in ("bf16", "fp16"):
        yield f"{t.dtype} is mixed precision: parameters and optimizer states stay fp32"
    if job.sizes["tp"] > 1:
        yield "tp needs a transformers model with a tp_plan, loaded with this device mesh"
    if job.sizes["cp"] > 1:
        yield "approximated: cp is torch's, of scaled_dot_product_attention with causal masks alone"
    yield "start it on each node: accelerate launch --config_file FILE --machine_rank N SCRIPT"


def _body(plan: Plan) -> str:
    return yaml_text(config_tree(plan.job))


def config_tree(job: JobSpec, *, deepspeed: bool = False, has_trainer: bool = False) -> Tree:
    """The config file of a job. deepspeed: it shards, instead of FSDP; has_trainer: transformers' Trainer
    recomputes, and needs sizes of a mesh for more than one axis alone."""
    nodes = job.cluster.nodes
    tree: dict[str, Value | Tree] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if deepspeed else _distributed_type(job),
        "mixed_precision": MIXED_PRECISION.get(job.training.dtype, "no"),
        "num_machines": nodes,
        "num_processes": job.world_size,
        "main_training_function": "main",
    }
    if nodes > 1:
        tree |= {"main_process_ip": "MAIN_PROCESS_IP", "main_process_port": 29500}
    if deepspeed:
        tree["deepspeed_config"] = _deepspeed(job)
    elif _is_sharded(job):
        tree["fsdp_config"] = _fsdp(job, has_trainer=has_trainer)
    has_mesh = job.sizes["cp"] > 1 or dp_degrees(job)[0] > 1 or not has_trainer
    if (_is_sharded(job) and has_mesh and not deepspeed) or job.sizes["tp"] > 1:
        tree["parallelism_config"] = _parallelism(job)
    return tree


def _distributed_type(job: JobSpec) -> str:
    if _is_sharded(job):
        return "FSDP"
    device = job.cluster.device
    if job.world_size == 1:
        return "NO"
    kind = "cuda" if device is None else device.kind
    return DISTRIBUTED_TYPES.get(kind, f"MULTI_{kind.upper()}")


def _deepspeed(job: JobSpec) -> Tree:
    stage, t = zero_stage(job), job.training
    return {
        "zero_stage": stage,
        "offload_optimizer_device": "cpu" if t.offload_optimizer else "none",
        "offload_param_device": "cpu" if t.offload_parameters else "none",
        "zero3_init_flag": stage == 3,
        "zero3_save_16bit_model": stage == 3,
    }


def _fsdp(job: JobSpec, *, has_trainer: bool) -> Tree:
    tree: dict[str, Value] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": zero_stage(job) == 3,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": job.training.recompute == "full" and not has_trainer,
    }
    if job.training.offload_parameters:
        tree["fsdp_offload_params"] = True
    return tree


def _parallelism(job: JobSpec) -> Tree:
    """Sizes whose product is the world."""
    replicate, shard = dp_degrees(job) if _is_sharded(job) else (1, job.sizes["dp"])
    sizes = {
        "dp_replicate_size": replicate,
        "dp_shard_size": shard,
        "cp_size": job.sizes["cp"],
        "tp_size": job.sizes["tp"],
    }
    tree: dict[str, int | str] = {f"parallelism_config_{key}": n for key, n in sizes.items()}
    if job.sizes["cp"] > 1:
        is_gathered = job.parallel.stated_cp_comm == "all_gather"
        tree["parallelism_config_cp_comm_strategy"] = "allgather" if is_gathered else "alltoall"
    return tree


def _variables(plan: Plan) -> dict[str, str]:
    return variables_of(config_tree(plan.job))


def variables_of(tree: Tree) -> dict[str, str]:
    """The variables that `accelerate launch` makes of a config for every rank; Accelerator() reads them."""
    values: dict[str, object] = {"accelerate_mixed_precision": tree["mixed_precision"]}
    for name, prefix in (("fsdp", ""), ("parallelism_config", ""), ("deepspeed", "accelerate_deepspeed_")):
        table = tree.get(name if name == "parallelism_config" else f"{name}_config")
        if isinstance(table, Mapping):
            values[f"accelerate_use_{name}"] = True
            values |= {f"{prefix}{key.replace('3_init_flag', '3_init')}": value for key, value in table.items()}
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in values.items()}
    return {key.upper(): text for key, text in texts.items()}


LAUNCHER = ForeignLauncher(
    "accelerate",
    "accelerate 1.15",
    "yaml",
    _refusals,
    _notes,
    _body,
    read_accelerate,
    LauncherLog(BAR, "accelerate, transformers, Lightning"),
    variables=_variables,
)
