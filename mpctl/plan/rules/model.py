"""Rules about the model: heads, widths, sequence, memory, and the settings that its family accepts.

The family's description (model/families/description.py) holds positions, orders of norms, the shortest
sequence and whether there is a decoder; no rule here names a family.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors, padded_vocab, splits_kv_heads
from mpctl.core.units import bytes_text, plural
from mpctl.model.families import all_builtin, get_family
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.topology import replicas
from mpctl.plan.rules.check import Check, divides, listed, refusal
from mpctl.plan.rules.sizes import context_parts, head_columns, sequence_parts
from mpctl.plan.rules.tensor_mode import feature_columns, feature_parts, grid_divides
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import get_profile

USUAL_LENGTH = 8192  # tokens of a sample in pre-training (Llama 3: arXiv 2407.21783, section 3.4)


def position_rules(draft: LayoutDraft) -> Iterator[Check]:
    """A table of learned positions has a row for each token of the sequence."""
    model = draft.job.model
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
    """Whether a job uses all the tokens that a config.json allows, far more than models are trained
    on: max_position_embeddings is not a training length."""
    is_config = (model.source or "").endswith(".json")
    return is_config and USUAL_LENGTH < model.seq_length == model.max_positions


def length_rules(draft: LayoutDraft) -> Iterator[Check]:
    """A config.json states the longest possible sequence, not the length in training."""
    job = draft.job
    if job.model is not None and is_longest(job.model):
        yield Check(
            "config-length",
            "warning",
            "model.seq_length",
            f"{job.model.seq_length:,} tokens a sample, the config's "
            "max_position_embeddings: the longest that the model reads",
            f"for a shorter sample --set model.seq_length={USUAL_LENGTH}",
        )


def head_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Heads divide hidden, tp divides heads, and tp splits or shares kv heads evenly."""
    job = draft.job
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
    columns = head_columns(model) or tp  # heads-divide-hidden says what is wrong
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


def rotary_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Rotary positions turn pairs of a head's columns; Llama 3.1's scaling blends between two
    wavelengths."""
    model = draft.job.model
    if model is None or model.position != "rotary":
        return
    if model.head_dim is not None and model.head_dim % 2 and not model.is_mla:
        yield Check(
            "rotary-head-dim",
            "error",
            "model.head_dim",
            f"{model.head_dim} is odd, but rotary positions turn pairs of columns",
            f"use {model.head_dim + 1}, or model.position learned",
        )
    scaling = model.rotary_scaling
    if scaling is not None and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield Check(
            "rotary-scaling",
            "error",
            "model.rotary_scaling.high_freq_factor",
            f"{scaling.high_freq_factor:g} is not above low_freq_factor {scaling.low_freq_factor:g}",
            f"use a number above {scaling.low_freq_factor:g}",
        )


def width_rules(draft: LayoutDraft) -> Iterator[Check]:
    """tp divides the MLP's width; the word table is padded to a multiple of tp."""
    job = draft.job
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


def sequence_rules(draft: LayoutDraft) -> Iterator[Check]:
    """cp and, under sequence parallelism, tp divide the sequence."""
    job = draft.job
    p, model = job.parallel, job.model
    if p.sequence_parallel and p.tp == 1:
        yield refusal(
            "sequence-parallel-needs-tp",
            "parallel.sequence_parallel",
            "sequence parallelism splits over tp, and tp is 1",
            Offer("parallel.tp", tuple(range(2, 17)), "tp", near=2),
            more="--no-sequence-parallel",
        )
    if p.tp_comm_overlap and not (p.sequence_parallel and p.tp > 1 and p.tensor_mode == "1d"):
        message = "it overlaps the gathers of sequence parallelism over tp in tensor_mode 1d"
        yield refusal(
            "tp-comm-overlap-needs-sequence",
            "parallel.tp_comm_overlap",
            message,
            more="--set parallel.tp_comm_overlap=false, or --sequence-parallel with tp above 1",
        )
    if model is None:
        return
    seq = model.seq_length
    if p.cp > 1:
        parts = context_parts(p.cp)
        ways = f"use a sequence that is a multiple of {parts} (two blocks a rank)"
        yield divides("cp-divides-sequence", "parallel.cp", seq, parts, "tokens", ways)
    if p.sequence_parallel and p.tp > 1:
        ways = f"use a sequence that is a multiple of {sequence_parts(p.tp, p.cp)}"
        yield divides("tp-divides-sequence", "parallel.tp", seq // p.cp, p.tp, "tokens of a rank", ways)


def memory_check(job: JobSpec, heaviest_bytes: int, stage: int) -> Check | None:
    """The check that the fullest stage, whose peak is `heaviest_bytes`, fits its device and leaves
    the cluster's headroom free; None without a device."""
    device, usable = job.cluster.device, job.cluster.usable_bytes
    if device is None or usable is None:
        return None
    need, have = bytes_text(heaviest_bytes), bytes_text(device.memory_bytes)
    rule, where = "memory-fits", "parallel"
    if not job.cluster.fits(heaviest_bytes):
        over, headroom = bytes_text(heaviest_bytes - usable), job.cluster.headroom
        return Check(
            rule,
            "warning",
            where,
            f"stage {stage} needs {need} a rank, {over} above the {have} of {device.name} less {headroom:g} % headroom",
            memory_advice(job),
        )
    return Check(rule, "ok", where, f"stage {stage}, the fullest, needs {need} of {have}")


def memory_advice(job: JobSpec) -> str:
    """Settings that may make the job fit, in words: `raise tp, pp or zero, or training.recompute full`. Those at
    their maximum are not named: of its runtime, its node (tp), its model, or because no replica is left."""
    p, t, model, runs = job.parallel, job.training, job.model, get_profile(job.training.runtime).runs
    if model is None:
        return ""
    left, experts = job.sizes["dp"], model.experts or 1
    domain = job.cluster.nvlink_domain or job.cluster.gpus_per_node or job.world_size
    wider = [size for size in divisors(left * p.tp) if p.tp < size <= domain and model.heads % size == 0]
    deeper = [size for size in divisors(left * p.pp) if p.pp < size <= model.all_layers]
    spread = [size for size in divisors(job.expert_sizes["edp"] * p.ep) if size > p.ep and experts % size == 0]
    raised = {
        "tp": runs.tensor and wider,
        "pp": runs.pipeline and deeper,
        "ep": runs.experts and spread,
        "zero": p.zero < max(runs.zero) and replicas(job) > 1,
    }
    ways = [f"raise {listed(names)}"] if (names := [name for name, can in raised.items() if can]) else []
    ways += ["training.recompute full"] * (t.recompute != "full" and "full" in runs.recompute)
    ways += ["training.micro_batch_size 1"] * ((t.micro_batch_size or 1) > 1)
    if not ways:
        return "use more GPUs, a smaller model or shorter sequences"
    return ", or ".join([*ways, *["more GPUs"] * (not names)])


HOST_SHARE = 0.9  # of a host's memory; the rest is for Python, CUDA's contexts and files


def host_memory_check(job: JobSpec, node_bytes: int) -> Check | None:
    """The check that what the ranks of a node keep in host memory fits the cluster's hosts; None
    where these are not known or nothing is kept."""
    have, rule, where = job.cluster.host_memory, "host-memory-fits", "cluster.host_memory"
    if have is None or not node_bytes:
        return None
    t = job.training
    states = "states, " if t.offload_optimizer or t.offload_parameters or t.optimizer.startswith("paged") else ""
    need = f"{states}offloaded inputs and copies for checkpoints need {bytes_text(node_bytes)} of a host's"
    if node_bytes <= HOST_SHARE * have:
        return Check(rule, "ok", where, f"{need} {bytes_text(have)}")
    ways = "checkpoint.asynchronous false, or fewer replicas on a node"
    if states:
        ways = f"more replicas over more nodes, optimizer adafactor or sgd, {ways}"
    if t.offload_activations:
        ways = f"training.offload_activations false, {ways}"
    return Check(
        rule,
        "warning",
        where,
        f"{need} {bytes_text(have)}, of which at most {HOST_SHARE:.0%} are for them",
        f"use {ways}",
    )


def family_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Positions, sequence length, norms and kv heads that the model's family accepts."""
    model = draft.job.model
    if model is None:
        return
    family = get_family(model.family)
    if model.position not in family.positions:
        yield Check(
            "family-positions",
            "error",
            "model.position",
            f"family {family.name} has no {model.position} positions",
            f"use {' or '.join(family.positions)}",
        )
    if model.seq_length < (least := family.shortest_sequence):
        yield Check(
            "shortest-sequence",
            "error",
            "model.seq_length",
            f"{model.seq_length} is too short for a sample of family {family.name}",
            f"use {least} or more",
        )
    if model.norm_order not in family.norm_orders:
        others = [other.name for other in all_builtin() if model.norm_order in other.norm_orders]
        yield Check(
            "family-norms",
            "error",
            "model.norm_order",
            f"{model.norm_order}, but family {family.name} has {listed(family.norm_orders)}",
            f"use {' or '.join(family.norm_orders)}, or family {' or '.join(others)}",
        )
    if not family.grouped_queries and model.kv_heads != model.heads:
        yield Check(
            "family-kv-heads",
            "error",
            "model.kv_heads",
            f"{model.kv_heads}, but family {family.name} needs as many as heads, {model.heads}",
            f"use {model.heads}",
        )


def relative_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Half of the buckets of each direction have one distance each, and the largest distance is
    above those: with n buckets, n/4 in the encoder, which attends both ways, n/2 in the decoder."""
    model = draft.job.model
    if model is None or model.position != "relative":
        return
    buckets, distance = model.relative_buckets, model.relative_max_distance
    if buckets % 2 or buckets < 4:
        yield Check(
            "relative-buckets",
            "error",
            "model.relative_buckets",
            f"{buckets} buckets are not an even number of at least 4",
            f"use {max(4, buckets + buckets % 2)}",
        )
    elif distance <= buckets // 2:
        yield Check(
            "relative-distance",
            "error",
            "model.relative_max_distance",
            f"{distance} is not above the {buckets // 2} distances that have a bucket of their own among {buckets}",
            f"use {buckets // 2 + 1} or more, or fewer relative_buckets",
        )


def decoder_rules(draft: LayoutDraft) -> Iterator[Check]:
    """A family with a decoder needs its depth and its length, and no other family takes them."""
    job = draft.job
    model = job.model
    if model is None:
        return
    family = get_family(model.family)
    if family.target_length is None:
        yield from _no_decoder(model)
        return
    usual = (
        ("decoder-layers", "decoder_layers", model.layers, "as many as encoder layers"),
        ("decoder-length", "decoder_seq_length", family.target_length(model.seq_length), "the targets of its samples"),
    )
    for rule, key, value, what in usual:
        if getattr(model, key) is None:
            yield Check(rule, "error", f"model.{key}", f"family {family.name} needs it", f"use {value} for {what}")
    if model.decoder_seq_length:
        yield from _decoder_length(job, model.decoder_seq_length)


def _no_decoder(model: ModelSpec) -> Iterator[Check]:
    given = (("decoder-layers", "decoder_layers", "layers"), ("decoder-length", "decoder_seq_length", "tokens"))
    for rule, key, what in given:
        if (value := getattr(model, key)) is not None:
            others = [family.name for family in all_builtin() if family.has_decoder]
            yield Check(
                rule,
                "error",
                f"model.{key}",
                f"family {model.family} has no decoder for {value} {what}",
                f"leave it out, or use family {' or '.join(others)}",
            )


def _decoder_length(job: JobSpec, length: int) -> Iterator[Check]:
    """The decoder's tokens must divide among the ranks that share its sequence."""
    p, where = job.parallel, "model.decoder_seq_length"
    if p.cp > 1:
        parts = context_parts(p.cp)
        ways = f"use a multiple of {parts} (two blocks a rank)"
        yield divides("cp-divides-decoder", where, length, parts, "decoder tokens", ways)
    if p.sequence_parallel and p.tp > 1:
        parts = sequence_parts(p.tp, p.cp)
        ways = f"use a multiple of {parts}"
        yield divides("sp-divides-decoder", where, length, parts, "decoder tokens", ways)
