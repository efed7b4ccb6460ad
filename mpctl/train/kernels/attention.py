"""The variants of attention: `AttentionVariant`, which a `KernelBackend` computes.

Of query row i and key j, at global positions r_i and j, the score is scale q_i k_j, with slopes
minus slope (r_i - j), with a bias plus bias_ij. It counts where j <= r_i (causal), j > r_i - window
and mask_ij allow it. Then the softmax over the keys, and dropout of its result.

Letters: b batch, a heads of this rank, k key-value heads, q queries, s keys, d head size, t tp.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, log2

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.kernels.masks import causal_mask, numbers


@dataclass(frozen=True, eq=False)
class AttentionVariant:
    """Keys that a block of queries sees, and changes to its scores.

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
        """Whether every fused kernel supports it: causal or not, and nothing else."""
        return self.dropout is None and self.mask is None and not self.forms_pairs

    @property
    def forms_pairs(self) -> bool:
        """Whether a kernel that supports only a mask or a bias needs one made for the call, of q x
        s elements, which it saves for backward."""
        return self.bias is not None or self.window is not None or self.slopes is not None

    def seen(self, key: Tensor) -> Tensor | None:
        """Return the mask of the keys that count, [.., q, s] booleans; None for all."""
        if not self.is_causal:
            return self.mask
        causal = causal_mask(self.rows, range(key.shape[-2]), window=self.window, device=key.device)
        return causal if self.mask is None else self.mask & causal

    def added(self, query: Tensor, key: Tensor) -> Tensor | None:
        """The sum of the bias and ALiBi's, [b or 1, a, q, s], added to the scores; None for
        nothing; of the query's dtype if there are slopes."""
        if self.slopes is None:
            return self.bias
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        rows, keys = (numbers(x, query.device) for x in (self.rows, range(key.shape[-2])))
        distance = (keys - rows[:, None]).to(dtype)
        # [a, 1, 1] x [q, s] -> [1, a, q, s]
        alibi = (self.slopes.to(dtype)[:, None, None] * distance)[None].to(query.dtype)
        return alibi if self.bias is None else self.bias + alibi


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[b, k/t, s, d] -> [b, a/t, s, d]: a key-value head for each of its queries."""
    queries_per_kv_head = query.shape[1] // key.shape[1]
    if queries_per_kv_head == 1:
        return key, value
    return (key.repeat_interleave(queries_per_kv_head, dim=1), value.repeat_interleave(queries_per_kv_head, dim=1))


def equally_wide(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values padded to one head size, for kernels that have only one. Columns of
    zeros change no score, and those of the result are cut off."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0:
        return query, key, F.pad(value, (0, missing))
    return F.pad(query, (0, -missing)), F.pad(key, (0, -missing)), value


def lower_right(queries: int, keys: int) -> Tensor:
    """torch's causal bias for the last rows: it has no values, so that a dispatch mode (a memory
    tracker's, fake tensors') has nothing to count or convert, and is switched off here."""
    # Here, since it imports torch._dynamo: a second of processor time at the start of each rank.
    from torch.nn.attention.bias import causal_lower_right

    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def slopes(heads: int, own: range | None = None, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the heads `own` of `heads`, all by default: [a], float64 on `device`.

    Made once, where a layer is built: a step copies nothing from the host.
    """
    power = 2 ** floor(log2(heads))
    whole = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    between = [2 ** (-4 * (k + 1) / power) for k in range(0, 2 * (heads - power), 2)]
    of_all = (*whole, *between)
    chosen = of_all if own is None else of_all[own.start : own.stop]
    return torch.tensor(chosen, dtype=torch.float64, device=device)
