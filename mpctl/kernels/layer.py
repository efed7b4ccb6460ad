"""One pre-norm transformer layer: x += drop(attention(norm(x))), then x += drop(mlp(norm(x))).

GPT-2's order; the parallel split is Megatron-LM's (arXiv 1909.08053, figure 4): four all-reduces
of b*s*h elements a layer, two forward (g of attention and MLP) and two backward (their f). With
b=2, s=8, h=16 in float32 that is 4 x 1024 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpctl.kernels.attention import ParallelSelfAttention
from mpctl.kernels.group import Group
from mpctl.kernels.mlp import Activation, ParallelMLP
from mpctl.kernels.noise import Noise
from mpctl.kernels.norm import LayerNorm


class ParallelTransformerLayer(nn.Module):
    """[b, s, h] -> [b, s, h].

    site names the layer to the dropout masks and must not depend on the layout: `layers.7` by the
    layer's global number. dropout is for the two residual branches, attention_dropout for the
    probabilities. output_std: std of the two projections into the residual, 0.02/sqrt(2L) for L
    layers; by default init_std.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        ffn: int,
        *,
        group: Group,
        site: str,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        activation: Activation = "gelu",
        bias: bool = True,
        eps: float = 1e-5,
        init_std: float = 0.02,
        output_std: float | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.site = dropout, site
        self.attention_norm = LayerNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.attention = ParallelSelfAttention(
            hidden,
            heads,
            group=group,
            site=f"{site}.attention.probabilities",
            kv_heads=kv_heads,
            head_dim=head_dim,
            dropout=attention_dropout,
            causal=causal,
            bias=bias,
            init_std=init_std,
            output_std=output_std,
            dtype=dtype,
            device=device,
        )
        self.mlp_norm = LayerNorm(hidden, eps=eps, dtype=dtype, device=device)
        self.mlp = ParallelMLP(
            hidden,
            ffn,
            group=group,
            activation=activation,
            bias=bias,
            init_std=init_std,
            output_std=output_std,
            dtype=dtype,
            device=device,
        )

    def forward(self, hidden: Tensor, noise: Noise | None = None) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), noise)
        hidden = hidden + self._dropped(attended, noise, "attention")
        widened = self.mlp(self.mlp_norm(hidden))
        return hidden + self._dropped(widened, noise, "mlp")

    def _dropped(self, x: Tensor, noise: Noise | None, branch: str) -> Tensor:
        if noise is None:
            return x
        return noise.dropout(x, self.dropout, site=f"{self.site}.{branch}")

    def extra_repr(self) -> str:
        return f"site={self.site}, dropout={self.dropout}"
