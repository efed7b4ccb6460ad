"""Chat data under every layout: losses, norms and gradients of one process, in float64; packed rows are what their
conversations are alone."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mpctl.model.layout.topology import job_topology
from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.data.chat_samples import ChatRows, ChatSamples
from mpctl.train.data.manifest import open_prepared
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.parameters import initialise
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.rehearsal.worker import rehearse_rank
from tests.train.runtime.chat import LENGTH, chat_job, make_chat_data
from tests.train.runtime.test_axes import SHAPES, same_gradients
from tests.train.runtime.test_memory import LAYOUTS as MEMORY_LAYOUTS
from tests.train.runtime.test_memory import job_of as memory_job
from tests.train.runtime.tiny import SETTINGS, VOCAB, column, tiny_plan, train

PP2 = {"parallel__pp": 2, "model__layers": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one-micro-batch": {"training__micro_batch_size": 8},
    "tp2-sp": {"tp": 2, "parallel__sequence_parallel": True},
    "cp2": {"parallel__cp": 2},
    "dp2-zero3": {"dp": 2, "parallel__zero": 3},
    "dp2-zero1": {"dp": 2, "parallel__zero": 1},
    "pp2": PP2,
    "tp2-cp2-full": {"tp": 2, "parallel__cp": 2, "training__recompute": "full"},
    "cp2-dp2-selective": {"dp": 2, "parallel__cp": 2, "training__recompute": "selective"},
    "pp2-zero-bubble": {**PP2, "parallel__schedule": "zero-bubble"},
}
QUICK = {("gpt", "best-fit", "one-micro-batch"), ("gpt", "best-fit", "cp2"), ("llama", "none", "dp2-zero3")}
PACKINGS = ("best-fit", "wrapped", "none")
CASES = [
    pytest.param(*case, marks=[pytest.mark.slow] * (case not in QUICK))
    for case in product(("gpt", "llama", "latent"), PACKINGS, LAYOUTS)
]


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("chats")
    return {packing: make_chat_data(root, packing=packing) for packing in PACKINGS}


@pytest.fixture(scope="module")
def one_process(chats, tmp_path_factory):
    done: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def trained(shape: str, packing: str) -> list[dict[str, Any]]:
        if (shape, packing) not in done:
            done[shape, packing] = train(job_of(chats, shape, packing, {}), tmp_path_factory.mktemp("one"))
        return done[shape, packing]

    return trained


def job_of(chats, shape: str, packing: str, changes: dict[str, Any]):
    ranks = [changes.get(key, 1) for key in ("tp", "dp", "parallel__cp", "parallel__pp")]
    fixed = {"training__dtype": "fp64", "training__steps": 3, "checkpoint__at_end": False, "checkpoint__interval": 0}
    world = {"cluster__gpus_per_node": int(np.prod(ranks))}
    return chat_job(chats[packing], **{**fixed, **world, **SHAPES[shape], **changes})


@pytest.mark.parametrize(("shape", "packing", "name"), CASES)
@pytest.mark.quick(4)
def test_the_loss_does_not_tell_the_layout(chats, one_process, tmp_path, shape: str, packing: str, name: str) -> None:
    job = job_of(chats, shape, packing, LAYOUTS[name])
    ranks, alone = train(job, tmp_path), one_process(shape, packing)
    for figure in ("loss", "grad_norm"):
        assert column(ranks, figure) == pytest.approx(column(alone, figure), rel=1e-10)
    last = [found[0]["records"][-1]["validation_loss"] for found in (ranks, alone)]
    assert last[0] == pytest.approx(last[1], rel=1e-10)
    same_gradients(ranks, alone, vocab=VOCAB)
    estimate = tiny_plan(job).estimate
    assert all(rank["traffic"] == planned_traffic(estimate.messages[0]) for rank in ranks)


FORMS: dict[str, dict[str, Any]] = {
    **{name: SHAPES[name] for name in ("gpt", "llama", "latent")},
    "alibi": {"model__position": "alibi"},
    "window": {**SHAPES["llama"], "model__attention_window": 7},
}


@pytest.mark.parametrize("name", FORMS)
def test_a_packed_row_is_its_conversations_alone(chats, name: str) -> None:
    """The sum of losses and its gradients, of one row and of a sequence for each of its conversations."""
    keys = {key: value for key, value in SETTINGS.items() if key.startswith("model.")}
    keys |= {key.replace("__", "."): value for key, value in FORMS[name].items()} | {"model.seq_length": LENGTH}
    shape = ModelSpec.model_validate({key.removeprefix("model."): value for key, value in keys.items()})
    module = build_module(shape, TrainingSpec(), ShardContext(dtype=torch.float64))
    initialise(module, 1)
    rows = ChatRows(open_prepared(chats["best-fit"]).train.open(), LENGTH)
    number = max(range(len(rows)), key=lambda i: len(rows.pieces(i)))
    assert len(rows.pieces(number)) > 2

    def loss(parts: list[tuple[int, int]]) -> torch.Tensor:
        row, total = rows.row(number), torch.zeros((), dtype=torch.float64)
        for start, stop in parts:
            fields = {key: torch.from_numpy(value[None, start:stop].copy()) for key, value in row.items()}
            fields["weights"] = fields.pop("mask").double()
            if len(parts) > 1:
                del fields["places"]
            total = total + module.loss(Batch(torch.tensor([0]), fields), None)
        return total

    ends = np.cumsum(rows.pieces(number)[:, 2]).tolist()
    losses, gradients = [], []
    for parts in ([(0, LENGTH)], list(zip([0, *ends], ends, strict=False))):
        module.zero_grad()
        losses.append(loss(parts))
        losses[-1].backward()
        gradients.append([parameter.grad.clone() for parameter in module.parameters()])
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for packed, alone in zip(*gradients, strict=True):
        assert (packed - alone).abs().max() <= 1e-12 * max(1.0, alone.abs().max())


def test_the_loss_is_the_mean_over_counted_tokens(chats, tmp_path) -> None:
    """By one process, before its first update, from all rows of its step."""
    job = job_of(chats, "gpt", "best-fit", {"training__dropout": 0.0, "training__attention_dropout": 0.0})
    record = train(job, tmp_path)[0]["records"][0]
    rows = ChatRows(open_prepared(chats["best-fit"]).train.open(), LENGTH)
    fields = ChatSamples(rows, seed=job.training.seed, together=8).batch(range(8))
    assert job.model is not None
    module = build_module(job.model, job.training, ShardContext(dtype=torch.float64))
    initialise(module, job.training.seed)
    batch = Batch(torch.arange(8), {name: torch.from_numpy(array) for name, array in fields.items()})
    logits = module(batch)
    counted = batch["weights"] > 0
    expected = torch.nn.functional.cross_entropy(logits[counted], batch["targets"][counted])
    assert record["loss"] == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2-sp", "cp2", "dp2-zero3", "pp2", "tp2-cp2-full"])
def test_adapters_on_conversations(chats, tmp_path, name: str) -> None:
    adapter = {"training__adapter__rank": 4, "training__adapter__dropout": 0.1}
    jobs = [job_of(chats, "llama", "best-fit", {**adapter, **how}) for how in ({}, LAYOUTS[name])]
    alone, ranks = (train(job, tmp_path / str(number)) for number, job in enumerate(jobs))
    for figure in ("loss", "grad_norm"):
        assert column(ranks, figure) == pytest.approx(column(alone, figure), rel=1e-10)


MEMORY = [
    ("gpt", mode) for mode in ("dry", "tp2-sp", "full", "selective", "cp2", "cuda", "cuda-full", "cuda-dropout", "pp2")
]
MEMORY += [(shape, mode) for shape in ("llama", "latent") for mode in ("dry", "cp2-dry", "cuda")]


@pytest.mark.parametrize("packing", ["best-fit", "none"])
@pytest.mark.parametrize(
    ("shape", "mode"), [pytest.param(*one, marks=[pytest.mark.slow] * (one != ("gpt", "cuda"))) for one in MEMORY]
)
def test_a_peak_is_as_planned(shape: str, mode: str, packing: str) -> None:
    job = memory_job(shape, {**MEMORY_LAYOUTS[mode], "data__chat__packing": packing})
    topology = job_topology(job)
    for stage, memory in enumerate(tiny_plan(job).estimate.memory):
        account = rehearse_rank(job, topology, topology.rank(pp=stage))
        assert account["failure"] is None, "".join(account["failure"]["traceback"])
        assert memory.tensor_bytes == pytest.approx(account["peak_bytes"], rel=0.02)
        assert memory.activation_bytes == pytest.approx(account["activation_bytes"], rel=0.01)
