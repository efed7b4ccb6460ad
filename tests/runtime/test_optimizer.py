"""Norm, clipping, schedule, decay and the masters of 16-bit parameters, against numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpctl.launch.summary import planned_traffic
from mpctl.layers.parameters import Init, shard_parameter
from mpctl.layout.buckets import Bucket
from mpctl.runtime.optimizer import Optimizer, learning_rate
from mpctl.runtime.step_guard import NotFinite
from mpctl.runtime.update import clip_factor
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.runtime.zero.param_store import BucketShard, ParamStore
from mpctl.shard import Shard
from mpctl.sharding import View
from mpctl.spec.training import TrainingSpec
from mpctl.transport.group import Group
from tests.ranks import run_ranks
from tests.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

CPU = torch.device("cpu")
PLAIN = TrainingSpec(learning_rate=0.1, warmup_steps=0, weight_decay=0.0)


def _parameter(values: Tensor, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(values.to(dtype))


def _buffer(
    parameters: list[nn.Parameter],
    dtype: torch.dtype,
    tp: Group | None = None,
    undecayed: frozenset[str] = frozenset(),
) -> GradientBuffer:
    """Of one bucket, on one replica. undecayed: numbers of parameters."""
    names, sizes = tuple(map(str, range(len(parameters)))), tuple(p.numel() for p in parameters)
    bucket = Bucket(names, sizes, View(), undecayed=undecayed)
    groups = {"tp": tp or Group()}
    return GradientBuffer([BucketShard(bucket, tuple(parameters), Group())], dtype, CPU, groups)


def _optimizer(buffer: GradientBuffer, training: TrainingSpec) -> Optimizer:
    return Optimizer(buffer, [ParamStore(store.shard) for store in buffer.stores], training)


def test_learning_rate_by_hand() -> None:
    training = TrainingSpec(learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=10, steps=110)
    by_hand = {0: 1e-4, 4: 5e-4, 9: 1e-3, 10: 1e-3, 35: 8.6819805e-4, 60: 5.5e-4, 110: 1e-4}
    for step, rate in by_hand.items():  # 35: 1e-4 + 4.5e-4 (1 + cos 45°)
        assert learning_rate(training, step) == pytest.approx(rate, rel=1e-7), step
    assert learning_rate(training, 500) == pytest.approx(1e-4)


def _norm(rank: int, size: int) -> float:
    """A split [4, 3] of ones and a replicated [5] of twos: sqrt(12 + 20)."""
    half = range(2 * rank, 2 * rank + 2)
    split = shard_parameter(Shard((4, 3), {0: (half,)}), init=Init("ones"))
    both = shard_parameter(Shard((5,)), init=Init("ones"))
    buffer = _buffer([both, split], torch.float32, Group(rank, size, torch.distributed.group.WORLD))
    split.grad.fill_(1.0)
    both.grad.fill_(2.0)
    return float(buffer.norm())


def test_the_norm_counts_every_parameter_once() -> None:
    assert run_ranks(_norm, 2) == [pytest.approx(math.sqrt(32))] * 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_norm_is_exact_in_any_precision(dtype: torch.dtype) -> None:
    """Of 200,000 elements: the sum is not taken in the precision of the elements."""
    parameter = _parameter(torch.linspace(-1, 1, 200_000), dtype)
    buffer = _buffer([parameter], dtype)
    buffer.stores[0].local.copy_(parameter.detach())
    exact = parameter.detach().double().square().sum().sqrt().item()
    assert float(buffer.norm()) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(("bound", "left"), [(1.0, 1.0), (10.0, 5.0), (0.0, 5.0)])
def test_clipping(bound: float, left: float) -> None:
    parameter = _parameter(torch.zeros(2))
    buffer = _buffer([parameter], torch.float32)
    parameter.grad.copy_(torch.tensor([3.0, 4.0]))
    buffer.scale(clip_factor(float(buffer.norm()), bound))
    assert float(buffer.norm()) == pytest.approx(left)
    assert parameter.grad[0] / parameter.grad[1] == pytest.approx(0.75)


def test_what_is_declared_so_does_not_decay() -> None:
    """Whatever its dimensions: the biases of two experts are a [2, 2], too."""
    matrix, norm, biases = (_parameter(torch.ones(*size)) for size in ((2, 2), (2,), (2, 2)))
    training = PLAIN.model_copy(update={"weight_decay": 0.5})
    buffer = _buffer([matrix, norm, biases], torch.float32, undecayed=frozenset({"1", "2"}))
    _optimizer(buffer, training).step(0)
    assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.1 * 0.5))  # no gradient: decay alone
    assert torch.equal(norm, torch.ones(2))
    assert torch.equal(biases, torch.ones(2, 2))


def test_an_update_by_hand() -> None:
    parameter = _parameter(torch.tensor([1.0, -1.0]))
    optimizer = _optimizer(_buffer([parameter], torch.float32), PLAIN)
    parameter.grad.copy_(torch.tensor([0.3, -20.0]))
    optimizer.step(0)  # Adam's first step is the rate, whatever the gradient's size
    assert torch.allclose(parameter.detach(), torch.tensor([0.9, -0.9]), atol=1e-6)


def test_masters_keep_what_bfloat16_would_lose() -> None:
    parameter = _parameter(torch.ones(4, 4), torch.bfloat16)
    training = PLAIN.model_copy(update={"learning_rate": 1e-4, "min_learning_rate": 1e-4})
    buffer = _buffer([parameter], torch.float32)
    optimizer = _optimizer(buffer, training)
    for step in range(30):  # each step is a fortieth of the spacing of bfloat16 below 1
        buffer.stores[0].local.fill_(1.0)
        optimizer.step(step)
    assert torch.allclose(optimizer.values[0].detach(), torch.tensor(1 - 30e-4), atol=1e-6)
    assert torch.equal(parameter, torch.full_like(parameter, 1 - 2**-8))


@pytest.mark.slow
def test_bfloat16_tracks_float32(runs) -> None:
    assert column(runs.get(dtype="bf16")) == pytest.approx(column(runs.get()), abs=0.02)
    assert column(runs.get(dtype="bf16")) != pytest.approx(column(runs.get()), abs=1e-5)


def test_gradients_in_bfloat16_halve_the_message_and_stay_close(runs, tmp_path: Path) -> None:
    changes = {"training__dtype": "bf16", "training__gradient_dtype": "bf16"}
    job = tiny_job(runs.data, 1, 2, **changes)
    ranks = train(job, tmp_path)
    assert column(ranks) == pytest.approx(column(runs.get()), abs=0.05)
    traffic = ranks[0]["traffic"]
    assert traffic == planned_traffic(tiny_plan(job).estimate.messages[0])
    assert traffic["dp_cp all_reduce"] == {"count": 1, "bytes": 2 * ranks[0]["count"]}


def test_a_gradient_that_is_no_number_stops_before_the_update(data: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_job(data, training__clip_norm=0.0), tmp_path)
    losses = trainer.run()
    next(losses)
    with torch.no_grad():
        trainer.model.final_norm.weight[0] = float("nan")
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(NotFinite, match=r"step 2 is nan: .* parameter final_norm"):
        next(losses)
    after = list(trainer.model.parameters())
    pairs = zip(before, after, strict=True)
    assert all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in pairs)
