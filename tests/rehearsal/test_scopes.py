"""Whose an operation is, forward, backward and computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mpctl.rehearsal.audit import Scopes, part_of, pattern


class Seen(TorchDispatchMode):
    def __init__(self, scopes: Scopes) -> None:
        super().__init__()
        self.scopes, self.places = scopes, list[tuple[str, str, str]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = self.scopes.place("forward")
        name = func._schema.name.split("::")[1]
        self.places += [(name, *place)]
        return func(*args, **(kwargs or {}))

    def where(self, operation: str) -> list[tuple[str, ...]]:
        return [place[1:] for place in self.places if place[0] == operation]


class Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Layer(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.again = Exponential(), Exponential(), again

    def forward(self, x: Tensor) -> Tensor:
        if self.again:
            result: Tensor = checkpoint(
                lambda x: self.second(self.first(x)), x, use_reentrant=False
            )
            return result
        return self.second(self.first(x))


@pytest.mark.parametrize("again", [False, True])
def test_backward_is_the_module_that_made_the_node(again: bool) -> None:
    model, scopes = nn.Sequential(Layer(again), Layer(again)), Scopes()
    scopes.watch(model)
    x = torch.zeros(3, requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False), Seen(scopes) as seen:
        model(x).sum().backward()
    names = ["0.first", "0.second", "1.first", "1.second"]
    forward = [(name, "forward") for name in names]
    computed = [
        (f"{layer}.{name}", "recompute") for layer in (1, 0) for name in ("first", "second")
    ]
    assert seen.where("exp") == forward + (computed if again else [])
    assert seen.where("mul") == [(name, "backward") for name in reversed(names)]


def test_a_parameters_sum_has_its_name_and_the_rest_is_named_by_the_work() -> None:
    model, scopes = nn.Sequential(nn.Linear(2, 2)), Scopes()
    scopes.watch(model)
    with torch.autograd.set_multithreading_enabled(False), Seen(scopes) as seen:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        with scopes.during("optimizer"):
            torch.ones(2).neg()
    assert ("0.weight.grad", "backward") in seen.where("add_")
    assert seen.where("neg") == [("optimizer", "step")]


def test_names() -> None:
    assert pattern("encoder.layers.11.mlp.up") == "encoder.layers.*.mlp.up"
    assert part_of("encoder.layers.*.mlp.up") == "encoder.layers.*"
    assert part_of("final_norm") == "outside of layers"
