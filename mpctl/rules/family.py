"""Rules about the settings that a model's family accepts, as its description says them.

The family's description (families/description.py) holds positions, orders of norms, the shortest
sequence and whether there is a decoder; no rule here names a family.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.families import all_builtin, get_family
from mpctl.rules.check import Check, divides, listed
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec


def family_rules(job: JobSpec) -> Iterator[Check]:
    """Positions, sequence length, norms and kv heads that the model's family accepts."""
    model = job.model
    if model is None:
        return
    family = get_family(model.family)
    if model.position not in family.positions:
        yield Check("family-positions", "error", "model.position",
                    f"family {family.name} has no {model.position} positions",
                    f"use {' or '.join(family.positions)}")  # fmt: skip
    if model.seq_length < (least := family.shortest_sequence):
        yield Check("shortest-sequence", "error", "model.seq_length",
                    f"{model.seq_length} is too short for a sample of family {family.name}",
                    f"use {least} or more")  # fmt: skip
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
        yield Check("family-kv-heads", "error", "model.kv_heads",
                    f"{model.kv_heads}, but family {family.name} needs as many as heads, "
                    f"{model.heads}", f"use {model.heads}")  # fmt: skip


def relative_rules(job: JobSpec) -> Iterator[Check]:
    """Half of the buckets of each direction stand for one distance each, and the largest distance
    lies beyond: of n buckets n/4 in the encoder, which looks both ways, n/2 in the decoder."""
    model = job.model
    if model is None or model.position != "relative":
        return
    buckets, distance = model.relative_buckets, model.relative_max_distance
    if buckets % 2 or buckets < 4:
        yield Check("relative-buckets", "error", "model.relative_buckets",
                    f"{buckets} buckets are not an even number of at least 4",
                    f"use {max(4, buckets + buckets % 2)}")  # fmt: skip
    elif distance <= buckets // 2:
        yield Check("relative-distance", "error", "model.relative_max_distance",
                    f"{distance} is not above the {buckets // 2} distances that have a bucket of "
                    f"their own among {buckets}",
                    f"use {buckets // 2 + 1} or more, or fewer relative_buckets")  # fmt: skip


def decoder_rules(job: JobSpec) -> Iterator[Check]:
    """A family with a decoder needs its depth and its length, and no other family takes them."""
    model = job.model
    if model is None:
        return
    family = get_family(model.family)
    if family.target_length is None:
        yield from _no_decoder(model)
        return
    usual = (
        ("decoder-layers", "decoder_layers", model.layers, "as many as encoder layers"),
        ("decoder-length", "decoder_seq_length", family.target_length(model.seq_length),
         "the targets of its samples"),
    )  # fmt: skip
    for rule, key, value, what in usual:
        if getattr(model, key) is None:
            yield Check(rule, "error", f"model.{key}", f"family {family.name} needs it",
                        f"use {value} for {what}")  # fmt: skip
    if model.decoder_seq_length:
        yield from _decoder_length(job, model.decoder_seq_length)


def _no_decoder(model: ModelSpec) -> Iterator[Check]:
    given = (("decoder-layers", "decoder_layers", "layers"),
             ("decoder-length", "decoder_seq_length", "tokens"))  # fmt: skip
    for rule, key, what in given:
        if (value := getattr(model, key)) is not None:
            others = [family.name for family in all_builtin() if family.has_decoder]
            yield Check(rule, "error", f"model.{key}",
                        f"family {model.family} has no decoder for {value} {what}",
                        f"leave it out, or use family {' or '.join(others)}")  # fmt: skip


def _decoder_length(job: JobSpec, length: int) -> Iterator[Check]:
    """The decoder's tokens must divide among the ranks that share its sequence."""
    p, where = job.parallel, "model.decoder_seq_length"
    if p.cp > 1:
        ways = f"use a multiple of {2 * p.cp} (two blocks a rank)"
        yield divides("cp-divides-decoder", where, length, 2 * p.cp, "decoder tokens", ways)
    if p.sequence_parallel and p.tp > 1:
        ways = f"use a multiple of {p.tp * p.cp}"
        yield divides("sp-divides-decoder", where, length, p.tp * p.cp, "decoder tokens", ways)
