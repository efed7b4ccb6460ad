"""Attach adapters to a module: those of its operator table, under the table's names.

The table says which products have an adapter, and of which shapes (model/operators/adapters.py). The
module that multiplies by a product's weight gets a child `lora` with the factors, so that parameters
have the table's names: `layers.0.attention.qkv.lora.query.A.weight`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from mpctl.core.shard import Shard
from mpctl.core.sharding import DENSE
from mpctl.model.operators.adapters import MAGNITUDE, Target, fused_parts, targets_of
from mpctl.model.operators.layer import OperatorGroup
from mpctl.model.operators.matmul import MatMul, ParameterSpec
from mpctl.model.operators.table import StageSlice
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.layers.adapters import Adapter, AdapterDropout, AdapterRng, FusedAdapters
from mpctl.train.layers.context_parallel import NO_CP
from mpctl.train.layers.embedding import OutputHead
from mpctl.train.layers.grouped_linear import GroupedLinear
from mpctl.train.layers.linear import ColumnParallelLinear, Factor, RowParallelLinear
from mpctl.train.layers.parameters import ONES, ZEROS, Init, shard_of
from mpctl.train.layers.shard_context import ALONE, ShardContext
from mpctl.train.layers.transformer_layer import ResidualLayer


def attach_adapters(
    module: nn.Module,
    ends: AdapterRng,
    model: ModelSpec,
    adapter: AdapterSpec,
    context: ShardContext,
    slices: Sequence[StageSlice],
) -> None:
    """Give a stage's module the adapters of its slices' products, uninitialised. ends: what those of the
    ends read random numbers from; layers have theirs (`ResidualLayer.adapter_rng`)."""
    for prefix, group in _groups(slices):
        layer = module.get_submodule(prefix.removesuffix("."))
        source = layer.adapter_rng if isinstance(layer, ResidualLayer) else ends
        maker = _Maker(model, adapter, context, source)
        adapting = [each for each in group.products if each.adapts]
        factors = {each.name: each.matrix for each in adapting}
        factors |= {spec.name: spec for each in adapting for spec in each.weights[1:]}
        for product in group.products:
            if product.is_adapted:
                base = layer.get_submodule(product.name)
                base.lora = maker.adapters(base, product, targets_of(product, model, adapter), factors)


def _groups(slices: Sequence[StageSlice]) -> Iterator[tuple[str, OperatorGroup]]:
    """The layers and ends that a stage has, with the beginning of their parameters' names."""
    for part in slices:
        yield from ((f"{part.stack.prefix}.{layer}.", part.stack.block_of(layer)) for layer in part.layers)
        yield from (("", end.part) for end in part.ends)


class _Maker:
    """Makes the adapters of one layer or end."""

    def __init__(self, model: ModelSpec, adapter: AdapterSpec, context: ShardContext, source: AdapterRng) -> None:
        self.model, self.adapter, self.context, self.source = model, adapter, context, source

    def adapters(
        self, base: nn.Module, product: MatMul, targets: list[Target], factors: dict[str, ParameterSpec]
    ) -> nn.Module:
        """The module `lora` of a product's module. factors: A and B of the layer by name."""
        parts, starts, start = fused_parts(product, self.model), {"": 0}, 0
        ranks = self.context.expert_view.grid.axes["etp"] if product.is_grouped else self.context.tp.size
        for part, rows in parts.items():
            starts[part], start = start, start + rows // ranks
        made = {}
        for target in targets:
            a, b = (
                self._factor(base, factors[f"{target.name}.{which}"], target, list(parts.values())) for which in "AB"
            )
            dropout = self._dropout(base, product, target, shard_of(a.weight)) if self.adapter.dropout else None
            made[target.part] = Adapter(
                a,
                b,
                scale=self.adapter.scale,
                start=starts[target.part],
                dropout=dropout,
                magnitude=self._lengths(factors.get(f"{target.name}.{MAGNITUDE}"), target, list(parts.values())),
                columns=base.group if isinstance(base, RowParallelLinear) else ALONE,
            )
        return made.get("") or FusedAdapters(made)

    def _factor(self, base: nn.Module, spec: ParameterSpec, target: Target, parts: list[int]) -> Factor | GroupedLinear:
        is_a = spec.dims[-1] != "rank"
        # kaiming_uniform(a=sqrt(5)) of all inputs, not of a rank's: U(-1/sqrt(in), 1/sqrt(in))
        init = Init("uniform", spec.shape[-1] ** -0.5) if is_a else ZEROS
        view = None if spec.view == DENSE else self.context.expert_view
        is_fused = not (is_a or target.part) and view is None and len(parts) > 1
        weight = self.context.parameter(spec.shape, spec.dims, init, parts if is_fused else None, view=view)
        if isinstance(base, GroupedLinear):
            return GroupedLinear(weight)
        split = self.context.sequence_parallel
        if is_a and isinstance(base, RowParallelLinear):
            return Factor(weight, sums=base.group, sequence_parallel=split)
        group = base.group if not is_a and isinstance(base, (ColumnParallelLinear, OutputHead)) else ALONE
        return Factor(weight, group=group, sequence_parallel=split)

    def _lengths(self, spec: ParameterSpec | None, target: Target, parts: list[int]) -> nn.Parameter | None:
        """DoRA's, to which `start_lengths` gives the norms of W; None without."""
        if spec is None:
            return None
        return self.context.parameter(spec.shape, spec.dims, ONES, parts if not target.part and parts else None)

    def _dropout(self, base: nn.Module, product: MatMul, target: Target, shard: Shard) -> AdapterDropout:
        """Dropout at the positions of a base's input: inside of the layer those of all tp ranks, of the
        latent of keys and values those of all ranks. shard: that of A. Raises ValueError for experts, to
        which rows come without their positions."""
        context = self.context
        if product.is_grouped:
            raise ValueError(f"adapter.dropout {self.adapter.dropout}: experts have none (use 0)")
        if isinstance(base, RowParallelLinear):
            context = replace(context, sequence_parallel=False)
        elif product.name == "attention.key_value_up" or product.reads[1] == "hidden":
            cp = NO_CP if context.gathers_latents else context.cp
            context = replace(context, sequence_parallel=False, cp=cp)
        (columns,) = shard.blocks(1)
        return AdapterDropout(
            self.adapter.dropout, target.name, self.source, self.context.backend, context.positions, columns
        )
