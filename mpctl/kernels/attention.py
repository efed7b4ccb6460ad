"""What attention does with its scores (`AttentionVariant`), and torch's operations for all of it.

Of query row i and key j, at global positions r_i and j, the score is scale q_i k_j, with slopes
minus slope (r_i - j), with a bias plus bias_ij. It counts where j <= r_i (causal), j > r_i - window
and mask_ij allow it. Then the softmax over the keys, and dropout of its result.

Without attention dropout the product is torch's fused kernel, which keeps no scores; a window,
slopes and a bias become a mask of q x s elements. With it the product is computed step by step,
since the mask of torch's kernel would depend on the layout; backward then keeps probabilities, mask
and dropped probabilities: in 16 bit 2 + 1 + 2 bytes an element of [b, a/t, s, s], the 5as/h term of
arXiv 2205.05198, equation 1. What a backend replaces, the fused product and dropout, is asked of it
(`AttentionParts`).

Letters: b batch, a heads of this rank, k key-value heads, q queries, s keys, d head size, t tp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import floor, log2
from typing import Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpctl.kernels.counter_rng import DropoutMask
from mpctl.kernels.masks import Positions, causal_mask, numbers


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """Which keys a block of queries sees and how its scores are changed.

    rows: global positions of the q queries; keys count from 0. is_causal: keys behind a query are
    not seen; the rows then start at 0, or they are the last of the s positions. scale: of the
    scores before all else, None is 1/sqrt(head size). mask: boolean, True may attend, combined with
    the causal one by and; bias: added; both [b or 1, a or 1, q, s]. A query that a mask lets see no
    key gives zeros. window: keys that a query sees, up to itself, None for all; it counts where
    is_causal. slopes: [a], ALiBi's of the local heads, float64. dropout: the mask of the softmax's
    result, None for no dropout.
    """

    rows: range
    is_causal: bool = False
    scale: float | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None
    window: int | None = None
    slopes: Tensor | None = None
    dropout: DropoutMask | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every fused kernel takes it: causal or not, and nothing else."""
        return self.dropout is None and self.mask is None and not self.forms_pairs

    @property
    def forms_pairs(self) -> bool:
        """Whether a kernel that takes no more than a mask or a bias is given one made for the
        call, of q x s elements, which it keeps for backward."""
        return self.bias is not None or self.window is not None or self.slopes is not None


class AttentionParts(Protocol):
    """The two operations of attention that a `KernelBackend` chooses."""

    def scaled_dot_product(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """torch's scaled_dot_product_attention without dropout."""

    def dropout(self, x: Tensor, mask: DropoutMask) -> Tensor:
        """x [b, a, q, s] with dropout."""


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, parts: AttentionParts
) -> Tensor:
    """query [b, a, q, d], key and value [b, k, s, d] -> [b, a, q, d]."""
    if variant.dropout is not None:
        return _step_by_step(query, key, value, variant, variant.dropout, parts)
    if variant.is_plain:
        return _plain(query, key, value, variant, parts)
    key, value = _repeated(query, key, value)
    seen, bias = _seen(variant, key), _biased(variant, query, key)
    if bias is not None:
        bias = bias.to(query.dtype)
        seen = bias if seen is None else bias.masked_fill(~seen, -torch.inf)
    return parts.scaled_dot_product(query, key, value, seen, scale=variant.scale)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, parts: AttentionParts
) -> Tensor:
    # Whole squares from position 0, or the last rows of a longer prefix; one row sees all.
    rows, is_first = variant.rows, variant.is_causal and variant.rows.start == 0
    is_tail = variant.is_causal and not is_first and len(rows) > 1
    lower = _lower_right(len(rows), key.shape[-2]) if is_tail else None
    return parts.scaled_dot_product(
        query, key, value, lower, is_causal=is_first, scale=variant.scale, enable_gqa=True
    )


def _step_by_step(
    query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant, dropout: DropoutMask,
    parts: AttentionParts,
) -> Tensor:  # fmt: skip
    key, value = _repeated(query, key, value)
    # [b, a/t, q, d] x [b, a/t, d, s] -> [b, a/t, q, s]
    scale = 1 / math.sqrt(query.shape[-1]) if variant.scale is None else variant.scale
    scores = query.mul(scale) @ key.transpose(-1, -2)
    bias = _biased(variant, query, key)
    scores = scores if bias is None else scores.add_(bias)
    seen = _seen(variant, key)
    if seen is not None:
        # The lowest number, not -inf: a row that sees nothing must not become nan.
        scores = scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
    probabilities = scores.softmax(-1)
    if variant.mask is not None and seen is not None:
        probabilities = probabilities.masked_fill(~seen, 0.0)
    return parts.dropout(probabilities, dropout) @ value


def _seen(variant: AttentionVariant, key: Tensor) -> Tensor | None:
    """Which keys count, [.., q, s] booleans; None for all."""
    if not variant.is_causal:
        return variant.mask
    keys = range(key.shape[-2])
    causal = causal_mask(variant.rows, keys, window=variant.window, device=key.device)
    return causal if variant.mask is None else variant.mask & causal


def _biased(variant: AttentionVariant, query: Tensor, key: Tensor) -> Tensor | None:
    """The bias with what ALiBi adds, [b or 1, a/t, q, s]."""
    if variant.slopes is None:
        return variant.bias
    distance = distance_bias(variant.slopes, variant.rows, key.shape[-2], query)
    return distance if variant.bias is None else variant.bias + distance


def _lower_right(queries: int, keys: int) -> Tensor:
    """torch's causal bias for the last rows: it has no values, so that a dispatch mode (a memory
    tracker's, fake tensors') has nothing to count or convert, and is switched off here."""
    # Here, since it imports torch._dynamo: a second of processor time at the start of each rank.
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[b, k/t, s, d] -> [b, a/t, s, d]: a key-value head for each of its queries."""
    queries_per_kv_head = query.shape[1] // key.shape[1]
    if queries_per_kv_head == 1:
        return key, value
    return (
        key.repeat_interleave(queries_per_kv_head, dim=1),
        value.repeat_interleave(queries_per_kv_head, dim=1),
    )


def slopes(
    heads: int, own: range | None = None, device: torch.device | str | None = None
) -> Tensor:
    """The slopes of the heads `own` of `heads`, all by default: [a], float64 on `device`.

    Made once, where a layer is built: a step copies nothing from the host.
    """
    power = 2 ** floor(log2(heads))
    whole = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    between = [2 ** (-4 * (k + 1) / power) for k in range(0, 2 * (heads - power), 2)]
    of_all = (*whole, *between)
    chosen = of_all if own is None else of_all[own.start : own.stop]
    return torch.tensor(chosen, dtype=torch.float64, device=device)


def distance_bias(of_heads: Tensor, rows: Positions, keys: int, like: Tensor) -> Tensor:
    """What is added to the scores of these heads: [1, a, q, s] of the dtype and device of `like`.

    of_heads: their slopes, on that device. rows: global positions of the q queries; keys: how many,
    from position 0.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    queries, positions = numbers(rows, like.device), numbers(range(keys), like.device)
    distance = (positions - queries[:, None]).to(dtype)
    # [a, 1, 1] x [q, s] -> [1, a, q, s]
    return (of_heads.to(dtype)[:, None, None] * distance)[None].to(like.dtype)
