"""A model's matrix products and parameters by named dimensions, without torch.

The sharding law determines what is split (sharding.py and tensor_grid.py: which axes split a
dimension); the contraction law, applied three times, determines the collectives of a product:

    forward  Y = X W      contracts what X and W share and Y lacks
    dX = dY W^T           contracts what Y and W share and X lacks
    dW = X^T dY           contracts what X and Y share and W lacks (batch: once a step, over dp)

A reduced product is a row-parallel one and sends its result; a column-parallel one sends its input.
Backward sends no gradient that it does not compute (dX or dW of frozen parts): grad_flow.py.

>>> qkv = MatMul("qkv", "attention", ("batch", "seq", "hidden"), ("hidden", "heads"),
...              ("batch", "seq", "heads"))
>>> qkv.forward_axes, qkv.backward_axes          # column-parallel: f, all-reduced backward
((), ('tp',))
>>> qkv.message
('batch', 'seq', 'hidden')
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

from mpctl.core.collectives import Kind
from mpctl.core.sharding import DENSE, Views, reduced_axes
from mpctl.core.tensor_grid import FEATURES
from mpctl.model.operators.activation_shapes import (
    OF_LATENTS,
    ActivationShapes,
    AdapterShapes,
    Saved,
    SavedTensor,
    Width,
    is_outer,
)
from mpctl.model.operators.activation_shapes import Dims as Dims  # re-exported
from mpctl.model.operators.kernel_sets import ROWS_BLOCK, row_sums_bytes

ROUTED: Dims = ("routed",)
"""The rows of tokens that a rank's experts compute, one for each expert of a token."""
_SUM: tuple[Kind, ...] = ("all_reduce",)
_GATHER: tuple[Kind, ...] = ("all_gather",)
_SCATTER: tuple[Kind, ...] = ("reduce_scatter",)
KEY_LATENT = "attention.key_value_latent_norm"
LATENTS = {
    "attention.query_down": "query_latent",
    "attention.query_latent_norm": "query_latent",
    "attention.key_value_down": "key_columns",
    KEY_LATENT: "key_latent",
}
"""The columns of each tensor of latents (ActivationShapes.dims)."""
MODULES = {"latent": OF_LATENTS, "expert_ffn": "moe_act", "shared_ffn": "shared_experts", "ffn": "mlp"}
"""The module that forms a product's input again, by the last dimension of the input."""


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter: its name inside the model, full shape and the name of each dimension. decays:
    whether weight decay applies to it, as to all but norms and biases. view: the view of the ranks
    (sharding.View) whose axes cut its dimensions."""

    name: str
    shape: tuple[int, ...]
    dims: Dims
    decays: bool = True
    view: str = DENSE

    @cached_property
    def numel(self) -> int:
        """Elements of the unsharded parameter."""
        return prod(self.shape)

    @cached_property
    def is_split(self) -> bool:
        """Whether the ranks of its view cut it: a dimension of features, which every tensor mode
        cuts, or any parameter of another view than the dense one."""
        return self.view != DENSE or any(dim in FEATURES for dim in self.dims)

    def local_numel(self, views: Views) -> int:
        """Elements of it on each rank."""
        return self.numel // views[self.view].grid.weight_parts(self.dims)

    def partial_kind(self, views: Views) -> str:
        """The group over which its gradient is a partial sum after backward, empty where it is
        complete."""
        return views[self.view].grid.partial_kind(self.dims)


class CollectivePhases(NamedTuple):
    """Kinds of collectives of a product, such as `all_reduce`, in the order in which they run."""

    forward: tuple[Kind, ...]
    backward: tuple[Kind, ...]


class GradNeeds(NamedTuple):
    """Gradients that backward computes at Y = X W + b.

    x: dX. w: dW. y: any gradient, of this product or of operations before it.
    """

    x: bool = True
    w: bool = True
    y: bool = True


class MatMul(NamedTuple):
    """A matrix product Y = X W by the names of its dimensions.

    part: the heading under which reports count it. reads, weight, writes: the dimensions of X, W
    and Y. input_gradient: whether X can have a gradient. is_lookup: whether it is the lookup of
    rows in a table, which counts as the product of one-hot rows with it and computes nothing.
    table: the module whose weight it uses, if not its own (a tied head). is_head: whether it
    belongs to an output head, which low-precision training leaves in its wider dtype. is_gathered:
    whether every rank needs all of Y, of which a column product writes a part. value: the tensor
    that it reads (layer.py), which it saves for dW unless it is saved already; empty where that is
    negligible. weights: W and, where the model has biases, b. is_wide: whether it is multiplied in
    float32 at least, whatever the training dtype is (a router). is_frozen: whether W has no gradient
    because the model is trained by adapters (adapters.py); is_adapted: whether it has one; adapts: of
    an adapter's product, the name of the product to whose result its own is added. What both save:
    frozen_saved, adapter_saved.
    """

    name: str
    part: str
    reads: Dims
    weight: Dims
    writes: Dims
    input_gradient: bool = True
    is_lookup: bool = False
    table: str = ""
    is_head: bool = False
    is_gathered: bool = False
    value: str = ""
    weights: tuple[ParameterSpec, ...] = ()
    is_wide: bool = False
    is_frozen: bool = False
    is_adapted: bool = False
    adapts: str = ""

    @property
    def is_grouped(self) -> bool:
        """Whether its rows are those of tokens sent to experts, each multiplied by the matrix of
        its expert."""
        return bool(self.weights) and self.weights[0].dims[0] == "experts" and self.rows == ROUTED

    @property
    def matrix(self) -> ParameterSpec:
        """W as a parameter, of the model that the product was listed for."""
        return self.weights[0]

    @property
    def parameter(self) -> str:
        """Name of W."""
        return f"{self.table or self.name}.weight"

    @property
    def bias(self) -> str:
        """Name of b, which exists where the model has biases."""
        return f"{self.name}.bias"

    @property
    def rows(self) -> Dims:
        """The dimensions of X that W does not contract; a row of X for each of their elements."""
        return tuple([dim for dim in self.reads if dim in self.writes])

    @property
    def is_column(self) -> bool:
        """Whether it writes features (column-parallel), as the head does; else it reads them."""
        return any(dim in FEATURES for dim in self.writes)

    @property
    def makes_logits(self) -> bool:
        """Whether its result are logits, with a loss behind them; an adapter's is a part of them."""
        return "vocab" in self.writes and not self.adapts

    @property
    def forward_axes(self) -> tuple[str, ...]:
        """Axes over which forward leaves partial sums: those of contracted dimensions."""
        return reduced_axes((set(self.reads) & set(self.weight)) - set(self.writes))

    @property
    def backward_axes(self) -> tuple[str, ...]:
        """Axes over which dX = dY W^T leaves partial sums."""
        if not self.input_gradient:
            return ()
        return reduced_axes((set(self.writes) & set(self.weight)) - set(self.reads))

    @property
    def message(self) -> Dims:
        """Dimensions of the tensor that it sends over tp, forward or backward: its unsplit side."""
        return self.writes if "tp" in self.forward_axes else self.reads

    def collectives(self, *, sequence_parallel: bool, needs: GradNeeds) -> CollectivePhases:
        """The collectives over tp that forward and backward need, each of one `message`.

        Sequence parallelism splits an all-reduce into its two phases and moves one to the other
        side; a column product gathers its input again for dW (arXiv 2205.05198, section 4.2.2).
        """
        is_row, is_column = "tp" in self.forward_axes, "tp" in self.backward_axes
        if not sequence_parallel:
            return CollectivePhases(_SUM * is_row, _SUM * (is_column and needs.x))
        row = CollectivePhases(_SCATTER, _GATHER * (needs.x or needs.w))
        column = CollectivePhases(_GATHER, _GATHER * needs.w + _SCATTER * needs.x)
        return row if is_row else column if is_column else CollectivePhases((), ())

    @property
    def module(self) -> str:
        """The module that forms its input again, where only some are recomputed."""
        if self.reads[-1] == "hidden":
            return "layernorm" if self.value.endswith("norm") else ""
        return MODULES.get(self.reads[-1], "")

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Its input, unless an operation before saved it; a lookup the words. kept: names of the
        tensors that are saved already, to which it adds its own."""
        if self.is_frozen:
            return [*frozen_saved(self, shapes), *self._shared_gate(shapes)]
        if self.is_lookup:
            return [SavedTensor("words", ("looked_up", self.writes[1]), "index", 1 if shapes.tp > 1 else 0)]
        if self.adapts:
            return adapter_saved(self, shapes, kept)
        own = self.saved_input(shapes)
        is_copied = own.width == "operand" and shapes.operand < shapes.value
        is_kept = not self.value or (self.value in kept and not is_copied)
        kept.add(self.value)
        return [*([] if is_kept else [own]), *self._shared_gate(shapes)]

    def saved_input(self, shapes: ActivationShapes) -> SavedTensor:
        """The input as it is kept for dW. The latent of keys and values is gathered over tp and cp
        beforehand, in one tensor with the keys' part with positions, and stays gathered, unless a
        copy in fp8 is saved in its place."""
        is_latent = self.value == KEY_LATENT
        keeps_shard = shapes.keeps_shards and self.is_column and not is_latent
        width: Width = "value" if keeps_shard or self.is_head or self.is_wide or self.adapts else "operand"
        dims, outer = saved_dims(self.reads, self.value), is_outer(self.reads)
        if is_latent and shapes.kernels.keeps_shards:
            is_copied = width == "operand" and shapes.operand < shapes.value
            is_gathered = not is_copied and (shapes.tp > 1 or shapes.gathers_latents)
            ranks = ("cp",) if shapes.gathers_latents else ()
            dims, outer = (*dims[:-1], *ranks, "key_columns" if is_gathered else "key_latent"), False
        return SavedTensor(f"{self.name} input", dims, width, 1, outer, module=self.module)

    def _shared_gate(self, shapes: ActivationShapes) -> Saved:
        """For the gate of shared experts: the gate, and the result of the shared experts, which it multiplies."""
        if self.writes[-1] != "gate":
            return []
        is_cast = shapes.wide > shapes.value
        return [
            SavedTensor("shared result", (*self.rows, "hidden"), "value", 1, True),
            SavedTensor("shared gate", self.rows, "float", 1, True),
            *[SavedTensor("shared gate", self.rows, "value", 1, True)] * is_cast,
        ]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """dX, dW on its way to the gradient buffer, and dY where that is no gradient of the hidden
        states themselves. defers: dW is computed later, for which X and the gathered dY of a row
        product stay."""
        if self.is_lookup:
            return 0.0 if self.is_frozen else lookup_bytes(shapes, self.writes[1])
        if self.makes_logits:
            return self._head_needs(shapes)
        if self.adapts:
            return adapter_needs(self, shapes)
        seq = self.reads[1] if len(self.reads) > 2 else "seq"
        stream, own = shapes.stream_bytes(seq), shapes.own_bytes(seq)
        is_row, rows = self.writes[-1] == "hidden", shapes.count(self.rows) * shapes.value
        x, y = rows * self._inputs(shapes), rows * self.outputs(shapes)
        given = own * shapes.dropout if is_row else y
        if defers:
            return given + 2 * x + stream * shapes.splits if is_row else 0.0
        w = 0 if shapes.adds_products and not self.is_grouped else self.matrix_bytes(shapes)
        if self.is_frozen:
            return self._frozen_needs(shapes, x=x, given=given, stream=stream)
        needed = given + product_bytes(shapes, x=x, w=w, y=own if is_row else y) + cast_bytes(shapes, x=x, y=stream)
        if not shapes.splits:
            return needed
        if is_row and not self.is_grouped:
            return needed + stream  # the gathered dY
        gathered = 2 * stream + (own if shapes.keeps_shards else 0.0)  # X once more, and dX, which is summed
        return needed + gathered - (0.0 if is_row else x)

    def _frozen_needs(self, shapes: ActivationShapes, *, x: float, given: float, stream: float) -> float:
        """dX, that of the adapter until they are summed, and W if it is dequantised."""
        apart = self.is_adapted and shapes.adapter is not None and not shapes.adapter.adds
        w = self.matrix_bytes(shapes) * self.is_dequantized(shapes)
        if self.is_adapted and shapes.adapter is not None:
            w += self.matrix_bytes(shapes) * shapes.adapter.formed
        return given + (1 + apart) * x + w + stream * shapes.splits * (not self.is_grouped)

    def _head_needs(self, shapes: ActivationShapes) -> float:
        """Gradients of a head's input and of its table, if that is made. Those of the logits are
        written over them, where the loss does not take them all at once. Where a chunk of the logits is
        made at a time, that too."""
        logits, stream = shapes.count(self.writes), shapes.stream_bytes(self.writes[1])
        is_chunked = shapes.loss_chunks is not None
        if shapes.kernels.loss == "logits":
            own = shapes.value * is_chunked  # else they are saved
            return shapes.logits(self.writes) * (own + shapes.logit_bytes) + stream
        table = table_bytes(shapes) if shapes.makes_table_gradient and not self.is_frozen else 0
        if shapes.mode != "1d":
            return head_bytes(shapes, x=stream, w=table, y=logits * shapes.value)
        if is_chunked:  # a chunk's logits; dX, and under sequence parallelism X, of all tokens
            chunk = shapes.logits(self.writes) * shapes.value
            block = shapes.loss_block(self.writes) * (shapes.value < shapes.wide)  # else the logits' memory is
            return chunk + max(block, float(table)) + (1 + shapes.splits) * stream
        gathered = 2 * stream + (stream / shapes.tp if shapes.keeps_shards else 0.0)
        return stream + table + gathered * shapes.splits

    def deferred(self, shapes: ActivationShapes, waiting: set[str]) -> float:
        """Bytes of its input and of the gradient of its result, which wait for a deferred dW.
        waiting: inputs that wait already, to which it adds its own."""
        if self.is_wide or self.is_frozen:  # computed at once, or never
            return 0.0
        own = 0.0 if self.value in waiting else shapes.bytes_of([self.saved_input(shapes)])
        waiting.add(self.value)
        split = shapes.tp if shapes.splits and self.writes[-1] == "latent" else 1
        return own + shapes.count(self.rows) * self.outputs(shapes) * shapes.operand / split

    @property
    def is_stored(self) -> bool:
        """Whether W may be stored in another data type than training's (AdapterSpec.stored_as)."""
        return self.is_frozen and not (self.is_lookup or self.is_head or self.is_wide) and bool(self.weights)

    def is_dequantized(self, shapes: ActivationShapes) -> bool:
        """Whether a copy of W in the training dtype is made for each pass, and freed after it."""
        return self.is_stored and shapes.adapter is not None and shapes.adapter.dequantizes

    def _inputs(self, shapes: ActivationShapes) -> int:
        """Columns of X on this rank."""
        return shapes.count(dim for dim in saved_dims(self.reads, self.value) if dim not in self.rows)

    def outputs(self, shapes: ActivationShapes) -> int:
        """Columns of Y on this rank: both halves of a gated product, queries with keys and values."""
        columns = 1
        for dim, size in zip(self.matrix.dims, self.matrix.shape, strict=True):
            if dim in self.reads or (dim == "experts" and self.is_grouped):
                continue
            own = {"hidden": shapes.dims["hidden"], "expert_ffn": shapes.dims.get("expert_ffn", 0)}
            columns *= own.get(dim, size // (shapes.feature_parts if dim in FEATURES else 1))
        return columns

    def matrix_bytes(self, shapes: ActivationShapes) -> int:
        """Bytes of this rank's part of W; in 3d a third axis cuts it as well."""
        experts = shapes.local_experts if self.is_grouped else 1
        parts = shapes.side if shapes.mode == "3d" else 1
        return self._inputs(shapes) * self.outputs(shapes) * shapes.value // parts * experts


# ------------------------------------------------------------------------------
# What products save where adapters train a model. A frozen one saves no input, as it makes no dW. A
# reads its product's input, which the adapters of one input save once, unless each keeps a copy of
# its own: in another data type, or dropped. B saves X A. DoRA keeps results, which it scales,
# and norms of rows in float32.
#
# By hand, b 1, s 2, in 4, rank 2, bf16, q and k: X 2 x 4 x 2 = 16 bytes once, X A 2 x 8 bytes; with
# dropout two X, 32 bytes, and masks.


def frozen_saved(product: MatMul, shapes: ActivationShapes) -> Saved:
    """Return what a frozen product saves: a copy of W, if W is stored in a wider data type; of a
    dequantised one, in some software, its input."""
    adapter = shapes.adapter
    if adapter is None or not product.is_stored:
        return []
    if adapter.dequantizes and adapter.base_inputs:
        own = product.saved_input(shapes)
        return [own._replace(name=f"{product.name} input", times=own.times * adapter.base_inputs / shapes.value)]
    if not adapter.copies:
        return []
    return [SavedTensor(f"{product.name} weight copy", (), times=product.matrix_bytes(shapes) / shapes.value)]


def adapter_saved(product: MatMul, shapes: ActivationShapes, kept: set[str]) -> Saved:
    """Return what a product of an adapter saves: A its input, B X A and what dora keeps."""
    own, adapter = product.saved_input(shapes), shapes.adapter or AdapterShapes(shapes.value)
    if product.reads[-1] == "rank":
        columns = product.outputs(shapes) * adapter.results
        result = SavedTensor(
            f"{product.name} result", product.rows, times=columns, is_outer=is_outer(product.writes), module=own.module
        )
        norms = SavedTensor(f"{product.name} norms", (), "float", product.outputs(shapes), module=own.module)
        return [own._replace(times=adapter.value / shapes.value), *[result, norms] * (adapter.results > 0)]
    if adapter.remakes and product.reads[-1] in MODULES and product.reads[-1] != "latent":
        return []
    if not (adapter.dropout or adapter.input_copy):
        is_kept = product.value in kept
        kept.add(product.value)
        return [] if is_kept else [own]
    copy = own._replace(times=own.times * (adapter.input_copy or shapes.value) / shapes.value)
    mask = own._replace(name=f"{product.name} mask", width="mask", times=adapter.mask)
    return [copy, *[mask] * (adapter.dropout and adapter.mask > 0)]


def adapter_needs(product: MatMul, shapes: ActivationShapes) -> float:
    """Return temporary bytes of the backward of a product of an adapter: dX and dW, dY of B; with
    dropout the gradient of the dropped input besides."""
    split = shapes.tp if shapes.splits and is_outer(product.reads) else 1
    x = shapes.bytes_of([product.saved_input(shapes)._replace(width="value", times=1, is_outer=False)]) / split
    is_second = product.reads[-1] == "rank"
    y = shapes.count(product.rows) * product.outputs(shapes) * shapes.value * is_second
    drops = shapes.adapter is not None and shapes.adapter.dropout and not is_second
    return y + (1 + drops) * x + product.matrix_bytes(shapes)


def saved_dims(dims: Dims, value: str) -> Dims:
    """Dimensions as ActivationShapes has their sizes. value: the tensor with these dimensions."""
    if dims[-1] == "latent":
        return (*dims[:-1], LATENTS[value])
    return (*dims[:-1], "inner") if dims[-1] == "heads" else dims


# ------------------------------------------------------------------------------
# Temporary bytes of the backward of one matrix product, in every tensor mode.
#
# In addition to dY of y bytes, with x and w the bytes of a rank's parts of X and W:
#
#     1d         dX and dW                                   x + w
#     2d, 2.5d   b buffers for blocks that arrive, and p partial sums: one being made, one being
#                sent, this rank's own (train/layers/grid/products.py)
#                max(b w + p x, x + b x + p w)               b = min(q - 1, 2), p = min(q, 3)
#     3d         gathered dY and X, partial dX and dW, dX and dW (train/layers/grid/products.py)
#                l (y + 2 x + w) + x + w
#
# In 3d dW is laid out in blocks where partial dX has gone; a transport that still holds partial dX
# then takes l w more. For a head's logits 2d and 2.5d swap the roles: their gradient arrives in
# blocks, and dX stays, b y + b w + x + p w. The gradient of a lookup is gathered over the ranks
# that share it, copied without the words of other ranks, and then the table's gradient is computed.
#
# By hand, 2d with q = 2, x 8 bytes, w 4: max(4 + 16, 8 + 8 + 8) = 24 bytes, and 12 in 1d.


MOST_BUFFERS, MOST_SUMS = 2, 3


def product_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """Temporary bytes of the backward of Y = X W; x, w, y: bytes of this rank's parts."""
    if shapes.mode == "1d":
        return x + w
    side = shapes.side
    if shapes.mode == "3d":
        return side * (y + 2 * x + w) + x + w
    buffers, sums = min(side - 1, MOST_BUFFERS), min(side, MOST_SUMS)
    return max(buffers * w + sums * x, x + buffers * x + sums * w)


def cast_bytes(shapes: ActivationShapes, *, x: float, y: float) -> float:
    """Temporary bytes of the same backward in fp8 with mpctl's kernels: dY is cast twice, once
    transposed, and a CPU multiplies 16-bit copies of the cast operands. x, y: bytes of X and dY in
    16 bit."""
    if not shapes.kernels.casts or shapes.operand == shapes.value:
        return 0.0
    return y if shapes.is_cuda else x + 2 * y


def head_bytes(shapes: ActivationShapes, *, x: float, w: float, y: float) -> float:
    """The same of an output head on a grid, Y its logits and W its table."""
    if shapes.mode == "3d":
        return product_bytes(shapes, x=x, w=w, y=y)
    buffers, sums = min(shapes.side - 1, MOST_BUFFERS), min(shapes.side, MOST_SUMS)
    return buffers * (y + w) + x + sums * w


def table_bytes(shapes: ActivationShapes) -> int:
    """Bytes of this rank's part of the word table."""
    return shapes.dims["hidden"] * shapes.table_rows * shapes.value


def lookup_bytes(shapes: ActivationShapes, seq: str) -> float:
    """Temporary bytes of the backward of a lookup in the word table: the table's gradient, or the
    sums that are added to it (train/kernels/rows.py)."""
    rows: int = shapes.count(("looked_up", seq))
    made: float = table_bytes(shapes)
    if shapes.kernels.adds_rows:
        vectors = rows * shapes.dims["hidden"]
        sums = row_sums_bytes(vectors, width=shapes.value, wide=shapes.sums)
        converted = 0 if shapes.sums == shapes.value else min(vectors, ROWS_BLOCK) * shapes.sums
        made = min(made, sums) if shapes.is_cuda else converted
    if shapes.mode == "1d":
        return made
    given = rows * shapes.dims["hidden"] * shapes.value
    return given + max(given, made)
