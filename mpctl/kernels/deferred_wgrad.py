"""Weights' gradients that backward leaves for later, so that what others wait for comes first.

Backward of Y = X W^T is two products: dX = dY W, which the stage before waits for, and dW = dY^T X,
which nobody does before the update (arXiv 2401.10241, section 2). A weight that carries a
`DeferredWgrad` has its dW put off (product.py): dY and X are kept, and `Deferred` computes it when
it is called, gathering X where it is split, and adds it as backward would have. Gradients of biases
and norms are small and come with dX. The weight is a leaf, not a view of one.

By hand: one product, x = 2, w = 3: backward of y leaves dx = 3 and no dw; the deferred call adds 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Deferred = Callable[[], None]


class DeferredWgrad:
    """What the backwards since the last `take` put off, in their order."""

    def __init__(self) -> None:
        self._deferred: list[Deferred] = []

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """gradient: computes that of the leaf `weight`, to be added to it."""

        def deferred() -> None:
            with torch.no_grad():
                found = gradient()
            torch.autograd.backward([weight], [found])

        self._deferred.append(deferred)

    def take(self) -> list[Deferred]:
        taken, self._deferred = self._deferred, []
        return taken


def defer_wgrad(weight: nn.Parameter, later: DeferredWgrad) -> None:
    """From the next forward on, products leave this weight's gradient to `later`."""
    weight.later = later  # type: ignore[attr-defined]


def later_of(weight: Tensor) -> DeferredWgrad | None:
    found: DeferredWgrad | None = getattr(weight, "later", None)
    return found
