"""What happens around the passes of a chunk: reductions that start, parameters that come and go.

A listener is told of each action of the schedule, and within it of each layer: forward enters and
leaves it, backward reaches it. When backward reaches a unit, all units after it are done: autograd
works in the reverse order of forward, and accumulates before all else. So what is sent then depends
on the plan alone, never on which parameters a rank happened to use (BERT's next-sentence head is
used by one rank of cp only), and is in one order on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.layers.recompute import HostOffload
from mpctl.pipeline.schedule.orders import Action


class PassListener:
    """Called during a chunk's passes; does nothing. Units are numbered in forward order
    (layout/buckets.py)."""

    def begin(self, action: Action) -> None:
        """An action of the schedule begins."""

    def enter(self, unit: int) -> None:
        """Forward is about to compute the layer that is unit number `unit`."""

    def leave(self, unit: int) -> None:
        """Forward has computed the layer."""

    def back(self, unit: int) -> None:
        """Backward has the gradient of the layer's output: all units after it are done."""

    def end(self, action: Action) -> None:
        """The action ends."""


def watch_layers(
    chunk: nn.Module, layers: Mapping[str, int], listeners: Sequence[PassListener]
) -> None:
    """Have the listeners told, in their order, when a pass enters, leaves and goes back through a
    layer of the chunk. layers: unit numbers by name of the layer's module."""
    for name, unit in layers.items():
        module = chunk.get_submodule(name)
        module.register_forward_pre_hook(_entering(unit, listeners))
        module.register_forward_hook(_leaving(unit, listeners))


def _entering(unit: int, listeners: Sequence[PassListener]) -> Callable[..., None]:
    def entering(*_: Any) -> None:
        for listener in listeners:
            listener.enter(unit)

    return entering


def _leaving(unit: int, listeners: Sequence[PassListener]) -> Callable[..., None]:
    def back(_: Tensor) -> None:
        for listener in listeners:
            listener.back(unit)

    def leaving(_: nn.Module, __: Any, output: Tensor) -> None:
        for listener in listeners:
            listener.leave(unit)
        if torch.is_grad_enabled() and output.requires_grad:
            output.register_hook(back)

    return leaving


class OffloadPasses(PassListener):
    """Tells an offload where a forward begins."""

    def __init__(self, offload: HostOffload) -> None:
        self.offload = offload

    def begin(self, action: Action) -> None:
        """A new pass, where it is a forward."""
        if action.kind == "forward":
            self.offload.begin_pass()
