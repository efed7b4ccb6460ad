"""The settings that are a flag of Megatron-LM one to one, and its flags for variants of decoders.

Names, types and defaults are those of megatron-core 0.19.2, megatron/training/arguments.py, checked
by tests/interop/test_megatron_flags.py: training.weight_decay 0.1 is `--weight-decay 0.1`, and
without the flag Megatron takes 0.01. Flags that combine several settings, or express one
differently, are in megatron.py (writing) and from_megatron.py (reading).

Variants are features of decoders beyond GPT-2's and Llama's shapes. A window of w keys is
`--window-size w-1,0` there (keys to the left of the query, and to its right);
`--window-attn-skip-freq N` leaves every N-th layer without it, the last of each N: a window of 128
in every second layer is `--window-size 127,0 --window-attn-skip-freq 2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from mpctl.interop.config_text import Value
from mpctl.interop.limits import find_order, overlaps_products, splits_sequence
from mpctl.interop.mapping import ForeignKey, KeyReader, written
from mpctl.interop.megatron_optimizers import OPTIMIZER_FLAGS, gradients_of
from mpctl.model.layout.topology import zero_copies
from mpctl.model.pipeline.explicit import find_layout, layout_parts
from mpctl.model.pipeline.stages import job_stages
from mpctl.plan.estimate.loss import loss_way
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import write_layout
from mpctl.spec.model import ModelSpec
from mpctl.spec.parallel import CpComm
from mpctl.spec.runtime import job_profile
from mpctl.spec.training import CORE, CrossEntropy, RecomputeModule

SOFTWARE = "Megatron-LM core 0.19"
CP_COMM, CP_SIZES = "--cp-comm-type", "--hierarchical-context-parallel-sizes"
ORDERS = ("tp-cp-dp-pp", "tp-cp-pp-dp")
POSITIONS = {"learned": "learned_absolute", "rotary": "rope", "none": "none"}
NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
ATTENTIONS = {"flash": "flash", "unfused": "unfused"}
NEAREST = {"auto": "flash", "fused": "flash"}
LR_SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "WSD"}
NARROW_FLAGS = {
    "fp8": {"--fp8-format": "hybrid"},
    "mxfp8": {"--fp8-format": "e4m3", "--fp8-recipe": "mxfp8"},
    "nvfp4": {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"},
}
"""Products of fewer than 16 bits, by training.dtype, in addition to --bf16."""
FSDP_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}
ROPE_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192.0}
"""The values that --use-rope-scaling sets
(megatron/core/models/common/embeddings/rotary_pos_embedding)."""

INSTANCES = "--num-distributed-optimizer-instances"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
LAYERS_A_CHUNK = "--num-layers-per-virtual-pipeline-stage"
LAYOUT = "--pipeline-model-parallel-layout"


def words_of(values: Iterable[tuple[str, Value]]) -> Iterator[str]:
    """Flags as words; True is a switch, which False leaves out, and numbers of a list are joined."""
    for flag, value in values:
        if value is not False:
            yield flag
        if isinstance(value, tuple):
            yield from value
        elif not isinstance(value, bool):
            yield ",".join(map(str, value)) if isinstance(value, list) else str(value)


def pipeline_layout(job: JobSpec) -> str | None:
    """The layout of a job that has one or balances its stages by cost, in its shortest form; None for
    other jobs."""
    if job.parallel.pp == 1 or job.model is None:
        return None
    if (layout := find_layout(job)) is not None:
        return write_layout(layout.parts)
    if job.parallel.stage_balance != "cost":
        return None
    return write_layout(layout_parts(job_stages(job, job.model.layers), job.model.mtp_layers))


def _chunks(job: JobSpec) -> int | None:
    return job.parallel.vpp if job.parallel.vpp > 1 and pipeline_layout(job) is None else None


def cp_sizes(job: JobSpec) -> list[int] | None:
    """Ranks of cp that exchange sequence for heads, and ranks of a ring between such groups."""
    p = job.parallel
    return [p.head_parts, p.cp // p.head_parts] if p.stated_cp_comm == "a2a+p2p" else None


def read_cp_comm(reader: KeyReader, comm: str, sizes: str) -> None:
    """Set parallel.cp_comm and cp_a2a_size. comm, sizes: the keys of one type, or one a layer, and of the
    two sizes; Megatron takes a2a+p2p over one group for what its ring or exchange alone is."""
    s, types = reader.settings, {*reader.flags.get(comm, ())}
    if not types or s.get("parallel.cp", 1) == 1:
        return
    if len(types) > 1:
        message = f"{' '.join(reader.flags[comm])}: layers differ, and a job has one type"
        reader.wrong(comm, message, f"use one of {', '.join(sorted(types))} in all layers")
        return
    (kind,) = types
    if kind not in get_args(CpComm):
        reader.wrong(comm, f"{kind!r} is no type", f"use {', '.join(get_args(CpComm))}")
        return
    s["parallel.cp_comm"], given = kind, reader.flags.get(sizes, ())
    if kind != "a2a+p2p" or not given:
        return
    if len(given) != 2 or not all(size.isdecimal() and int(size) for size in given):
        reader.wrong(sizes, f"{' '.join(given)}: a job says two sizes", "give the ranks of an exchange and of a ring")
        return
    inner, ring = map(int, given)
    if inner * ring != s["parallel.cp"]:
        reader.wrong(sizes, f"{inner} x {ring} is not cp {s['parallel.cp']}", "use sizes whose product is cp")
    elif 1 in (inner, ring):
        s["parallel.cp_comm"] = "p2p" if inner == 1 else "a2a"
    else:
        s["parallel.cp_a2a_size"] = inner


def read_strategy(reader: KeyReader, key: str) -> int:
    """The ZeRO stage of Megatron-FSDP; without the key that of Megatron-LM and of Megatron-Bridge's recipes."""
    stages = {"no_shard": 0, "optim": 1, **{name: stage for stage, name in FSDP_STRATEGIES.items()}}
    strategy = reader.value(key, FSDP_STRATEGIES[3])
    if strategy not in stages:
        reader.wrong(key, f"{strategy!r} is no strategy of Megatron-FSDP", f"use {', '.join(stages)}")
    return stages.get(strategy, 3)


def _with_fsdp(value: Value) -> Callable[[JobSpec], Value]:
    return lambda job: value if job.parallel.zero > 1 else None


LAYOUT_FLAGS = (
    ForeignKey("--tensor-model-parallel-size", "parallel.tp", int, 1),
    ForeignKey("--pipeline-model-parallel-size", "parallel.pp", int, 1),
    ForeignKey("--context-parallel-size", "parallel.cp", int, 1),
    ForeignKey(CP_COMM, value=lambda job: job.parallel.stated_cp_comm),
    ForeignKey(CP_SIZES, value=lambda job: tuple(map(str, sizes)) if (sizes := cp_sizes(job)) else None),
    ForeignKey("--decoder-first-pipeline-num-layers", "parallel.first_stage_layers", int),
    ForeignKey("--decoder-last-pipeline-num-layers", "parallel.last_stage_layers", int),
    ForeignKey("--use-tp-pp-dp-mapping", value=lambda job: find_order(job, ORDERS) == ORDERS[1]),
    ForeignKey(LAYOUT, value=pipeline_layout),
    ForeignKey(CHUNKS, value=_chunks),
    ForeignKey("--sequence-parallel", value=splits_sequence),
    ForeignKey("--tp-comm-overlap", value=overlaps_products),
    ForeignKey("--account-for-embedding-in-pipeline-split", "parallel.embedding_is_layer", bool, False),
    ForeignKey("--account-for-loss-in-pipeline-split", "parallel.loss_is_layer", bool, False),
    ForeignKey("--use-distributed-optimizer", value=lambda job: job.parallel.zero > 0),
    ForeignKey(INSTANCES, value=lambda job: copies if (copies := zero_copies(job)) > 1 else None),
    ForeignKey("--use-megatron-fsdp", value=_with_fsdp(True)),
    ForeignKey("--data-parallel-sharding-strategy", value=lambda job: FSDP_STRATEGIES.get(job.parallel.zero)),
    ForeignKey("--ckpt-format", value=_with_fsdp("fsdp_dtensor")),
    ForeignKey("--no-gradient-accumulation-fusion", value=_with_fsdp(True)),
    ForeignKey("--overlap-grad-reduce", "parallel.overlap_gradients", bool, False),
    ForeignKey("--overlap-param-gather", value=lambda job: job.parallel.overlap_gradients and job.parallel.zero > 0),
)
BATCH_FLAGS = (
    ForeignKey("--micro-batch-size", "training.micro_batch_size", int),
    ForeignKey("--global-batch-size", "training.global_batch_size", int),
)


def _narrow(flag: str) -> Callable[[JobSpec], Value]:
    return lambda job: NARROW_FLAGS.get(job.training.dtype, {}).get(flag)


def _recipe(job: JobSpec) -> Value:
    is_tensorwise = job.training.dtype == "fp8" and job.training.fp8_recipe == "tensorwise"
    return "tensorwise" if is_tensorwise else _narrow("--fp8-recipe")(job)


def _if_delayed(value: Callable[[JobSpec], Value]) -> Callable[[JobSpec], Value]:
    """Megatron's own default is a history of one step."""
    return lambda job: value(job) if job.training.dtype == "fp8" and job.training.fp8_recipe != "tensorwise" else None


PRECISION_FLAGS = (
    ForeignKey("--bf16", value=lambda job: job.training.dtype in ("bf16", *NARROW_FLAGS)),
    ForeignKey("--fp8-format", value=_narrow("--fp8-format")),
    ForeignKey("--fp4-format", value=_narrow("--fp4-format")),
    ForeignKey("--fp8-recipe", value=_recipe),
    ForeignKey("--fp4-recipe", value=_narrow("--fp4-recipe")),
    ForeignKey("--fp8-amax-history-len", value=_if_delayed(lambda job: job.training.fp8_amax_history_len)),
    ForeignKey("--fp8-amax-compute-algo", value=_if_delayed(lambda job: "max")),
    ForeignKey("--grad-reduce-in-bf16", value=lambda job: gradients_of(job) == "bf16"),
)
FP16_FLAGS = (
    ForeignKey("--fp16", value=True),
    ForeignKey("--accumulate-allreduce-grads-in-fp32", value=lambda job: gradients_of(job) == "fp32"),
    ForeignKey("--initial-loss-scale", "training.loss_scale", float, 2.0**32),
    ForeignKey("--loss-scale-window", "training.loss_scale_window", int, 1000),
    ForeignKey("--min-loss-scale", "training.min_loss_scale", float, 1.0),
)


def _recomputed(job: JobSpec) -> Value:
    return None if job.training.recompute == "none" else job.training.recompute


def _modules(job: JobSpec) -> Value:
    t = job.training
    return tuple(t.recompute_modules or (CORE,)) if t.recompute == "selective" else None


def _if_full(value: Value) -> Callable[[JobSpec], Value]:
    return lambda job: value if job.training.recompute == "full" else None


RECOMPUTE_FLAGS = (
    ForeignKey("--recompute-granularity", value=_recomputed),
    ForeignKey("--recompute-modules", value=_modules),
    ForeignKey("--recompute-method", value=_if_full("uniform")),
    ForeignKey("--recompute-num-layers", value=_if_full(1)),
    ForeignKey("--distribute-saved-activations", "training.partition_activations", bool, False),
)
RECOMPUTE = tuple(f"--recompute-{key}" for key in ("granularity", "modules", "method", "num-layers"))


def read_recompute(reader: KeyReader, given: str, keys: Sequence[str]) -> None:
    """Set what is recomputed. given: the granularity; keys: those of granularity, modules, method and layers."""
    granularity, listed, way, count = keys
    if given not in ("", "selective", "full"):
        reader.wrong(granularity, f"{given!r} is not known", "use selective or full")
    modules = reader.flags.get(listed, (CORE,))
    if given == "selective" and not {*modules} <= {*get_args(RecomputeModule)}:
        message = f"{' '.join(modules)}: not all of these are planned"
        reader.wrong(listed, message, f"use {' '.join(get_args(RecomputeModule))}, or granularity full")
    elif given == "selective" and modules != (CORE,):
        reader.settings["training.recompute_modules"] = list(modules)
    method, per = reader.value(way, "uniform"), reader.value(count, "1")
    if given == "full" and (method, per) != ("uniform", "1"):
        message = f"{method} with {per} layers: a job recomputes every layer from its input"
        reader.wrong(way, message, f"use uniform with {count} 1")
    reader.settings["training.recompute"] = given or "none"


FUSION, IMPLEMENTATION = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
FUSIONS = {"fused": "native", "te": "te", "linear": "linear"}
"""Implementations of a fused loss by training.cross_entropy; linear is on Megatron-LM's branch dev."""


def _way(job: JobSpec) -> CrossEntropy:
    return loss_way(job.training, job_profile(job.training))


def _implementation(job: JobSpec) -> Value:
    return FUSIONS.get(_way(job))


LOSS_FLAGS = (
    ForeignKey(FUSION, value=lambda job: _implementation(job) is not None),
    ForeignKey(IMPLEMENTATION, value=_implementation),
)


def loss_flags(job: JobSpec) -> Iterator[tuple[str, Value]]:
    """Flags of the way that a plan computes its loss, with their values; none for linear that is not the job's
    but its runtime's, of other software."""
    is_theirs = job.training.cross_entropy is None and _way(job) == "linear"
    return iter(()) if is_theirs else written(job, LOSS_FLAGS)


def read_loss(reader: KeyReader, fusion: str, implementation: str, *, absent: CrossEntropy | None = None) -> None:
    """The setting of these keys. Without the first, the second says nothing, and the way is `absent`; None
    where that is not known."""
    ways = {theirs: ours for ours, theirs in FUSIONS.items()}
    given = reader.value(implementation, "native")
    if reader.has(implementation) and given not in ways:
        reader.wrong(implementation, f"{given!r} is not known", f"use {', '.join(ways)}")
    elif reader.has(fusion) and reader.value(fusion, "true") not in ("false", "False"):
        reader.settings["training.cross_entropy"] = ways[given]
    elif reader.has(fusion):
        reader.settings["training.cross_entropy"] = "unfused"
    elif absent is not None:
        reader.settings["training.cross_entropy"] = absent
    if reader.has(implementation) and not reader.has(fusion):
        reader.nearest(implementation, f"{given}: says nothing without {fusion}", f"add {fusion}, or leave it out")


MODEL_FLAGS = (
    ForeignKey("--num-layers", "model.layers", int),
    ForeignKey("--hidden-size", "model.hidden", int),
    ForeignKey("--ffn-hidden-size", "model.ffn", int),
    ForeignKey("--num-attention-heads", "model.heads", int),
    ForeignKey("--kv-channels", "model.head_dim", int),
    ForeignKey("--seq-length", "model.seq_length", int),
    ForeignKey("--max-position-embeddings", "model.max_positions", int),
    ForeignKey("--vocab-size", "model.vocab", int),
    ForeignKey("--make-vocab-size-divisible-by", "model.vocab_divisor", int, 128),
    ForeignKey("--position-embedding-type", "model.position", str, "learned_absolute", POSITIONS),
    ForeignKey("--normalization", "model.norm", str, "LayerNorm", NORMS),
    ForeignKey("--norm-epsilon", "model.norm_epsilon", float, 1e-5),
    ForeignKey("--attention-backend", "model.attention", str, "flash", ATTENTIONS, NEAREST),
    ForeignKey("--hidden-dropout", "training.dropout", float, 0.1),
    ForeignKey("--attention-dropout", "training.attention_dropout", float, 0.1),
)


def _of_model(value: Callable[[ModelSpec], Value]) -> Callable[[JobSpec], Value]:
    return lambda job: None if job.model is None else value(job.model)


def _window(model: ModelSpec) -> Value:
    return None if model.attention_window is None else [model.attention_window - 1, 0]


def _full_attention(model: ModelSpec) -> Value:
    every = model.full_attention_every or model.attention_window_every or 1
    return every if model.attention_window is not None and every > 1 else None


def _rotary_percent(model: ModelSpec) -> Value:
    return model.rotary_fraction if model.position == "rotary" and model.rotary_fraction != 1 else None


def _scaling_factor(model: ModelSpec) -> Value:
    return model.rotary_scaling.factor if model.rotary_scaling else None


FORM_FLAGS = (
    ForeignKey("--group-query-attention", value=_of_model(lambda m: m.kv_heads != m.heads)),
    ForeignKey("--num-query-groups", value=_of_model(lambda m: m.kv_heads if m.kv_heads != m.heads else None)),
    ForeignKey("--rotary-base", value=_of_model(lambda m: int(m.rotary_base) if m.position == "rotary" else None)),
    ForeignKey("--use-rope-scaling", value=_of_model(lambda m: m.rotary_scaling is not None)),
    ForeignKey("--rope-scaling-factor", value=_of_model(_scaling_factor)),
    ForeignKey("--swiglu", value=_of_model(lambda m: m.activation == "swiglu")),
    ForeignKey("--squared-relu", value=_of_model(lambda m: m.activation == "relu2")),
)
VARIANT_FLAGS = (
    ForeignKey("--qk-layernorm", value=_of_model(lambda m: True if m.qk_norm else None)),
    ForeignKey("--add-qkv-bias", value=_of_model(lambda m: True if m.bias == "qkv" else None)),
    ForeignKey("--mtp-num-layers", "model.mtp_layers", int, value=_of_model(lambda m: m.mtp_layers or None)),
    ForeignKey("--rotary-percent", "model.rotary_fraction", float, value=_of_model(_rotary_percent)),
    ForeignKey("--window-size", value=_of_model(_window)),
    ForeignKey("--window-attn-skip-freq", "model.full_attention_every", int, value=_of_model(_full_attention)),
)
"""Features of decoders beyond the shapes of GPT-2 and Llama."""
END_FLAGS = (
    # the fused kernel computes the tanh form
    ForeignKey("--no-bias-gelu-fusion", value=_of_model(lambda m: m.activation == "gelu" and m.bias is True)),
    ForeignKey("--disable-bias-linear", value=_of_model(lambda m: m.bias is not True)),
    ForeignKey("--untie-embeddings-and-output-weights", value=_of_model(lambda m: not m.tied_embeddings)),
)


def _decay_style(job: JobSpec) -> Value:
    return job.training.lr_wsd_decay_style if job.training.lr_schedule == "wsd" else None


TRAINING_FLAGS = (
    ForeignKey("--train-iters", "training.steps", int),
    ForeignKey("--seed", "training.seed", int, 1234),
    ForeignKey("--lr", "training.learning_rate", float),
    ForeignKey("--min-lr", "training.min_learning_rate", float, 0.0, value=lambda job: job.training.lowest_rate),
    ForeignKey("--lr-warmup-iters", "training.warmup_steps", int, 0),
    ForeignKey("--lr-decay-style", "training.lr_schedule", str, "linear", LR_SCHEDULES),
    ForeignKey("--lr-decay-iters", "training.lr_decay_steps", int),
    ForeignKey("--lr-wsd-decay-iters", "training.lr_wsd_decay_steps", int),
    ForeignKey("--lr-wsd-decay-style", "training.lr_wsd_decay_style", str, "exponential", value=_decay_style),
    ForeignKey("--weight-decay", "training.weight_decay", float, 0.01),
    ForeignKey("--adam-beta1", "training.beta1", float, 0.9),
    ForeignKey("--adam-beta2", "training.beta2", float, 0.999),
    ForeignKey("--adam-eps", "training.epsilon", float, 1e-8),
    ForeignKey("--clip-grad", "training.clip_norm", float, 1.0),
    ForeignKey("--init-method-std", "training.init_std", float, 0.02),
)
ROWS = (
    *LAYOUT_FLAGS,
    *BATCH_FLAGS,
    *PRECISION_FLAGS,
    *FP16_FLAGS,
    *RECOMPUTE_FLAGS,
    *LOSS_FLAGS,
    *MODEL_FLAGS,
    *FORM_FLAGS,
    *VARIANT_FLAGS,
    *END_FLAGS,
    *TRAINING_FLAGS,
    *OPTIMIZER_FLAGS,
)
WITHOUT_FLAG = (
    "embedding_norm",
    "embedding_multiplier",
    "parallel_residual",
    "shared_norm",
    "yarn_scaling",
    "rotary_scaling_type",
    "window_rotary_base",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "head_bias",
)


def variants(job: JobSpec) -> Iterator[tuple[str, Value]]:
    """Flags of a decoder's variants, with their values; True for a switch."""
    return written(job, VARIANT_FLAGS)


def read_variants(reader: KeyReader) -> None:
    """The settings of these flags."""
    reader.read(VARIANT_FLAGS)
    flags, found = reader.flags, reader.settings
    if "--squared-relu" in flags:
        found["model.activation"] = "relu2"
    if "--qk-layernorm" in flags:
        found["model.qk_norm"] = True
    if "--add-qkv-bias" in flags and "--disable-bias-linear" in flags:
        found["model.bias"] = "qkv"
    if "--window-size" in flags:  # `(127,0)` is a window of 128, too; -1 to the left is no window
        text = flags["--window-size"][0]
        left, _, right = text.strip("()").replace(" ", "").partition(",")
        if not left.lstrip("-").isdecimal() or right != "0":
            hint = "give keys to the left and 0: 127,0 is a window of 128"
            reader.wrong("--window-size", f"{text!r} is no window that a job can say", hint)
        elif int(left) >= 0:
            found["model.attention_window"] = int(left) + 1
