"""mpctl's parameters by Hugging Face's names and layouts, from tables of their classes; no torch.

A parameter of ours is one tensor of theirs, or several, each of which is a box of it: stacked on
dim 0 (q, k and v; gate and up), or a matrix of one expert (experts.up.weight [E, 2, f, h] is 2 E of
them). Linear layers stored [in, out] are transposed.
With hidden 8 and ffn 32, mlp.up.weight, ours [32, 8], is GPT-2's h.0.mlp.c_fc.weight, [8, 32].
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mpctl.core.errors import InputError, Issue
from mpctl.core.shard import Box
from mpctl.model.families import all_builtin, get_family, get_table
from mpctl.model.families.scheme import Scheme
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.spec.model import VARIANTS, ModelSpec, is_set


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs: its name, its shape as stored, and the box of our parameter that it is.

    transposed: whether it is stored [columns, rows]. pairs: (period, first) of rows that are stored
    as neighbouring pairs (Scheme.pairs).
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    transposed: bool = False
    pairs: tuple[int, int] | None = None


@dataclass(frozen=True)
class Row:
    """A parameter of ours, without padding: full shape, and the pieces that fill it."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def builtin_schemes() -> dict[str, Scheme]:
    """Every class that the built-in families can be written to, by its `model_type`."""
    families = (of_kind for family in all_builtin() for of_kind in family.hub_schemes().values())
    schemes = [scheme for of_kind in families for scheme in of_kind]
    return {kind: scheme for scheme in schemes for kind in (scheme.model_type, *scheme.also_read)}


def get_scheme(model: ModelSpec) -> Scheme:
    """The first class that can hold the model; InputError names what the nearest cannot hold."""
    schemes = get_family(model.family).hub_schemes()
    if not schemes:
        classes = ", ".join(scheme.architecture for scheme in builtin_schemes().values())
        others = [family.name for family in all_builtin() if family.hub_schemes()]
        raise InputError.of(
            "no-hub-class",
            "model.family",
            f"family {model.family!r} has none of the classes {classes}",
            f"use family {', '.join(others)}",
        )
    if model.position not in schemes:
        classes = " or ".join(scheme.architecture for scheme, *_ in schemes.values())
        raise InputError.of(
            "no-hub-class",
            "model.position",
            f"{model.position!r} positions cannot be represented in {classes}",
            f"use {' or '.join(schemes)}",
        )
    fewest: list[Issue] = []
    has_experts = model.experts is not None
    alike = [s for s in schemes[model.position] if ("experts" in s.variants) is has_experts]
    for scheme in alike or schemes[model.position]:
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
    for key, why in scheme.refuses(model):
        yield Issue(rule, f"model.{key}", f"{why} cannot be represented in {name}")
    if model.is_mla:
        return
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


def num_pieces(model: ModelSpec) -> int:
    """Count the tensors of a Hugging Face directory that rows_of names, without naming them."""
    scheme, experts = get_scheme(model), model.experts or 1
    return sum(
        len(_names(weight, model, scheme)) * (experts if _is_per_expert(weight) else 1)
        for weight in get_table(model, tp=1).weights()
    )


def router_rows(model: ModelSpec) -> dict[str, Row]:
    """The routers' weights [E, h] alone, as rows_of has them."""
    scheme, table = get_scheme(model), get_table(model, tp=1)
    routers = (w for w in table.weights() if w.dims[0] == "experts" and not _is_per_expert(w))
    return {weight.name: _row(weight, model, scheme) for weight in routers}


def _is_per_expert(weight: ParameterSpec) -> bool:
    """Whether a parameter has a matrix of its own for each expert."""
    return weight.dims[0] == "experts" and len(weight.shape) > 2


def _names(weight: ParameterSpec, model: ModelSpec, scheme: Scheme) -> Sequence[str]:
    """The modules of theirs that hold a parameter of ours."""
    key, _ = _key(weight.name.rpartition(".")[0])
    return {**scheme.modules, **(scheme.gated if model.gated else {})}[key]


def rows_of(model: ModelSpec) -> dict[str, Row]:
    """Every parameter of the model by name, with its place in a Hugging Face directory."""
    scheme, table = get_scheme(model), get_table(model, tp=1)
    return {weight.name: _row(weight, model, scheme) for weight in table.weights()}


def _row(weight: ParameterSpec, model: ModelSpec, scheme: Scheme) -> Row:
    shape = weight.shape
    if weight.dims[0] == "vocab":
        shape = (model.vocab, *shape[1:])
    owner, _, kind = weight.name.rpartition(".")
    key, number = _key(owner)
    names = _names(weight, model, scheme)
    if _is_per_expert(weight):
        matrices = _experts(shape, [f"{name}.{kind}" for name in names], number)
        return Row(weight.name, shape, tuple(matrices))
    turned = bool(number) and scheme.conv1d and len(shape) == 2
    pairs, first, pieces = scheme.pairs(model).get(key), 0, list[Piece]()
    heights = _heights(owner, shape[0], len(names), model)
    for name, height in zip(names, heights, strict=True):
        box = (range(first, first + height), *map(range, shape[1:]))
        stored = (height, *shape[1:])
        full = f"{name.format(number)}.{kind}"
        pieces.append(Piece(full, stored[::-1] if turned else stored, box, turned, pairs))
        first += height
    return Row(weight.name, shape, tuple(pieces))


def _experts(shape: tuple[int, ...], names: Sequence[str], layer: str) -> Iterator[Piece]:
    """A matrix for each expert and each of `names`: gate and up of [E, 2, f, h], one of
    [E, h, f]."""
    outer = len(shape) - 2
    for expert in range(shape[0]):
        for number, name in enumerate(names):
            at = (range(expert, expert + 1), range(number, number + 1))[:outer]
            box = (*at, *map(range, shape[outer:]))
            yield Piece(name.format(layer, expert), shape[outer:], box)


def _key(owner: str) -> tuple[str, str]:
    """For a module of ours: its key in a scheme, and its layer's number, empty outside of layers.

    >>> _key("layers.7.mlp.up")
    ('layers.{}.mlp.up', '7')
    """
    number = re.search(r"\.(\d+)\.", owner)
    return (owner, "") if number is None else (owner.replace(number[0], ".{}.", 1), number[1])


def biases_of(model: ModelSpec) -> dict[str, str]:
    """Our layers with experts, by name, and their tensors of correction biases [E]."""
    scheme = get_scheme(model)
    if not scheme.router_bias:
        return {}
    numbers = filter(model.has_experts, range(model.layers))
    return {f"layers.{number}.mlp": scheme.router_bias.format(number) for number in numbers}


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

    return {name: replace(row, pieces=tuple(map(spelled, row.pieces))) for name, row in rows.items()}


def is_extra(name: str, scheme: Scheme) -> bool:
    """Whether a tensor is not read: a mask, frequencies that the shape gives, a second copy."""
    return re.fullmatch(scheme.extra, name) is not None
