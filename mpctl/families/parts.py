"""Parts that the families' modules have in common, built as a model and its training say.

Letters: b batch, s sequence, h hidden; t tp, c cp.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpctl.kernels.embedding import OutputHead, VocabParallelEmbedding
from mpctl.kernels.group import Group
from mpctl.kernels.layer import ParallelTransformerLayer, held_rows
from mpctl.kernels.masks import Places
from mpctl.kernels.noise import Noise
from mpctl.kernels.parameters import ZEROS, Init, Shard, mark_partial, shard_parameter
from mpctl.kernels.rotary import Rotary
from mpctl.sharding import local_range, padded_vocab
from mpctl.spec.model import Model
from mpctl.spec.training import Training


class Table(nn.Module):
    """A replicated table [n, h]: positions, segments."""

    def __init__(
        self, rows: int, hidden: int, *, init: Init, is_partial: bool, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        whole = Shard((rows, hidden))
        self.weight = shard_parameter(whole, init=init, dtype=dtype, device=device)
        if is_partial:
            mark_partial(self)

    def forward(self, rows: Places) -> Tensor:
        """[s, h] of the rows of a range, or [..., h] of the rows that a tensor names."""
        weight: Tensor = self.weight
        return weight[rows.start : rows.stop] if isinstance(rows, range) else weight[rows]


class WholeLinear(nn.Module):
    """[..., i] -> [..., o] by a matrix that every rank holds whole."""

    def __init__(
        self, inputs: int, outputs: int, *, init: Init, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self.weight = shard_parameter(Shard((outputs, inputs)), init=init, **place)
        self.bias = shard_parameter(Shard((outputs,)), init=ZEROS, **place)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """tokens [b, s/c] -> [b, s/c, h], or this rank's [b, s/(ct), h] of it: word vectors and the
    rows of other tables, summed, then dropped out.

    tables: name -> height of the tables beside the words'. site: of the dropout.
    """

    def __init__(
        self, model: Model, training: Training, *, group: Group, cp: Group,
        sequence_parallel: bool, dtype: torch.dtype, device: torch.device,
        tables: dict[str, int], word_std: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        init = Init("normal", training.init_std)
        self.dropout, self.group, self.cp = training.dropout, group, cp
        self.sequence_parallel = sequence_parallel
        self.word = VocabParallelEmbedding(
            model.vocab, model.hidden, group=group, padded_vocab=padded(model, group),
            init=init if word_std is None else Init("normal", word_std),
            sequence_parallel=sequence_parallel, dtype=dtype, device=device,
        )  # fmt: skip
        for name, height in tables.items():
            table = Table(
                height, model.hidden, init=init, is_partial=sequence_parallel, dtype=dtype,
                device=device,
            )  # fmt: skip
            self.add_module(name, table)

    def forward(self, tokens: Tensor, **places: Tensor | None) -> Tensor:
        """places: by table, row numbers [b, s/c], or None for where the tokens stand."""
        hidden: Tensor = self.word(tokens)
        for name, numbers in places.items():
            table = self.get_submodule(name)
            hidden = hidden + table(self._rows(hidden) if numbers is None else self._own(numbers))
        return hidden

    def dropped(self, hidden: Tensor, noise: Noise | None, *, site: str = "embedding") -> Tensor:
        if noise is None or not noise.active(self.dropout):
            return hidden
        return noise.dropout(hidden, self.dropout, site=site, rows=self._rows(hidden))

    def _rows(self, hidden: Tensor) -> Places:
        return held_rows(
            hidden.shape[1], group=self.group, cp=self.cp,
            sequence_parallel=self.sequence_parallel, device=hidden.device,
        )  # fmt: skip

    def _own(self, numbers: Tensor) -> Tensor:
        """[b, s/c] -> [b, s/(ct)] under sequence parallelism."""
        if not self.sequence_parallel:
            return numbers
        own = local_range(numbers.shape[1], parts=self.group.size, index=self.group.rank)
        return numbers[:, own.start : own.stop]


def padded(model: Model, group: Group) -> int:
    """Rows of the word table."""
    return padded_vocab(model.vocab, tp=group.size, divisor=model.vocab_divisor)


def own_head(
    model: Model, training: Training, *, group: Group, sequence_parallel: bool,
    dtype: torch.dtype, device: torch.device,
) -> OutputHead | None:  # fmt: skip
    """None where the word table is the head."""
    if model.tied_embeddings:
        return None
    return OutputHead(
        model.vocab, model.hidden, group=group, init=Init("normal", training.init_std),
        padded_vocab=padded(model, group), sequence_parallel=sequence_parallel, dtype=dtype,
        device=device,
    )  # fmt: skip


def layer_settings(model: Model, training: Training) -> dict[str, Any]:
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
    model: Model, training: Training, *, prefix: str = "layers", **settings: Any
) -> nn.ModuleDict:
    """`model.layers` layers of self-attention and MLP by number. settings: causal, and the group,
    cp, sequence_parallel, dtype and device of every kernel."""
    rotary = None
    if model.position == "rotary":
        rotary = Rotary(model.head_size, model.rotary_base, model.rotary_scaling)
    common = {**layer_settings(model, training), "kv_heads": model.kv_heads, "rotary": rotary}
    return nn.ModuleDict({
        str(n): ParallelTransformerLayer(
            model.hidden, model.heads, model.ffn, site=f"{prefix}.{n}", **common, **settings
        )
        for n in range(model.layers)
    })  # fmt: skip


def weighted_sum(losses: Tensor, weights: Tensor) -> Tensor:
    """losses [b, s] by weights of any float type -> a scalar."""
    return (losses * weights.to(losses.dtype)).sum()
