"""megatron-core's kernels that run without a GPU: MLP, word table, cross entropy.

Its transformer layer does not: attention asks torch.cuda for a buffer (0.16.1). Installed by hand,
`pip install --no-deps megatron-core==0.16.1`; what needs it is skipped elsewhere. It works on
[s, b, h], so that its inputs and outputs are transposed here.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

IS_HERE = find_spec("megatron") is not None


def set_up(size: int) -> None:
    """Once in each rank: its groups are of the process."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def _config(hidden: int, ffn: int, size: int, dtype: torch.dtype) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=size,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        tensor_model_parallel_size=size,
        bias_activation_fusion=False,
    )


class TheirMLP(nn.Module):
    """[b, s, h] -> [b, s, h]."""

    def __init__(self, hidden: int, ffn: int, *, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
        from megatron.core.transformer.mlp import MLP, MLPSubmodules

        parts = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        self.mlp = MLP(_config(hidden, ffn, size, dtype), parts)

    def forward(self, x: Tensor) -> Tensor:
        out, bias = self.mlp(x.transpose(0, 1))
        return (out if bias is None else out + bias).transpose(0, 1)


def their_table(vocab: int, hidden: int, *, size: int, dtype: torch.dtype) -> nn.Module:
    """tokens [b, s] -> [b, s, h]."""
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    config = _config(hidden, hidden, size, dtype)
    return VocabParallelEmbedding(vocab, hidden, init_method=nn.init.normal_, config=config)


def their_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """[b, s, v/t] and [b, s] -> [b, s], the order of rows being all one; overwrites the logits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    losses: Tensor = vocab_parallel_cross_entropy(logits, targets)
    return losses
