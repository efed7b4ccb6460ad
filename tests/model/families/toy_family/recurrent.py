"""Families whose layers have no attention: a gated linear recurrence takes its place.

y_t = a_t y_(t-1) + (1 - a_t) v_t with a = sigmoid(gate), elementwise in ffn columns. `recurrent` has an
MLP behind it, `linear` two products without an activation, `mlp-first` the MLP before it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from mpctl.model.operators.activation_shapes import ActivationShapes, Saved, SavedTensor
from mpctl.model.operators.blocks import embedding, in_branch, linear_weights, output_head, word_table
from mpctl.model.operators.layer import INPUT, Activation, LayerStack, Operation, OperatorGroup
from mpctl.model.operators.matmul import Dims, MatMul
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.model import ModelSpec

from .family import FAMILY
from .ops import HIDDEN

INNER: Dims = ("batch", "seq", "ffn")
SCANS = {"recurrent": ("scan", "gelu"), "linear": ("scan", ""), "mlp-first": ("gelu", "scan")}
"""By family, what stands between the two products of a layer's first branch and of its second."""


class Scan(NamedTuple):
    """The recurrence over [b, s, f]."""

    part: str

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Gates and values, side by side; its result is the next product's input."""
        return [SavedTensor(f"{self.part} gates and values", INNER, times=2)]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Gradients of result, gates and values, and five tensors more in module.py's `_Scan`."""
        return float(8 * shapes.count(INNER) * shapes.value)


def branch(model: ModelSpec, name: str, between: str, value: str) -> tuple[Operation, ...]:
    """Two products with `between` between them, a norm before and a sum behind."""
    columns = model.ffn * (2 if between == "scan" else 1)
    h, made = ("hidden", model.hidden), f"{name}.between" if between else f"{name}.up"
    weights = linear_weights(f"{name}.up", ("ffn", columns), h, bias=False)
    up = MatMul(f"{name}.up", name, HIDDEN, ("hidden", "ffn"), INNER, value=f"{name}_norm", weights=weights)
    weights = linear_weights(f"{name}.down", h, ("ffn", model.ffn), bias=False)
    down = MatMul(f"{name}.down", name, INNER, ("ffn", "hidden"), HIDDEN, value=made, weights=weights)
    middle: dict[str, tuple[Operation, ...]] = {
        "scan": (Scan(name),),
        "gelu": (Activation(name, INNER, "gelu", False, f"{name}.up"),),
    }
    return in_branch(model, name, name, HIDDEN, value, (up, *middle.get(between, ()), down))


def operator_table(model: ModelSpec, *, tp: int, family: str) -> OperatorTable:
    """As the toy family's, with other layers."""
    word, (first, second) = word_table(model, tp=tp), SCANS[family]
    layer = OperatorGroup((*branch(model, "attention", first, INPUT), *branch(model, "mlp", second, "attention")))
    stack = LayerStack(
        "layers",
        (layer,) * model.layers,
        entry=embedding(HIDDEN, word),
        exit=OperatorGroup(output_head(HIDDEN, word, tied=True)),
    )
    return OperatorTable((stack,))


RECURRENT, LINEAR, MLP_FIRST = (
    replace(
        FAMILY,
        name=name,
        operator_table=partial(operator_table, family=name),
        implementation=f"{__package__}.recurrent_module:{name.upper().replace('-', '_')}",
    )
    for name in SCANS
)
