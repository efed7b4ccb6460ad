"""Hooks around the passes of a chunk, which start reductions and gather or free parameters.

A listener is notified of each action of the schedule and, within it, of each layer: when forward
enters or leaves it and when backward reaches it. When backward reaches a unit, all units after it
are done: autograd runs in the reverse order of forward, and accumulates gradients first. So what is
sent then depends on the plan alone, never on which parameters a rank used (only one rank of cp uses
BERT's next-sentence head), and is in the same order on all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.model.pipeline.schedule.orders import Action
from mpctl.train.layers.recompute import HostOffload


class PassListener:
    """Called during a chunk's passes; does nothing. Units are numbered in forward order
    (model/layout/buckets.py)."""

    def begin(self, action: Action) -> None:
        """An action of the schedule begins."""

    def enter(self, unit: int) -> None:
        """Forward is about to compute the layer that is unit number `unit`."""

    def leave(self, unit: int) -> None:
        """Forward has computed the layer."""

    def back(self, unit: int) -> None:
        """Backward has the gradient of the layer's output: all units after it are done."""

    def weights(self) -> None:
        """The weight gradients that the action's backward has deferred are about to be computed."""

    def end(self, action: Action) -> None:
        """The action ends."""


def watch_layers(chunk: nn.Module, layers: Mapping[str, int], listeners: Sequence[PassListener]) -> None:
    """Notify the listeners, in their order, when a forward enters or leaves a layer of the chunk
    and when backward reaches it. layers: unit numbers by name of the layer's module."""
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
    """Notifies an offload when a forward begins."""

    def __init__(self, offload: HostOffload) -> None:
        self.offload = offload

    def begin(self, action: Action) -> None:
        """A new pass, where it is a forward."""
        if action.kind == "forward":
            self.offload.begin_pass()
