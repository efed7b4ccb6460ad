"""Which modules a layer is built of where its weights are split over tensor-parallel ranks.

Layers and model families never name a split module: they ask `ShardContext.layers`, a
`TensorParallel`, for a column- or row-parallel linear layer, a norm, an embedding, an output head
or a loss. So they are the same code whatever the mode of tensor parallelism is:

    1d    Megatron-LM (arXiv 1909.08053): weights over t ranks, activations replicated, or split
          over the sequence (arXiv 2205.05198)

    2d, 2.5d, 3d    over a grid of ranks, which cuts activations too: samples and hidden states

A mode is a class with the methods of `TensorParallel` (grid/tensor_parallel.py names it). What
its grid cuts is told by mpctl/tensor_grid.py: *outside*, between the layers, and *inside*, between
a column- and a row-parallel layer. A module is given whole micro batches of tokens and targets; its
hidden states are this rank's part.

Letters: b batch, s sequence, h hidden, v vocabulary, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.counter_rng import CounterRNG, DropoutMask
from mpctl.kernels.masks import Positions
from mpctl.layers.context_parallel import NO_CP, RotaryTables, context_positions
from mpctl.layers.cross_entropy import vocab_parallel_cross_entropy
from mpctl.layers.embedding import OutputHead, ReplicatedTable, VocabParallelEmbedding, tied_logits
from mpctl.layers.fp8 import Fp8Operands
from mpctl.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpctl.layers.norm import LayerNorm, Norm, PlainLayerNorm, RMSNorm
from mpctl.layers.parameters import ZEROS, Init, mark_partial, shard_parameter
from mpctl.layers.recompute import HostOffload
from mpctl.shard import Shard
from mpctl.sharding import local_range
from mpctl.tensor_grid import TensorGrid
from mpctl.transport.group import Group

AnyNorm = LayerNorm | RMSNorm | PlainLayerNorm
NORMS: dict[Norm, type[AnyNorm]] = {
    "layernorm": LayerNorm, "rmsnorm": RMSNorm, "nonparametric": PlainLayerNorm
}  # fmt: skip
NO_TP = Group()  # of weights that are whole
WHOLE_GRID = TensorGrid()
M = TypeVar("M", bound=nn.Module)


class TensorParallel(Protocol):
    """Makes the split modules of one mode. Shapes are those of 1d; on a grid b and h are this
    rank's, too. A column-parallel layer gives what a row-parallel layer takes, whatever lies
    between them elementwise."""

    def samples(self, count: int, *, inside: bool = False) -> range:
        """Which samples of a micro batch of so many this rank holds, outside or inside."""

    def columns(self, width: int) -> range:
        """Which hidden states, by global number, the `width` of this rank are, outside."""

    @property
    def feature_parts(self) -> int:
        """Into how many parts heads, MLP columns and vocabulary are cut."""

    def local_heads(self, heads: int) -> range:
        """The attention heads of this rank, by global number; ValueError where they do not
        divide."""

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init,
        parts: Sequence[int] | None = None,
    ) -> nn.Module:  # fmt: skip
        """[b, s, inputs] -> [b, s, outputs/t]; parts: sizes of fused outputs, each split by
        itself."""

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> nn.Module:
        """[b, s, inputs/t] -> [b, s, outputs], summed over the ranks."""

    def norm(self, kind: Norm, hidden: int, *, eps: float) -> nn.Module:
        """Normalisation over the last dimension of activations between layers, [b, s, h]."""

    def replicated_table(self, rows: int, hidden: int, *, init: Init) -> nn.Module:
        """A small lookup table: row numbers [..] -> [.., hidden]."""

    def word_embedding(
        self, vocab: int, hidden: int, *, padded_vocab: int, init: Init
    ) -> nn.Module:
        """Tokens [b, s] -> vectors [b, s, hidden]."""

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> nn.Module:
        """[b, s, hidden] -> logits [b, s, v_local] of this rank's words."""

    def word_bias(self, padded_vocab: int) -> nn.Parameter:
        """One number a word, [padded_vocab/t], added to the logits."""

    def tied_logits(self, hidden: Tensor, embedding: Any) -> Tensor:
        """[b, s, hidden] -> logits [b, s, v_local] by the table of what `word_embedding` made."""

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, padded_vocab: int) -> Tensor:
        """Logits [b, s, v_local], targets [b, s] of the whole micro batch -> losses [b, s] of this
        rank's samples inside; overwrites the logits in backward."""


class TensorParallel1D:
    """Megatron's split over one group of t ranks: `TensorParallel` for `context.tp`."""

    def __init__(self, context: ShardContext) -> None:
        self.context, self.group = context, context.tp
        self._tensors: dict[str, Any] = {"dtype": context.dtype, "device": context.device}
        self._split = {
            "group": context.tp, "sequence_parallel": context.sequence_parallel, **self._tensors
        }  # fmt: skip

    def samples(self, count: int, *, inside: bool = False) -> range:
        """All of them."""
        return range(count)

    def columns(self, width: int) -> range:
        """All of them."""
        return range(width)

    @property
    def feature_parts(self) -> int:
        """One a rank."""
        return self.group.size

    def local_heads(self, heads: int) -> range:
        """A contiguous block of heads / t."""
        return local_range(heads, parts=self.group.size, index=self.group.rank)

    def column_linear(
        self, inputs: int, outputs: int, *, bias: bool, init: Init,
        parts: Sequence[int] | None = None,
    ) -> ColumnParallelLinear:  # fmt: skip
        """Rows of W over the ranks (linear.py)."""
        return ColumnParallelLinear(
            inputs, outputs, bias=bias, init=init, parts=parts,
            fp8=self.context.fp8_operands(), **self._split,
        )  # fmt: skip

    def row_linear(self, inputs: int, outputs: int, *, bias: bool, init: Init) -> RowParallelLinear:
        """Columns of W over the ranks (linear.py)."""
        return RowParallelLinear(
            inputs, outputs, bias=bias, init=init, fp8=self.context.fp8_operands(), **self._split
        )

    def norm(self, kind: Norm, hidden: int, *, eps: float) -> AnyNorm:
        """A replicated norm; its gradients are partial under sequence parallelism."""
        norm = NORMS[kind](hidden, eps=eps, backend=self.context.backend, **self._tensors)
        return self.context.replicated(norm)

    def replicated_table(self, rows: int, hidden: int, *, init: Init) -> ReplicatedTable:
        """Replicated; its gradients are partial under sequence parallelism."""
        return self.context.replicated(ReplicatedTable(rows, hidden, init=init, **self._tensors))

    def word_embedding(
        self, vocab: int, hidden: int, *, padded_vocab: int, init: Init
    ) -> VocabParallelEmbedding:
        """Rows of the table over the ranks (embedding.py)."""
        return VocabParallelEmbedding(
            vocab, hidden, padded_vocab=padded_vocab, init=init, **self._split
        )

    def output_head(self, vocab: int, hidden: int, *, padded_vocab: int, init: Init) -> OutputHead:
        """Rows of W, that is words, over the ranks (embedding.py)."""
        return OutputHead(vocab, hidden, padded_vocab=padded_vocab, init=init, **self._split)

    def word_bias(self, padded_vocab: int) -> nn.Parameter:
        """The block of this rank's rows of the word table, zeros at first."""
        shard = Shard((padded_vocab,), {0: (self._words(padded_vocab),)})
        return shard_parameter(shard, init=ZEROS, **self._tensors)

    def tied_logits(self, hidden: Tensor, embedding: VocabParallelEmbedding) -> Tensor:
        """By this rank's rows of the word table (embedding.py)."""
        return tied_logits(hidden, embedding)

    def cross_entropy(self, logits: Tensor, targets: Tensor, *, padded_vocab: int) -> Tensor:
        """Three all-reduces of b*s numbers; logits stay split (cross_entropy.py)."""
        first = self._words(padded_vocab).start
        return vocab_parallel_cross_entropy(
            logits, targets, group=self.group, first=first, overwrite=True,
            backend=self.context.backend,
        )  # fmt: skip

    def _words(self, padded_vocab: int) -> range:
        return local_range(padded_vocab, parts=self.group.size, index=self.group.rank)


@dataclass(frozen=True)
class ShardContext:
    """How a rank's share of a model is cut and where it lies; by default the whole model.

    tp: the group over which weights are split; cp: that over which the sequence is
    (context_parallel.py). sequence_parallel: activations between the layers are split over tp too,
    along the sequence (arXiv 2205.05198). dtype, device: of parameters, torch's defaults by
    default. backend: the kernels of attention and norms. tensor_parallel: makes the modules of the
    mode of tensor parallelism. grid, groups: of a mode other than 1d the grid of the tp ranks and
    this rank's groups in it, by their names (TensorGrid.groups). fp8: linear layers multiply in fp8
    (1d alone). offload: keeps saved inputs in host memory, for layers that are configured so.
    rotary_tables: those of rotary positions, which layers share.
    """

    tp: Group = NO_TP
    cp: Group = NO_CP
    sequence_parallel: bool = False
    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    backend: KernelBackend = TORCH_BACKEND
    tensor_parallel: Callable[[ShardContext], TensorParallel] = TensorParallel1D
    grid: TensorGrid = WHOLE_GRID
    groups: Mapping[str, Group] = field(default_factory=dict)
    fp8: bool = False
    offload: HostOffload = field(default_factory=HostOffload)
    rotary_tables: RotaryTables = field(default_factory=RotaryTables)

    @cached_property
    def layers(self) -> TensorParallel:
        """What makes the split modules."""
        return self.tensor_parallel(self)

    def fp8_operands(self) -> Fp8Operands | None:
        """What casts the operands of one more linear layer; None where none is cast."""
        return Fp8Operands(self.backend) if self.fp8 else None

    def replicated(self, module: M) -> M:
        """A module that every rank of 1d holds whole: under sequence parallelism it meets a rank's
        own positions alone, so that its gradients are partial sums over tp."""
        if self.sequence_parallel:
            mark_partial(module)
        return module

    @property
    def holds_first_position(self) -> bool:
        """Whether the first position of the sequence is among this rank's rows."""
        return self.cp.rank == 0 and (not self.sequence_parallel or self.tp.rank == 0)

    def positions(self, length: int, device: torch.device) -> Positions:
        """Global positions of the `length` rows that this rank holds of activations between
        layers.
        """
        parts, index = (self.tp.size, self.tp.rank) if self.sequence_parallel else (1, 0)
        own = local_range(length * parts, parts=parts, index=index)
        if self.cp.size == 1:
            return own
        length_cp = length * parts * self.cp.size
        of_cp = context_positions(length_cp, self.cp.size, self.cp.rank, device=device)
        return of_cp[own.start : own.stop]

    def own_samples(self, tensor: Tensor, *, inside: bool = False) -> Tensor:
        """[b, ..] of the whole micro batch -> of this rank's samples, outside or inside."""
        own = self.layers.samples(len(tensor), inside=inside)
        return tensor if len(own) == len(tensor) else tensor[own.start : own.stop]

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
        self, x: Tensor, rng: CounterRNG | None, p: float, residual: Tensor, *, rng_site: str
    ) -> Tensor:
        """residual + dropout(x), both [b, s, h] between layers."""
        mask = self._dropout_mask(x, rng, p, rng_site)
        return residual + x if mask is None else self.backend.dropout_add(x, mask, residual)

    def _dropout_mask(
        self, x: Tensor, rng: CounterRNG | None, p: float, rng_site: str
    ) -> DropoutMask | None:
        own = self.own_rng(rng)
        if own is None or not own.active(p):
            return None
        rows, columns = self.positions(x.shape[1], x.device), self.layers.columns(x.shape[-1])
        return own.mask(x.shape, p, rng_site=rng_site, rows=rows, columns=columns)

    def own_rows(self, tensor: Tensor) -> Tensor:
        """[b, s/c, ..] of the whole micro batch -> this rank's part between layers: [b, s/(ct), ..]
        under sequence parallelism."""
        tensor = self.own_samples(tensor)
        if not self.sequence_parallel:
            return tensor
        own = local_range(tensor.shape[1], parts=self.tp.size, index=self.tp.rank)
        return tensor[:, own.start : own.stop]
