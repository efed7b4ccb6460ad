"""The code of a model family that workers run: its module, its samples, and batches of them.

Each family's description names its `FamilyImplementation` by import path (description.py), so that
a worker imports its own family's code alone. Needs torch.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from mpctl.core.errors import InputError
from mpctl.model.families import get_family, get_table
from mpctl.model.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.data.indexed import IndexedDataset
from mpctl.train.data.samples import Fields, SampleSource
from mpctl.train.families.adapters import attach_adapters
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.adapters import Adapter, AdapterRng
from mpctl.train.layers.attention import DecoderCaches
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ResidualLayer


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
"""The tensors that a pipeline stage passes to the next one."""


class FamilyModule(nn.Module):
    """One rank's part of a model: all of it, or that of a pipeline stage.

    EMBEDDING_SITES: the names under which embeddings draw dropout. adapter_rng: what adapters before
    and behind the layers, as the head's, read random numbers from.
    """

    EMBEDDING_SITES: ClassVar[tuple[str, ...]] = ("embedding",)

    def __init__(self) -> None:
        super().__init__()
        self.adapter_rng = AdapterRng()

    def stage_forward(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """The state from the previous stage, () for the first -> the state for the next; from the
        last one only the loss. `OperatorTable.boundary` names the dimensions in between.

        The loss is the sum over the batch's samples of their mean losses, of which training sums
        this rank's part; a scalar. rng None is no dropout.
        """
        raise NotImplementedError

    def forward(self, batch: Batch, rng: CounterRNG | None = None) -> Any:
        """Logits of this rank's words, [b, s/c, words], of a model in one stage."""
        raise NotImplementedError

    def rng_sites(self) -> dict[str, tuple[str, ...]]:
        """Return the sites of dropout by scope: the embeddings, then each layer (StepKeys)."""
        layers = (module for module in self.modules() if isinstance(module, ResidualLayer))
        own = {"": (self.EMBEDDING_SITES, self.adapter_rng)}
        own |= {each.rng_site: (each.RNG_SITES, each.adapter_rng) for each in layers}
        adapters = [module for module in self.modules() if isinstance(module, Adapter)]
        return {
            scope: (
                *sites,
                *(each.dropout.rng_site for each in adapters if each.dropout and each.dropout.source is rng),
            )
            for scope, (sites, rng) in own.items()
        }

    def loss(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """The loss of a batch, by a model in one stage; a scalar, as `stage_forward` gives it."""
        (loss,) = self.stage_forward((), batch, rng)
        return loss


class EncoderDecoderModule(FamilyModule):
    """A module with an encoder and a decoder that attends to it, as sampling drives it: a model in
    one stage without sequence or context parallelism."""

    @property
    def decoder_depth(self) -> int:
        """Layers of the decoder, each of which needs its caches."""
        raise NotImplementedError

    def encode(self, state: State, batch: Batch, rng: CounterRNG | None, *, mask: Tensor | None = None) -> Tensor:
        """The encoder's result y [b, s, h] for `tokens` [b, s]; mask [b, 1, 1, s]: False at
        padding."""
        raise NotImplementedError

    def decode_step(
        self, batch: Batch, source: Tensor, caches: Sequence[DecoderCaches], *, mask: Tensor | None = None
    ) -> Tensor:
        """Logits [b, words] behind the last of `decoder_tokens` [b, q], which follow those in
        the caches, one pair a layer. source: y; mask as for `encode`."""
        raise NotImplementedError


@dataclass(frozen=True)
class FamilyImplementation:
    """The code of a family that workers run: its module class and the class of its samples.

    module is called with (model, training, shard context, *slices): of each stack what the rank's
    pipeline stage has, in the order of the data. It builds parameters without initial values.
    """

    module: Callable[..., FamilyModule]
    samples: type[Objective]


def get_implementation(name: str) -> FamilyImplementation:
    """The code of the family of this name; InputError where its package gives none."""
    path = get_family(name).implementation
    try:
        implementation = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError.of(
            "family-import",
            "model.family",
            f"{path}, the implementation of family {name}, cannot be imported: {error}",
            "repair the package that it comes from",
        ) from None
    if isinstance(implementation, FamilyImplementation):
        return implementation
    raise InputError.of(
        "family-import",
        "model.family",
        f"{path} is a {type(implementation).__name__}, not an mpctl.train.families.implementation.FamilyImplementation",
        "repair the package that it comes from",
    )


def build_module(
    model: ModelSpec,
    training: TrainingSpec,
    shard_context: ShardContext,
    stage_slices: Sequence[StageSlice] | None = None,
) -> FamilyModule:
    """This rank's share of a pipeline stage's module, with uninitialised parameters.

    shard_context: how it is cut, its dtype and device, and the kernels that it calls.
    stage_slices: what the stage has of each stack of layers; by default all of the model.
    """
    if stage_slices is None:
        table = get_table(model, tp=shard_context.tp.size, adapter=training.adapter)
        stage_slices = table.stage_slices([(0, table.layers)])
    implementation = get_implementation(model.family)
    module = implementation.module(model, training, shard_context, *stage_slices)
    if training.adapter is not None:
        attach_adapters(module, module.adapter_rng, model, training.adapter, shard_context, stage_slices)
    return module
