"""Layers that predict tokens further ahead: by hand, by their formula, and in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mpctl.run.launch.summary import planned_traffic
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.gpt.module import GPT
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.prediction import mean_of_predictions, tokens_ahead
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.train.layers.oracle import close, fill
from tests.train.runtime.test_axes import SHAPES, same_copies
from tests.train.runtime.test_experts import same_gradients
from tests.train.runtime.tiny import column, make_data, tiny_job, tiny_plan, train

S = 8
COMMON = {
    "layers": 2,
    "hidden": 16,
    "heads": 4,
    "vocab": 120,
    "seq_length": S,
    "vocab_divisor": 2,
    "position": "rotary",
    "norm": "rmsnorm",
    "tied_embeddings": False,
}
EXPERTS = {
    "model__experts": 8,
    "model__experts_per_token": 2,
    "model__expert_ffn": 24,
    "model__shared_expert_ffn": 16,
    "model__dense_layers": 1,
    "model__router_score": "sigmoid",
    "model__router_bias": True,
    "training__moe_bias_update_rate": 0.02,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**SHAPES["llama"], "model__mtp_layers": 2},
    "tied": {"model__mtp_layers": 1},
    "deepseek": {**SHAPES["latent"], **EXPERTS, "model__mtp_layers": 1},
}
SP: dict[str, Any] = {"parallel__sequence_parallel": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"parallel__pp": 2},
    "tp2-sp": {"tp": 2, **SP, "parallel__tp_comm_overlap": True},
    "tp2-sp-full": {"tp": 2, **SP, "training__recompute": "full"},
    "ep2-zero3": {"dp": 2, "parallel__zero": 3},
    "zero-bubble": {"tp": 2, "parallel__pp": 2, "parallel__schedule": "zero-bubble", **SP},
}
QUICK = {("llama", "tp2-sp"), ("tied", "pp2"), ("deepseek", "pp2")}
CASES = [
    pytest.param(model, layout, marks=[pytest.mark.slow] * ((model, layout) not in QUICK))
    for model in MODELS
    for layout in LAYOUTS
]


def test_tokens_by_hand() -> None:
    targets = torch.tensor([[6, 7, 8, 9]])
    assert tokens_ahead(targets, 0).tolist() == [[6, 7, 8, 9]]
    assert tokens_ahead(targets, 1).tolist() == [[7, 8, 9, 0]]
    losses = torch.tensor([[1.0, 2.0, 6.0, 100.0], [3.0, 3.0, 3.0, 100.0]])
    assert mean_of_predictions(losses, 1) == 3 + 3


def _made(coefficient: float, mtp_layers: int = 2) -> GPT:
    model = ModelSpec.model_validate({**COMMON, "mtp_layers": mtp_layers})
    training = TrainingSpec(mtp_loss_coeff=coefficient)
    made = build_module(model, training, ShardContext(dtype=torch.float64))
    assert isinstance(made, GPT)
    for module in (made.embedding, made.layers, made.final_norm, made.head, made.mtp):
        assert module is not None
        fill(module)
    return made


def _batch() -> Batch:
    text = torch.randint(0, 120, (2, S + 1), generator=torch.Generator().manual_seed(5))
    return Batch(torch.arange(2), {"tokens": text[:, :-1], "targets": text[:, 1:]})


def _gradients(module: GPT, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(names, parameters, found, strict=True)
    return {name: torch.zeros_like(p) if grad is None else grad for name, p, grad in pairs}


def _formula(module: GPT, batch: Batch) -> tuple[Tensor, Tensor]:
    """The loss of the next token, and those of the two after it, from whole logits."""
    assert module.embedding is not None and isinstance(module.head, torch.nn.Module)
    tokens, targets = batch["tokens"], batch["targets"]
    word: Tensor = module.embedding.get_parameter("word.weight")
    head: Tensor = module.head.get_parameter("weight")

    def loss(hidden: Tensor, skipped: int) -> Tensor:
        logits = (hidden @ head.T)[:, : S - skipped, :120]
        wanted = targets[:, skipped:]
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) * len(tokens)

    hidden = word[tokens]
    for layer in module.layers.values():
        hidden = layer(hidden)
    hidden, further = module.final_norm(hidden), []
    first = loss(hidden, 0)
    for number, layer in enumerate(module.mtp.values(), 1):
        rows = [targets[:, number - 1 :], torch.zeros(len(tokens), number - 1, dtype=torch.int64)]
        ahead = layer.get_submodule("embedding_norm")(word[torch.cat(rows, 1)])
        joined = torch.cat((ahead, layer.get_submodule("hidden_norm")(hidden)), -1)
        hidden = layer(joined @ layer.get_parameter("projection.weight").T)
        hidden = layer.get_submodule("final_norm")(hidden)
        further.append(loss(hidden, number))
    return first, sum(further, torch.zeros(()))


def test_gradients_are_those_of_the_weighted_losses() -> None:
    module, batch = _made(0.3), _batch()
    first, further = _formula(module, batch)
    loss = module.loss(batch, None)
    close(loss.detach(), first.detach())
    expected = _gradients(module, first + 0.3 / 2 * further)
    for name, gradient in _gradients(module, loss).items():
        close(gradient, expected[name])
        assert gradient.abs().max() > 0, name


def test_it_costs_nothing_where_nothing_is_trained() -> None:
    module, batch = _made(0.3), _batch()
    calls: list[str] = []
    for layer in module.mtp.values():
        layer.register_forward_hook(lambda *_: calls.append("mtp"))
    with torch.no_grad():
        close(module.loss(batch, None), _made(0.3, mtp_layers=1).loss(batch, None).detach())
    assert not calls
    module.loss(batch, None)
    assert calls == ["mtp", "mtp"]


def test_a_split_sequence_is_refused() -> None:
    model = ModelSpec.model_validate({**COMMON, "mtp_layers": 1})
    with pytest.raises(ValueError, match="with cp 2: it runs with cp 1"):
        build_module(model, TrainingSpec(), ShardContext(cp=Group(0, 2, name="cp")))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("mtp"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory):
    """Trainings of one process, by model."""
    done: dict[str, list[dict[str, Any]]] = {}

    def trained(model: str) -> list[dict[str, Any]]:
        if model not in done:
            done[model] = train(_job(data, model, {}), tmp_path_factory.mktemp("one"))
        return done[model]

    return trained


def _job(data: Path, model: str, layout: dict[str, Any]):
    ranks = layout.get("tp", 1) * layout.get("dp", 1) * layout.get("parallel__pp", 1)
    experts = {"parallel__ep": 2} if model == "deepseek" and "dp" in layout else {}
    return tiny_job(
        data,
        **{
            **MODELS[model],
            **layout,
            **experts,
            "cluster__gpus_per_node": ranks,
            "training__dtype": "fp64",
            "training__steps": 4,
            "checkpoint__interval": 0,
            "checkpoint__at_end": False,
        },
    )


@pytest.mark.parametrize(("model", "layout"), CASES)
@pytest.mark.quick(1)
def test_a_layout_changes_nothing_and_the_plan_is_what_runs(
    data: Path, alone, tmp_path: Path, model: str, layout: str
) -> None:
    job = _job(data, model, LAYOUTS[layout])
    ranks, one = train(job, tmp_path, timeout=120), alone(model)
    for name in ("loss", "grad_norm"):
        assert column(ranks, name) == pytest.approx(column(one, name), rel=1e-10)
    same_copies(ranks)
    assert any(name.startswith("mtp.0.") for name in same_gradients(ranks, one))
    estimate = tiny_plan(job).estimate
    for rank in ranks:
        stage = rank["coords"]["pp"]
        assert rank["count"] == estimate.memory[stage].parameters
        assert rank["traffic"] == planned_traffic(estimate.messages[stage])
        sent = rank["validation"]  # in which no layer predicts further tokens
        planned = estimate.validation(stage, rank["coords"]["dp"], sent["samples"])
        assert sent["traffic"] == planned_traffic(planned)
