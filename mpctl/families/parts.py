"""Parts that the families' modules have in common, built as a model and its training say.

A pipeline stage builds what it holds of each stack (operators/table.py): some layers, the entry
with the first, the exit with the last. A tied head needs the word table, so that the exit has one
too.

Letters: b batch, s sequence, h hidden; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.families.batch import Batch, FamilyModule, State
from mpctl.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.kernels.cache import KeyValueCache
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.cross_entropy import vocab_parallel_cross_entropy
from mpctl.kernels.embedding import OutputHead, VocabParallelEmbedding, tied_logits
from mpctl.kernels.layer import NORMS, ParallelTransformerLayer, held_rows
from mpctl.kernels.masks import Positions
from mpctl.kernels.parameters import ZEROS, Init, Shard, mark_partial, shard_parameter
from mpctl.kernels.rotary import Rotary
from mpctl.operators.table import StageSlice
from mpctl.sharding import local_range, padded_vocab
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.transport.group import Group

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class ShardContext:
    """Where a rank's share of a model lies: the groups that split it, its type and its device."""

    group: Group
    cp: Group
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    backend: KernelBackend = TORCH_BACKEND

    @property
    def of_tensors(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    @property
    def of_linear(self) -> dict[str, Any]:
        split = {"group": self.group, "sequence_parallel": self.sequence_parallel}
        return split | self.of_tensors

    @property
    def of_layers(self) -> dict[str, Any]:
        return self.of_linear | {"cp": self.cp, "backend": self.backend}

    def partial(self, module: M) -> M:
        """The module, marked where each tp rank sees a part of the sequence by it."""
        if self.sequence_parallel:
            mark_partial(module)
        return module


class EmbeddingTable(nn.Module):
    """A replicated table [n, h]: positions, segments."""

    def __init__(self, rows: int, hidden: int, place: ShardContext, *, init: Init) -> None:
        super().__init__()
        self.weight = shard_parameter(Shard((rows, hidden)), init=init, **place.of_tensors)
        place.partial(self)

    def forward(self, rows: Positions) -> Tensor:
        """[s, h] of the rows of a range, or [..., h] of the rows that a tensor names."""
        weight: Tensor = self.weight
        return weight[rows.start : rows.stop] if isinstance(rows, range) else weight[rows]


class ReplicatedLinear(nn.Module):
    """[..., i] -> [..., o] by a matrix that every rank holds whole."""

    def __init__(self, inputs: int, outputs: int, place: ShardContext, *, init: Init) -> None:
        super().__init__()
        whole = Shard((outputs, inputs))
        self.weight = shard_parameter(whole, init=init, **place.of_tensors)
        self.bias = shard_parameter(Shard((outputs,)), init=ZEROS, **place.of_tensors)
        place.partial(self)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """tokens [b, s/c] -> [b, s/c, h], or this rank's [b, s/(ct), h] of it: word vectors and the
    rows of other tables, summed, then dropped out.

    tables: name -> height of the tables beside the words'. site: of the dropout.
    """

    def __init__(
        self,
        model: ModelSpec,
        training: TrainingSpec,
        place: ShardContext,
        *,
        tables: dict[str, int],
        word_std: float | None = None,
    ) -> None:
        super().__init__()
        init = Init("normal", training.init_std)
        self.dropout, self.place = training.dropout, place
        self.word = VocabParallelEmbedding(
            model.vocab, model.hidden, padded_vocab=padded(model, place.group),
            init=init if word_std is None else Init("normal", word_std), **place.of_linear,
        )  # fmt: skip
        for name, height in tables.items():
            self.add_module(name, EmbeddingTable(height, model.hidden, place, init=init))

    def forward(self, tokens: Tensor, **places: Tensor | None) -> Tensor:
        """places: by table, row numbers [b, s/c], or None for where the tokens stand."""
        hidden: Tensor = self.word(tokens)
        for name, numbers in places.items():
            table = self.get_submodule(name)
            hidden = hidden + table(self._rows(hidden) if numbers is None else self._own(numbers))
        return hidden

    def dropped(
        self, hidden: Tensor, noise: CounterRNG | None, *, site: str = "embedding"
    ) -> Tensor:
        if noise is None or not noise.active(self.dropout):
            return hidden
        return noise.dropout(hidden, self.dropout, site=site, rows=self._rows(hidden))

    def _rows(self, hidden: Tensor) -> Positions:
        place = self.place
        return held_rows(
            hidden.shape[1], group=place.group, cp=place.cp,
            sequence_parallel=place.sequence_parallel, device=hidden.device,
        )  # fmt: skip

    def _own(self, numbers: Tensor) -> Tensor:
        """[b, s/c] -> [b, s/(ct)] under sequence parallelism."""
        group = self.place.group
        if not self.place.sequence_parallel:
            return numbers
        own = local_range(numbers.shape[1], parts=group.size, index=group.rank)
        return numbers[:, own.start : own.stop]


def padded(model: ModelSpec, group: Group) -> int:
    """Rows of the word table."""
    return padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)


def own_head(model: ModelSpec, training: TrainingSpec, place: ShardContext) -> OutputHead | None:
    """None where the word table is the head."""
    if model.tied_embeddings:
        return None
    return OutputHead(
        model.vocab, model.hidden, init=Init("normal", training.init_std),
        padded_vocab=padded(model, place.group), **place.of_linear,
    )  # fmt: skip


def norm_of(model: ModelSpec, place: ShardContext) -> nn.Module:
    norm = NORMS[model.norm](
        model.hidden, eps=model.norm_epsilon, backend=place.backend, **place.of_tensors
    )
    return place.partial(norm)


def layer_settings(model: ModelSpec, training: TrainingSpec) -> dict[str, Any]:
    """Keywords that every kind of transformer layer takes from a job.

    Projections into the residual start smaller by 1/sqrt(2L) (Radford et al. 2019, GPT-2).
    """
    return {
        "dropout": training.dropout, "attention_dropout": training.attention_dropout,
        "head_dim": model.head_size, "activation": model.activation, "bias": model.bias,
        "norm": model.norm, "eps": model.norm_epsilon, "recompute": training.recompute,
        "partition": training.partition_activations, "offload": training.offload_activations,
        "init_std": training.init_std,
        "output_std": training.init_std / (2 * model.layers) ** 0.5,
    }  # fmt: skip


def encoder_layers(
    model: ModelSpec, training: TrainingSpec, place: ShardContext, numbers: Iterable[int], *,
    prefix: str = "layers", **settings: Any,
) -> nn.ModuleDict:  # fmt: skip
    """Layers of self-attention and MLP by their numbers. settings: causal, order, scale."""
    rotary = None
    if model.position == "rotary":
        scaling = model.rotary_scaling.model_dump() if model.rotary_scaling else None
        rotary = Rotary(model.head_size, model.rotary_base, scaling)
    settings |= {"kv_heads": model.kv_heads, "rotary": rotary, **place.of_layers}
    settings |= layer_settings(model, training)
    return nn.ModuleDict({
        str(n): ParallelTransformerLayer(
            model.hidden, model.heads, model.ffn, site=f"{prefix}.{n}", **settings
        )
        for n in numbers
    })  # fmt: skip


class SingleStackModule(FamilyModule):
    """A family of one stack of self-attention: a stage holds some layers, and either end.

    tables: those beside the words', for the entry. Subclasses say how hidden states come about
    (`entered`), what else a layer is given (`beside`) and what is made of them (`logits`, `left`).
    """

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, place: ShardContext, held: StageSlice, *,
        tables: dict[str, int], **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.place, self.held = model, place, held
        needs_words = held.has_entry or (held.has_exit and model.tied_embeddings)
        own = tables if held.has_entry else {}
        self.embedding = Embedding(model, training, place, tables=own) if needs_words else None
        self.layers = encoder_layers(model, training, place, held.layers, **settings)
        self.head: nn.Module | None = None
        if held.has_exit:
            self.head = own_head(model, training, place)

    def advance(self, state: State, batch: Batch, noise: CounterRNG | None) -> State:
        hidden = self.through(self.entered(batch, noise) if self.held.has_entry else state[0],
                              batch, noise)  # fmt: skip
        return (self.left(hidden, batch),) if self.held.has_exit else (hidden,)

    def forward(self, batch: Batch, noise: CounterRNG | None = None) -> Any:
        return self.logits(self.through(self.entered(batch, noise), batch, noise))

    def through(self, hidden: Tensor, batch: Batch, noise: CounterRNG | None) -> Tensor:
        beside = self.beside(batch)
        for layer in self.layers.values():
            hidden = layer(hidden, noise, **beside)
        return hidden

    def continued(
        self, batch: Batch, caches: Sequence[KeyValueCache], *, mask: Tensor | None = None
    ) -> Tensor:
        """Logits [b, v_local] behind the last of the batch's positions, which follow those in the
        caches, one a layer; needs a model in one stage without sequence or context parallelism.

        batch: of the new positions alone, with their `positions` [b, s]. mask [b, 1, s or 1, all
        positions]: joins the layers' own.
        """
        hidden, places = self.entered(batch, None), batch["positions"]
        for layer, cache in zip(self.layers.values(), caches, strict=True):
            hidden = layer(hidden, None, mask=mask, positions=places, cache=cache)
        logits: Tensor = self.logits(hidden[:, -1:])
        return logits[:, 0]

    def entered(self, batch: Batch, noise: CounterRNG | None) -> Tensor:
        """Hidden states of the batch's tokens."""
        raise NotImplementedError

    def beside(self, batch: Batch) -> dict[str, Tensor]:
        """What every layer is given beside the hidden states."""
        return {}

    def logits(self, hidden: Tensor) -> Any:
        """Hidden states behind the last layer -> logits, as the family gives them."""
        raise NotImplementedError

    def left(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The loss, from hidden states behind the last layer."""
        raise NotImplementedError

    def words(self, hidden: Tensor) -> Tensor:
        """Logits [b, s/c, v_local] by the word table, or by a head of its own."""
        if self.head is not None and not self.model.tied_embeddings:
            logits: Tensor = self.head(hidden)
            return logits
        assert self.embedding is not None
        return tied_logits(hidden, self.embedding.word)

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return word_losses(self.model, self.place, logits, targets)


def word_losses(model: ModelSpec, place: ShardContext, logits: Tensor, targets: Tensor) -> Tensor:
    """-log p(target) of every token, [b, s/c]; the vocabulary is never gathered."""
    own = local_range(padded(model, place.group), parts=place.group.size, index=place.group.rank)
    return vocab_parallel_cross_entropy(
        logits, targets, group=place.group, first=own.start, overwrite=True
    )


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """losses [b, s] by weights of any float type -> a scalar."""
    return (losses * weights.to(losses.dtype)).sum()
