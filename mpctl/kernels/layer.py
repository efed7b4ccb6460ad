"""One transformer layer of self-attention and MLP, with norms in any order (residual.py), the MLP
behind attention or beside it (parallel residual: GPT-NeoX, arXiv 2204.06745, section 2.1).

The parallel split is Megatron-LM's (arXiv 1909.08053, figure 4), for either order. Collectives of
b*s*h elements each, whole message, forward + backward:

    tensor parallel                 2 all-reduce + 2 all-reduce
    with sequence parallelism       2 all-gather, 2 reduce-scatter + 4 all-gather, 2 reduce-scatter
    recompute full, pre             backward has the forward's too, without dropout one fewer
    recompute full, post            backward has the forward's too, all: the last norm's input
                                    follows the last reduction
    full, partition_activations     and 1 all-gather of the kept input

Under sequence parallelism (arXiv 2205.05198, section 4.2.2) norms, dropout and residual see this
rank's positions only; two of the four all-gathers are of inputs gathered again for dW. With b=2,
s=8, h=16 in float32 each message is 1024 bytes. A mask depends on the global position alone, so
every row of this table draws the same.

>>> import torch
>>> from mpctl.kernels.config import AttentionConfig, MLPConfig
>>> config = LayerConfig(AttentionConfig(hidden=16, heads=4), MLPConfig(hidden=16, ffn=64))
>>> layer = ParallelTransformerLayer(config, ShardContext(), rng_site="layers.0")
>>> layer(torch.zeros(2, 8, 16)).shape
torch.Size([2, 8, 16])

Letters: b batch, s sequence, h hidden, a heads, t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.cache import KeyValueCache
from mpctl.kernels.config import LayerConfig
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.masks import Positions
from mpctl.kernels.mlp import ParallelMLP
from mpctl.kernels.residual import ResidualLayer
from mpctl.kernels.rotary import Turns
from mpctl.kernels.tensor_parallel import ShardContext


class ParallelTransformerLayer(ResidualLayer):
    """hidden [b, s/c, h] -> [b, s/c, h]; with sequence parallelism both are [b, s/(ct), h].

    rng_site: see ResidualLayer. Parameters are uninitialised (`parameters.initialise` fills them).
    Raises ValueError where heads, kv_heads or ffn cannot be split over `shard_context.tp`.
    """

    RNG_SITES = ("attention", "mlp", "attention.probabilities")

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__(config, shard_context, rng_site)
        order = config.norm_order
        has_first, has_result = order != "output", order in ("output", "sandwich")
        shares = config.parallel_residual and config.shared_norm
        self.attention_norm = self._norm() if has_first else None
        self.attention = ParallelSelfAttention(
            config.attention,
            shard_context,
            "attention.probabilities",
            recompute=config.recompute == "selective",
        )
        self.attention_output_norm = self._norm() if has_result else None
        self.mlp_norm = self._norm() if has_first and not shares else None
        self.mlp = ParallelMLP(config.mlp, shard_context)
        self.mlp_output_norm = self._norm() if has_result else None

    def forward(
        self,
        hidden: Tensor,
        rng: CounterRNG | None = None,
        *,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        positions: Positions | None = None,
        turns: Turns | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """rng: draws dropout; None is no dropout. mask, bias, positions, turns, cache: as
        ParallelSelfAttention's."""
        return self._checkpointed(
            self._compute,
            hidden,
            self._own_rng(rng),
            mask=mask,
            bias=bias,
            positions=positions,
            turns=turns,
            cache=cache,
        )

    def _compute(
        self,
        hidden: Tensor,
        rng: CounterRNG | None,
        *,
        mask: Tensor | None,
        bias: Tensor | None,
        positions: Positions | None,
        turns: Turns | None,
        cache: KeyValueCache | None,
    ) -> Tensor:
        def attend(x: Tensor) -> Tensor:
            return self.attention(
                x, rng, mask=mask, bias=bias, positions=positions, turns=turns, cache=cache
            )

        if self.config.parallel_residual:
            return self._both(hidden, attend, rng)
        hidden = self._branch(
            "attention", hidden, self.attention_norm, attend, rng, self.attention_output_norm
        )
        return self._branch("mlp", hidden, self.mlp_norm, self.mlp, rng, self.mlp_output_norm)

    def _both(
        self, hidden: Tensor, attend: Callable[[Tensor], Tensor], rng: CounterRNG | None
    ) -> Tensor:
        """x + drop(attention(norm(x))) + drop(mlp(norm(x))), with one norm or two."""
        assert self.attention_norm is not None
        read = self.attention_norm(hidden)
        both = self._dropout_add(attend(read), rng, "attention", hidden)
        read = read if self.mlp_norm is None else self.mlp_norm(hidden)
        return self._dropout_add(self.mlp(read), rng, "mlp", both)
