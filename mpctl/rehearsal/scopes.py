"""Which module an operation belongs to, forward and backward.

Forward, the innermost module whose call is under way has it; a model's own work, outside of its
modules, is named by the method of its family (`embed`, `word_losses`). Autograd numbers its nodes
in the order in which they are made (the sequence numbers that torch's profiler uses to join forward
and backward). Nodes that have appeared since the operation before were made by the module of this
one; a node's backward belongs to the module that made it, and the sum into a parameter's gradient
to `PARAMETER.grad`. What runs with gradients enabled inside of a backward is forward once more:
`recompute`.

By hand, modules a and b, an operation each, nodes 0 and 1: backward runs node 1, which is b's, then
node 0, a's.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr as next_node_number

from mpctl.pipeline.schedule.orders import Kind
from mpctl.rundir.rank_files import Pass

NO_NUMBER = (1 << 64) - 1  # of the nodes that add up parameters' gradients
DEFERRED = "deferred weights"  # whose gradients a schedule computes apart (zero-bubble)
LAYER = re.compile(r"^(?:.*?\.)?layers\.\d+")


@dataclass
class Scopes:
    """Where the step under way is. names: of modules; outside: what is done outside of passes;
    makers: (first node, module) in the order of nodes; parameters: names by identity."""

    names: Mapping[nn.Module, str] = field(default_factory=dict)
    parameters: Mapping[int, str] = field(default_factory=dict)
    outside: str = ""
    stack: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    seen: int = 0

    def watch(self, model: nn.Module) -> None:
        """Follow the calls of all modules of a model from now on."""
        chunks = list(getattr(model, "chunks", [model]))
        named = [(module, name) for chunk in chunks for name, module in chunk.named_modules()]
        self.names = {module: name for module, name in named if name}
        for module in self.names:
            module.register_forward_pre_hook(self._enter)
            module.register_forward_hook(self._leave, always_call=True)
        self.parameters = {id(p): name for name, p in model.named_parameters()}

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Work outside of passes, by name."""
        before, self.outside = self.outside, what
        try:
            yield
        finally:
            self.outside = before

    def place(self, action: Kind | None) -> tuple[str, Pass]:
        """The module and the pass of the operation under way. action: of the schedule, None outside
        of a micro batch's."""
        node = torch._C._current_autograd_node()
        module, phase = self._place(node, action)
        made = next_node_number()
        if made > self.seen:
            self.starts.append(self.seen)
            self.makers.append(module)
            self.seen = made
        return module, phase

    def _place(self, node: Any, action: Kind | None) -> tuple[str, Pass]:
        if self.stack:
            return self.stack[-1], "forward" if node is None else "recompute"
        if node is None:
            if action is None or self.outside:
                return self.outside or "step", "step"
            if action == "backward_weight":
                return DEFERRED, "backward"
            return _method(), "forward" if action == "forward" else "backward"
        maker = self._maker(node)
        if not torch.is_grad_enabled():
            return maker, "backward"
        layer = LAYER.match(maker)
        return layer[0] if layer and _is_in_layer() else maker, "recompute"

    def _maker(self, node: Any) -> str:
        number = node._sequence_nr()
        if number == NO_NUMBER:
            return f"{self.parameters.get(id(node.variable), 'parameter')}.grad"
        place = bisect_right(self.starts, number) - 1
        return self.makers[place] if place >= 0 else _method()

    def _enter(self, module: nn.Module, *_: Any) -> None:
        self.stack.append(self.names[module])

    def _leave(self, *_: Any) -> None:
        self.stack.pop()


def pattern(name: str) -> str:
    """The name with its numbers merged: `layers.3.mlp.up` -> `layers.*.mlp.up`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def part_of(module: str) -> str:
    """The kind of layer that a pattern lies in, `layers.*`; `outside of layers` for the rest."""
    found = re.match(r"^(?:.*?\.)?layers\.\*", module)
    return found[0] if found else "outside of layers"


def _method() -> str:
    """The innermost method of a family's module that is being called."""
    return _innermost("/mpctl/families/") or "pipeline"


def _is_in_layer() -> bool:
    return _innermost("/mpctl/layers/transformer_layer.py") is not None


def _innermost(*paths: str) -> str | None:
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename.replace("\\", "/")
        if any(path in file for path in paths):
            return str(frame.f_code.co_name)
        frame = frame.f_back
    return None
