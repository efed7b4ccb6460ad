"""Experts split over ranks against all of them on one, and these against plain formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.core.sharding import EXPERTS, View
from mpctl.core.tensor_grid import DimGrid
from mpctl.train.kernels.activation import activated
from mpctl.train.layers.attention import AttentionConfig
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.experts import ExpertsConfig, ParallelExperts, RouterConfig
from mpctl.train.layers.parameters import DeferredWgrad, DefersWgrad, initialise, parallel_attributes, partial_kind
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.layers.transformer_layer import ParallelTransformerLayer
from mpctl.train.transport.group import Group
from mpctl.train.transport.timing import Collective
from tests.threads import group_of, run_ranks
from tests.train.layers.oracle import NO_PEERS, Part, close, copies, fill, gradients, held, logged, numbers, whole

B, S, H, FFN, E = 4, 8, 8, 6, 8
NAME = "layers.0.mlp"
SCALE = 0.7
ROUTER = RouterConfig(E, 2, aux_coefficient=0.3, z_coefficient=0.2)
CONFIG = ExpertsConfig(H, FFN, ROUTER)
SIGMOID = replace(ROUTER, per_token=3, score="sigmoid", scale=2.5, has_bias=True, groups=4, groups_per_token=2)
CONFIGS = {
    "mixtral": CONFIG,
    "plain softmax, shared": replace(
        CONFIG, router=replace(ROUTER, per_token=3, renormalize=False), shared_ffn=12, shared_gate=True
    ),
    "deepseek": replace(CONFIG, router=SIGMOID, shared_ffn=4, activation="gelu"),
    "micro batch": replace(CONFIG, router=replace(ROUTER, balancing="micro_batch")),
    "global": replace(CONFIG, router=replace(ROUTER, balancing="global")),
    "one expert": replace(CONFIG, router=replace(ROUTER, per_token=1, renormalize=False)),
    "no losses": replace(CONFIG, router=RouterConfig(E, E)),
}
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
        groups["tp"], groups["cp"], layout.tp > 1, torch.float64, groups=groups, expert_view=layout.view, routing=log
    )


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
    rank: int,
    size: int,
    layout: Layout,
    config: ExpertsConfig,
    made: Made = _experts,
    defers: bool = False,
    groups: dict[str, Group] | None = None,
) -> dict[str, Any]:
    messages: list[Collective] = []
    groups, log = groups or layout.groups(rank, messages), _log(config)
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
        "y": y.detach(),
        "dx": x.grad,
        "gradients": gradients(module),
        "losses": losses,
        "counts": totals.counts,
        "bias": log.biases(),
        "sent": sent,
        "deferred": len(waiting),
    }


def _rows(results: Sequence[dict[str, Any]], key: str, layout: Layout) -> Tensor:
    """[B, S, H] from the parts of all ranks."""
    full = torch.full((B, S, H), torch.nan, dtype=torch.float64)
    for rank, result in enumerate(results):
        places = torch.arange(B * S).view(B, S)
        tp, cp = rank % layout.tp, rank // layout.tp % layout.cp
        dp = rank // (layout.tp * layout.cp)
        own = held(places.chunk(layout.dp)[dp], Group(tp, layout.tp), Group(cp, layout.cp), layout.tp > 1)
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


@pytest.mark.parametrize("kind", CONFIGS)
def test_one_rank_computes_the_formula(kind: str) -> None:
    """Every token through every expert, times its weight or 0."""
    config = CONFIGS[kind]
    router = config.router
    log = _log(config)
    module = config.build(_context(ALONE, ALONE.groups(0), log), NAME)
    _fill(module, config)
    x, w = _tokens(), copies(module)
    y = module(x)
    logits = x.flatten(0, 1) @ w["router.weight"].T
    scores = logits.sigmoid() if router.score == "sigmoid" else logits.softmax(-1)
    choice = scores + log.row(NAME).bias
    if router.groups > 1:
        best = choice.unflatten(-1, (router.groups, -1)).sort(-1).values[..., -2:].sum(-1)
        kept = best >= best.sort(-1).values[:, -router.groups_per_token, None]
        choice = choice.masked_fill(~kept.repeat_interleave(E // router.groups, -1), -torch.inf)
    lowest = choice.sort(-1).values[:, -router.per_token, None]
    weights = scores * (choice >= lowest)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    rows = x.flatten(0, 1)
    every = [
        activated(rows @ up.flatten(0, 1).T, config.activation) @ down.T
        for up, down in zip(w["experts.up.weight"], w["experts.down.weight"], strict=True)
    ]
    expected = (torch.stack(every, 1) * weights[..., None]).sum(1) * router.scale
    if config.shared_ffn:
        inner = activated(rows @ w["shared.up.weight"].T, config.activation)
        shared = inner @ w["shared.down.weight"].T
        gate = rows @ w["shared_gate.weight"].T if config.shared_gate else None
        expected = expected + (shared if gate is None else shared * gate.sigmoid())
    close(y.detach(), expected.view_as(y).detach())
    counts = (weights > 0).sum(0)
    assert torch.equal(log.end(Group()).counts[0], counts)


def test_auxiliary_losses_by_autograd() -> None:
    """The gradient of the router's weight is that of the output and SCALE times that of the losses,
    whose values the log has."""
    config = CONFIGS["plain softmax, shared"]
    results = {}
    for coefficient in (0.0, 1.0):
        router = replace(config.router, aux_coefficient=0.3 * coefficient, z_coefficient=0.2 * coefficient)
        results[coefficient] = _result(0, 1, ALONE, replace(config, router=router))
    module = config.build(_context(ALONE, ALONE.groups(0), _log(config)), NAME)
    _fill(module, config)
    weight = copies(module)["router.weight"]
    logits = _tokens() @ weight.T  # [B, S, E]
    chosen = F.one_hot(logits.topk(3).indices, E).sum(-2).double()
    f, p = chosen.sum(1) / (3 * S), logits.softmax(-1).mean(1)
    balance, z = 0.3 * E * (f * p).sum(), 0.2 * logits.logsumexp(-1).square().mean(1).sum()
    (balance + z).backward()
    close(results[1.0]["losses"], torch.stack([balance, z]).detach()[None])
    with_losses, without = (results[c]["gradients"]["router.weight"][0] for c in (1.0, 0.0))
    assert weight.grad is not None
    close(with_losses - without, SCALE * weight.grad)


def _layer(config: ExpertsConfig, context: ShardContext, recompute: str) -> torch.nn.Module:
    whole_layer = LayerConfig(
        AttentionConfig(H, 2),
        config,
        dropout=0.0,
        recompute=recompute,  # type: ignore[arg-type]
    )
    return ParallelTransformerLayer(whole_layer, context, "layers.0")


def _full(config: ExpertsConfig, context: ShardContext) -> torch.nn.Module:
    return _layer(config, context, "full")


def _none(config: ExpertsConfig, context: ShardContext) -> torch.nn.Module:
    return _layer(config, context, "none")


@pytest.mark.parametrize("kind", ["plain softmax, shared", "deepseek"])
@pytest.mark.parametrize("layout", ["ep 2", "tp 2, cp 2, etp 2, ep 2", "etp 2 x ep 2"])
def test_recomputation_neither_chooses_nor_counts_again(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, at = CONFIGS[kind], LAYOUTS[layout]
    alone = _result(0, 1, ALONE, config, _none)
    kept = run_ranks(_result, at.world, at, config, _none)
    _assert_as_one(kept, alone, at)
    from mpctl.train.layers import experts

    calls, choose = [], experts.choose_experts
    monkeypatch.setattr(experts, "choose_experts", lambda *a, **k: calls.append(1) or choose(*a, **k))
    repeated = run_ranks(_result, at.world, at, config, _full)
    assert len(calls) == at.world
    for once, twice in zip(kept, repeated, strict=True):
        assert torch.equal(once["y"], twice["y"]) and torch.equal(once["dx"], twice["dx"])
        assert torch.equal(once["counts"], twice["counts"])
        assert torch.equal(once["losses"], twice["losses"])
        for name, (gradient, _) in once["gradients"].items():
            assert torch.equal(gradient, twice["gradients"][name][0])
        axis = "ep" if at.etp == 1 else "etp_ep"
        rows = [[m for m in r["sent"] if m[:2] == ("all_to_all", axis)] for r in (once, twice)]
        assert [len(messages) for messages in rows] == [4, 6]
        counts = [[m for m in r["sent"] if m[3] == "int64"] for r in (once, twice)]
        assert counts[0] == counts[1]


@pytest.mark.parametrize("layout", ["ep 2", "tp 2, dp 2, ep 4", "etp 2 x ep 2"])
def test_deferred_weight_gradients_are_those_of_backward(layout: str) -> None:
    config, at = CONFIGS["deepseek"], LAYOUTS[layout]
    now = run_ranks(_result, at.world, at, config)
    later = run_ranks(_result, at.world, at, config, _experts, True)
    for once, deferred in zip(now, later, strict=True):
        assert (once["deferred"], deferred["deferred"]) == (0, 4)  # up, down of both
        assert torch.equal(once["dx"], deferred["dx"])
        for name, (gradient, _) in once["gradients"].items():
            close(deferred["gradients"][name][0], gradient)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_messages_are_those_of_the_plan(layout: Layout) -> None:
    """counts, dispatch, combine; backward mirrors the two; counts by sequence over tp and cp."""
    results = run_ranks(_result, layout.world, layout, CONFIG)
    n = layout.etp * layout.ep
    axis, tokens = "ep" if layout.etp == 1 else "etp_ep", B * S // layout.world
    samples = B // layout.dp
    expected = []
    for name, size in (("tp", layout.tp), ("cp", layout.cp)):
        expected += [("all_reduce", name, 8 * samples * E, "int64")] if size > 1 else []
    if n > 1:
        rows = ("all_to_all", axis, layout.etp * 2 * tokens * H * 8, "float64")
        expected += [("all_gather", axis, 8 * n * E, "int64"), *[rows] * 4]
    for result in results:
        assert result["sent"] == expected


def test_nothing_is_counted_or_added_outside_of_a_step() -> None:
    config = CONFIGS["deepseek"]
    log = _log(config)
    log.end(Group())
    log.begin(SCALE)
    module = config.build(_context(ALONE, ALONE.groups(0), log), NAME)
    _fill(module, config)
    with torch.no_grad():
        module(_tokens())
    log.is_training = False
    gradients_of = []
    for coefficient in (config.router.aux_coefficient, 0.0):
        log.scale = coefficient
        module.zero_grad()
        module(_tokens()).sum().backward()
        gradients_of.append(module.router.weight.grad)
    assert torch.equal(*gradients_of)
    totals = log.end(Group())
    assert not totals.counts.any() and not totals.losses.any()


def test_a_bias_follows_from_the_counts_by_hand() -> None:
    alone = _result(0, 1, ALONE, CONFIGS["deepseek"])
    counts = alone["counts"][0]
    assert counts.sum() == B * S * 3
    mean = B * S * 3 / E
    expected = [
        bias + 0.25 * ((count < mean) - (count > mean))
        for bias, count in zip(torch.tensor(UNEVEN).tolist(), counts.tolist(), strict=True)
    ]
    assert alone["bias"][NAME] == pytest.approx(expected, abs=1e-7)


def test_parameters_are_parts_of_the_full_ones() -> None:
    """Initial values of a rank at etp index 1 of 2 and ep index 1 of 2."""
    full = CONFIG.build(ShardContext(dtype=torch.float64), NAME)
    initialise(full, 7)
    layout = LAYOUTS["etp 2 x ep 2"]
    groups = {"etp_ep": Group(3, 4, NO_PEERS, "etp_ep")}
    context = ShardContext(dtype=torch.float64, groups=groups, expert_view=layout.view)
    part = CONFIG.build(context, NAME)
    initialise(part, 7)
    assert part.experts.up.weight.shape == (4, 2, 3, H)
    assert torch.equal(part.experts.up.weight, full.experts.up.weight[4:, :, 3:])
    assert torch.equal(part.experts.down.weight, full.experts.down.weight[4:, :, 3:])
    assert torch.equal(part.router.weight, full.router.weight)
    assert full.experts.up.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert {parallel_attributes(p).partial for p in part.parameters()} == {""}


REFUSED: dict[str, Callable[[], object]] = {
    r"8 is not divisible by 3": lambda: RouterConfig(8, 2, groups=3, groups_per_token=1),
    "groups_per_token 3 is above 2": lambda: RouterConfig(8, 2, groups=2, groups_per_token=3),
    "per_token 9: a token has 8 experts": lambda: RouterConfig(8, 9),
    "per_token 5: a token has 4 experts": lambda: RouterConfig(8, 5, groups=2, groups_per_token=1),
    "score 'max' is not one of softmax": lambda: RouterConfig(8, 2, score="max"),  # type: ignore
    "shared_gate: there are no shared": lambda: replace(CONFIG, shared_gate=True),
    "8 is not divisible by 16": lambda: _split(Layout(ep=16)),
    "6 is not divisible by 4": lambda: _split(Layout(etp=4)),
    r"tp 2 without sequence_parallel: .*\(turn it on\)": lambda: CONFIG.build(ShardContext(Group(0, 2)), NAME),
    "layers.0.mlp is not among the layers with experts": lambda: CONFIG.build(
        ShardContext(routing=RoutingLog(["layers.1.mlp"], E)), NAME
    ),
}


def _split(layout: Layout) -> None:
    size = layout.ep * layout.etp
    groups = {name: Group(0, size, NO_PEERS, name) for name in ("ep", "etp_ep")}
    CONFIG.build(ShardContext(groups=groups, expert_view=layout.view), NAME)


def test_bad_values_are_refused() -> None:
    for message, make in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            make()
