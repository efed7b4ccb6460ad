"""What a software does with a model besides its matrix products: a runtime profile.

How often it reads and writes which tensor, what it overlaps, what its host spends on launching
kernels. The profiles of presets/runtimes are those that `training.runtime` names; their figures
come from the software's sources and papers, those under [host] and [overlap] from a fit to
published runs. Nothing here knows a model, and nothing is keyed by one.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

from pydantic import Field, ValidationError

from mpctl.errors import InputError
from mpctl.spec.base import Count, DType, NonNegative, Positive, Share, Table
from mpctl.spec.presets import get_preset
from mpctl.spec.runtime_memory import Memory


class Passes(Table):
    """How often a tensor is read or written once, forward and backward: a gelu by itself is 2."""

    forward: NonNegative
    backward: NonNegative


class Operators(Table):
    """What memory bounds, for one micro batch."""

    hidden: Passes = Field(description="hidden states, a sublayer: norm, dropout, residual")
    dropout: Passes = Field(
        Passes(forward=0, backward=0), description="as hidden, and only where training.dropout is "
        "above 0; of other software it is among those"
    )  # fmt: skip
    width: Passes = Field(description="q, k, v and context: splits, rotations, transposes, biases")
    inner: Passes = Field(description="what an MLP's matrices give and take: activation, bias")
    scores: Passes = Field(description="score matrix where it is held: scale, mask, softmax")
    logits: Passes = Field(description="bytes, not passes, a logit: casts and the loss")
    gradient_bytes: NonNegative = Field(
        description="moved for a trained parameter and micro batch beyond its dW: accumulation"
    )
    optimizer_bytes: Positive = Field(description="moved for a parameter that a rank steps")
    cast_bytes: NonNegative = Field(0.0, description="an element of an fp8 product's operands")
    flash: Positive = Field(1.0, description="its flash attention to the device's, forward")
    flash_backward: Positive = Field(1.0, description="and backward")
    recompute: Literal["core", "half"] = Field(
        "core", description="what selective recomputation repeats: scores, or every other product"
    )
    stops_early: bool = Field(
        False, description="recomputation ends at the last tensor that backward needs"
    )


class Overlap(Table):
    """Which share of a message goes on beside products, at most as long as those take."""

    tp: Share = Field(description="a column product's gradient beside its weights' gradient")
    pp: Share = Field(description="a message between stages beside the work of both")
    dp: Share = Field(description="gradients (and parameters) beside the last backward")
    zero: Share = Field(0.0, description="ZeRO-3's gathers and scatters beside each layer")
    drag: NonNegative = Field(0.0, description="of what overlaps, that products take longer")
    keeps: bool = Field(
        False, description="in a pipeline ZeRO-3's parameters stay gathered from the first micro "
        "batch to the last, and gradients are scattered once"
    )  # fmt: skip
    scatters: bool = Field(
        False, description="tp ranks send a part of a message between stages each, and gather it"
    )


class Host(Table):
    """Seconds of the host thread that launches kernels; what it takes longer than they."""

    layer: NonNegative = Field(description="a layer's forward; its backward takes twice as long")
    micro_batch: NonNegative = Field(0.0, description="the rest of a pass over a stage")
    message: NonNegative = Field(0.0, description="a message between stages, at either end")
    sync: NonNegative = Field(
        0.0, description="part of it more that a layer takes where tp has 8 ranks that wait for "
        "each other, by the cube of tp"
    )  # fmt: skip
    step: NonNegative = Field(0.0, description="once a step")


class Seen(Table):
    """What the runs of the fit were: beyond it an estimate is an extrapolation."""

    devices: list[str] = Field(default_factory=list)
    clusters: list[str] = Field(default_factory=list)
    dtypes: list[DType] = Field(default_factory=list)
    gpus: Count = Field(1, description="of the largest run")
    parameters: Positive = Field(1, description="of the largest model")


class Profile(Table):
    name: str
    gradient_dtype: DType | None = Field(None, description="reduced in; the training's when absent")
    operators: Operators
    overlap: Overlap
    host: Host
    spread: Positive = Field(
        description="of log(measured / estimated) over runs like those of the fit, left out of it"
    )
    spread_apart: Positive = Field(description="over whole tables, each left out of the fit")
    seen: Seen = Field(default_factory=Seen)
    memory: Memory = Field(default_factory=Memory, description="of the memory estimate")
    source: str


@cache
def get_profile(name: str) -> Profile:
    """The preset of `training.runtime`; raises InputError where a file of it is wrong."""
    try:
        return Profile.model_validate(get_preset("runtimes", name, where="training.runtime"))
    except ValidationError as error:
        where = f"presets/runtimes/{name}.toml"
        raise InputError.of("bad-profile", where, str(error)) from None
