"""GPT as a module, with the same names and shapes of parameters as in its operator table (ops.py).

h0 = drop(word[tokens] + position[0..s)); h = blocks(h0); logits = norm(h) word^T
(Radford et al. 2019, GPT-2: pre-norm, tied output). The modern variant is the same with RMSNorm,
rotary positions, a gated MLP, fewer kv heads, no biases and a head of its own (Llama, arXiv
2302.13971). Names are global (`layers.7.mlp.up.weight`), so that weights and dropout masks follow
from the seed whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from mpctl.model.operators.table import StageSlice
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.gpt.samples import GptSamples
from mpctl.train.families.implementation import Batch, FamilyImplementation, State
from mpctl.train.families.parts import SingleStackModule, model_norm, weighted_sum
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.masks import packed_mask
from mpctl.train.layers.context_parallel import context_positions
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.prediction import PredictionLayer, mean_of_predictions, tokens_ahead
from mpctl.train.layers.shard_context import ShardContext


class GPT(SingleStackModule):
    """A batch has tokens and targets [b, s/c]; the loss of a sample is the mean over its tokens. It may have
    positions [b, s/c]; weights [b, s/c], by which losses are summed instead; and places [b, s/c], the positions in
    rows of several conversations, which attention keeps apart. Rotary positions and ALiBi know distances alone, so
    that only learned positions start anew."""

    def __init__(
        self, model: ModelSpec, training: TrainingSpec, shard_context: ShardContext, *stage_slices: StageSlice
    ) -> None:
        super().__init__(model, training, shard_context, *stage_slices)
        self.embedding_norm = model_norm(model, shard_context) if self.has_entry and model.embedding_norm else None
        self.prediction_scale = training.mtp_loss_coeff / max(1, model.mtp_layers)
        predicts = any(end.part.layers for part in stage_slices for end in part.ends)
        count = model.mtp_layers if predicts else 0
        self.mtp = nn.ModuleDict({str(n): self._prediction(training, n) for n in range(count)})

    def _prediction(self, training: TrainingSpec, number: int) -> PredictionLayer:
        """A layer of multi-token prediction: as the last layer, without a window. As the rest of
        the model's end it is neither recomputed in full nor narrowed to fp8."""
        config = self.layer_kind(training, self.model.layers - 1)
        if config.recompute == "full":
            config = replace(config, recompute="none", partition_activations=False, offload_activations=False)
        context = replace(self.shard_context, fp8=False)
        init = Init("normal", training.init_std)
        return PredictionLayer(config, context, f"mtp.{number}", init=init)

    def tables(self, model: ModelSpec) -> dict[str, int]:
        """Learned positions, where the model has them."""
        return {"position": model.max_positions} if model.position == "learned" else {}

    def embed(self, batch: Batch, rng: CounterRNG | None) -> Tensor:
        """[b, s/c, h] of the tokens; a batch may give other positions than where they stand."""
        assert self.embedding is not None
        is_learned = self.model.position == "learned"
        given = batch.fields.get("positions", batch.fields.get("places"))
        rows = {"position": given} if is_learned else {}
        hidden = self.scaled(self.embedding(batch["tokens"], **rows))
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        return self.embedding.dropped(hidden, rng)

    def layer_kwargs(self, batch: Batch) -> dict[str, Tensor]:
        """mask [b, 1, s/c, s] of rows that hold several conversations."""
        places, cp = batch.fields.get("places"), self.shard_context.cp
        if places is None:
            return {}
        length = places.shape[1] * cp.size
        rows = context_positions(length, cp.size, cp.rank, device=places.device)
        return {"mask": packed_mask(places, length, queries=rows)}

    def scaled(self, words: Tensor) -> Tensor:
        """Vectors of words times the model's factor of embeddings."""
        factor = self.model.embedding_multiplier
        return words if factor is None else words * factor

    def stage_forward(self, state: State, batch: Batch, rng: CounterRNG | None) -> State:
        """See FamilyModule. The gradients of layers of multi-token prediction are those of their
        losses, of which the result has no part."""
        if len(state) > 1:  # predicted in a stage before
            *predicted, normed = state
        elif self.mtp:
            hidden = self.embed(batch, rng) if self.has_entry else state[0]
            normed, predicted = self.final_norm(self._transform(hidden, batch, rng)), []
        else:
            return super().stage_forward(state, batch, rng)
        if not self.has_exit:
            targets = batch["targets"]
            return (*(predicted or [found for _, found in self._predicted(normed, targets, rng)]), normed)
        loss = self._mean_loss(normed, batch)
        if not torch.is_grad_enabled():
            return (loss,)
        further = self._further_losses(predicted, normed, batch["targets"], rng)
        return (loss + (further - further.detach()),)

    def _predicted(self, normed: Tensor, targets: Tensor, rng: CounterRNG | None) -> Iterator[tuple[int, Tensor]]:
        """The distance and the result of each layer of multi-token prediction; where nothing is trained,
        what it would read."""
        rows = targets.shape[1]
        for distance, layer in enumerate(self.mtp.values(), 1):
            assert isinstance(layer, PredictionLayer) and self.embedding is not None
            if torch.is_grad_enabled():
                ahead = self.scaled(self.embedding(tokens_ahead(targets, distance - 1)))
                normed = layer.predict(normed, ahead, rng, self._table(layer, rows, normed))
            yield distance, normed

    def _further_losses(
        self, predicted: Sequence[Tensor], normed: Tensor, targets: Tensor, rng: CounterRNG | None
    ) -> Tensor:
        """The weighted losses of tokens behind the next one, summed over samples. predicted: results of layers
        of a stage before, if they run there."""
        total = torch.zeros((), dtype=torch.float32, device=normed.device)
        for distance, found in enumerate(predicted, 1) if predicted else self._predicted(normed, targets, rng):
            losses = self.head_losses(found, tokens_ahead(targets, distance))
            total = total + mean_of_predictions(losses, distance)
        return total * self.prediction_scale

    def compute_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """The sum over samples of the mean loss of their tokens."""
        return self._mean_loss(self.final_norm(hidden), batch)

    def _mean_loss(self, normed: Tensor, batch: Batch) -> Tensor:
        losses = self.head_losses(normed, batch["targets"])
        weights = batch.fields.get("weights")
        return losses.sum() * (1 / self.model.seq_length) if weights is None else weighted_sum(losses, weights)


IMPLEMENTATION = FamilyImplementation(module=GPT, samples=GptSamples)
