"""A rank's share of a model: which parameters it holds, and which modules multiply them.

`ShardContext` has the groups of a rank and the grid of the tensor-parallel ranks
(mpctl/core/tensor_grid.py), which defines by the names of dimensions the rank's part of parameters,
samples and hidden states: *outside*, between the layers, and *inside*, between a column- and a
row-parallel layer. Layers ask it for parameters (`parameter`), and for modules that depend on the
grid alone: norms, small tables, the loss.

A mode of tensor parallelism defines how parts are multiplied: layers and families never name a
split module, but ask `ShardContext.layers`, a `TensorParallel`, for a column- or row-parallel
linear layer, a word embedding or an output head. So they are the same code in every mode:

    1d    Megatron-LM (arXiv 1909.08053): weights over t ranks, activations replicated, or split
          over the sequence (arXiv 2205.05198)

    2d, 2.5d, 3d    over a grid of ranks, which cuts activations too: samples and hidden states

Modules take unsplit micro batches of tokens and targets; hidden states are this rank's part.

Letters: b batch, s sequence, h hidden, v vocabulary, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpctl.core.sharding import EXPERTS, View, local_range, local_size
from mpctl.core.tensor_grid import Axes, DimGrid, TensorGrid
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.counter_rng import CounterRNG, DropoutMask
from mpctl.train.kernels.masks import Positions
from mpctl.train.layers.context_parallel import NO_CP, RotaryTables, context_positions
from mpctl.train.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.train.layers.embedding import OutputHead, ReplicatedTable, VocabParallelEmbedding
from mpctl.train.layers.fp8 import Fp8Operands
from mpctl.train.layers.linear import ColumnParallelLinear, LocalLinear, ReplicatedLinear, RowParallelLinear
from mpctl.train.layers.linear_cross_entropy import linear_cross_entropy
from mpctl.train.layers.norm import LayerNorm, Norm, PlainLayerNorm, RMSNorm
from mpctl.train.layers.parameters import ONES, ZEROS, Init, shard_parameter
from mpctl.train.layers.recompute import HostOffload
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.transport.group import Group

ALONE = Group()
GRID_OF_TP = TensorGrid()  # stands for the 1d grid of the tp ranks
_EXPERT_AXES = DimGrid({"etp": 1, "ep": 1}, {"experts": "ep", "expert_ffn": "etp"})
ALL_EXPERTS = View(EXPERTS, _EXPERT_AXES, shard_group="etp_ep", replica_group="edp")
"""The view of experts all of which are on one rank."""


class TensorParallel(Protocol):
    """Makes the modules of one mode that multiply by split weights. Shapes are those of 1d; on a
    grid b and h are this rank's, too. The output of a column-parallel layer, after any elementwise
    operation, is the input of a row-parallel layer."""

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, parts: Sequence[int] | None = None
    ) -> nn.Module:
        """[b, s, inputs] -> [b, s, outputs/t]; parts: sizes of fused outputs, each split
        separately."""

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """[b, s, inputs/t] -> [b, s, outputs], summed over the ranks."""

    def word_embedding(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> nn.Module:
        """Tokens [b, s] -> vectors [b, s, hidden]. Its method `logits` is the tied head:
        [b, s, hidden] -> [b, s, v_local]."""

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> nn.Module:
        """[b, s, hidden] -> logits [b, s, v_local] of this rank's words (`own_words`), which
        columns of padding may follow."""


class TensorParallel1D:
    """Megatron's split over one group of t ranks: `TensorParallel` for `context.tp`."""

    def __init__(self, context: ShardContext) -> None:
        self.context = context
        self._split: dict[str, Any] = {
            "group": context.tp,
            "sequence_parallel": context.sequence_parallel,
            "dtype": context.dtype,
            "device": context.device,
        }

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init, parts: Sequence[int] | None = None
    ) -> ColumnParallelLinear:
        """Rows of W over the ranks (linear.py)."""
        return ColumnParallelLinear(
            inputs,
            outputs,
            bias=bias,
            init=init,
            parts=parts,
            overlaps=self.context.overlaps_gathers,
            fp8=self.context.fp8_operands(),
            **self._split,
        )

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> RowParallelLinear:
        """Columns of W over the ranks (linear.py)."""
        return RowParallelLinear(inputs, outputs, bias=bias, init=init, fp8=self.context.fp8_operands(), **self._split)

    def word_embedding(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> VocabParallelEmbedding:
        """Rows of the table over the ranks (embedding.py)."""
        return VocabParallelEmbedding(vocab, hidden, padded_vocab=padded_vocab, init=init, **self._split)

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> OutputHead:
        """Rows of W, that is words, over the ranks (embedding.py)."""
        return OutputHead(vocab, hidden, padded_vocab=padded_vocab, init=init, **self._split)


@dataclass(frozen=True)
class ShardContext:
    """A rank's share of a model, its dtype and device; by default the unsharded model.

    tp: the group over which weights are split; cp: the group over which the sequence is split
    (context_parallel.py). sequence_parallel: activations between the layers are split over tp too,
    along the sequence (arXiv 2205.05198). dtype, device: those of parameters, torch's defaults by
    default. backend: the kernels of attention and norms. tensor_parallel: makes the modules of the
    mode of tensor parallelism. grid: that of the tp ranks, by default 1d; groups: this rank's
    groups by name: in a grid of another mode (TensorGrid.groups), and `ep` and `etp_ep` where
    experts are split. fp8: linear layers multiply in fp8 (only 1d). offload: keeps saved inputs in
    host memory, for layers that are configured so. rotary_tables: the rotary tables that layers
    share. expert_view: how the ranks hold experts. routing: the record of routers, with their
    correction biases. overlaps_gathers: inputs of column-parallel layers are gathered in two halves
    under sequence parallelism (only 1d). exchanges_heads: ranks of cp exchange sequence for heads
    (context_exchange.py) instead of gathering keys and values.
    """

    tp: Group = ALONE
    cp: Group = NO_CP
    sequence_parallel: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    backend: KernelBackend = TORCH_BACKEND
    tensor_parallel: Callable[[ShardContext], TensorParallel] = TensorParallel1D
    grid: TensorGrid = GRID_OF_TP
    groups: Mapping[str, Group] = field(default_factory=dict)
    fp8: bool = False
    offload: HostOffload = field(default_factory=HostOffload)
    rotary_tables: RotaryTables = field(default_factory=RotaryTables)
    expert_view: View = ALL_EXPERTS
    routing: RoutingLog = field(default_factory=RoutingLog)
    overlaps_gathers: bool = False
    exchanges_heads: bool = False

    def __post_init__(self) -> None:
        if self.grid is GRID_OF_TP:
            grid = TensorGrid.of("1d", self.tp.size, sequence_parallel=self.sequence_parallel)
            object.__setattr__(self, "grid", grid)

    @cached_property
    def layers(self) -> TensorParallel:
        """The factory of split modules."""
        return self.tensor_parallel(self)

    @cached_property
    def coords(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the grid."""
        return self.grid.coords(self.tp.rank)

    def group(self, *axes: str) -> Group:
        """The group over these axes of the grid; a group of one rank if their sizes are 1."""
        kind = self.grid.kind_of(axes)
        return (self.tp if kind == "tp" else self.groups[kind]) if kind else ALONE

    def block(self, size: int, axes: Axes) -> range:
        """The block of `range(size)` that this rank keeps of a dimension split over the axes.
        Raises ValueError if they do not divide it."""
        local_size(size, parts=self.grid.parts(axes))
        return self.grid.block(size, axes, self.coords)

    @property
    def expert_group(self) -> Group:
        """The group whose ranks exchange the rows of experts: `ep`, or `etp_ep` where an expert is
        split."""
        axes = self.expert_view.grid.axes
        if self.expert_view.grid.size == 1:
            return ALONE
        return self.groups["ep" if axes["etp"] == 1 else self.expert_view.shard_group]

    def parameter(
        self,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        init: Init,
        parts: Sequence[int] | None = None,
        *,
        view: View | None = None,
    ) -> nn.Parameter:
        """This rank's part of a parameter of these named dimensions, uninitialised, marked with the
        group over which its gradient is a partial sum. parts: sizes of the fused parts along the
        first dimension, each of which is split separately. view: that of the parameter, by default
        the dense one. Raises ValueError if the grid does not divide a dimension."""
        if view is None:
            view, rank = View(grid=self.grid), self.tp.rank
        else:
            rank = self.groups[view.shard_group].rank if view.grid.size > 1 else 0
        shard = view.shard(shape, dims, rank, parts)
        partial = view.grid.partial_kind(dims)
        return shard_parameter(
            shard,
            init=init,
            partial=partial,
            is_table=dims == ("vocab", "hidden"),
            dtype=self.dtype,
            device=self.device,
        )

    def norm(self, kind: Norm, size: int, *, eps: float, dim: str = "hidden") -> nn.Module:
        """Normalisation over the last dimension of activations. dim: `hidden` between layers,
        `heads` over all heads together; of rows that are on one rank `head_size` within a head,
        `latent` of latent attention."""
        axes = {"hidden": self.grid.hidden_axes, "heads": self.grid.feature_axes}
        group = self.group(*axes.get(dim, ()))
        if kind == "nonparametric":
            return PlainLayerNorm(size, eps=eps)
        weight = self.parameter((size,), (dim,), ONES)
        if kind == "rmsnorm":
            return RMSNorm(weight, eps=eps, backend=self.backend, group=group)
        bias = self.parameter((size,), (dim,), ZEROS)
        return LayerNorm(weight, bias, eps=eps, backend=self.backend, group=group)

    def replicated_table(self, rows: int, hidden: int, *, init: Init) -> ReplicatedTable:
        """A small lookup table: row numbers [..] -> [.., hidden]."""
        return ReplicatedTable(self.parameter((rows, hidden), ("positions", "hidden"), init))

    def replicated_linear(self, inputs: int, outputs: int, *, init: Init) -> ReplicatedLinear:
        """[.., inputs] -> [.., outputs], for unsplit rows of hidden states, which only 1d has."""
        weight = self.parameter((outputs, inputs), ("features", "features"), init)
        return ReplicatedLinear(weight, self.parameter((outputs,), ("features",), ZEROS))

    def local_linear(self, inputs: int, outputs: int, *, dims: tuple[str, str], init: Init) -> LocalLinear:
        """[b, s, inputs] -> [b, s, outputs or this rank's of them], without a message. dims: names
        of outputs and inputs, by which W is cut."""
        weight = self.parameter((outputs, inputs), dims, init)
        return LocalLinear(weight, fp8=self.fp8_operands())

    def word_bias(self, padded_vocab: int) -> nn.Parameter:
        """A bias per word, [padded_vocab/t], added to the logits, initially zeros."""
        return self.parameter((padded_vocab,), ("vocab",), ZEROS)

    def own_words(self, vocab: int, *, padded_vocab: int) -> range:
        """Global ids of the words of this rank's logits, without padding; may be empty."""
        own = self.block(padded_vocab, self.grid.feature_axes)
        return range(min(own.start, vocab), min(own.stop, vocab))

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, words: range) -> Tensor:
        """Logits [b, s, v_local], targets [b, s] of the full micro batch -> losses [b, s] of this
        rank's samples inside. words: `own_words`; columns behind them are padding. Three
        all-reduces of b*s numbers (cross_entropy.py); overwrites the logits in backward."""
        return vocab_parallel_cross_entropy(
            logits,
            self.own_samples(targets, inside=True),
            group=self.group(*self.grid.feature_axes),
            first=words.start,
            words=len(words),
            overwrite=True,
            backend=self.backend,
        )

    def linear_cross_entropy(
        self, hidden: Tensor, table: Tensor, targets: Tensor, *, words: range, chunks: int | None
    ) -> Tensor:
        """As `cross_entropy`, of logits that are made chunk by chunk from hidden states, between the
        layers, and this rank's rows of the head's table (linear_cross_entropy.py; only 1d)."""
        return linear_cross_entropy(
            hidden,
            table,
            targets,
            group=self.tp,
            words=words,
            chunks=chunks,
            sequence_parallel=self.sequence_parallel,
            backend=self.backend,
        )

    def fp8_operands(self) -> Fp8Operands | None:
        """A caster of operands for one more linear layer; None without fp8."""
        return Fp8Operands(self.backend) if self.fp8 else None

    def local_heads(self, heads: int) -> range:
        """The attention heads of this rank, by global number: a contiguous block. Raises ValueError
        if they cannot be split evenly."""
        return self.block(heads, self.grid.feature_axes)

    @property
    def holds_first_position(self) -> bool:
        """Whether this rank's rows include the first position of the sequence."""
        return self.cp.rank == 0 and (not self.sequence_parallel or self.tp.rank == 0)

    @property
    def gathers_latents(self) -> bool:
        """Whether ranks of cp make keys and values of the full sequence."""
        return self.cp.size > 1 and not self.exchanges_heads

    def query_rows(self, length: int, device: torch.device) -> Tensor:
        """Global positions of the queries whose attention this rank computes, of a full sequence."""
        own = Group() if self.exchanges_heads else self.cp
        return context_positions(length, own.size, own.rank, device=device)

    def positions(self, length: int, device: torch.device) -> Positions:
        """Global positions of this rank's `length` rows of activations between layers."""
        parts, index = (self.tp.size, self.tp.rank) if self.sequence_parallel else (1, 0)
        own = local_range(length * parts, parts=parts, index=index)
        if self.cp.size == 1:
            return own
        length_cp = length * parts * self.cp.size
        of_cp = context_positions(length_cp, self.cp.size, self.cp.rank, device=device)
        return of_cp[own.start : own.stop]

    def own_samples(self, tensor: Tensor, *, inside: bool = False) -> Tensor:
        """[b, ..] of the full micro batch -> this rank's samples, outside or inside."""
        axes = self.grid.sample_axes(inside=inside)
        if not axes:
            return tensor
        own = self.block(len(tensor), axes)
        return tensor[own.start : own.stop]

    def own_rng(self, rng: CounterRNG | None, *, inside: bool = False) -> CounterRNG | None:
        """The random numbers of this rank's samples, outside or inside."""
        if rng is None:
            return None
        samples = self.own_samples(rng.samples, inside=inside)
        return rng if samples is rng.samples else replace(rng, samples=samples)

    def dropout(self, x: Tensor, rng: CounterRNG | None, p: float, *, rng_site: str) -> Tensor:
        """x [b, s, h] between layers with dropout of probability p; rng None is no dropout."""
        mask = self._dropout_mask(x, rng, p, rng_site)
        return x if mask is None else self.backend.dropout(x, mask)

    def dropout_add(
        self,
        x: Tensor,
        rng: CounterRNG | None,
        p: float,
        residual: Tensor,
        *,
        rng_site: str,
        bias: Tensor | None = None,
    ) -> Tensor:
        """residual + dropout(x), both [b, s, h] between layers. bias: as
        `KernelBackend.dropout_add`'s, where there is dropout."""
        mask = self._dropout_mask(x, rng, p, rng_site)
        if mask is None:
            return residual + x
        return self.backend.dropout_add(x, mask, residual, **({} if bias is None else {"bias": bias}))

    def _dropout_mask(self, x: Tensor, rng: CounterRNG | None, p: float, rng_site: str) -> DropoutMask | None:
        own = self.own_rng(rng)
        if own is None or not own.active(p):
            return None
        rows, columns = self.positions(x.shape[1], x.device), range(x.shape[-1])
        if axes := self.grid.hidden_axes:
            columns = self.block(len(columns) * self.grid.parts(axes), axes)
        return own.mask(x.shape, p, rng_site=rng_site, rows=rows, columns=columns)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """[b, s/c, ..] of the full micro batch -> this rank's part between layers: [b, s/(ct), ..]
        under sequence parallelism."""
        tensor = self.own_samples(tensor)
        if not self.sequence_parallel:
            return tensor
        own = local_range(tensor.shape[1], parts=self.tp.size, index=self.tp.rank)
        return tensor[:, own.start : own.stop]
