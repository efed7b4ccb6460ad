"""Rules about the model: heads, widths, sequence, batches, precision, memory."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.errors import Offer
from mpctl.rules.check import Check, divides, refusal
from mpctl.rules.tensor_mode import feature_columns, feature_parts, grid_divides
from mpctl.sharding import divisors, padded_vocab, splits_kv_heads
from mpctl.spec.job import HALVES, JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.units import bytes_text, plural

USUAL_LENGTH = 8192  # tokens of a sample in pre-training (Llama 3: arXiv 2407.21783, section 3.4)


def position_rules(job: JobSpec) -> Iterator[Check]:
    """A table of learned positions has a row for each token of the sequence."""
    model = job.model
    if model is None:
        return
    if model.position == "learned" and model.max_positions < model.seq_length:
        yield Check(
            "max-positions",
            "error",
            "model.max_positions",
            f"{model.max_positions} is less than the sequence length, {model.seq_length}",
            f"use at least {model.seq_length}, which makes another model (the new rows are "
            "untrained), or shorter sequences",
        )


def is_longest(model: ModelSpec) -> bool:
    """Whether a config.json is taken at all the tokens that the model can read, far more than
    models are trained on: its max_position_embeddings is no training length."""
    is_config = (model.source or "").endswith(".json")
    return is_config and USUAL_LENGTH < model.seq_length == model.max_positions


def length_rules(job: JobSpec) -> Iterator[Check]:
    """A config.json says how long a sequence may be, and not how long those of training are."""
    if job.model is not None and is_longest(job.model):
        yield Check("config-length", "warning", "model.seq_length",
                    f"{job.model.seq_length:,} tokens a sample, the config's "
                    "max_position_embeddings: the longest that the model reads",
                    f"for a shorter sample --set model.seq_length={USUAL_LENGTH}")  # fmt: skip


def head_rules(job: JobSpec) -> Iterator[Check]:
    """Heads divide hidden, tp divides heads, and tp splits or shares kv heads evenly."""
    model, tp = job.model, job.parallel.tp
    if model is None:
        return
    if model.head_dim is None:
        message = f"{model.heads} heads do not divide hidden {model.hidden}"
        offer = Offer("model.heads", tuple(divisors(model.hidden)), "model.heads", model.heads)
        more = "give model.head_dim"
        yield refusal("heads-divide-hidden", "model.heads", message, offer, more=more)
    yield from grid_divides(job, "tp-divides-heads", model.heads, "attention heads", feature_parts)
    kv, heads = model.kv_heads, model.heads
    if heads % kv:
        yield divides("kv-heads-divide-heads", "model.kv_heads", heads, kv, "attention heads")
    if job.parallel.tensor_mode != "1d":
        if kv != heads:
            yield from grid_divides(job, "tp-divides-kv-heads", kv, "kv heads", feature_parts)
        return
    countable = model.head_dim is not None or model.hidden % heads == 0
    columns = model.head_size if countable else tp  # heads-divide-hidden says what is wrong
    if not splits_kv_heads(kv, columns, parts=tp):
        legal = tuple(k for k in divisors(heads) if splits_kv_heads(kv, columns, parts=k))
        message = f"{tp} neither divides {plural(kv, 'kv head')} nor is a multiple of them"
        if tp % kv == 0:
            message = f"{tp // kv} ranks share a kv head, and do not divide its {columns} columns"
        yield refusal("tp-divides-kv-heads", "parallel.tp", message, Offer("parallel.tp", legal))
    elif kv % tp:
        yield Check(
            "tp-divides-kv-heads",
            "warning",
            "parallel.tp",
            f"the columns of each of {kv} kv heads are split over {tp // kv} ranks, which gather "
            "its keys and values in every layer",
        )


def rotary_rules(job: JobSpec) -> Iterator[Check]:
    """Rotary positions turn pairs of a head's columns; Llama 3.1's scaling blends between two
    wavelengths."""
    model = job.model
    if model is None or model.position != "rotary":
        return
    if model.head_dim is not None and model.head_dim % 2:
        yield Check("rotary-head-dim", "error", "model.head_dim",
                    f"{model.head_dim} is odd, but rotary positions turn pairs of columns",
                    f"use {model.head_dim + 1}, or model.position learned")  # fmt: skip
    scaling = model.rotary_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Check("rotary-scaling", "error", "model.rotary_scaling.high_freq_factor",
                    f"{scaling.high_freq_factor:g} is not above low_freq_factor "
                    f"{scaling.low_freq_factor:g}",
                    f"use a number above {scaling.low_freq_factor:g}")  # fmt: skip


def width_rules(job: JobSpec) -> Iterator[Check]:
    """tp divides the MLP's width; the word table is padded so that it does."""
    model, tp = job.model, job.parallel.tp
    if model is None:
        return
    yield from grid_divides(job, "tp-divides-ffn", model.ffn, "ffn columns", feature_columns)
    padded = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    exact = padded == model.vocab
    each = f"{padded // tp} rows a rank"
    message = (
        f"{padded} tokens, {each}"
        if exact
        else (
            f"{model.vocab} tokens are padded to {padded} "
            f"({model.vocab_divisor} x tp {tp}), {each}; padding never enters the loss"
        )
    )
    yield Check("vocab-padding", "ok", "model.vocab", message)


def sequence_rules(job: JobSpec) -> Iterator[Check]:
    """cp and, under sequence parallelism, tp divide the sequence."""
    p, model = job.parallel, job.model
    if p.sequence_parallel and p.tp == 1:
        yield refusal(
            "sequence-parallel-needs-tp",
            "parallel.sequence_parallel",
            "sequence parallelism splits over tp, and tp is 1",
            Offer("parallel.tp", tuple(range(2, 17)), "tp", near=2),
            more="--no-sequence-parallel",
        )
    if model is None:
        return
    seq = model.seq_length
    if p.cp > 1:
        ways = f"use a sequence that is a multiple of {2 * p.cp} (two blocks a rank)"
        yield divides("cp-divides-sequence", "parallel.cp", seq, 2 * p.cp, "tokens", ways)
    if p.sequence_parallel and p.tp > 1:
        ways = f"use a sequence that is a multiple of {p.tp * p.cp}"
        yield divides(
            "tp-divides-sequence", "parallel.tp", seq // p.cp, p.tp, "tokens of a rank", ways
        )


def batch_rules(job: JobSpec) -> Iterator[Check]:
    """The global batch is a whole number of micro batches on each replica."""
    t, dp = job.training, job.sizes["dp"]
    batch, per_pass = t.global_batch_size or 1, t.micro_batch_size * dp
    rule, where = "batch-divides", "training.global_batch_size"
    product = f"micro batch {t.micro_batch_size} x dp {dp} = {per_pass}"
    if batch % per_pass:
        down, up = batch // per_pass * per_pass, -(-batch // per_pass) * per_pass
        legal = tuple(k for k in divisors(batch) if batch % (k * dp) == 0)
        yield refusal(
            rule, where, f"{plural(batch, 'sample')} cannot be divided by {product}",
            Offer(where, tuple(sorted({down or up, up})), "a global batch of"),
            Offer("training.micro_batch_size", legal, "micro batch", near=t.micro_batch_size),
        )  # fmt: skip
    else:
        count = plural(batch // per_pass, "micro batch", "micro batches")
        message = f"{plural(batch, 'sample')} = {product} x {count}"
        yield Check(rule, "ok", where, message)


def recompute_rules(job: JobSpec) -> Iterator[Check]:
    """Only full recomputation saves each layer's input, which alone can be sharded or moved to the
    host (ZeRO-R, arXiv 1910.02054)."""
    t, rule = job.training, "recompute-full"
    for key in ("partition_activations", "offload_activations"):
        if getattr(t, key) and t.recompute != "full":
            message = f"true needs recompute full, and recompute is {t.recompute}"
            yield Check(rule, "error", f"training.{key}", message, "use training.recompute full")
    if t.partition_activations and job.parallel.sequence_parallel:
        message = "true has no effect: sequence parallelism shards the saved inputs already"
        hint = "use false, or --no-sequence-parallel"
        yield Check(
            "partition-or-sequence", "error", "training.partition_activations", message, hint
        )


def dtype_rules(job: JobSpec) -> Iterator[Check]:
    """The device states a rate for the data type; without it no time is estimated."""
    device, dtype = job.cluster.device, job.training.dtype
    if device is not None and dtype not in device.peak_flops:
        known = ", ".join(device.peak_flops)
        yield Check(
            "dtype-on-device",
            "warning",
            "training.dtype",
            f"{device.name} has no {dtype} rate in its preset, so no time is estimated",
            f"known: {known}",
        )


def slow_dtype(job: JobSpec) -> Iterator[Check]:
    """fp32 on a GPU of today is many times slower than 16-bit products; on a CPU, where jobs are
    tried out, it is what people want."""
    device, dtype = job.cluster.device, job.training.dtype
    if (
        device is None
        or device.is_cpu
        or dtype not in ("fp32", "fp64")
        or dtype not in device.peak_flops
    ):
        return
    times = {half: device.peak_flops.get(half, 0) / device.peak_flops[dtype] for half in HALVES}
    half = max(HALVES, key=times.__getitem__)
    if times[half] > 1:
        message = (
            f"{dtype} on {device.name}: products in {half} are {times[half]:.3g} times as fast"
        )
        hint = f"use --dtype {half}"
        if dtype == "fp32" and "tf32" in device.peak_flops:
            rate = device.peak_flops["tf32"] / device.peak_flops[dtype]
            hint += f", or tf32: {rate:.3g} times as fast, operands rounded to 11 bits"
        yield Check("slow-dtype", "warning", "training.dtype", message, hint)


def memory_check(job: JobSpec, heaviest_bytes: int, stage: int) -> Check | None:
    """The check that the fullest stage, whose peak is `heaviest_bytes`, fits its device and leaves
    the cluster's headroom free; None without a device."""
    device, usable = job.cluster.device, job.cluster.usable_bytes
    if device is None or usable is None:
        return None
    need, have = bytes_text(heaviest_bytes), bytes_text(device.memory_bytes)
    rule, where = "memory-fits", "parallel"
    if heaviest_bytes > usable:
        over, headroom = bytes_text(heaviest_bytes - usable), job.cluster.headroom
        return Check(
            rule,
            "warning",
            where,
            f"stage {stage} needs {need} a rank, {over} above the {have} of {device.name} less "
            f"{headroom:g} % headroom",
            "raise tp, pp or zero, or training.recompute full",
        )
    return Check(rule, "ok", where, f"stage {stage}, the fullest, needs {need} of {have}")
