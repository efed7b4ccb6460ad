"""One decoder layer of an encoder-decoder, pre-norm, in the order of T5 (arXiv 1910.10683, 2.1).

    x += drop(attention(norm(x)))     causal self attention
    x += drop(cross(norm(x), y))      y: the encoder's output, normed by the encoder
    x += drop(mlp(norm(x)))

Collectives forward + backward: Q messages of b*q*h elements, decoder rows, and S messages of b*s*h,
encoder rows; whole messages:

    tensor parallel             3Q all-reduce + 3Q, 1S all-reduce
    with sequence parallelism   3Q, 1S all-gather, 3Q reduce-scatter
                                + 6Q, 1S all-gather, 3Q, 1S reduce-scatter
    recompute full              backward has the forward's too, without dropout one of Q fewer
    full, partition_activations and 1Q all-gather of the kept input
    context parallelism         1 all-gather of 2*b*(a/t)*q*d and 1 of 2*b*(a/t)*s*d elements
                                + a reduce-scatter of each

Every layer sends its own S, and keeps y, one tensor for all layers: recomputation, and
partitioned or offloaded activations, concern x alone. b=1, q=8, s=16,
h=4 in float32: Q is 128 bytes, S 256.

Letters: b batch, q decoder positions, s encoder positions, h hidden, a heads, d head size, t tp,
c cp.
"""

from __future__ import annotations

from torch import Tensor

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.cache import DecoderCaches
from mpctl.kernels.config import LayerConfig
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.cross_attention import ParallelCrossAttention
from mpctl.kernels.mlp import ParallelMLP
from mpctl.kernels.residual import ResidualLayer
from mpctl.kernels.tensor_parallel import ShardContext

NO_CACHES = DecoderCaches()


class ParallelDecoderLayer(ResidualLayer):
    """hidden [b, q/c, h], context [b, s/c, h] -> [b, q/c, h].

    With sequence parallelism all three are split over tp too, [b, q/(ct), h] and so on.
    config.attention describes both attentions: the self-attention is causal where it says so, the
    cross-attention never is. rng_site: see ResidualLayer. Raises ValueError for norm_order post,
    and for what cross-attention does not do (cross_attention.py).
    """

    RNG_SITES = ("attention", "cross", "mlp", "attention.probabilities", "cross.probabilities")

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__(config, shard_context, rng_site)
        if config.norm_order != "pre":
            raise ValueError("norm_order post: a decoder layer is pre-norm (set norm_order to pre)")
        recompute = config.recompute == "selective"
        self.attention_norm = self._norm()
        self.attention = ParallelSelfAttention(
            config.attention,
            shard_context,
            "attention.probabilities",
            recompute=recompute,
        )
        self.cross_norm = self._norm()
        self.cross = ParallelCrossAttention(
            config.attention, shard_context, "cross.probabilities", recompute=recompute
        )
        self.mlp_norm = self._norm()
        self.mlp = ParallelMLP(config.mlp, shard_context)

    def forward(
        self,
        hidden: Tensor,
        context: Tensor,
        rng: CounterRNG | None = None,
        *,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
        caches: DecoderCaches = NO_CACHES,
    ) -> Tensor:
        """rng: draws dropout; None is no dropout. bias [1 or b, a/t, q/c, q] and mask
        [b or 1, 1, q/c, q] are the self-attention's; context_mask [b or 1, 1, q/c, s]: which of the
        encoder's tokens are seen. caches: for incremental decoding (cache.py)."""
        return self._checkpointed(
            self._compute,
            hidden,
            context,
            self._own_rng(rng),
            bias=bias,
            mask=mask,
            context_mask=context_mask,
            caches=caches,
        )

    def _compute(
        self,
        hidden: Tensor,
        context: Tensor,
        rng: CounterRNG | None,
        *,
        bias: Tensor | None,
        mask: Tensor | None,
        context_mask: Tensor | None,
        caches: DecoderCaches,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.attention(x, rng, bias=bias, mask=mask, cache=caches.own)

        def attend_to_context(x: Tensor) -> Tensor:
            return self.cross(x, context, rng, mask=context_mask, cache=caches.cross)

        hidden = self._branch("attention", hidden, self.attention_norm, attend, rng)
        hidden = self._branch("cross", hidden, self.cross_norm, attend_to_context, rng)
        return self._branch("mlp", hidden, self.mlp_norm, self.mlp, rng)
