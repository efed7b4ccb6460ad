"""A plan as the command line of Megatron-LM's pretrain_gpt.py.

Spelling and limits: megatron-core 0.19.2, megatron/training/arguments.py. Megatron derives dp and
the micro batches, pads the vocabulary to a multiple of 128 x tp, runs 1F1B (interleaved with
several chunks), and has ZeRO 1 as its distributed optimizer, ZeRO 2 and 3 as Megatron-FSDP.

By hand, 4 stages of 2 chunks over 12 layers balanced as 1, 2, 2, 1, 1, 2, 2, 1 are the layout
`Et|tt|tt|t|t|tt|tt|tL`: stage s of chunk c is part c x 4 + s.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Value
from mpctl.interop.emitted import WIDTH, ForeignLauncher, plan_notes
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.limits import LauncherLimits, find_order, refused
from mpctl.interop.mapping import ForeignKey, written
from mpctl.interop.megatron_experts import (
    LAYER_FREQ,
    expert_flags,
    expert_notes,
    expert_refusals,
    latent_flags,
    layer_pattern,
    layers_with_experts,
)
from mpctl.interop.megatron_flags import (
    BATCH_FLAGS,
    FP16_FLAGS,
    FSDP_STRATEGIES,
    LAYOUT_FLAGS,
    MODEL_FLAGS,
    NARROW_FLAGS,
    ORDERS,
    ROPE_SCALING,
    SOFTWARE,
    TRAINING_FLAGS,
    WITHOUT_FLAG,
    variants,
)
from mpctl.model.layout.topology import expert_view, zero_copies, zero_stage
from mpctl.model.pipeline.stages import Span
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec, is_set
from mpctl.spec.training import CORE
from mpctl.spec.yarn import find_yarn

LIMITS = LauncherLimits(
    "Megatron-LM",
    orders=tuple(ORDERS),
    dtypes=("fp32", "bf16", "fp16", *NARROW_FLAGS),
    partition=True,
    ep=True,
    etp=True,
    zero_size="any",
)
SCHEDULES = ("1f1b", "interleaved")
Flags = Iterator[str]


def megatron_refusals(plan: Plan, who: str = LIMITS.launcher) -> Iterator[Issue]:
    """Issues of a plan that Megatron-Core cannot express; who: the launcher, for messages."""
    job, training = plan.job, plan.job.training
    yield from replace(LIMITS, launcher=who).refusals(plan)
    legal = {"fp32": ("fp32",), "fp16": ("fp16", "fp32")}.get(training.dtype, ("fp32", "bf16"))
    if (reduced := training.reduced_dtype) not in legal and training.dtype != "fp64":
        message = f"{who} reduces gradients of {training.dtype} in {' or '.join(legal)}"
        yield refused("training.gradient_dtype", reduced, message, f"use gradient_dtype {legal[0]}")
    if training.partition_activations and job.parallel.tp == 1:
        message = f"{who} distributes saved activations over tp, which is 1"
        hint = "use partition_activations false"
        yield refused("training.partition_activations", "true", message, hint)
    if job.has_experts and (edp := expert_view(job).replicas) % (copies := zero_copies(job)):
        message = f"{who} cuts the replicas of experts, edp {edp}, into {copies} instances too"
        hint = "use a larger zero_size, or a smaller ep"
        yield refused("parallel.zero_size", job.parallel.zero_size, message, hint)
    if training.seed == 0:
        yield refused("training.seed", 0, f"{who} takes seeds above 0", "use seed 1 or above")
    if job.model is not None:
        yield from _model_refusals(job.model, who)
        yield from expert_refusals(job.model, who)


def _model_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    """Issues of a shape that Megatron-Core's GPT model cannot have; who: the launcher, for
    messages."""
    if model.family != "gpt":
        message = f"only gpt models are written as {who}'s"
        yield refused("model.family", model.family, message, "use --emit torch for its layout alone")
    if model.norm_order != "pre":
        yield refused("model.norm_order", model.norm_order, f"{who} has pre", "use norm_order pre")
    of_yarn = () if find_yarn(model) is None else ("yarn_scaling", "attention_scale")
    for key in WITHOUT_FLAG:
        if key not in of_yarn and is_set(model, key):
            message = f"{who} has no setting that does the same"
            hint = "--emit torch for the layout"
            yield refused(f"model.{key}", getattr(model, key), message, hint)
    every = model.attention_window_every
    if every is not None and every > 2:
        message = f"{who} can give every N-th layer full attention, not one in {every} the window"
        yield refused("model.attention_window_every", every, message, "use full_attention_every")
    if model.position == "alibi":
        message = f"{who} has learned_absolute, rope and none"
        yield refused("model.position", "alibi", message, "use learned or rotary")
    if model.norm == "nonparametric":
        message = f"{who}'s norms have weights"
        yield refused("model.norm", model.norm, message, "use layernorm or rmsnorm")
    if model.qk_norm == "width":
        yield refused("model.qk_norm", "width", f"{who} norms each head", "use qk_norm true")
    if model.bias in ("attention", "mlp"):
        message = f"{who} has biases in all linear layers, in q, k and v, or in none"
        yield refused("model.bias", model.bias, message, "use true, qkv or false")
    if model.activation not in ("gelu", "gelu_tanh", "relu2", "swiglu"):
        message = f"{who} has gelu, gelu_tanh, relu2 and swiglu of these"
        yield refused("model.activation", model.activation, message, "use gelu or swiglu")
    elif model.activation == "gelu_tanh" and model.bias is not True:
        message = f"{who} has the tanh form in its kernel for gelu with bias alone"
        yield refused("model.activation", "gelu_tanh", message, "use gelu, or bias true")
    if model.position == "rotary" and not model.rotary_base.is_integer():
        message = f"{who} takes whole numbers"
        yield refused("model.rotary_base", model.rotary_base, message, "use an integer")
    if model.rotary_scaling is not None:
        for key, fixed in ROPE_SCALING.items():
            if (value := getattr(model.rotary_scaling, key)) != fixed:
                where = f"model.rotary_scaling.{key}"
                yield refused(where, value, f"{who} fixes {fixed}", f"use {fixed}")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "Megatron-LM", schedules=SCHEDULES)
    if zero_stage(job) > 1:
        yield (
            f"approximated: ZeRO {zero_stage(job)} is Megatron-FSDP, other code than the "
            "distributed optimizer, with its own checkpoint format; CUDA_DEVICE_MAX_CONNECTIONS "
            "must not be 1"
        )
    if narrow := NARROW_FLAGS.get(job.training.dtype):
        yield (f"approximated: {job.training.dtype} is {' '.join(narrow)} over bf16, with Transformer Engine's recipe")
    if job.model is None:
        yield "no model is named: add --num-layers and the other flags of its shape"
    elif job.parallel.schedule == "1f1b" and job.parallel.vpp > 1:
        yield "several chunks a rank: 1F1B is the interleaved schedule"
    yield from expert_notes(job)
    yield "not here: data, tokenizer (its vocabulary wins over --vocab-size), checkpoints, logging"


def _body(plan: Plan) -> str:
    """A command over several lines. The words of torchrun are written verbatim, the flags are
    quoted where a shell would interpret them."""
    job = plan.job
    lines = list(_broken([*_launch_words(job), "pretrain_gpt.py"]))
    parts = (_layout_flags(plan), _batch_flags(job), _model_flags(job), _expert_flags(job))
    for flags in (*parts, _training_flags(job)):
        lines += _broken(map(shlex.quote, flags))
    return " \\\n    ".join(lines)


def _broken(words: Iterable[str]) -> Iterator[str]:
    """Words over lines, each new one beginning with a flag."""
    line = ""
    for word in words:
        if line and word.startswith("--") and len(line) + len(word) > WIDTH - 25:
            yield line
            line = ""
        line = f"{line} {word}" if line else word
    if line:
        yield line


def _launch_words(job: JobSpec) -> list[str]:
    """torchrun on each node; the node's number and the first node's address are shell variables."""
    p, nodes, gpus = job.parallel, job.cluster.nodes, job.cluster.gpus_per_node or 1
    needs_one = (p.tp > 1 or p.cp > 1) and zero_stage(job) < 2
    words = ["CUDA_DEVICE_MAX_CONNECTIONS=1"] if needs_one else []
    if nodes == 1:
        return [*words, "torchrun", "--standalone", "--nproc-per-node", str(gpus)]
    return [
        *words,
        "torchrun",
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        str(gpus),
        "--node-rank",
        '"$NODE_RANK"',
        "--master-addr",
        '"$MASTER_ADDR"',
        "--master-port",
        "29500",
    ]


def plain_flags(job: JobSpec, flags: Iterable[ForeignKey]) -> Flags:
    """The words of settings that are one flag each; a setting that is None is left out."""
    return _words(written(job, flags))


def _words(flags: Iterable[tuple[str, Value]]) -> Flags:
    """Flags as words; True is a switch, and numbers of a list are joined."""
    for flag, value in flags:
        yield flag
        if value is not True:
            yield ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _layout_flags(plan: Plan) -> Flags:
    job, p = plan.job, plan.job.parallel
    yield from plain_flags(job, LAYOUT_FLAGS)
    yield from ORDERS[find_order(job, tuple(ORDERS)) or "tp-cp-dp-pp"]
    if (by_cost := layout_by_cost(plan)) is not None:
        yield from ("--pipeline-model-parallel-layout", by_cost)
    elif p.vpp > 1:
        yield from ("--num-virtual-stages-per-pipeline-rank", str(p.vpp))
    if p.sequence_parallel and p.tp > 1:
        yield "--sequence-parallel"
        if p.tp_comm_overlap:
            yield "--tp-comm-overlap"
    if p.embedding_is_layer:
        yield "--account-for-embedding-in-pipeline-split"
    if p.loss_is_layer:
        yield "--account-for-loss-in-pipeline-split"
    if p.zero:
        yield "--use-distributed-optimizer"
    if (copies := zero_copies(job)) > 1:
        yield from ("--num-distributed-optimizer-instances", str(copies))
    if p.zero > 1:
        yield from ("--use-megatron-fsdp", "--data-parallel-sharding-strategy")
        yield from (FSDP_STRATEGIES[p.zero], "--ckpt-format", "fsdp_dtensor")
        yield "--no-gradient-accumulation-fusion"
    if p.overlap_gradients:
        yield "--overlap-grad-reduce"
        if p.zero:
            yield "--overlap-param-gather"


def _expert_flags(job: JobSpec) -> Flags:
    """Experts and latents; which layers have experts as arithmetic of lists."""
    for flag, value in (*expert_flags(job), *latent_flags(job)):
        if flag == LAYER_FREQ and job.model is not None:
            yield from (flag, layer_pattern(layers_with_experts(job.model)))
        else:
            yield from _words([(flag, value)])


def layout_by_cost(plan: Plan) -> str | None:
    """The stages of a plan that balances them by cost, as a layout; None for other plans."""
    p = plan.job.parallel
    if p.stage_balance != "cost" or p.pp == 1 or plan.stages is None:
        return None
    return layout_text(plan.stages)


def layout_text(stages: Iterable[Iterable[Span]]) -> str:
    """The spans of layers by [stage][chunk] as Megatron's pipeline layout: E embedding, t layer, L
    loss, `|` between the parts in the order in which a sample passes them."""
    by_stage = [[stop - start for start, stop in chunks] for chunks in stages]
    counts = [count for chunk in zip(*by_stage, strict=True) for count in chunk]
    parts = ["t" if count == 1 else f"t*{count}" if count else "" for count in counts]
    return f"E{'|'.join(parts)}L"


def _batch_flags(job: JobSpec) -> Flags:
    t = job.training
    yield from plain_flags(job, BATCH_FLAGS)
    if t.dtype == "bf16" or t.dtype in NARROW_FLAGS:
        yield "--bf16"
        yield from NARROW_FLAGS.get(t.dtype, ())
    if t.dtype == "fp8" and t.fp8_recipe == "tensorwise":
        yield from ("--fp8-recipe", "tensorwise")
    elif t.dtype == "fp8":  # Megatron's own default is a history of one step
        yield from ("--fp8-amax-history-len", str(t.fp8_amax_history_len))
        yield from ("--fp8-amax-compute-algo", "max")
    if t.reduced_dtype == "bf16":
        yield "--grad-reduce-in-bf16"
    if t.dtype == "fp16":
        yield "--fp16"
        if t.reduced_dtype == "fp32":
            yield "--accumulate-allreduce-grads-in-fp32"
        yield from plain_flags(job, FP16_FLAGS)
    if t.recompute == "selective":
        yield from ("--recompute-granularity", "selective", "--recompute-modules")
        yield from t.recompute_modules or (CORE,)
    if t.recompute == "full":
        yield from ("--recompute-granularity", "full", "--recompute-method", "uniform")
        yield from ("--recompute-num-layers", "1")
    if t.partition_activations:
        yield "--distribute-saved-activations"


def _model_flags(job: JobSpec) -> Flags:
    model = job.model
    if model is None:
        return
    yield from plain_flags(job, MODEL_FLAGS)
    if model.kv_heads != model.heads:
        yield from ("--group-query-attention", "--num-query-groups", str(model.kv_heads))
    if model.position == "rotary":
        yield from ("--rotary-base", str(int(model.rotary_base)))
    if model.rotary_scaling is not None:
        yield from ("--use-rope-scaling", "--rope-scaling-factor", str(model.rotary_scaling.factor))
    if model.activation == "swiglu":
        yield "--swiglu"
    if model.activation == "relu2":
        yield "--squared-relu"
    yield from _words(variants(model))
    if model.activation == "gelu" and model.bias is True:
        yield "--no-bias-gelu-fusion"  # the fused kernel computes the tanh form
    if model.bias is not True:
        yield "--disable-bias-linear"
    if not model.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"


def _training_flags(job: JobSpec) -> Flags:
    lowest = {"min_learning_rate": job.training.lowest_rate}
    training = job.training.model_copy(update=lowest)
    if training.lr_schedule != "wsd":
        training = training.model_copy(update={"lr_wsd_decay_style": None})
    yield from plain_flags(job.model_copy(update={"training": training}), TRAINING_FLAGS)


LAUNCHER = ForeignLauncher("megatron", SOFTWARE, "shell", megatron_refusals, _notes, _body, read_megatron)
