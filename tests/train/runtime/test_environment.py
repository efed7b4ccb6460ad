"""A trainer takes everything of its machine from the environment that it is given."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.rundir.breadcrumb import Breadcrumb, HostBreadcrumbs, rank_memory
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.runtime.batches import Batches
from mpctl.train.runtime.build import build_chunks, build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.train import Trainer
from tests.train.runtime.tiny import settings

NO_DROPOUT = {"training__dropout": 0.0, "training__attention_dropout": 0.0}


@dataclass
class CountingKernels(KernelBackend):
    """torch's kernels, and how often each was called."""

    calls: list[str] = field(default_factory=list)

    def attention(self, *tensors: Any, **how: Any) -> Tensor:
        self.calls.append("attention")
        return super().attention(*tensors, **how)

    def layer_norm(self, *tensors: Any) -> Tensor:
        self.calls.append("layer_norm")
        return super().layer_norm(*tensors)


def build(job: JobSpec, folder: Path, **changed: Any) -> Trainer:
    environment = RuntimeEnvironment.of_machine(job, folder, local_rank=0)
    return build_trainer(folder, JobLayout.of(job), 0, replace(environment, **changed))


def few_steps(data: Path, **changes: Any) -> JobSpec:
    return load_job(
        None, settings(**{"data__path": str(data), "training__eval_samples": 0, "training__steps": 3, **changes})
    )


def test_layers_call_the_kernels_of_the_environment(data: Path, tmp_path: Path) -> None:
    """2 layers of 1 attention and 2 norms, and the last norm; 4 micro batches."""
    kernels = CountingKernels()
    build(few_steps(data, **NO_DROPOUT), tmp_path, kernels=kernels).one_step()
    assert kernels.calls.count("attention") == 4 * 2
    assert kernels.calls.count("layer_norm") == 4 * (2 * 2 + 1)


def test_parameters_are_initialized_by_the_environment(data: Path, tmp_path: Path) -> None:
    seen: dict[str, int] = {}

    def fill(parameter: nn.Parameter, name: str, seed: int) -> None:
        seen[name] = seed
        parameter.data.fill_(0.25)

    job = few_steps(data)
    trainer = build(job, tmp_path, initialize=fill)
    parameters = dict(trainer.model.named_parameters())
    assert seen == dict.fromkeys(parameters, job.training.seed)
    assert all(torch.equal(p, torch.full_like(p, 0.25)) for p in parameters.values())


def test_a_stop_and_the_peak_memory_come_from_the_environment(data: Path, tmp_path: Path) -> None:
    job = few_steps(data, checkpoint__interval=0)
    trainer = build(job, tmp_path, stop_requested=lambda: True, peak_memory=lambda: 12345)
    (record,) = trainer.run()
    assert record["memory_bytes"] == [12345]
    assert trainer.step == 1 and trainer.saver.saved == {1}


def test_a_rank_is_asked_to_stop_in_the_memory_that_it_shares(data: Path, tmp_path: Path) -> None:
    host = HostBreadcrumbs(range(1), tmp_path)
    shared_state = Breadcrumb(rank_memory(0, host.environment))
    environment = RuntimeEnvironment.of_machine(few_steps(data), tmp_path, local_rank=0, breadcrumb=shared_state)
    assert environment.device == torch.device("cpu") and not environment.stop_requested()
    host.request_stop()
    assert environment.stop_requested()
    assert environment.peak_memory() > 2**20


def test_batches_come_from_the_environment(data: Path, tmp_path: Path) -> None:
    opened: list[Batches] = []

    def open_batches(job: JobSpec, **of_rank: Any) -> Batches:
        opened.append(Batches.open(job, data=data, **of_rank))
        return opened[-1]

    job = few_steps(data, data__path=str(tmp_path / "nothing-here"))
    trainer = build(job, tmp_path, open_batches=open_batches)
    assert opened == [trainer.batches]
    trainer.one_step()
    assert trainer.step == 1


SOURCE = Path(__file__).parents[3] / "mpctl"


def test_the_kernels_of_a_model_are_always_chosen() -> None:
    """There is no default that a task on a GPU could build with by mistake."""
    for function in (build_chunks, RuntimeEnvironment):
        assert inspect.signature(function).parameters["kernels"].default is inspect.Parameter.empty


@pytest.mark.parametrize("path", ["evaluation", "sampling", "build", "probes/layers", "probes/kernels"])
def test_every_task_computes_with_the_kernels_of_its_device(path: str) -> None:
    """torch's own are named by the module alone that falls back to them."""
    tree = ast.parse((SOURCE / "train" / "runtime" / f"{path}.py").read_text("utf-8"))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert "TORCH_BACKEND" not in names
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) == "ShardContext"]
    assert all("backend" in {key.arg for key in call.keywords} for call in made)
    assert made or any(ast.unparse(c.func) == "build_chunks" for c in calls)
    if path != "build":  # which is given them
        assert any(ast.unparse(call.func) == "machine_kernels" for call in calls)
