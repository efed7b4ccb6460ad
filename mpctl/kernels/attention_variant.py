"""What becomes of attention's scores between the two products, as one value that a kernel is given.

Of query row i and key j, at global positions r_i and j, the score is scale q_i k_j, with slopes
minus slope (r_i - j), with a bias plus bias_ij. It counts where j <= r_i (causal), j > r_i - window
and mask_ij allow it. Then the softmax over the keys, and dropout of its result.

By hand, causal, rows 2 and 3 of 4 keys, window 2: row 2 sees keys 1 2, row 3 keys 2 3.

Letters: b batch, a heads of this rank, q queries, s keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mpctl.kernels.dropout_mask import DropoutMask


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
