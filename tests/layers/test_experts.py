"""Experts split over ranks against all of them on one, and these against plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.layers.experts import ExpertsConfig, ParallelExperts, RouterConfig
from mpctl.layers.parameters import (
    DeferredWgrad,
    DefersWgrad,
    partial_kind,
)
from mpctl.layers.routing_log import RoutingLog
from mpctl.layers.shard_context import ShardContext
from mpctl.sharding import EXPERTS, View
from mpctl.tensor_grid import DimGrid
from mpctl.transport.group import Group
from mpctl.transport.timing import Collective
from tests.layers.oracle import (
    Part,
    close,
    fill,
    gradients,
    held,
    logged,
    numbers,
    whole,
)
from tests.threads import group_of, run_ranks

B, S, H, FFN, E = 4, 8, 8, 6, 8
NAME = "layers.0.mlp"
SCALE = 0.7
ROUTER = RouterConfig(E, 2, aux_coefficient=0.3, z_coefficient=0.2)
CONFIG = ExpertsConfig(H, FFN, ROUTER)
SIGMOID = replace(
    ROUTER, per_token=3, score="sigmoid", scale=2.5, has_bias=True, groups=4, groups_per_token=2
)
CONFIGS = {
    "mixtral": CONFIG,
    "plain softmax, shared": replace(
        CONFIG, router=replace(ROUTER, per_token=3, renormalize=False), shared_ffn=12,
        shared_gate=True,
    ),
    "deepseek": replace(CONFIG, router=SIGMOID, shared_ffn=4, activation="gelu"),
    "micro batch": replace(CONFIG, router=replace(ROUTER, balancing="micro_batch")),
    "global": replace(CONFIG, router=replace(ROUTER, balancing="global")),
    "one expert": replace(CONFIG, router=replace(ROUTER, per_token=1, renormalize=False)),
    "no losses": replace(CONFIG, router=RouterConfig(E, E)),
}  # fmt: skip
UNEVEN = (0.5, -0.5, 0.0, 0.1, -0.5, -0.1, -2.0, -2.0)
LAST = (5, 0, 3, 2, 0, 1, 7, 2)


@dataclass(frozen=True)
class Layout:
    """Ranks in the order tp, cp, dp, and etp, ep, edp."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    etp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp

    def groups(self, rank: int, log: list[Collective] | None = None) -> dict[str, Group]:
        def strided(name: str, step: int, size: int) -> Group:
            first = rank - rank // step % size * step
            return group_of(rank, range(first, first + step * size, step), name, log)

        return {
            "tp": strided("tp", 1, self.tp),
            "cp": strided("cp", self.tp, self.cp),
            "dp": strided("dp", self.tp * self.cp, self.dp),
            "ep": strided("ep", self.etp, self.ep),
            "etp_ep": strided("etp_ep", 1, self.etp * self.ep),
            "edp": strided("edp", self.etp * self.ep, self.world // (self.etp * self.ep)),
            "world": strided("world", 1, self.world),
        }

    @property
    def view(self) -> View:
        grid = DimGrid({"etp": self.etp, "ep": self.ep}, {"experts": "ep", "expert_ffn": "etp"})
        return View(EXPERTS, grid, "etp_ep", replica_group="edp")


ALONE = Layout()
LAYOUTS = {
    "ep 2": Layout(dp=2, ep=2),
    "ep 4": Layout(dp=4, ep=4),
    "ep 2 of 4": Layout(dp=4, ep=2),
    "etp 2": Layout(dp=2, etp=2),
    "etp 2 x ep 2": Layout(dp=4, etp=2, ep=2),
    "tp 2 x ep 2": Layout(tp=2, ep=2),
    "tp 2, dp 2, ep 4": Layout(tp=2, dp=2, ep=4),
    "tp 2, ep 1": Layout(tp=2),
    "cp 2 x ep 2": Layout(cp=2, ep=2),
    "tp 2, cp 2, etp 2, ep 2": Layout(tp=2, cp=2, etp=2, ep=2),
}


def _log(config: ExpertsConfig) -> RoutingLog:
    """In training, with uneven biases and the counts of an earlier step."""
    log = RoutingLog([NAME], E, bias_rate=0.25 if config.router.has_bias else None)
    log.load({NAME: UNEVEN} if config.router.has_bias else {}, {NAME: LAST})
    log.begin(SCALE)
    return log


def _context(layout: Layout, groups: dict[str, Group], log: RoutingLog) -> ShardContext:
    return ShardContext(
        groups["tp"], groups["cp"], layout.tp > 1, torch.float64, groups=groups,
        expert_view=layout.view, routing=log,
    )  # fmt: skip


def _fill(module: torch.nn.Module, config: ExpertsConfig) -> None:
    fill(module)
    for name, parameter in module.named_parameters():
        if name.endswith("router.weight"):
            with torch.no_grad():
                parameter[-2:, 0] = -9.0


def _tokens() -> Tensor:
    """[B, S, H]; the first column keeps all tokens from the last two experts."""
    x = numbers(B, S, H, seed=8)
    x[..., 0] = 2.0
    return x


def _own(x: Tensor, layout: Layout, groups: dict[str, Group]) -> Tensor:
    """A rank's samples and positions of x [B, S, ..]."""
    dp = groups["dp"]
    return held(x.chunk(dp.size)[dp.rank], groups["tp"], groups["cp"], layout.tp > 1)


def _sum_gradients(module: torch.nn.Module, groups: dict[str, Group]) -> None:
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        if ".experts." in f".{name}":
            reduced: tuple[str, ...] = ("edp",)
        else:
            partial = ("tp",) if partial_kind(parameter) else ()
            reduced = (*partial, "cp", "dp")
        for axis in reduced:
            parameter.grad = groups[axis].all_reduce(parameter.grad)


Made = Callable[[ExpertsConfig, ShardContext], torch.nn.Module]


def _experts(config: ExpertsConfig, context: ShardContext) -> ParallelExperts:
    return config.build(context, NAME)


def _result(
    rank: int, size: int, layout: Layout, config: ExpertsConfig, made: Made = _experts,
    defers: bool = False,
) -> dict[str, Any]:  # fmt: skip
    messages: list[Collective] = []
    groups, log = layout.groups(rank, messages), _log(config)
    module = made(config, _context(layout, groups, log))
    _fill(module, config)
    deferred = DeferredWgrad()
    for part in module.modules() if defers else ():
        if isinstance(part, DefersWgrad):
            part.defer_wgrad(deferred)
    x = _own(_tokens(), layout, groups).requires_grad_()
    y = module(x)
    y.backward(_own(numbers(B, S, H, seed=9), layout, groups))
    waiting = deferred.take()
    for compute in waiting:
        compute()
    sent = logged(messages)
    _sum_gradients(module, groups)
    totals = log.end(groups["world"])
    log.apply(totals)
    losses = groups["world"].all_reduce(totals.losses)
    return {
        "y": y.detach(), "dx": x.grad, "gradients": gradients(module), "losses": losses,
        "counts": totals.counts, "bias": log.biases(), "sent": sent, "deferred": len(waiting),
    }  # fmt: skip


def _rows(results: Sequence[dict[str, Any]], key: str, layout: Layout) -> Tensor:
    """[B, S, H] from the parts of all ranks."""
    full = torch.full((B, S, H), torch.nan, dtype=torch.float64)
    for rank, result in enumerate(results):
        places = torch.arange(B * S).view(B, S)
        tp, cp = rank % layout.tp, rank // layout.tp % layout.cp
        dp = rank // (layout.tp * layout.cp)
        own = held(
            places.chunk(layout.dp)[dp], Group(tp, layout.tp), Group(cp, layout.cp), layout.tp > 1
        )
        full.view(-1, H)[own.flatten()] = result[key].flatten(0, 1)
    return full


def _assert_as_one(results: list[dict[str, Any]], alone: dict[str, Any], layout: Layout) -> None:
    for key in ("y", "dx"):
        close(_rows(results, key, layout), alone[key])
    for name, (gradient, _) in alone["gradients"].items():
        parts: list[Part] = [result["gradients"][name] for result in results]
        close(whole(parts), gradient)
    for result in results:
        close(result["losses"], alone["losses"])
        assert torch.equal(result["counts"], alone["counts"])
        assert result["bias"] == alone["bias"]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_split_experts_are_those_of_one_rank(kind: str, layout: Layout) -> None:
    config = CONFIGS[kind]
    if config.router.balancing == "micro_batch" and layout.dp > 1:
        pytest.skip("depends on the micro batch")
    alone = _result(0, 1, ALONE, config)
    assert (alone["counts"][0, -2:] == 0).all() or config.router.per_token == E
    _assert_as_one(run_ranks(_result, layout.world, layout, config), alone, layout)
