"""Add the products of adapters (LoRA) to a model's stacks, and say what they freeze.

The adapter of a product Y = X W is two more products, H = X A and Y += s H B, with A [rank, in] and B
[out, rank]. They obey the contraction law (matmul.py) like all others: the adapter of a column
product has A whole and B cut like W's rows, and sums dH over tp; that of a row product has A cut like
W's columns, sums H over tp, and has B whole. Two bases bring a sum of their own, which the adapter's
part joins: the product that makes keys and values of latents (dX), and experts over etp (dX of the
first product, Y of the last). There the adapter sends nothing, and the gradient of its whole factor is
a partial sum. A product that fuses several outputs (queries, keys and values; gate and up) has one
adapter for each, as PEFT has, or one for all where the target is a fused module (`c_attn`).

Parameters are named for the product: `attention.qkv.lora.query.A.weight`,
`attention.output.lora.B.weight`; DoRA's lengths are `attention.output.lora.magnitude`.

By hand, hidden 8, rank 2, heads of width 8: q_proj has A [2, 8] and B [8, 2], 32 parameters; on tp 2
a rank holds all of A and 4 rows of B, 24.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, zip_longest
from math import prod
from typing import NamedTuple, TypeGuard

from mpctl.model.operators.layer import Activation, AttentionOp, Dropout, LayerStack, Operation, OperatorGroup
from mpctl.model.operators.matmul import KEY_LATENT, MatMul, ParameterSpec
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec

MARK = ".lora."
"""In the name of every parameter of an adapter."""
MAGNITUDE = "magnitude"
"""The parameter of a DoRA adapter with the lengths of its rows."""

QKV, UP = ("query", "key", "value"), ("gate", "up")
# Names of modules -> products of ours, with the output where a product fuses several. A product is
# named by its end: `attention.output` is every attention's of a layer, `mlp.up` is no expert's.
_MLP, _SHARED, _EXPERTS = "mlp", "mlp.shared", "mlp.experts"
_MLPS = (_MLP, _SHARED, _EXPERTS)


def _in_mlps(product: str, part: str = "") -> tuple[tuple[str, str], ...]:
    return tuple((f"{mlp}.{product}", part) for mlp in _MLPS)


_FUSED_QKV, _OUTPUT = (("attention.qkv", ""),), (("attention.output", ""),)
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "q_proj": (("attention.qkv", "query"), ("attention.query", "")),
    "k_proj": (("attention.qkv", "key"),),
    "v_proj": (("attention.qkv", "value"),),
    "q_a_proj": (("attention.query_down", ""),),
    "q_b_proj": (("attention.query_up", ""),),
    "kv_a_proj_with_mqa": (("attention.key_value_down", ""),),
    "kv_b_proj": (("attention.key_value_up", ""),),
    **dict.fromkeys(("c_attn", "qkv_proj", "query_key_value", "linear_qkv", "Wqkv"), _FUSED_QKV),
    **dict.fromkeys(("o_proj", "out_proj", "dense", "linear_proj"), _OUTPUT),
    "c_proj": (*_OUTPUT, *_in_mlps("down")),
    **dict.fromkeys(("gate_proj", "w1"), _in_mlps("up", "gate")),
    **dict.fromkeys(("up_proj", "w3"), _in_mlps("up", "up")),
    **dict.fromkeys(("c_fc", "fc1", "dense_h_to_4h", "gate_up_proj", "linear_fc1"), _in_mlps("up")),
    **dict.fromkeys(("down_proj", "w2", "fc2", "dense_4h_to_h", "linear_fc2"), _in_mlps("down")),
    **dict.fromkeys(("lm_head", "output_layer"), (("head", ""),)),
}
_QWEN = {"w1": _in_mlps("up", "up"), "w2": _in_mlps("up", "gate")}  # next to c_attn, whose model has no w3
GROUPS = {"all-linear": ("attention.", "cross", "mlp."), "attention": ("attention.", "cross"), "mlp": ("mlp.",)}
"""Targets that name several products, by the beginnings of their names."""
_EMBEDDING = "embedding.word."
_SAVED = {
    "lm_head": "head.",
    "output_layer": "head.",
    "embed_tokens": _EMBEDDING,
    "wte": _EMBEDDING,
    "word_embeddings": _EMBEDDING,
}


class Target(NamedTuple):
    """An adapter of one output of a product. part: which one, empty for all of a product. shape,
    dims: those of the output's rows of W."""

    product: MatMul
    part: str
    rows: int

    @property
    def name(self) -> str:
        """The adapter's name, `attention.qkv.lora.query`."""
        return adapter_name(self.product.name, self.part)


def adapter_name(product: str, part: str = "") -> str:
    """The adapter of one output of a product.

    >>> adapter_name("layers.0.attention.qkv", "query")
    'layers.0.attention.qkv.lora.query'
    """
    return f"{product}.lora" + (f".{part}" if part else "")


def adapted(stacks: Sequence[LayerStack], model: ModelSpec, adapter: AdapterSpec) -> tuple[LayerStack, ...]:
    """The stacks with the products of an adapter. Layers of one kind stay one object."""
    return tuple(stack.mapped(lambda group: _adapted_group(group, model, adapter)) for stack in stacks)


def _adapted_group(group: OperatorGroup, model: ModelSpec, adapter: AdapterSpec) -> OperatorGroup:
    """A layer or an end with its adapters; layers inside an end (multi-token prediction) are frozen."""
    operations = [
        one._replace(result=behind.value) if isinstance(one, Activation) and isinstance(behind, MatMul) else one
        for one, behind in zip_longest(group.operations, group.operations[1:])
    ]
    found = tuple(one for each in operations for one in _with_adapters(each, model, adapter))
    frozen = {one.value: one.is_adapted and not adapter.dropout for one in found if _is_frozen(one)}
    return OperatorGroup(
        tuple(one._replace(keeps_copy=frozen.get(one.result)) if isinstance(one, AttentionOp) else one for one in found)
    )


def _is_frozen(operation: Operation) -> TypeGuard[MatMul]:
    return isinstance(operation, MatMul) and operation.is_frozen


def _with_adapters(operation: Operation, model: ModelSpec, adapter: AdapterSpec) -> Iterator[Operation]:
    if isinstance(operation, OperatorGroup):
        yield _adapted_group(operation, model, adapter.model_copy(update={"targets": ()}))
    elif isinstance(operation, MatMul):
        is_saved = operation.parameter.startswith(tuple(saved_patterns(adapter)))
        targets = [] if operation.is_lookup or is_saved else targets_of(operation, model, adapter)
        yield operation._replace(is_frozen=not is_saved, is_adapted=bool(targets))
        for target in targets:
            down, up = _products(target, adapter)
            yield from (down, _with_lengths(up) if adapter.kind == "dora" else up)
    elif isinstance(operation, Dropout):  # of embeddings
        yield operation._replace(is_frozen=not any(map(_EMBEDDING.startswith, saved_patterns(adapter))))
    else:
        yield operation


def targets_of(product: MatMul, model: ModelSpec, adapter: AdapterSpec) -> list[Target]:
    """The adapters of one product, in the order of its outputs; none where it is no target."""
    parts = fused_parts(product, model)
    chosen = dict.fromkeys(part for name in adapter.targets for part in _named(product, name, adapter, list(parts)))
    if "" in chosen and not parts:
        return [Target(product, "", prod(product.matrix.shape[_rows_at(product) : -1]))] if chosen else []
    if "" in chosen:
        return [Target(product, "", sum(parts.values()))]
    return [Target(product, part, parts[part]) for part in parts if part in chosen]


def _named(product: MatMul, name: str, adapter: AdapterSpec, parts: list[str]) -> Iterable[str]:
    """Outputs of a product that a target names; every one of an unfused product is ''."""
    if name in GROUPS:
        is_linear = not (product.is_wide or product.is_head) and product.weights
        return (parts or [""]) if is_linear and product.name.startswith(GROUPS[name]) else ()
    if name == product.name:
        return parts or [""]
    table = _QWEN if "c_attn" in adapter.targets and name in _QWEN else NAMES
    found = [part for ours, part in table.get(name, ()) if ours == product.name]
    return [part if part in parts else "" for part in found if part in parts or not part or part == "up"]


def _rows_at(product: MatMul) -> int:
    """The dimension of W with its outputs: the first but experts'."""
    return 1 if product.is_grouped else 0


def fused_parts(product: MatMul, model: ModelSpec) -> dict[str, int]:
    """Rows of W of each output that a product fuses, in order; empty where it has one."""
    if product.name == "attention.qkv":
        size = model.head_size
        return dict(zip(QKV, (model.heads * size, *(model.kv_heads * size,) * 2), strict=True))
    if product.name.endswith(".up") and product.name.startswith("mlp") and model.gated:
        halves = product.matrix.shape[2] if product.is_grouped else product.matrix.shape[0] // 2
        return dict.fromkeys(UP, halves)
    return {}


def _with_lengths(up: MatMul) -> MatMul:
    """B with the trained lengths of the rows of W + B A, a number for each output."""
    outputs = slice(0, -1)
    lengths = ParameterSpec(
        f"{up.name.removesuffix('.B')}.{MAGNITUDE}",
        up.matrix.shape[outputs],
        up.matrix.dims[outputs],
        view=up.matrix.view,
    )
    return up._replace(weights=(*up.weights, lengths))


def has_lengths(product: MatMul) -> bool:
    """Whether a product of an adapter has trained lengths (dora)."""
    return bool(product.adapts) and len(product.weights) > 1


def output_rows(product: MatMul, model: ModelSpec) -> dict[str, range]:
    """Rows of W by output that an adapter may be for: '' for all of them; experts' are those of each."""
    heights = fused_parts(product, model)
    total = sum(heights.values()) or prod(product.matrix.shape[_rows_at(product) : -1])
    edges = pairwise(accumulate(heights.values(), initial=0))
    return {"": range(total), **{part: range(*edge) for part, edge in zip(heights, edges, strict=True)}}


def _products(target: Target, adapter: AdapterSpec) -> Iterator[MatMul]:
    """The two products of an adapter."""
    base, name, rank = target.product, target.name, ("rank", adapter.rank)
    matrix = base.matrix
    sides = list(zip(matrix.dims, matrix.shape, strict=True))
    inputs, lead, outputs = sides[-1], sides[: _rows_at(base)], sides[_rows_at(base) : -1]
    if target.part:
        outputs = [(base.writes[-1], target.rows)]
    # Keys and values are made of latents that tp and cp have gathered, whose gradient one sum completes.
    first = ("summed_rank", adapter.rank) if base.value == KEY_LATENT else rank
    between = (*base.rows, "rank")
    down = MatMul(
        f"{name}.A",
        base.part,
        base.reads,
        (base.reads[-1], "rank"),
        between,
        input_gradient=base.input_gradient,
        is_head=base.is_head,
        value=base.value,
        weights=(_weight(f"{name}.A.weight", matrix, *lead, first, inputs),),
        adapts=base.name,
    )
    up = MatMul(
        f"{name}.B",
        base.part,
        between,
        ("rank", base.writes[-1]),
        base.writes,
        is_head=base.is_head,
        value=f"{name}.A",
        weights=(_weight(f"{name}.B.weight", matrix, *lead, *outputs, rank),),
        adapts=base.name,
    )
    yield from (down, up)


def _weight(name: str, like: ParameterSpec, *sizes: tuple[str, int]) -> ParameterSpec:
    dims, shape = zip(*sizes, strict=True)
    return ParameterSpec(name, shape, dims, view=like.view)


def is_of_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return MARK in name


def saved_patterns(adapter: AdapterSpec) -> list[str]:
    """Beginnings of the names of parameters that are trained in full next to the adapters."""
    return [_SAVED.get(name, name) for name in adapter.modules_to_save]


def is_saved_name(name: str, parameters: Iterable[str]) -> bool:
    """Whether a name of modules_to_save means one of these parameters."""
    return any(parameter.startswith(_SAVED.get(name, name)) for parameter in parameters)
