"""Rules about training: learning rate, what is frozen, attention dropout, batches, precision."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.model.families import get_table
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.operators import fused_attention
from mpctl.model.operators.kernel_sets import kernel_set
from mpctl.plan.rules.check import Check, refusal
from mpctl.plan.rules.sizes import head_columns
from mpctl.spec.job import HALVES, JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import CORE


def rate_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The learning rate falls from its peak, and warm-up and decay fit into the steps."""
    job = draft.job
    t = job.training
    if t.lr_schedule != "constant" and t.lowest_rate > t.learning_rate:
        yield Check(
            "min-rate",
            "error",
            "training.min_learning_rate",
            f"{t.lowest_rate:g} is above learning_rate {t.learning_rate:g}, from which {t.lr_schedule} goes down",
            f"use at most {t.learning_rate:g}, or lr_schedule constant",
        )
    if t.lr_decay_steps is not None:
        yield from _decay_steps(job, t.lr_decay_steps)
    yield from _wsd(job)


def _decay_steps(job: JobSpec, steps: int) -> Iterator[Check]:
    t, where = job.training, "training.lr_decay_steps"
    if t.lr_schedule == "constant":
        yield Check(
            "lr-decay-steps",
            "error",
            where,
            f"{steps}, but lr_schedule constant has no decay",
            "leave it out, or use lr_schedule linear, cosine or wsd",
        )
    elif t.warmup_steps > steps:
        yield Check(
            "lr-decay-steps",
            "error",
            where,
            f"{steps} steps end before the warm-up of {t.warmup_steps}",
            f"use at least {t.warmup_steps}, or fewer warmup_steps",
        )


def _wsd(job: JobSpec) -> Iterator[Check]:
    t, rule, where = job.training, "lr-wsd-decay-steps", "training.lr_wsd_decay_steps"
    end = t.lr_decay_steps or t.steps
    room, given = max(1, end - t.warmup_steps), t.lr_wsd_decay_steps
    if t.lr_schedule != "wsd":
        if given is not None:
            yield Check(
                rule,
                "error",
                where,
                f"{given}, but lr_schedule is {t.lr_schedule}",
                "leave it out, or use lr_schedule wsd",
            )
    elif given is None:
        yield Check(
            rule,
            "error",
            where,
            "lr_schedule wsd needs the length of its decay",
            f"use {max(1, room // 10)}, a tenth of what follows the warm-up",
        )
    elif given > room:
        yield Check(
            rule,
            "error",
            where,
            f"{given} steps of decay are more than the {room} that follow the warm-up, until step {end}",
            f"use at most {room}",
        )


WHERE = "training.freeze"


def freeze_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Every pattern of training.freeze matches a parameter, and not all parameters are frozen."""
    job = draft.job
    patterns = job.training.freeze
    if job.model is None or not patterns:
        return
    from mpctl.model.operators.grad_flow import frozen_by

    sizes = {weight.name: weight.numel for weight in get_table(job.model, tp=1).weights()}
    for pattern in patterns:
        if not any(map(frozen_by([pattern]), sizes)):
            yield _matches_nothing(pattern, job.model, list(sizes))
    is_frozen = frozen_by(patterns)
    frozen = [name for name in sizes if is_frozen(name)]
    count = f"{len(frozen)} of {len(sizes)} parameters"
    if len(frozen) == len(sizes):
        yield Check(
            "freeze-leaves-some",
            "error",
            WHERE,
            f"{' with '.join(map(repr, patterns))} freezes {count}, so nothing is trained",
            "leave out a pattern, or narrow one: layers.[0-5].* is 6 layers",
        )
    elif frozen:
        share = sum(sizes[name] for name in frozen) / sum(sizes.values())
        message = f"{count} are frozen, {share:.1%} of the model's elements"
        yield Check("freeze-leaves-some", "ok", WHERE, message)


def _matches_nothing(pattern: str, model: ModelSpec, names: list[str]) -> Check:
    """The error for a pattern without a match, with the nearest names in layer 0."""
    from difflib import get_close_matches  # only where something is wrong

    of_one = [name for name in names if re.search(r"\.[1-9]\d*\.", name) is None]
    near = get_close_matches(pattern.strip("*.") or "*", of_one, n=3, cutoff=0.0)
    last = max(model.layers, model.decoder_layers or 0) - 1
    return Check(
        "freeze-matches",
        "error",
        WHERE,
        f"{pattern!r} matches none of {len(names)} parameters, with layers 0 to {last}",
        f"a pattern must match a whole name, such as {', '.join(near)}",
    )


def attention_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Attention dropout on a GPU holds no scores in memory; else a warning says why."""
    job = draft.job
    training, model = job.training, job.model
    if model is None or not training.attention_dropout or job.device_kind == "cpu":
        return
    if not kernel_set(draft.profile.memory.kernels, training.runtime).fuses_variants:
        return
    columns = max(model.qk_size, model.v_size) if model.is_mla else head_columns(model)
    if columns is None:  # heads-divide-hidden says what is wrong
        return
    refused = fused_attention.refusal(training.value_bytes, columns)
    if refused is not None:
        message = (
            f"{training.attention_dropout:g}: {refused.reason}, so that scores lie in memory, "
            f"{model.heads} x {model.seq_length}^2 a sample and layer"
        )
        hint = f"{refused.hint}, or training.attention_dropout 0"
        yield Check("fused-attention", "warning", "training.attention_dropout", message, hint)


def batch_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The global batch is a multiple of the micro batches of all replicas."""
    job = draft.job
    t, dp = job.training, job.sizes["dp"]
    batch, per_pass = t.global_batch_size or 1, t.micro_batch_size * dp
    rule, where = "batch-divides", "training.global_batch_size"
    product = f"micro batch {t.micro_batch_size} x dp {dp} = {per_pass}"
    if batch % per_pass:
        down, up = batch // per_pass * per_pass, -(-batch // per_pass) * per_pass
        legal = tuple(k for k in divisors(batch) if batch % (k * dp) == 0)
        yield refusal(
            rule,
            where,
            f"{plural(batch, 'sample')} cannot be divided by {product}",
            Offer(where, tuple(sorted({down or up, up})), "a global batch of"),
            Offer("training.micro_batch_size", legal, "micro batch", near=t.micro_batch_size),
        )
    else:
        count = plural(batch // per_pass, "micro batch", "micro batches")
        message = f"{plural(batch, 'sample')} = {product} x {count}"
        yield Check(rule, "ok", where, message)


def recompute_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Only full recomputation saves each layer's input, which alone can be sharded or moved to the
    host (ZeRO-R, arXiv 1910.02054)."""
    job = draft.job
    t, rule = job.training, "recompute-full"
    for key in ("partition_activations", "offload_activations"):
        if getattr(t, key) and t.recompute != "full":
            message = f"true needs recompute full, and recompute is {t.recompute}"
            yield Check(rule, "error", f"training.{key}", message, "use training.recompute full")
    if t.partition_activations and job.parallel.sequence_parallel:
        message = "true has no effect: sequence parallelism shards the saved inputs already"
        hint = "use false, or --no-sequence-parallel"
        yield Check("partition-or-sequence", "error", "training.partition_activations", message, hint)


def module_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Megatron alone recomputes other parts of a layer than attention's scores."""
    training, rule, where = draft.job.training, "recompute-modules", "training.recompute_modules"
    given = " ".join(training.recompute_modules)
    if not given:
        return
    if training.recompute != "selective":
        message = f"{given} needs recompute selective, and recompute is {training.recompute}"
        yield Check(rule, "error", where, message, "use training.recompute selective")
    kernels = draft.profile.memory.kernels
    if given != CORE and not kernel_set(kernels, training.runtime).repeats_modules:
        message = f"{given}: {training.runtime} recomputes {CORE} alone"
        yield Check(rule, "error", where, message, "use runtime megatron-core, or leave it out")


def dtype_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The device has a rate for the data type; without one no time is estimated. A GPU with fp16 and
    without bf16 (before Ampere) does not multiply in bf16."""
    job = draft.job
    device, dtype = job.cluster.device, job.training.dtype
    if device is not None and dtype not in device.peak_flops:
        known = ", ".join(device.peak_flops)
        if dtype == "bf16" and "fp16" in device.peak_flops and not device.is_cpu:
            message = f"{device.name} has no bf16: its rates are {known}"
            yield Check("dtype-on-device", "error", "training.dtype", message, "use --dtype fp16")
            return
        yield Check(
            "dtype-on-device",
            "warning",
            "training.dtype",
            f"{device.name} has no {dtype} rate in its preset, so no time is estimated",
            f"known: {known}",
        )


def slow_dtype(draft: LayoutDraft) -> Iterator[Check]:
    """fp32 on a modern GPU is many times slower than 16-bit products; on a CPU, where jobs are
    tried out, it is the usual choice."""
    job = draft.job
    device, dtype = job.cluster.device, job.training.dtype
    if device is None or device.is_cpu or dtype not in ("fp32", "fp64") or dtype not in device.peak_flops:
        return
    times = {half: device.peak_flops.get(half, 0) / device.peak_flops[dtype] for half in HALVES}
    half = max(HALVES, key=times.__getitem__)
    if times[half] > 1:
        message = f"{dtype} on {device.name}: products in {half} are {times[half]:.3g} times as fast"
        hint = f"use --dtype {half}"
        if dtype == "fp32" and "tf32" in device.peak_flops:
            rate = device.peak_flops["tf32"] / device.peak_flops[dtype]
            hint += f", or tf32: {rate:.3g} times as fast, operands rounded to 11 bits"
        yield Check("slow-dtype", "warning", "training.dtype", message, hint)
