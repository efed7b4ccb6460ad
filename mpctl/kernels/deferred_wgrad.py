"""Weight gradients that backward leaves for later, so that what other stages wait for comes first.

Backward of Y = X W^T is two products: dX = dY W, which the stage before waits for, and dW = dY^T X,
which no rank needs before the update (arXiv 2401.10241, section 2). A weight with a `DeferredWgrad`
(`parameters.defer_wgrad`) has its dW deferred (product.py): dY and X are saved, and `Deferred`
computes dW when it is called, gathering X where it is split, and adds it as backward would have.
Gradients of biases and norms are small and are computed with dX. The weight is a leaf tensor, not a
view of one.

By hand: one product, x = 2, w = 3: backward of y leaves dx = 3 and no dw; the deferred call adds 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Deferred = Callable[[], None]


class DeferredWgrad:
    """The weight gradients that backward has deferred since the last `take`, in their order."""

    def __init__(self) -> None:
        self._deferred: list[Deferred] = []

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Defer one. gradient: computes that of the leaf `weight`, to which it will be added."""

        def deferred() -> None:
            with torch.no_grad():
                computed = gradient()
            torch.autograd.backward([weight], [computed])

        self._deferred.append(deferred)

    def take(self) -> list[Deferred]:
        """The gradients deferred so far, to be computed by calling them; none are left."""
        taken, self._deferred = self._deferred, []
        return taken
