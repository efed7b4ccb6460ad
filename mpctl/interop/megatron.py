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

from mpctl.core.errors import Issue
from mpctl.interop.emitted import WIDTH, ForeignLauncher, plan_notes
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.limits import LauncherLimits, refused
from mpctl.interop.mapping import written
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
    END_FLAGS,
    FORM_FLAGS,
    FP16_FLAGS,
    LAYOUT_FLAGS,
    MODEL_FLAGS,
    NARROW_FLAGS,
    ORDERS,
    PRECISION_FLAGS,
    RECOMPUTE_FLAGS,
    ROPE_SCALING,
    SOFTWARE,
    TRAINING_FLAGS,
    VARIANT_FLAGS,
    WITHOUT_FLAG,
    loss_flags,
    words_of,
)
from mpctl.interop.megatron_log import LOG
from mpctl.interop.megatron_optimizers import OPTIMIZER_FLAGS, optimizer_refusals
from mpctl.model.layout.topology import expert_view, zero_copies, zero_stage
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec, is_set
from mpctl.spec.yarn import find_yarn

LIMITS = LauncherLimits(
    "Megatron-LM",
    cp_comm=("p2p", "all_gather", "a2a", "a2a+p2p"),
    orders=ORDERS,
    dtypes=("fp32", "bf16", "fp16", *NARROW_FLAGS),
    partition=True,
    ep=True,
    etp=True,
    zero_size="any",
    losses=("unfused", "fused", "linear"),
    optimizers=("adamw", "muon"),
    host=("offload_optimizer",),
    offload_settings=("offload_fraction", "offload_overlap"),
    moments=("fp32", "fp16", "bf16", "fp8"),
)
SCHEDULES = ("1f1b", "interleaved")


def megatron_refusals(plan: Plan, limits: LauncherLimits = LIMITS) -> Iterator[Issue]:
    """Issues of a plan that a launcher of Megatron-Core cannot express."""
    job, training, who = plan.job, plan.job.training, limits.launcher
    yield from limits.refusals(plan)
    legal = {"fp32": ("fp32",), "fp16": ("fp16", "fp32")}.get(training.dtype, ("fp32", "bf16"))
    if (reduced := training.reduced_dtype) not in legal and training.dtype != "fp64":
        message = f"{who} reduces gradients of {training.dtype} in {' or '.join(legal)}"
        yield refused("training.gradient_dtype", reduced, message, f"use gradient_dtype {legal[0]}")
    if training.partition_activations and job.parallel.tp == 1:
        message = f"{who} distributes saved activations over tp, which is 1"
        yield refused("training.partition_activations", "true", message, "use partition_activations false")
    if job.has_experts and (edp := expert_view(job).replicas) % (copies := zero_copies(job)):
        message = f"{who} cuts the replicas of experts, edp {edp}, into {copies} instances too"
        yield refused("parallel.zero_size", job.parallel.zero_size, message, "use a larger zero_size, or a smaller ep")
    yield from optimizer_refusals(job, who)
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
            yield refused(f"model.{key}", getattr(model, key), message, "--emit torch for the layout")
    every = model.attention_window_every
    if every is not None and every > 2:
        message = f"{who} can give every N-th layer full attention, not one in {every} the window"
        yield refused("model.attention_window_every", every, message, "use full_attention_every")
    if model.position == "alibi":
        yield refused("model.position", "alibi", f"{who} has learned_absolute, rope and none", "use learned or rotary")
    if model.norm == "nonparametric":
        yield refused("model.norm", model.norm, f"{who}'s norms have weights", "use layernorm or rmsnorm")
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
        yield refused("model.rotary_base", model.rotary_base, f"{who} takes whole numbers", "use an integer")
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
        words = " ".join(words_of(narrow.items()))
        yield f"approximated: {job.training.dtype} is {words} over bf16, with Transformer Engine's recipe"
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
    batch = (*BATCH_FLAGS, *PRECISION_FLAGS, *(FP16_FLAGS if job.training.dtype == "fp16" else ()), *RECOMPUTE_FLAGS)
    model = (*MODEL_FLAGS, *FORM_FLAGS, *VARIANT_FLAGS, *END_FLAGS) if job.model else ()
    parts = (written(job, rows) for rows in (LAYOUT_FLAGS, batch, model))
    training = (words_of(written(job, rows)) for rows in (TRAINING_FLAGS, OPTIMIZER_FLAGS))
    for flags in (*map(words_of, parts), words_of(loss_flags(job)), _expert_flags(job), *training):
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
    connections = 32 if job.training.moe_overlap else int(needs_one)
    words = [f"CUDA_DEVICE_MAX_CONNECTIONS={connections}"] if connections else []
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


def _expert_flags(job: JobSpec) -> Iterator[str]:
    """Experts and latents; which layers have experts as arithmetic of lists."""
    for flag, value in (*expert_flags(job), *latent_flags(job)):
        if flag == LAYER_FREQ and job.model is not None:
            yield from (flag, layer_pattern(layers_with_experts(job.model)))
        else:
            yield from words_of([(flag, value)])


LAUNCHER = ForeignLauncher(
    "megatron", SOFTWARE, "shell", megatron_refusals, _notes, _body, read_megatron, LOG, "pretrain_gpt.py"
)
