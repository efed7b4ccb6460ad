"""Families ask a mode of tensor parallelism for their split modules; other modes can be given."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from mpctl.model.families import get_table
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import build_module
from mpctl.train.layers.linear import ColumnParallelLinear
from mpctl.train.layers.parameters import partial_kind
from mpctl.train.layers.shard_context import ShardContext, TensorParallel, TensorParallel1D
from mpctl.train.transport.group import Group

LAYERS = 2
SHAPE: dict[str, Any] = {"layers": LAYERS, "hidden": 16, "heads": 4, "vocab": 30, "seq_length": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "norm": "rmsnorm",
        "position": "rotary",
        "activation": "swiglu",
        "kv_heads": 2,
        "bias": False,
        "tied_embeddings": False,
    },
    "bert": {"family": "bert"},
    "glm": {"family": "glm"},
    "t5": {"family": "t5", "decoder_layers": LAYERS, "decoder_seq_length": 8, "position": "relative"},
}
# (column, row) linear layers of all layers, word tables and heads of their own
LAWS = {
    "gpt": (4, 4, 1, 0),
    "llama": (4, 4, 1, 1),
    "bert": (4, 4, 1, 0),
    "glm": (4, 4, 1, 0),
    "t5": (12, 10, 1, 0),
}  # t5: qkv and up; qkv, query, key and value, up


class _Recorded(TensorParallel1D):
    """1d, which notes what it is asked for. A mode of its own kind makes other modules instead."""

    made: Counter[str]

    def __init__(self, context: ShardContext) -> None:
        super().__init__(context)
        self.made = Counter()

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in ("made", "context", "group"):
            self.made[name] += 1
        return super().__getattribute__(name)


class _WideColumns(TensorParallel1D):
    """A mode whose column-parallel layers are a class of its own."""

    class Column(ColumnParallelLinear):
        pass

    def column_linear(self, inputs: int, outputs: int, **options: Any) -> nn.Module:
        return self.Column(inputs, outputs, **options, **self._split)


def _built(kind: str, mode: type[TensorParallel1D]) -> tuple[nn.Module, ShardContext]:
    model = ModelSpec(**SHAPE, **FAMILIES[kind])
    context = ShardContext(Group(1, 2), dtype=torch.float64, tensor_parallel=mode)
    return build_module(model, TrainingSpec(), context), context


@pytest.mark.parametrize("kind", LAWS)
def test_a_family_asks_the_mode_for_its_parts(kind: str) -> None:
    _, context = _built(kind, _Recorded)
    made = context.layers.made  # type: ignore[attr-defined]
    names = ("column_linear", "row_linear", "word_embedding", "output_head")
    assert tuple(made[name] for name in names) == LAWS[kind]


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_column_layer_of_a_model_is_the_modes_own(kind: str) -> None:
    module, _ = _built(kind, _WideColumns)
    columns = [m for m in module.modules() if isinstance(m, ColumnParallelLinear)]
    assert columns and all(type(m) is _WideColumns.Column for m in columns)


def test_1d_has_every_method_of_a_mode() -> None:
    wanted = {name for name in vars(TensorParallel) if not name.startswith("_")}
    assert wanted <= set(dir(TensorParallel1D))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("split", [False, True])
def test_what_the_table_calls_partial_is_marked(kind: str, split: bool) -> None:
    model = ModelSpec(**SHAPE, **FAMILIES[kind])
    context = ShardContext(Group(0, 2), sequence_parallel=split, dtype=torch.float64)
    module = build_module(model, TrainingSpec(), context)
    assert get_table(model, tp=2).layers == len([m for m in module.modules() if hasattr(m, "attention_norm")])
    marked = {name for name, p in module.named_parameters() if partial_kind(p)}
    norms = {name for name, _ in module.named_parameters() if "norm" in name}
    assert marked >= norms if split else marked == set()


def test_positions_and_rows_of_a_rank() -> None:
    rows = torch.arange(8).view(1, 8)
    whole = ShardContext()
    assert whole.positions(8, rows.device) == range(8)
    assert whole.own_rows(rows) is rows and whole.holds_first_position
    split = ShardContext(Group(1, 2), sequence_parallel=True)
    assert split.positions(4, rows.device) == range(4, 8)
    assert split.own_rows(rows).tolist() == [[4, 5, 6, 7]] and not split.holds_first_position
    assert not ShardContext(cp=Group(1, 2, name="cp")).holds_first_position
    assert ShardContext(Group(1, 2)).holds_first_position
