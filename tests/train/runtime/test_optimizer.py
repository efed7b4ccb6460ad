"""Norm, clipping, schedule, decay and the masters of 16-bit parameters, against numbers by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mpctl.core.shard import Shard
from mpctl.core.sharding import View
from mpctl.model.layout.buckets import Bucket
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.training import TrainingSpec
from mpctl.train.layers.parameters import Init, shard_parameter
from mpctl.train.runtime.optimizer import WSD_SHAPES, Optimizer, ParameterGroup, UpdateRule, learning_rate
from mpctl.train.runtime.step_guard import NotFinite
from mpctl.train.runtime.update import clip_factor
from mpctl.train.runtime.zero.gradients import GradientBuffer
from mpctl.train.runtime.zero.param_store import BucketShard, ParamStore
from mpctl.train.transport.group import Group
from tests.ranks import run_ranks
from tests.train.runtime.tiny import column, make_trainer, tiny_job, tiny_plan, train

CPU = torch.device("cpu")
PLAIN = TrainingSpec(learning_rate=0.1, warmup_steps=0, weight_decay=0.0)


def _parameter(values: Tensor, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(values.to(dtype))


def _buffer(
    parameters: list[nn.Parameter], dtype: torch.dtype, tp: Group | None = None, undecayed: frozenset[str] = frozenset()
) -> GradientBuffer:
    """Of one bucket, on one replica. undecayed: numbers of parameters."""
    names, sizes = tuple(map(str, range(len(parameters)))), tuple(p.numel() for p in parameters)
    bucket = Bucket(names, sizes, View(), undecayed=undecayed)
    groups = {"tp": tp or Group()}
    return GradientBuffer([BucketShard(bucket, tuple(parameters), Group())], dtype, CPU, groups)


def _optimizer(buffer: GradientBuffer, training: TrainingSpec) -> Optimizer:
    return Optimizer(buffer, [ParamStore(store.shard) for store in buffer.stores], training)


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


def test_gradients_in_bfloat16_halve_the_message_and_stay_close(data: Path, tmp_path: Path) -> None:
    few = {"training__steps": 4, "training__eval_samples": 0, "checkpoint__interval": 0}
    changes = {**few, "training__dtype": "bf16", "training__gradient_dtype": "bf16"}
    job = tiny_job(data, 1, 2, **changes)
    ranks = train(job, tmp_path / "bf16")
    exact = [record["loss"] for record in make_trainer(tiny_job(data, **few), tmp_path).run()]
    assert column(ranks) == pytest.approx(exact, abs=0.05)
    assert column(ranks) != pytest.approx(exact, abs=1e-5)
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


# ---------------------------------------------------------------- AdamW, with torch's own


RATES = (1e-3, 2e-3, 5e-4)


def _values() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (7,), (2, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_moments_are_those_of_torch(dtype: torch.dtype) -> None:
    ours, theirs = ([nn.Parameter(v.to(dtype)) for v in _values()] for _ in range(2))
    adam = UpdateRule([ParameterGroup(ours[:1], 0.1), ParameterGroup(ours[1:], 0.0)], 0.9, 0.95, 1e-8)
    torch_adam = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    for step, rate in enumerate(RATES, start=1):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.sin(torch.arange(mine.numel()).view_as(mine) * step).to(dtype)
            other.grad = mine.grad.clone()
        for group in torch_adam.param_groups:
            group["lr"] = rate
        adam.step(rate)
        torch_adam.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        assert all(torch.equal(adam.state[mine][n], torch_adam.state[other][n]) for n in adam.moments)
        assert float(adam.state[mine]["step"]) == len(RATES)


def test_a_value_without_a_gradient_is_left_alone() -> None:
    value = nn.Parameter(torch.ones(3))
    adam = UpdateRule([ParameterGroup([value], 0.1)], 0.9, 0.95, 1e-8)
    adam.step(1e-3)
    assert torch.equal(value, torch.ones(3)) and not adam.state


# ---------------------------------------------------------------- the learning rate


SCHEDULES = [("constant", "linear"), ("linear", "linear"), ("cosine", "linear")]
SCHEDULES += [("wsd", style) for style in WSD_SHAPES]


def rates(count: int, **settings: Any) -> list[float]:
    return [learning_rate(TrainingSpec(**settings), step) for step in range(count)]


@given(st.integers(0, 50), st.integers(1, 300), st.integers(0, 400))
def test_the_default_is_the_cosine_of_before_to_the_last_bit(w: int, steps: int, step: int) -> None:
    training = TrainingSpec(warmup_steps=w, steps=steps)
    peak, low = training.learning_rate, training.lowest_rate
    expected = peak * (step + 1) / w if step < w else None
    if expected is None:
        progress = min(1.0, (step - w) / max(1, steps - w))
        expected = low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))
    assert learning_rate(training, step) == expected


@pytest.mark.parametrize(
    ("schedule", "style", "expected"),
    [
        ("constant", "linear", [0.5, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", "linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]),
        ("cosine", "linear", [0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0, 0]),
        ("wsd", "linear", [0.5, 1, 1, 1, 1, 0.5, 0, 0]),
        ("wsd", "cosine", [0.5, 1, 1, 1, 1, 0.5, 0, 0]),
        ("wsd", "exponential", [0.5, 1, 1, 1, 1, 0.4142136, 0, 0]),
        ("wsd", "minus_sqrt", [0.5, 1, 1, 1, 1, 0.2928932, 0, 0]),
    ],
)
def test_rates_by_hand(schedule: Any, style: Any, expected: list[float]) -> None:
    """Two steps of warm-up, then until step 6; wsd decays over the last two."""
    found = rates(
        8,
        learning_rate=1.0,
        min_learning_rate=0.0,
        warmup_steps=2,
        steps=6,
        lr_schedule=schedule,
        lr_wsd_decay_style=style,
        lr_wsd_decay_steps=2,
    )
    assert found == pytest.approx(expected, abs=1e-7)


@given(st.sampled_from(SCHEDULES), st.integers(0, 20), st.integers(1, 60), st.data())
def test_bounds_and_continuity_of_rates(kind: tuple[Any, Any], warmup: int, room: int, data: st.DataObject) -> None:
    """Up to the peak in the warm-up, never up again, at most to the minimum, where it stays."""
    schedule, style = kind
    decay = data.draw(st.integers(1, room))
    end = warmup + room
    found = rates(
        end + 5,
        learning_rate=1.0,
        min_learning_rate=0.1,
        warmup_steps=warmup,
        steps=7,
        lr_decay_steps=end,
        lr_schedule=schedule,
        lr_wsd_decay_style=style,
        lr_wsd_decay_steps=decay,
    )
    rise, rest = found[:warmup], found[warmup:]
    assert rise == sorted(rise) and (not rise or rise[-1] == 1.0)
    assert rest[0] == 1.0 and rest == sorted(rest, reverse=True)
    last = 1.0 if schedule == "constant" else 0.1
    assert rest[room:] == pytest.approx([last] * 5, rel=1e-12)
    if schedule == "wsd":
        assert set(rest[: room - decay + 1]) == {1.0}


def test_more_steps_do_not_change_the_rates_where_the_decay_has_its_own() -> None:
    kept = [rates(100, steps=steps, lr_decay_steps=60) for steps in (60, 90)]
    assert kept[0] == kept[1]
    assert rates(100, steps=60) != rates(100, steps=90)


def test_a_peak_below_the_default_minimum_stays_as_it_is() -> None:
    """Fine-tuning at 1e-5 needs no second setting: the default minimum of 3e-5 gives way."""
    assert TrainingSpec(learning_rate=3e-4).lowest_rate == 3e-5
    assert set(rates(200, learning_rate=1e-5, warmup_steps=0)) == {1e-5}
