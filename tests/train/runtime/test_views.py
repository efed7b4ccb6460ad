"""A toy second view: a parameter split over ep, which is carved from dp, trains as the whole one.

In every second layer the MLP adds gate(x) E, with E [experts, hidden] and gate = softmax(x E^T).
The ranks of ep hold its rows; the layer gathers them, and its backward sums their gradients over
ep, so that those of edp are what is left to sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from mpctl.core.sharding import View
from mpctl.core.tensor_grid import DimGrid
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.layer import OperatorGroup, Table
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.plan.estimate.memory import layout_memory
from mpctl.plan.estimate.messages import step_messages
from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.job import JobSpec
from mpctl.spec.load import parse
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.gpt.module import GPT
from mpctl.train.layers.config import LayerConfig
from mpctl.train.layers.mlp import MLPConfig, ParallelMLP
from mpctl.train.layers.parameters import Init, shard_parameter
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.runtime import build
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.train import Trainer
from mpctl.train.transport.group import Group
from tests.ranks import run_ranks
from tests.train.runtime.tiny import make_data, tiny_job

EXPERTS, WITH_EXPERTS = 4, 1
NAME = f"layers.{WITH_EXPERTS}.mlp.experts"
DIMS = ("experts", "hidden")


def toy_view(job: JobSpec, ep: int) -> View:
    """ep is the fastest axis of what was dp; tp and cp are 1."""
    edp = job.sizes["dp"] // ep
    grid = DimGrid({"ep": ep}, {"experts": "ep"})
    sizes = {"ep": ep, "edp": edp, "pp": 1}
    return View("toy", grid, "ep", edp, "edp", job.parallel.zero if edp > 1 else 0, sizes)


def toy_layout(job: JobSpec, ep: int) -> JobLayout:
    plain = JobLayout.of(job)
    (stack,) = plain.table.stacks
    added = ParameterSpec("mlp.experts", (EXPERTS, plain.model.hidden), DIMS, view="toy")
    blocks = list(stack.blocks)
    block = blocks[WITH_EXPERTS]
    blocks[WITH_EXPERTS] = OperatorGroup((*block.operations, Table("mlp", (added,))))
    table = replace(plain.table, stacks=(replace(stack, blocks=tuple(blocks)),))
    return JobLayout(job, plain.model, table, plain.stages, (toy_view(job, ep),))


class GatheredRows(torch.autograd.Function):
    """The rows of all ranks of a group; their gradients are summed and dealt out again."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_gather(rows, 0)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(gradients[0].contiguous(), 0), None  # type: ignore[attr-defined]


class ToyMLP(ParallelMLP):
    def __init__(self, config: MLPConfig, context: ShardContext) -> None:
        super().__init__(config, context)
        self.ep = context.groups.get("ep", Group())
        view = View(grid=DimGrid({"ep": self.ep.size}, {"experts": "ep"}))
        shard = view.shard((EXPERTS, config.hidden), DIMS, self.ep.rank)
        self.experts = shard_parameter(shard, init=Init("normal", 0.3), dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        rows = GatheredRows.apply(self.experts, self.ep)
        return super().forward(x) + torch.softmax(x @ rows.T, -1) @ rows


@dataclass(frozen=True)
class ToyConfig(MLPConfig):
    def build(self, shard_context: ShardContext, name: str = "") -> ParallelMLP:
        return ToyMLP(self, shard_context)


class ToyGPT(GPT):
    def layer_config(self, training: TrainingSpec, layer: int) -> LayerConfig:
        config = super().layer_config(training, layer)
        if layer != WITH_EXPERTS:
            return config
        assert isinstance(config.mlp, MLPConfig)
        return replace(config, mlp=ToyConfig(**vars(config.mlp)))


def toy_module(model: Any, training: Any, context: Any, slices: Any) -> ToyGPT:
    return ToyGPT(model, training, context, *slices)


def toy_trainer(raw: dict[str, Any], ep: int, run_dir: Path, rank: int) -> Trainer:
    build.build_module = toy_module  # in a process of its own
    job = parse(raw)
    layout = toy_layout(job, ep)
    environment = RuntimeEnvironment.of_machine(job, run_dir, local_rank=rank)
    return build.build_trainer(run_dir, layout, rank, environment)


def _train(rank: int, size: int, raw: dict[str, Any], ep: int, run_dir: str, resumed: str) -> dict[str, Any]:
    trainer = toy_trainer(raw, ep, Path(run_dir), rank)
    if resumed:
        trainer.resume(Path(resumed))
    states = {
        trainer.names[parameter]: {field: value.clone() for field, value in state.items()}
        for parameter, state in trainer.optimizer.states()
    }
    records = list(trainer.run())
    held = sum(t.nbytes for store in trainer.optimizer.stores for t in _state_tensors(store))
    gradients = sum(t.nbytes for t in trainer.gradients.buffer.tensors)
    return {
        "loss": [record["loss"] for record in records],
        "norm": [record["grad_norm"] for record in records],
        "traffic": trainer.step_traffic,
        "count": sum(p.numel() for p in trainer.model.parameters()),
        "optimizer": 2 * held,
        "gradients": gradients,
        "states": states,
    }


def _state_tensors(store: Any) -> list[Tensor]:
    return [part.values for part in store.stepped]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("views"))


def toy_job(data: Path, dp: int, zero: int = 0) -> JobSpec:
    return tiny_job(
        data,
        dp=dp,
        parallel__zero=zero,
        parallel__bucket_bytes=40_000,
        training__dtype="fp64",
        training__steps=4,
        training__eval_samples=0,
        training__clip_norm=0.1,
        checkpoint__interval=2,
    )


def ranks_of(job: JobSpec, ep: int, run_dir: Path, resumed: str = "") -> list[dict[str, Any]]:
    raw = job.model_dump(mode="json")
    return run_ranks(_train, job.world_size, raw, ep, str(run_dir), resumed, timeout=120)


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = ranks_of(toy_job(data, 1), 1, tmp_path_factory.mktemp("alone"))
    return found


def test_a_topology_answers_for_the_groups_of_the_view(data: Path) -> None:
    layout = toy_layout(toy_job(data, 4), 2)
    topology = layout.topology
    assert [list(group) for group in topology.kind_groups("ep")] == [[0, 1], [2, 3]]
    assert [list(group) for group in topology.kind_groups("edp")] == [[0, 2], [1, 3]]
    assert list(topology.group(3, "dp_cp")) == [0, 1, 2, 3]
    assert {"dp_cp", "ep", "edp", "embedding"} <= topology.kinds.keys()
    assert layout.group_sizes["edp"] == 2
    own = [bucket for bucket in layout.buckets(0) if NAME in bucket.names]
    assert [(b.names, b.view.name, b.sizes) for b in own] == [((NAME,), "toy", (2 * 32,))]


@pytest.mark.parametrize("zero", [*(pytest.param(zero, marks=pytest.mark.slow) for zero in range(3)), 3])
@pytest.mark.quick(1)
def test_it_trains_is_clipped_and_saved_as_the_whole_one(
    data: Path, tmp_path: Path, alone: dict[str, Any], zero: int
) -> None:
    """Over ep 2 x edp 2; then what it saved is read by one rank, and by two over ep 2, whose edp is
    1: there ZeRO has the dense parameters to share, and nothing of the experts."""
    job = toy_job(data, 4, zero)
    ranks = ranks_of(job, 2, tmp_path / "four")
    assert all(norm > 0.1 for norm in alone["norm"])  # so that each step is clipped
    for rank in ranks:
        assert rank["loss"] == pytest.approx(alone["loss"], rel=1e-10)
        assert rank["norm"] == pytest.approx(alone["norm"], rel=1e-10)
    layout = toy_layout(job, 2)
    (memory,), (messages,) = layout_memory(layout), step_messages(layout)
    planned = planned_traffic(messages)
    for rank in ranks:
        sent = {name: sum_ for name, sum_ in rank["traffic"].items() if not _is_layers(name, sum_)}
        ep_norm = {"ep all_reduce": planned["ep all_reduce"]}
        assert sent == planned and ep_norm.items() <= sent.items()
        assert rank["count"] == memory.parameters
        assert rank["gradients"] == memory.gradient_bytes
        assert rank["optimizer"] == memory.optimizer_bytes
    saved = RunDir(tmp_path / "four").path / "checkpoints/step-2"
    (one,) = ranks_of(toy_job(data, 1), 1, tmp_path / "one", str(saved))
    two = ranks_of(toy_job(data, 2, zero), 2, tmp_path / "two", str(saved))
    for other in (one, *two):
        assert other["loss"] == pytest.approx(alone["loss"][2:], rel=1e-10)
    for name, state in one["states"].items():
        for field, value in state.items():
            parts = [rank["states"][name][field] for rank in two]
            held = torch.cat(parts) if name == NAME else parts[0]
            assert torch.equal(held, value), (name, field)
    assert one["states"][NAME]["exp_avg"].abs().amax() > 0


def _is_layers(name: str, counted: dict[str, int]) -> bool:
    """What the toy's own layer sends, which no operator table describes."""
    return name in ("ep all_gather", "ep reduce_scatter")
