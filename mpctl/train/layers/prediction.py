"""Multi-token prediction: layers behind the last one that predict tokens further ahead.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). Of the tokens t, layer k = 1, 2, .. sees at position i
the result h_i of layer k - 1, for k = 1 the model's, normed as for the head, and the vector of a
token that position i had to predict:

    h'_i = P [norm(embedding(t_{i+k})) | norm(h_i)]        P [h, 2h]
    h_i  = norm(layer(h'))_i                               the next layer's input, and the head's

Its logits predict t_{i+k+1}; word table and head are the model's own. The last k positions of a
sample have nothing to predict there and do not count. Each layer's mean loss counts with
coefficient / layers in the gradients; it does not change the loss that is reported, which stays
that of the next token, and validation and sampling leave the layers out.

P is split by rows over tp, and its results are gathered: one all-gather of b s h in addition to
the messages of a column-parallel product, another in backward under sequence parallelism.
By hand, s 4, k 1: of tokens 5 6 7 8 and targets 6 7 8 9 the vectors of 6 7 8 9 predict 7 8 9; the
last position does not count.

Letters: b batch, s sequence, h hidden, t tp.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.kernels.rotary import CosSin
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mappings import SEQUENCE, gather_from_region, scatter_to_region
from mpctl.train.layers.parameters import Init
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer


class PredictionLayer(ParallelTransformerLayer):
    """hidden [b, s, h] and the vectors of the tokens ahead [b, s, h] -> [b, s, h]; with sequence
    parallelism all are [b, s/t, h]. rng_site: as ParallelTransformerLayer's; init: of P. Raises
    ValueError under context parallelism, where tokens ahead are on other ranks."""

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str, *, init: Init) -> None:
        super().__init__(config, shard_context, rng_site)
        if (cp := shard_context.cp.size) > 1:
            raise ValueError(f"multi-token prediction with cp {cp}: it runs with cp 1 alone")
        h = config.hidden
        self.embedding_norm, self.hidden_norm = self._norm(), self._norm()
        self.projection = shard_context.layers.column_linear(2 * h, h, bias=False, init=init)
        self.final_norm = self._norm()

    def predict(self, hidden: Tensor, ahead: Tensor, rng: CounterRNG | None, cos_sin: CosSin | None) -> Tensor:
        """The result for hidden states, normed for the head, and the vectors of tokens ahead."""
        tp = self.shard_context.tp
        joined = torch.cat((self.embedding_norm(ahead), self.hidden_norm(hidden)), dim=-1)
        # [b, s/t, 2h] -> [b, s, h/t] -> [b, s, h] -> [b, s/t, h]
        projected = gather_from_region(self.projection(joined), tp)
        if self.shard_context.sequence_parallel:
            projected = scatter_to_region(projected, tp, dim=SEQUENCE)
        result: Tensor = self.final_norm(self(projected, rng, cos_sin=cos_sin))
        return result


def tokens_ahead(targets: Tensor, distance: int) -> Tensor:
    """Shift targets [b, s] to the left by `distance` and fill up with 0 at the end of a sample."""
    return nn.functional.pad(targets[:, distance:], (0, distance))


def mean_of_predictions(losses: Tensor, distance: int) -> Tensor:
    """losses [b, s] of tokens `distance` behind the next ones -> the sum over samples of the mean
    over the positions that have such a token."""
    count = losses.shape[1] - distance
    return losses[:, :count].sum() * (1 / max(1, count))
