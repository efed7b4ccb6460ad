"""Experts' products in fp8: those of 16 bits within fp8's error, with one scale in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.shard import Shard
from mpctl.train.kernels.fp8 import E4M3
from mpctl.train.kernels.grouped import RowGroups
from mpctl.train.layers.experts import ExpertsConfig, ParallelExperts, RouterConfig
from mpctl.train.layers.fp8 import CastsToFp8, Fp8Operands, Fp8Scales
from mpctl.train.layers.grouped_linear import GroupedLinear
from mpctl.train.layers.linear import ColumnParallelLinear
from mpctl.train.layers.parameters import DeferredWgrad, Init, initialise, shard_of, shard_parameter, take
from mpctl.train.layers.routing_log import RoutingLog
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.threads import run_ranks
from tests.train.layers.oracle import whole
from tests.train.layers.test_experts import ALONE, LAYOUTS, Layout, _own, _sum_gradients
from tests.train.layers.test_fp8 import error, numbers

B, S, H, FFN, E = 4, 8, 32, 16, 8
NAME = "layers.0.mlp"
CONFIG = ExpertsConfig(H, FFN, RouterConfig(E, 2, aux_coefficient=0.1), shared_ffn=16)


def _linear(fp8: bool, sizes: list[int]) -> GroupedLinear:
    weight = shard_parameter(Shard((len(sizes), 48, H)), init=Init("normal", 0.02), dtype=torch.bfloat16)
    made = GroupedLinear(weight, Fp8Operands() if fp8 else None)
    initialise(made, 7)
    return made


def _passed(module: GroupedLinear, sizes: list[int], deferred: bool = False) -> list[Tensor]:
    later = DeferredWgrad()
    if deferred:
        module.defer_wgrad(later)
    rows = numbers(sum(sizes), H).requires_grad_()
    y = module(rows, RowGroups(torch.tensor(sizes), sizes))
    y.backward(numbers(*y.shape, seed=5) / 64)
    for compute in later.take():
        compute()
    assert rows.grad is not None and module.weight.grad is not None
    return [y.detach(), rows.grad, module.weight.grad]


@pytest.mark.parametrize("sizes", [[20, 0, 7, 37], [64]])
def test_results_and_gradients_are_those_of_16_bits_within_fp8s_error(sizes: list[int]) -> None:
    ours, exact = _passed(_linear(True, sizes), sizes), _passed(_linear(False, sizes), sizes)
    errors = [error(a, b) for a, b in zip(ours, exact, strict=True)]
    assert max(errors) < 0.09
    assert min(errors) > 0.005, "it was not multiplied in fp8"
    empty = [i for i, size in enumerate(sizes) if size == 0]
    assert not ours[2][empty].any()
    for once, later in zip(ours, _passed(_linear(True, sizes), sizes, True), strict=True):
        assert torch.equal(once, later)


def test_one_expert_is_a_linear_layer() -> None:
    """Bit for bit, with the same operands."""
    sizes = [64]
    grouped = _linear(True, sizes)
    linear = ColumnParallelLinear(H, 48, group=Group(), bias=False, dtype=torch.bfloat16, fp8=Fp8Operands())
    with torch.no_grad():
        linear.weight.copy_(grouped.weight[0])
    x = numbers(1, 64, H).requires_grad_()
    y = linear(x)
    y.backward(numbers(1, 64, 48, seed=5) / 64)
    ours = _passed(grouped, sizes)
    for actual, expected in zip(ours, (y[0], x.grad[0], linear.weight.grad[None]), strict=True):
        assert torch.equal(actual, expected)


def test_rows_are_kept_in_one_byte() -> None:
    kept: list[Tensor] = []
    module = _linear(True, [16, 16])
    rows = numbers(32, H).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        module(rows, RowGroups(torch.tensor([16, 16]), [16, 16]))
    own = [t for t in kept if t.data_ptr() != module.weight.data_ptr() and t.dim()]
    assert [(t.dtype, tuple(t.shape)) for t in own] == [(E4M3, (H, 32))]


def test_no_rows_have_no_products() -> None:
    y, dx, dw = _passed(_linear(True, [0, 0]), [0, 0])
    assert y.shape == (0, 48) and dx.shape == (0, H)
    assert dw.shape == (2, 48, H) and not dw.any()


def _two_steps(rank: int, size: int, layout: Layout) -> dict[str, Any]:
    """The second step has the scales of the first."""
    groups, log = layout.groups(rank), RoutingLog([NAME], E)
    context = ShardContext(
        groups["tp"],
        groups["cp"],
        layout.tp > 1,
        torch.bfloat16,
        groups=groups,
        expert_view=layout.view,
        routing=log,
        fp8=True,
    )
    module: ParallelExperts = CONFIG.build(context, NAME)
    for number, parameter in enumerate(module.parameters()):
        shard = shard_of(parameter)
        with torch.no_grad():
            parameter.copy_(take(shard, numbers(*shard.shape, seed=number) * 0.3))
    casters = {
        name: part.fp8_products()[""].operands for name, part in module.named_modules() if isinstance(part, CastsToFp8)
    }
    table = Fp8Scales(list(casters), 2, torch.device("cpu"))
    table.bind(casters)
    for step in range(2):
        module.zero_grad()
        log.begin(0.5)
        x = _own(numbers(B, S, H, seed=8 + step), layout, groups).requires_grad_()
        y = module(x)
        y.backward(_own(numbers(B, S, H, seed=18 + step) / 64, layout, groups))
        _sum_gradients(module, groups)
        table.end_step(groups["world"])
        log.end(groups["world"])
    gradients = {name: (p.grad, shard_of(p)) for name, p in module.named_parameters()}
    return {"y": y.detach(), "gradients": gradients, "scales": table.scales, "names": table.names}


@pytest.mark.parametrize("layout", ["ep 2", "ep 4", "etp 2 x ep 2", "tp 2 x ep 2"])
def test_scales_do_not_depend_on_the_layout(layout: str) -> None:
    at = LAYOUTS[layout]
    alone = _two_steps(0, 1, ALONE)
    assert len(alone["names"]) == 4
    ranks = run_ranks(_two_steps, at.world, at)
    for result in ranks:
        assert torch.equal(result["scales"], alone["scales"])
    if at.tp == 1:
        assert error(torch.cat([result["y"] for result in ranks]), alone["y"]) < 2**-7
    for name, (gradient, _) in alone["gradients"].items():
        parts = [result["gradients"][name] for result in ranks]
        held = {str(shard): (value, shard) for value, shard in parts}
        assert error(whole(list(held.values())) if len(held) > 1 else parts[0][0], gradient) < 0.02


def test_a_table_has_a_row_for_all_experts_of_a_layer() -> None:
    module = replace(CONFIG, shared_ffn=0).build(ShardContext(fp8=True), NAME)
    named = dict(module.named_modules())
    assert [n for n, part in named.items() if isinstance(part, CastsToFp8)] == ["experts.up", "experts.down"]
    assert module.experts.up.fp8_products().keys() == {""}
