"""What an encoder's and a decoder's layer share: residual branches and their recomputation.

pre     x += drop(branch(norm(x)))        GPT-2, T5, Llama
post    x = norm(x + drop(branch(x)))     BERT (arXiv 1706.03762, section 3.1)
output  x += drop(norm(branch(x)))        OLMo 2 (arXiv 2501.00656, section 3.2)
sandwich  x += drop(norm(branch(norm'(x))))   Gemma 2 (arXiv 2408.00118, section 2)
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor, nn

from mpctl.kernels.config import LayerConfig
from mpctl.kernels.counter_rng import CounterRNG
from mpctl.kernels.recompute import checkpointed
from mpctl.kernels.tensor_parallel import ShardContext


class ResidualLayer(nn.Module):
    """Base of the transformer layers.

    rng_site names the layer to the dropout masks; it must not depend on the layout, `layers.7` by
    the layer's global number. RNG_SITES: what is dropped out within a layer; the names are the same
    in each, so that a compiled layer serves for all of them. Raises ValueError for
    partition_activations under sequence parallelism, where a layer's input is a part already.
    """

    RNG_SITES: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: LayerConfig, shard_context: ShardContext, rng_site: str) -> None:
        super().__init__()
        if config.partition_activations and shard_context.sequence_parallel:
            raise ValueError(
                "partition_activations: under sequence_parallel a layer's input is 1/t already "
                "(drop one)"
            )
        self.config, self.shard_context, self.rng_site = config, shard_context, rng_site

    def _norm(self) -> nn.Module:
        config = self.config
        return self.shard_context.layers.norm(config.norm, config.hidden, eps=config.eps)

    def _checkpointed(self, compute: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """compute(hidden, ..) that keeps for backward what `config.recompute` says; where no
        gradient is asked for, nothing is kept."""
        config = self.config
        if config.recompute != "full" or not self._needs_gradients(*args, *kwargs.values()):
            return compute(*args, **kwargs)
        return checkpointed(
            compute,
            *args,
            group=self.shard_context.tp,
            partition=config.partition_activations,
            offload=self.shard_context.offload if config.offload_activations else None,
            **kwargs,
        )

    def _own_rng(self, rng: CounterRNG | None) -> CounterRNG | None:
        """The random numbers of this layer's sites."""
        return None if rng is None else rng.within(self.rng_site)

    def _needs_gradients(self, *inputs: Any) -> bool:
        tensors = (value for value in inputs if isinstance(value, Tensor))
        return any(tensor.requires_grad for tensor in chain(tensors, self.parameters()))

    def _branch(
        self,
        name: str,
        x: Tensor,
        norm: nn.Module | None,
        compute: Callable[[Tensor], Tensor],
        rng: CounterRNG | None,
        output_norm: nn.Module | None = None,
    ) -> Tensor:
        if self.config.norm_order == "post" and norm is not None:
            return norm(self._dropout_add(compute(x), rng, name, x))
        result = compute(x if norm is None else norm(x))
        result = result if output_norm is None else output_norm(result)
        return self._dropout_add(result, rng, name, x)

    def _dropout_add(
        self, x: Tensor, rng: CounterRNG | None, branch: str, residual: Tensor
    ) -> Tensor:
        """residual + dropout(x) of one branch."""
        return self.shard_context.dropout_add(
            x, rng, self.config.dropout, residual, rng_site=branch
        )

    def extra_repr(self) -> str:
        """Dropout and the settings that differ from the defaults, for `print(module)`."""
        config = self.config
        unusual = {
            f"norm_order={config.norm_order}": config.norm_order != "pre",
            "sequence_parallel": self.shard_context.sequence_parallel,
            f"recompute={config.recompute}": config.recompute != "none",
            "partition_activations": config.partition_activations,
            "offload_activations": config.offload_activations,
        }
        options = "".join(f", {name}" for name, is_set in unusual.items() if is_set)
        return f"rng_site={self.rng_site}, dropout={config.dropout}{options}"
