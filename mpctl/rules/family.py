"""Rules about what a family is: its positions, its norms, its second stack."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.families.t5.special import target_length
from mpctl.rules.check import Check, divides
from mpctl.spec.job import JobSpec
from mpctl.spec.model import FamilyName, ModelSpec

POSITIONS: dict[FamilyName, tuple[str, ...]] = {
    "gpt": ("learned", "rotary", "none"),
    "bert": ("learned",),
    "t5": ("relative",),
    "glm": ("learned",),
}
SHORTEST: dict[FamilyName, int] = {"gpt": 1, "bert": 5, "t5": 3, "glm": 3}


def family_rules(job: JobSpec) -> Iterator[Check]:
    model = job.model
    if model is None:
        return
    legal = POSITIONS[model.family]
    if model.position not in legal:
        yield Check("family-positions", "error", "model.position",
                    f"family {model.family} has no {model.position} positions",
                    f"use {' or '.join(legal)}")  # fmt: skip
    if model.seq_length < (least := SHORTEST[model.family]):
        yield Check("shortest-sequence", "error", "model.seq_length",
                    f"{model.seq_length} is too short for a sample of family {model.family}",
                    f"use {least} or more")  # fmt: skip
    if model.norm_order == "post" and model.family != "bert":
        yield Check("family-norms", "error", "model.norm_order",
                    f"family {model.family} has its norms before attention and MLP",
                    "use pre, or family bert")  # fmt: skip
    if model.family == "t5" and model.kv_heads != model.heads:
        yield Check("family-kv-heads", "error", "model.kv_heads",
                    f"{model.kv_heads}, but cross attention has as many as heads, {model.heads}",
                    f"use {model.heads}")  # fmt: skip


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
    """Only t5 has a decoder, and it needs both its depth and its length."""
    model = job.model
    if model is None:
        return
    usual = (
        ("decoder-layers", "decoder_layers", model.layers, "as many as encoder layers"),
        ("decoder-length", "decoder_seq_length", target_length(model.seq_length),
         "span corruption's targets"),
    )  # fmt: skip
    for rule, key, value, what in usual:
        given = getattr(model, key)
        if model.family == "t5" and given is None:
            yield Check(rule, "error", f"model.{key}", "family t5 needs it",
                        f"use {value} for {what}")  # fmt: skip
        elif model.family != "t5" and given is not None:
            yield Check(rule, "error", f"model.{key}",
                        f"family {model.family} has no decoder for {given} "
                        + ("layers" if key == "decoder_layers" else "tokens"),
                        "leave it out, or use family t5")  # fmt: skip
    if model.family == "t5" and model.decoder_seq_length:
        yield from _decoder_length(job, model, model.decoder_seq_length)


def _decoder_length(job: JobSpec, model: ModelSpec, length: int) -> Iterator[Check]:
    p, where = job.parallel, "model.decoder_seq_length"
    if p.cp > 1:
        ways = f"use a multiple of {2 * p.cp} (two blocks a rank)"
        yield divides("cp-divides-decoder", where, length, 2 * p.cp, "decoder tokens", ways)
    if p.sequence_parallel and p.tp > 1:
        ways = f"use a multiple of {p.tp * p.cp}"
        yield divides("sp-divides-decoder", where, length, p.tp * p.cp, "decoder tokens", ways)
