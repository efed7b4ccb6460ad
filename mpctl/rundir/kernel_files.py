"""What `mpctl bench kernels` asks of its ranks, and what they answer.

A case is one kernel at one shape. In each round every case is timed once for each number of ranks
that run it at the same time, the others waiting: `ranks` [1, 2] is a core alone, then two beside
each other. By hand, 3 cases, ranks [1, 2] and 2 rounds are 12 answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from typing_extensions import TypedDict

from mpctl.spec.base import DType
from mpctl.spec.model import ModelSpec

KernelName = Literal[
    "matmul", "attention", "unfused_attention", "heads", "branch", "activation", "cross_entropy",
    "optimizer", "accumulate", "triad", "copy", "layer",
]  # fmt: skip
"""matmul: a product of a linear layer. attention: softmax(Q K^T) V, which keeps no scores;
unfused_attention: step by step, as attention dropout needs it. heads: queries, keys and values out
of one product, with rotary positions, and heads side by side for the next. branch: norm, dropout
and sum of a residual branch. activation: that of an MLP. optimizer: gradient norm, clipping, AdamW
and zeroing. accumulate: adding a micro batch's gradients to the step's. triad: a = b + s c; copy:
a = b. layer: a whole transformer layer."""
KernelPart = Literal["forward", "backward", "backward_input", "backward_weight", "both", "update"]
"""both: forward and backward; update: of a kernel that has no passes."""


LAYER_SIZES = ("hidden", "heads", "kv_heads", "head_dim", "ffn", "seq_length")
"""What the shape of a whole layer has, beside micro_batch_size and whether it is causal."""


class KernelCase(TypedDict):
    """A kernel to be timed. dtype: in mpctl's words, such as fp32; shape: its sizes by name
    (bench/kernel_list.py says which a kernel has); copies: sets of operands that are used in turn,
    so that caches do not hold them all."""

    kernel: KernelName
    part: KernelPart
    dtype: DType
    shape: dict[str, int]
    copies: int


class KernelRequest(TypedDict):
    """Time every case in so many rounds. dropout, attention_dropout: probabilities, as in training.
    ranks: numbers of ranks that run a case at once, the largest no more than there are. seconds:
    that all rounds may take, None for no limit; the first round is always completed. least_seconds:
    of one timing, which repeats a kernel that is shorter."""

    task: Literal["kernels"]
    cases: list[KernelCase]
    dropout: float
    attention_dropout: float
    ranks: list[int]
    rounds: int
    seconds: float | None
    least_seconds: float


class KernelTiming(TypedDict):
    """One case in one round. seconds: of one run of the kernel on the slowest of the ranks;
    cpu_seconds: processor time of one run on the average of them; repeats: runs timed together."""

    event: Literal["kernel"]
    round: int
    case: int
    ranks: int
    seconds: float
    cpu_seconds: float
    repeats: int


def sized_layer(model: ModelSpec, sizes: Mapping[str, int]) -> ModelSpec:
    """The model with other sizes of a layer, by the names of its settings."""
    return model.model_copy(update={name: sizes[name] for name in LAYER_SIZES})
