"""mpctl's parameters by Hugging Face's names and layouts, from tables of their classes; no torch.

A parameter of ours is one tensor of theirs, or several stacked on dim 0 (q, k and v; gate and up).
Linear layers stored [in, out] are transposed.
With hidden 8 and ffn 32, mlp.up.weight, ours [32, 8], is GPT-2's h.0.mlp.c_fc.weight, [8, 32].
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace

from mpctl.errors import InputError, Issue
from mpctl.families import all_builtin, get_family, get_table
from mpctl.families.scheme import Scheme
from mpctl.operators.matmul import ParameterSpec
from mpctl.spec.model import VARIANTS, ModelSpec, is_set


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs: its name, its shape as stored, and whether that is transposed."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def rows(self) -> int:
        return self.shape[-1] if self.transposed else self.shape[0]


@dataclass(frozen=True)
class Row:
    """A parameter of ours, without padding: full shape, and the pieces stacked on dim 0."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def builtin_schemes() -> dict[str, Scheme]:
    """Every class that the built-in families can be written to, by its `model_type`."""
    families = (of_kind for family in all_builtin() for of_kind in family.hub_schemes().values())
    schemes = (scheme for of_kind in families for scheme in of_kind)
    return {scheme.model_type: scheme for scheme in schemes}


def get_scheme(model: ModelSpec) -> Scheme:
    """The first class that can hold the model; InputError names what the nearest cannot hold."""
    schemes = get_family(model.family).hub_schemes()
    if not schemes:
        classes = ", ".join(scheme.architecture for scheme in builtin_schemes().values())
        others = [family.name for family in all_builtin() if family.hub_schemes()]
        raise InputError.of(
            "no-hub-class", "model.family",
            f"family {model.family!r} has none of the classes {classes}",
            f"use family {', '.join(others)}",
        )  # fmt: skip
    if model.position not in schemes:
        classes = " or ".join(scheme.architecture for scheme, *_ in schemes.values())
        raise InputError.of(
            "no-hub-class", "model.position",
            f"{model.position!r} positions cannot be represented in {classes}",
            f"use {' or '.join(schemes)}",
        )  # fmt: skip
    fewest: list[Issue] = []
    for scheme in schemes[model.position]:
        issues = list(_inexpressible(model, scheme))
        if not issues:
            return scheme
        fewest = issues if not fewest or len(issues) < len(fewest) else fewest
    raise InputError(fewest)


def _inexpressible(model: ModelSpec, scheme: Scheme) -> Iterator[Issue]:
    """An issue for each setting of the model that the class cannot represent."""
    rule, name = "no-hub-class", scheme.architecture
    for key, legal in scheme.expressible.items():
        if (value := getattr(model, key)) not in legal:
            message = f"{value!r} cannot be represented in {name}"
            yield Issue(rule, f"model.{key}", message, f"use {', '.join(map(str, legal))}")
    for key in VARIANTS:
        if key not in scheme.variants and is_set(model, key):
            message = f"{getattr(model, key)} cannot be represented in {name}"
            yield Issue(rule, f"model.{key}", message, "leave it out")
    if model.head_dim is None:
        message = f"{model.heads} heads do not divide hidden {model.hidden}"
        yield Issue(rule, "model.heads", message, "give model.head_dim")
        return
    if scheme.heads_fill_hidden and model.heads * model.head_size != model.hidden:
        message = f"{name} needs heads x head_dim to be hidden, but {model.heads} x "
        message += f"{model.head_size} is not {model.hidden}"
        yield Issue(rule, "model.head_dim", message)
    if not scheme.grouped_heads and model.kv_heads != model.heads:
        message = f"{model.kv_heads}, but {name} has as many as heads, {model.heads}"
        yield Issue(rule, "model.kv_heads", message)


def rows_of(model: ModelSpec) -> dict[str, Row]:
    """Every parameter of the model by name, with its place in a Hugging Face directory."""
    scheme, table = get_scheme(model), get_table(model, tp=1)
    return {weight.name: _row(weight, model, scheme) for weight in table.weights()}


def _row(weight: ParameterSpec, model: ModelSpec, scheme: Scheme) -> Row:
    shape = weight.shape
    if weight.dims[0] == "vocab":
        shape = (model.vocab, *shape[1:])
    owner, _, kind = weight.name.rpartition(".")
    names, in_block = _their_names(owner, scheme, gated=model.gated)
    turned = in_block and scheme.conv1d and len(shape) == 2
    shapes = [(height, *shape[1:]) for height in _heights(owner, shape[0], len(names), model)]
    return Row(weight.name, shape, tuple(
        Piece(f"{name}.{kind}", piece[::-1] if turned else piece, turned)
        for name, piece in zip(names, shapes, strict=True)
    ))  # fmt: skip


def _their_names(owner: str, scheme: Scheme, *, gated: bool) -> tuple[tuple[str, ...], bool]:
    """For a module of ours: the names of theirs, and whether it belongs to a layer."""
    modules = {**scheme.modules, **(scheme.gated if gated else {})}
    number = re.search(r"\.(\d+)\.", owner)
    if number is None:
        return modules[owner], False
    key = owner.replace(number[0], ".{}.")
    return tuple(name.format(number[1]) for name in modules[key]), True


def _heights(owner: str, height: int, pieces: int, model: ModelSpec) -> tuple[int, ...]:
    """Rows of each piece in the stack: equal, unless keys and values have fewer heads."""
    if pieces > 1 and owner.endswith("attention.qkv"):
        return (model.heads * model.head_size, *[model.kv_heads * model.head_size] * 2)
    return (height // pieces,) * pieces


def as_stored(rows: Mapping[str, Row], stored: Container[str], scheme: Scheme) -> dict[str, Row]:
    """The same rows under the names that the files use; a missing piece keeps its usual name."""

    def spelled(piece: Piece) -> Piece:
        names = [re.sub(pattern, other, piece.name) for pattern, other in scheme.spellings]
        known = (name for name in (piece.name, *names) if name in stored)
        return replace(piece, name=next(known, piece.name))

    return {
        name: replace(row, pieces=tuple(map(spelled, row.pieces))) for name, row in rows.items()
    }  # fmt: skip


def is_extra(name: str, scheme: Scheme) -> bool:
    """Whether a tensor is not read: a mask, frequencies that the shape gives, a second copy."""
    return re.fullmatch(scheme.extra, name) is not None
