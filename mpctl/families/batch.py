"""The seam between a family and the runtime: where samples come from, what a module is fed, what
it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from mpctl.data.indexed import IndexedDataset
from mpctl.data.samples import Fields, SampleSource
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.layers.attention import DecoderCaches
from mpctl.layers.transformer_layer import ResidualLayer


@dataclass(frozen=True)
class Batch:
    """samples [b]: global numbers, which the dropout masks follow. fields: the arrays that the
    family's `Samples` made, by name; of [b, s] ones this rank's part of the sequence, [b, s/c]."""

    samples: Tensor
    fields: Mapping[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]


class Objective(Protocol):
    """Samples of a family's training objective without end; each is a function of (seed, number)
    alone, so that every layout trains on the same ones."""

    def __init__(self, source: SampleSource) -> None:
        """InputError where the data or the sequence length is too small for a sample."""

    samples_per_epoch: int
    dataset: IndexedDataset

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers as NumPy arrays by name, as the family's `batch_arrays`
        describes them: the batch first, int64, or float64 for weights."""


State = tuple[Tensor, ...]
"""What a pipeline stage hands to the next one."""


class FamilyModule(nn.Module):
    """What one rank has of a model: all of it, or what a pipeline stage holds.

    EMBEDDING_SITES: the names under which embeddings draw dropout.
    """

    EMBEDDING_SITES: ClassVar[tuple[str, ...]] = ("embedding",)

    def advance(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """What the stage before gave, () for the first -> what the stage behind needs; of the last
        one the loss alone. `OperatorTable.boundary` names the dimensions in between.

        The loss is the sum over the batch's samples of their mean losses, of which training sums
        this rank's part; a scalar. rng None is no dropout.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, rng: CounterRNG | None = None) -> Any:
        """Logits of this rank's words, [b, s/c, v_local], of a model in one stage."""
        raise NotImplementedError

    def rng_sites(self) -> dict[str, tuple[str, ...]]:
        """Where dropout is drawn, by scope: the embeddings, then each layer (StepKeys)."""
        layers = (module for module in self.modules() if isinstance(module, ResidualLayer))
        return {"": self.EMBEDDING_SITES, **{each.rng_site: each.RNG_SITES for each in layers}}

    def loss(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """The loss of a batch, by a model in one stage; a scalar, as `advance` gives it."""
        (loss,) = self.advance((), batch, rng)
        return loss


class EncoderDecoderModule(FamilyModule):
    """A module with an encoder and a decoder that attends to it, as sampling drives it: a model in
    one stage without sequence or context parallelism."""

    @property
    def decoder_depth(self) -> int:
        """Layers of the decoder, each of which needs its caches."""
        raise NotImplementedError

    def encode(
        self, state: State, batch: Batch, rng: CounterRNG | None, *, mask: Tensor | None = None
    ) -> Tensor:
        """The encoder's result y [b, s, h] for `tokens` [b, s]; mask [b, 1, 1, s]: False at
        padding."""
        raise NotImplementedError

    def decode_step(
        self, batch: Batch, source: Tensor, caches: Sequence[DecoderCaches], *,
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Logits [b, v_local] behind the last of `decoder_tokens` [b, q], which follow those in
        the caches, one pair a layer. source: y; mask as for `encode`."""
        raise NotImplementedError
