"""Modules of a Hugging Face class that can have an adapter, and which rows of which of our adapters they hold.

A product of ours may be several modules of theirs (queries, keys and values; gate and up), or a part of one (GPT-2's
c_attn holds all three). An adapter of ours covers one output of a product or all of them. What both have in common is
a SharedRows. No torch here.

By hand, queries of 8 rows, keys and values of 4: the adapter `layers.0.attention.qkv.lora.key` is all of k_proj's, and
rows 8 to 11 of c_attn's B.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mpctl.model.families import get_table
from mpctl.model.families.scheme import WORD_TABLE, Scheme
from mpctl.model.operators.adapters import adapter_name, output_rows
from mpctl.model.operators.matmul import MatMul
from mpctl.spec.model import ModelSpec
from mpctl.train.weights.names import Row, get_scheme, rows_of

FUSED_EXPERTS = {"up": "gate_up_proj", "down": "down_proj"}
"""Parameters of transformers 5's `experts` modules, which stack the matrices of all experts."""


class SharedRows(NamedTuple):
    """Rows that a module and an adapter of ours share. adapter: its name, `layers.0.mlp.down.lora`; ours, theirs: the
    rows of its B and of the module's."""

    adapter: str
    ours: range
    theirs: range


@dataclass(frozen=True)
class PeftModule:
    """A module of theirs that computes some rows of a product of ours.

    name: as in the keys of adapter_model.safetensors; parameter: of fused experts, the one of the module that is
    adapted. product: ours, `layers.0.attention.qkv`; rows: of it. outputs: rows of the product by the output that an
    adapter of ours is named for. pairs: as in names.Piece. apart: modules of single experts in files of transformers 4,
    by expert.
    """

    name: str
    product: str
    rows: range
    outputs: dict[str, range]
    inputs: int
    experts: int = 0
    parameter: str = ""
    pairs: tuple[int, int] | None = None
    apart: tuple[tuple[str, ...], ...] = ()

    @property
    def target(self) -> str:
        """What a list of targets names: the module, or the parameter of it."""
        return f"{self.name}.{self.parameter}" if self.parameter else self.name

    @property
    def ours(self) -> str:
        """The product without its layer's number: `attention.qkv`."""
        return re.sub(r"^.*?\.\d+\.", "", self.product)

    @property
    def kind(self) -> str:
        """The module without the numbers of layers and experts: `self_attn.q_proj`."""
        return re.sub(r".*\.\d+\.", "", self.target)

    def parts(self, adapters: Collection[str]) -> list[SharedRows]:
        """What it shares with these adapters of ours, in the order of its rows."""
        names = {adapter_name(self.product, part): rows for part, rows in self.outputs.items()}
        return [part for name in names if name in adapters and (part := self._part(name, names[name])) is not None]

    def _part(self, adapter: str, covered: range) -> SharedRows | None:
        both = range(max(covered.start, self.rows.start), min(covered.stop, self.rows.stop))
        if not both:
            return None
        ours, theirs = (range(both.start - of.start, both.stop - of.start) for of in (covered, self.rows))
        return SharedRows(adapter, ours, theirs)


def peft_modules(model: ModelSpec) -> list[PeftModule]:
    """Every module with a linear layer, in the order of the model's products, the head last."""
    scheme, rows = get_scheme(model), rows_of(model)
    table = get_table(model, tp=1)
    found: list[PeftModule] = []
    for stack in table.stacks:
        for layer in range(stack.layers):
            for product in stack.block_of(layer).products:
                if product.weights and not (product.is_lookup or product.is_wide):
                    owner = f"{stack.prefix}.{layer}.{product.name}"
                    found += _modules(owner, product, model, rows[f"{owner}.weight"])
    heads = [product for stack in table.stacks for product in stack.exit.products if product.is_head]
    return [*found, *(_head(product, model, scheme, rows) for product in heads if product.name == "head")]


def _modules(owner: str, product: MatMul, model: ModelSpec, row: Row) -> Iterator[PeftModule]:
    outputs = output_rows(product, model)
    if product.is_grouped:
        yield _experts(owner, outputs, row)
        return
    for piece in row.pieces:
        name = piece.name.removesuffix(".weight")
        yield PeftModule(name, owner, piece.box[0], outputs, row.shape[-1], pairs=piece.pairs)


def _experts(owner: str, outputs: dict[str, range], row: Row) -> PeftModule:
    experts = row.shape[0]
    names = [piece.name.removesuffix(".weight") for piece in row.pieces]
    each = len(names) // experts
    name = names[0][: names[0].index(".experts.") + len(".experts")].replace("block_sparse_moe", "mlp")
    return PeftModule(
        name,
        owner,
        outputs[""],
        outputs,
        row.shape[-1],
        experts,
        FUSED_EXPERTS[owner.rpartition(".")[2]],
        apart=tuple(tuple(names[start : start + each]) for start in range(0, len(names), each)),
    )


def _head(product: MatMul, model: ModelSpec, scheme: Scheme, rows: Mapping[str, Row]) -> PeftModule:
    """The output head, whose weight may be the word table's."""
    own = rows.get("head.weight")
    name = scheme.copies[WORD_TABLE][0] if own is None else own.pieces[0].name
    words = range(model.vocab)
    return PeftModule(name.removesuffix(".weight"), "head", words, {"": words}, product.matrix.shape[-1])
