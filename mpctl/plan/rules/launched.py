"""Rules about a decoder's shape, and about which jobs `mpctl launch` runs.

Models, data types and kinds of device that estimates cover but mpctl's kernels do not are planned
and not launched: plan and search give a warning, `mpctl launch` an error. By hand: a Gemma 2 plans,
and is not launched because of attention_softcap and logit_softcap.

Training in fp8: tensor cores take operands whose rows are a multiple of 16 elements, which of the
three products of a linear layer are its inputs, its outputs, and the tokens of a micro batch
(train/layers/fp8.py). By hand, ffn 3072 over tp 64: 48 columns of the MLP a rank, a multiple of
16; over tp 128, 24, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.core.units import PRODUCT_BYTES
from mpctl.model.families import all_builtin, get_family, get_table
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.rules.check import Check, listed
from mpctl.plan.rules.experts import routing_not_launched
from mpctl.plan.rules.loss import loss_not_launched
from mpctl.plan.rules.optimizers import states_not_launched
from mpctl.plan.rules.sizes import head_columns
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LAUNCHED_AS
from mpctl.spec.model import VARIANTS, ModelSpec, is_set
from mpctl.spec.parallel import ParallelSpec
from mpctl.spec.runtime import get_profile, is_launched, launched_runtime

RULE, JOB_RULE = "model-launched", "job-launched"
ONLY_PLANNED = {
    "attention_softcap": "bounded attention scores",
    "logit_softcap": "bounded logits",
    "rotary_scaling_type": "another scaling of rotary positions than Llama 3.1's and YaRN",
    "head_bias": "a bias of the output layer",
    "attention_sinks": "learned scores of attention without a key",
    "expert_bias": "biases of routers and experts",
    "activation_limit": "a bounded activation",
}
IN_1D = ("qk_norm", "parallel_residual", "embedding_norm", "attention_window", "embedding_multiplier", "mtp_layers")
AS_MEGATRON = "to plan it as Megatron-Core runs it: --runtime megatron-core"
PLANNED_ONLY = "it is planned only: mpctl plan and search count it"


def variant_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The family takes the keys by which decoders differ, and they agree with each other."""
    model = draft.job.model
    if model is None:
        return
    family = get_family(model.family)
    for key in VARIANTS:
        if key not in family.variants and is_set(model, key):
            others = [other.name for other in all_builtin() if other.variants]
            yield Check(
                "family-variants",
                "error",
                f"model.{key}",
                f"family {family.name} has no {key}",
                f"leave it out, or use family {listed(others)}",
            )
    if not family.variants and not isinstance(model.bias, bool):
        yield Check(
            "family-variants",
            "error",
            "model.bias",
            f"family {family.name} has biases in all linear layers or in none",
            "use true or false",
        )
    yield from _agreement(model)


def _agreement(model: ModelSpec) -> Iterator[Check]:
    rule = "variants-agree"
    if model.expert_bias and model.experts is None:
        yield Check(rule, "error", "model.expert_bias", "there are no experts", "give model.experts, or leave it out")
    if model.attention_sinks and model.is_mla:
        yield Check(rule, "error", "model.attention_sinks", "is not planned with mla", "leave it out")
    for key in ("attention_window_every", "full_attention_every", "window_rotary_base"):
        if is_set(model, key) and model.attention_window is None:
            yield Check(
                rule,
                "error",
                f"model.{key}",
                "there is no attention_window",
                "give model.attention_window, or leave it out",
            )
    if is_set(model, "attention_window_every") and is_set(model, "full_attention_every"):
        yield Check(
            rule, "error", "model.full_attention_every", "is given with attention_window_every", "leave one of them out"
        )
    if model.shared_norm and not model.parallel_residual:
        yield Check(
            rule,
            "error",
            "model.shared_norm",
            "attention and MLP share a norm where both read the layer's input",
            "use parallel_residual true",
        )
    if model.parallel_residual and model.norm_order != "pre":
        yield Check(
            rule,
            "error",
            "model.norm_order",
            f"{model.norm_order} is not planned with parallel_residual",
            "use norm_order pre",
        )
    scalings = ("rotary_scaling", "yarn_scaling", "rotary_scaling_type")
    first, *others = [key for key in scalings if getattr(model, key) is not None] or [""]
    for key in others:
        yield Check(rule, "error", f"model.{key}", f"is given with {first}", "leave one of them out")
    if (yarn := model.yarn_scaling) is not None and yarn.beta_fast < yarn.beta_slow:
        yield Check(
            rule,
            "error",
            "model.yarn_scaling.beta_fast",
            f"{yarn.beta_fast:g} is below beta_slow {yarn.beta_slow:g}",
            f"use {yarn.beta_slow:g} or more",
        )
    turned = model.rotary_fraction * (model.head_dim or 2)
    if model.position == "rotary" and int(turned) % 2:
        yield Check(
            rule,
            "error",
            "model.rotary_fraction",
            f"{model.rotary_fraction:g} of {model.head_dim} columns are {int(turned)}, and rotary positions turn pairs",
            "use a part that is even",
        )


def launched_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Whether `mpctl launch` runs the job; an ok is reported only for a config.json's shape."""
    job = draft.job
    model = job.model
    if model is None or not draft.profile.runs.launched:
        return
    yield from why_not_launched(job)
    if not any(not_launched(job)) and Path(model.source or "").name == "config.json":
        yield Check(RULE, "ok", "model", "`mpctl launch` runs this shape")


def why_not_launched(job: JobSpec) -> list[Check]:
    """Every reason, as a warning with a way out, why this version cannot launch the job on any
    host; empty if it can. The runtime profile of other software is a reason too."""
    runtime = job.training.runtime
    if not is_launched(runtime):
        return [
            Check(
                JOB_RULE,
                "warning",
                "training.runtime",
                f"{runtime} is planned, not run by `mpctl launch`",
                f"use --runtime {launched_runtime(runtime)}",
            )
        ]
    kind = device_not_launched(job)
    return [*([kind] if kind else []), *settings_not_launched(job), *not_launched(job)]


def device_not_launched(job: JobSpec) -> Check | None:
    """The reason if ranks would run on a kind of accelerator that is only planned; else None."""
    kind = job.device_kind
    if kind is None or kind in LAUNCHED_AS:
        return None
    name = job.cluster.device.name if job.cluster.device else kind
    hint = "`mpctl plan` and `search` accept it; --device cpu runs the same ranks on CPU cores"
    message = f"ranks run on {listed(list(LAUNCHED_AS))}, and {name} is of kind {kind}"
    return Check(JOB_RULE, "warning", "cluster.device.kind", message, hint)


def settings_not_launched(job: JobSpec) -> Iterator[Check]:
    """Tensor mode and data types that the planner knows but mpctl's workers do not run."""
    training, mode = job.training, job.parallel.tensor_mode
    runs = get_profile(launched_runtime(training.runtime)).runs
    if mode not in runs.tensor_modes:
        yield Check(
            JOB_RULE,
            "warning",
            "parallel.tensor_mode",
            f"{mode} is planned, not run by `mpctl launch`",
            f"use {listed(runs.tensor_modes)}",
        )
    comm = job.parallel.stated_cp_comm
    if comm is not None and comm not in runs.cp_comm:
        message = f"{comm} is planned, not run by `mpctl launch`"
        yield Check(JOB_RULE, "warning", "parallel.cp_comm", message, f"use {listed(runs.cp_comm)}; {AS_MEGATRON}")
    if job.parallel.head_parts > 1 and job.packed_attention:
        message = f"{comm} with rows of several conversations is planned, not run by `mpctl launch`"
        yield Check(JOB_RULE, "warning", "parallel.cp_comm", message, "use all_gather, or data.chat without packing")
    sums = [dtype for dtype in runs.dtypes if dtype not in PRODUCT_BYTES]
    chosen = (("dtype", training.dtype, runs.dtypes), ("gradient_dtype", training.reduced_dtype, sums))
    for key, dtype, run in chosen:
        if dtype not in run:
            yield Check(
                JOB_RULE,
                "warning",
                f"training.{key}",
                f"{dtype} is planned, not run by `mpctl launch`",
                f"use {listed(run)}; {AS_MEGATRON}",
            )
    for where, message, hint in (*routing_not_launched(job), *states_not_launched(job), *loss_not_launched(job)):
        yield Check(JOB_RULE, "warning", where, message, hint)
    yield from fp8_not_launched(job)
    yield from adapter_not_launched(job)


def not_launched(job: JobSpec) -> Iterator[Check]:
    """A warning for each key of a job's model that mpctl's workers do not run."""
    model = job.model
    if model is None:
        return
    keys = [key for key in ONLY_PLANNED if is_set(model, key)]
    for key in keys:
        what = f"{ONLY_PLANNED[key]}: planned, not run by `mpctl launch`"
        yield _planned(key, getattr(model, key), what, PLANNED_ONLY)
    if model.qk_norm == "width" and model.norm == "nonparametric":
        yield _planned(
            "qk_norm",
            "width",
            "a norm over all heads without weights: planned, not run by `mpctl launch`",
            PLANNED_ONLY,
        )
    if (mode := job.parallel.tensor_mode) != "1d":
        for key in (*IN_1D, *_not_on_a_grid(model)):
            if is_set(model, key):
                message = f"planned, not run in tensor_mode {mode}"
                yield _planned(key, getattr(model, key), message, "use tensor_mode 1d")
    if model.mtp_layers and job.parallel.cp > 1:
        message = f"planned, not run with cp {job.parallel.cp} by `mpctl launch`"
        yield _planned("mtp_layers", model.mtp_layers, message, "use cp 1")
    for key in ("parallel_residual", "mtp_layers"):
        if is_set(model, key) and (job.training.freeze or job.training.adapter):
            message = "planned, not run with frozen parameters by `mpctl launch`"
            yield _planned(key, getattr(model, key), message, "leave training.freeze empty, and training.adapter out")


def keys_not_launched(model: ModelSpec) -> list[str]:
    """The keys of `[model]` because of which `mpctl launch` does not run a model, in any job."""
    reasons = not_launched(JobSpec(model=model))
    return [check.where.removeprefix("model.") for check in reasons]


def _not_on_a_grid(model: ModelSpec) -> Iterator[str]:
    if model.position == "alibi":
        yield "position"
    if model.norm == "nonparametric":
        yield "norm"
    if model.norm_order in ("output", "sandwich"):
        yield "norm_order"


def _planned(key: str, value: object, message: str, hint: str) -> Check:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Check(RULE, "warning", f"model.{key}", f"{shown}: {message}", hint)


def adapter_not_launched(job: JobSpec) -> Iterator[Check]:
    """A warning for each setting of `[training.adapter]` that mpctl's workers do not run."""
    adapter, model, dtype = job.training.adapter, job.model, job.training.dtype
    if adapter is None:
        return
    if adapter.kind == "dora" and adapter.dropout and job.parallel.tp > 1:
        yield _of_adapter("dropout", f"{adapter.dropout:g} of dora over tp {job.parallel.tp}", "use 0, or tp 1")
    if adapter.dtype not in (None, dtype):
        yield _of_adapter("dtype", adapter.dtype, f"leave it out: A and B are then {dtype}, the training dtype")
    if adapter.stored_as == "nf4":
        if adapter.kind == "dora":
            yield _of_adapter("base_precision", "nf4 under dora, whose lengths read W", "use kind qlora")
        if dtype == "fp8":
            yield _of_adapter("base_precision", "nf4 under training.dtype fp8", "use --dtype bf16")
        if job.model is not None and job.model.experts and job.parallel.ep * job.parallel.etp > 1:
            ranks = f"ep {job.parallel.ep} and etp {job.parallel.etp}"
            yield _of_adapter("base_precision", f"nf4 of experts over {ranks}", "use ep 1 and etp 1")
    elif adapter.stored_as not in (None, dtype):
        yield _of_adapter(
            "base_precision",
            adapter.stored_as,
            "use nf4 or kind lora without base_precision, or train it with TRL or Axolotl: mpctl emit JOB trl",
        )
    if model is None:
        return
    if job.launch.compile:
        yield Check(JOB_RULE, "warning", "launch.compile", "true: not tried with adapters", "use launch.compile false")
    if get_family(model.family).has_decoder and job.parallel.tp > 1:
        yield _of_adapter("targets", f"layers of {model.family} over tp {job.parallel.tp}", "use tp 1")
    table = get_table(model, tp=1, adapter=adapter)
    parts = (part for stack in table.stacks for part in (*stack.kinds, stack.entry, stack.exit))
    products = [product for part in parts for product in part.products]
    adapted = {product.adapts for product in products}
    if any(product.is_head and product.table != product.name and product.name in adapted for product in products):
        message = "lm_head is the word table here (tied_embeddings)"
        yield _of_adapter("targets", message, "leave lm_head out, or use tied_embeddings false")
    if any(product.is_grouped and product.name in adapted for product in products):
        if adapter.dropout:
            yield _of_adapter("dropout", f"{adapter.dropout:g} of experts' rows", "use 0, or targets attention")
        if job.parallel.etp > 1:
            yield _of_adapter(
                "targets", f"experts split over etp {job.parallel.etp}", "use etp 1, or targets attention"
            )


def _of_adapter(key: str, value: object, hint: str) -> Check:
    message = f"{value}: planned, not run by `mpctl launch`"
    return Check(JOB_RULE, "warning", f"training.adapter.{key}", message, hint)


MULTIPLE = 16  # elements of a side of an fp8 product
WIDER = "or --dtype bf16"
Side = tuple[str, str, int, int, str]
"""The key that a refusal names, what the columns are, their number, ranks, and what to change."""


def fp8_not_launched(job: JobSpec) -> Iterator[Check]:
    """A warning for each reason why mpctl's workers cannot train the job in fp8; none for other
    dtypes."""
    if job.training.dtype != "fp8":
        return
    yield from _device(job)
    p, model = job.parallel, job.model
    if p.tensor_mode != "1d":
        yield _refused("parallel.tensor_mode", f"{p.tensor_mode} is not run in fp8", "use tensor_mode 1d")
    if model is not None and p.tensor_mode == "1d":
        yield from _family(model)
        yield from _sides(job, model)


def _device(job: JobSpec) -> Iterator[Check]:
    device = job.cluster.device
    if device is None or device.is_cpu or job.device_kind == "cpu":
        return
    if "fp8" not in device.peak_flops:
        yield _refused(
            "cluster.device",
            f"{device.name} does not multiply in fp8: its preset has no such rate",
            "use a device of compute capability 8.9 or more, such as h100-sxm or l40s,",
        )
    elif job.device_kind == "rocm":
        yield _refused(
            "cluster.device.kind",
            f"{device.name}: fp8 was not tried on AMD, whose MI300 has formats of its own",
            "use a device of kind cuda",
        )


def _family(model: ModelSpec) -> Iterator[Check]:
    if get_family(model.family).has_decoder:
        yield _refused(
            "model.family",
            f"{model.family}: the layers of a decoder that read an encoder are not run in fp8",
            "use another family",
        )


def _sides(job: JobSpec, model: ModelSpec) -> Iterator[Check]:
    """Each side of a rank's matrices is a multiple of 16."""
    p, training = job.parallel, job.training
    tokens = training.micro_batch_size * model.seq_length
    sides = (
        ("model.hidden", "hidden", model.hidden, 1, "hidden"),
        *(_latent_sides(model, p.tp) if model.is_mla else _head_sides(model, p.tp)),
        *_inner_sides(model, p),
        ("training.micro_batch_size", "tokens of a micro batch", tokens, p.cp, "micro_batch_size, seq_length or cp"),
    )
    for where, what, size, ranks, setting in sides:
        if size % ranks == 0 and size // ranks % MULTIPLE:
            each = f"{size // ranks} {what}" + (f" a rank ({size} over {ranks})" * (ranks > 1))
            yield _refused(where, f"{each}: fp8 multiplies multiples of {MULTIPLE}", f"use another {setting}")


def _inner_sides(model: ModelSpec, p: ParallelSpec) -> Iterator[Side]:
    """Inner widths: of the MLP where a layer has one, of each expert and of the shared ones. Rows
    of an expert are filled up (train/layers/grouped_linear.py)."""
    if model.layers_with_experts < model.layers:
        yield "parallel.tp", "columns of the MLP", model.ffn, p.tp, "tp or ffn"
    if model.experts is not None:
        yield ("parallel.etp", "columns of an expert", model.expert_width, p.etp, "etp or expert_ffn")
        yield ("parallel.tp", "columns of the shared experts", model.shared_expert_ffn, p.tp, "tp or shared_expert_ffn")


def _head_sides(model: ModelSpec, tp: int) -> Iterator[Side]:
    if (d := head_columns(model)) is None:  # heads-divide-hidden says what is wrong
        return
    for what, heads in (
        ("columns of queries, keys and values", model.heads + 2 * model.kv_heads),
        ("columns of the heads", model.heads),
    ):
        yield "parallel.tp", what, heads * d, tp, "tp or other heads"


def _latent_sides(model: ModelSpec, tp: int) -> Iterator[Side]:
    latent, nope = model.kv_lora_rank or 0, model.qk_nope_head_dim or 0
    for key, what, size in (
        ("q_lora_rank", "columns of the queries' latent", model.q_lora_rank or 0),
        ("kv_lora_rank", "columns of the latent", latent),
        ("qk_rope_head_dim", "columns of latent and positions", latent + (model.qk_rope_head_dim or 0)),
    ):
        yield f"model.{key}", what, size, 1, key
    for what, columns in (
        ("columns of queries", model.qk_size),
        ("columns of keys and values", nope + model.v_size),
        ("columns of the heads", model.v_size),
    ):
        yield "parallel.tp", what, model.heads * columns, tp, "tp or other heads"


def _refused(where: str, message: str, way: str) -> Check:
    return Check(JOB_RULE, "warning", where, message, f"{way} {WIDER}")
