"""What happens around the passes of a chunk: reductions that start, parameters that come and go.

A listener hears of each action of the schedule, and within it of each layer: forward enters and
leaves it, backward reaches it. When backward reaches a unit, all behind it are done: autograd works
in the reverse order of forward, and accumulates before all else. So what is sent then depends on
the plan alone, never on which parameters a rank happened to use (BERT's next-sentence head is used
by one rank of cp only), and is in one order on all replicas.

By hand, layers 1 and 2 between entry 0 and exit 3: enter 1, leave 1, enter 2, leave 2; back 2 (the
exit's gradients are there), back 1 (layer 2's are), end (all are).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.pipeline.schedule.orders import Action


class PassListener:
    """Hears nothing; units are numbered in forward order (layout/buckets.py)."""

    def begin(self, action: Action) -> None: ...

    def enter(self, unit: int) -> None: ...

    def leave(self, unit: int) -> None: ...

    def back(self, unit: int) -> None: ...

    def end(self, action: Action) -> None: ...


class PassListeners(PassListener):
    """Tells every listener, in their order."""

    def __init__(self, listeners: Sequence[PassListener]) -> None:
        self.listeners = listeners

    def watch(self, chunk: nn.Module, layers: Mapping[str, int]) -> None:
        """layers: the modules of a chunk's layers with the numbers of their units."""
        for name, unit in layers.items():
            module = chunk.get_submodule(name)
            module.register_forward_pre_hook(self._entering(unit))
            module.register_forward_hook(self._leaving(unit))

    def _entering(self, unit: int) -> Callable[..., None]:
        return lambda *_: self.enter(unit)

    def _leaving(self, unit: int) -> Callable[..., None]:
        def leaving(_: nn.Module, __: Any, output: Tensor) -> None:
            self.leave(unit)
            if torch.is_grad_enabled() and output.requires_grad:
                output.register_hook(lambda _: self.back(unit))

        return leaving

    def begin(self, action: Action) -> None:
        for listener in self.listeners:
            listener.begin(action)

    def enter(self, unit: int) -> None:
        for listener in self.listeners:
            listener.enter(unit)

    def leave(self, unit: int) -> None:
        for listener in self.listeners:
            listener.leave(unit)

    def back(self, unit: int) -> None:
        for listener in self.listeners:
            listener.back(unit)

    def end(self, action: Action) -> None:
        for listener in self.listeners:
            listener.end(action)
