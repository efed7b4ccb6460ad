"""Adapters on one rank: a model with them is that of W + s B A, and saves what is planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpctl.model.families import get_table
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.activation_shapes import activation_shapes
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.kernels.counter_rng import CounterRNG
from mpctl.train.layers.adapters import Adapter
from mpctl.train.layers.parameters import initialise, partial_kind, shard_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.test_experts import MOE
from tests.train.runtime.tiny import settings

CONTEXT = ShardContext(dtype=torch.float64)
MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "llama": (SHAPES["llama"], ["all-linear", "lm_head"]),
    "fused": (SHAPES["llama"], ["linear_qkv", "gate_up_proj"]),
    "gpt": ({}, ["c_attn", "c_proj", "c_fc"]),
    "latent": (SHAPES["latent"], ["all-linear"]),
    "experts": (MOE, ["all-linear"]),
    "fused experts": (MOE, ["gate_up_proj", "down_proj"]),
}


def job_of(shape: dict[str, Any], adapter: dict[str, Any]) -> Any:
    dry = {"training__dropout": 0.0, "training__attention_dropout": 0.0, "training__dtype": "fp64"}
    return load_job(None, settings(**{**shape, **dry, "training__adapter": {"rank": 4, "alpha": 6.0, **adapter}}))


def made(model: ModelSpec, training: TrainingSpec, context: ShardContext = CONTEXT) -> nn.Module:
    module = build_module(model, training, context)
    initialise(module, 3)
    return module


def batch(model: ModelSpec) -> Batch:
    numbers = torch.arange(2 * model.seq_length).view(2, -1)
    return Batch(torch.arange(2), {"tokens": numbers * 7 % 290, "targets": (numbers * 5 + 1) % 290})


def filled(module: nn.Module) -> nn.Module:
    """With B that is not 0."""
    for name, parameter in module.named_parameters():
        if name.endswith("B.weight"):
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    return module


def adapters(module: nn.Module) -> dict[str, Adapter]:
    return {name: each for name, each in module.named_modules() if isinstance(each, Adapter)}


def matrices(weight: Tensor) -> Tensor:
    """[out, in], or of experts [E, .., in] -> [E, out, in]."""
    return weight if weight.dim() == 2 else weight.flatten(1, -2)


def rows(weight: Tensor, adapter: Adapter) -> Tensor:
    """The rows of W that an adapter is for, as a view."""
    return matrices(weight).narrow(-2, adapter.start, matrices(adapter.B.weight).shape[-2])


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_merged_weights(name: str) -> None:
    """Of W' = W + s B A the gradient is dW'; dA = s B^T dW' and dB = s dW' A^T."""
    shape, targets = MODELS[name]
    job = job_of(shape, {"targets": targets})
    module = filled(made(job.model, job.training))
    merged = made(job.model, job.training.model_copy(update={"adapter": None}))
    found = adapters(module)
    for where, adapter in found.items():
        weight = merged.get_parameter(f"{where.partition('.lora')[0]}.weight")
        a, b = adapter.A.weight, adapter.B.weight
        with torch.no_grad():
            rows(weight, adapter).add_(matrices(b) @ a, alpha=adapter.scale)
    data = batch(job.model)
    losses = [each.loss(data, None) for each in (module, merged)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-12)
    for loss in losses:
        loss.backward()
    assert len(found) > 3
    for where, adapter in found.items():
        weight = merged.get_parameter(f"{where.partition('.lora')[0]}.weight")
        dw = rows(weight.grad, adapter)
        a, b = adapter.A.weight, adapter.B.weight
        torch.testing.assert_close(a.grad, adapter.scale * matrices(b).mT @ dw, rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(b.grad, (adapter.scale * dw @ a.mT).view_as(b), rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "lora") for name in MODELS), ("llama", "dora"), ("gpt", "dora"), ("latent", "dora")]
)
def test_module_and_table_agree(name: str, kind: str, ranks: int) -> None:
    """Names, full and local shapes, and over what gradients are partial sums."""
    shape, targets = MODELS[name]
    job = job_of(shape, {"targets": targets, "kind": kind})
    context = ShardContext(Group(0, ranks), sequence_parallel=ranks > 1)
    with torch.device("meta"):
        module = build_module(job.model, job.training, context)
    table = get_table(job.model, tp=ranks, adapter=job.training.adapter)
    own = {name: (shard_of(p).shape, tuple(p.shape), partial_kind(p)) for name, p in module.named_parameters()}
    views = {"dense": context.grid, "experts": context.expert_view.grid}
    planned = {}
    for weight in table.weights():
        grid = views[weight.view]
        parts = [grid.parts(axes) for axes in grid.weight_axes(weight.dims)]
        local = tuple(size // n for size, n in zip(weight.shape, parts, strict=True))
        planned[weight.name] = weight.shape, local, grid.partial_kind(weight.dims)
    assert own == planned


def test_initial_values_and_what_is_frozen() -> None:
    """A is uniform in +-1/sqrt(in) of the full input, a rank's part a slice of it; B is 0."""
    job = job_of(SHAPES["llama"], {"targets": ["o_proj", "down_proj"]})
    whole, part = (
        dict(made(job.model, job.training, context).named_parameters())
        for context in (CONTEXT, ShardContext(Group(1, 2), dtype=torch.float64))
    )
    first = whole["layers.0.mlp.down.lora.A.weight"]
    bound = job.model.ffn**-0.5
    assert 0.9 * bound < first.abs().max() < bound
    assert first.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert torch.equal(part["layers.0.mlp.down.lora.A.weight"], first[:, job.model.ffn // 2 :])
    assert not torch.equal(first, whole["layers.1.mlp.down.lora.A.weight"])
    assert not whole["layers.0.mlp.down.lora.B.weight"].any()


def test_doras_layer_is_the_formula() -> None:
    """Y = X W^T + (c - 1) D W^T + c s D A^T B^T + b of dropped D, with c = m / |W + s B A| and a constant
    norm (arXiv 2402.09353, section 4.3); with its gradients, of a product with biases and of one of q, k, v."""
    for shape, targets, where in (({}, ["c_attn"], ""), (SHAPES["llama"], ["k_proj"], "key")):
        for dropout in (0.0, 0.5):
            job = job_of(shape, {"targets": targets, "kind": "dora", "dropout": dropout})
            layer = filled(made(job.model, job.training)).get_submodule("layers.0")
            layer.adapter_rng.rng = CounterRNG(0, 1, torch.arange(2)).within("layers.0")
            base = layer.attention.qkv
            adapter = base.lora[where] if where else base.lora
            base.weight.requires_grad_(False)
            a, b, m = adapter.A.weight, adapter.B.weight, adapter.magnitude
            with torch.no_grad():
                m.copy_(torch.rand(m.shape, dtype=m.dtype, generator=torch.Generator().manual_seed(2)) + 0.5)
                if base.bias is not None:
                    base.bias.copy_(torch.arange(len(base.bias)) / 10.0)
            x = torch.randn(2, job.model.seq_length, job.model.hidden, dtype=m.dtype, requires_grad=True)
            dropped = adapter.dropout(x) if dropout else x
            assert dropout == 0 or (dropped == 0).any()
            own = base.weight[adapter.start : adapter.start + len(b)]
            c = m / (own + adapter.scale * b @ a).norm(dim=1).detach()
            added = (c - 1) * (dropped @ own.mT) + c * adapter.scale * (dropped @ a.mT @ b.mT)
            widths = adapter.start, len(base.weight) - adapter.start - len(b)
            bias = 0.0 if base.bias is None else base.bias.detach()
            expected = x @ base.weight.mT + nn.functional.pad(added, widths) + bias
            found = base(x)
            found = found if isinstance(found, Tensor) else found[0] + bias
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            dy, inputs = torch.randn(found.shape, dtype=m.dtype), (x, a, b, m)
            for one, other in zip(*(torch.autograd.grad(y, inputs, dy) for y in (found, expected)), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def saved_bytes(layer: nn.Module, x: Tensor, rng: CounterRNG | None, tables: Any) -> int:
    """Bytes that a layer's forward saves for backward, without parameters and rotary tables."""
    outside = {p.untyped_storage().data_ptr() for p in layer.parameters()} | {
        t.untyped_storage().data_ptr() for t in tables
    }
    seen: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(x, rng, cos_sin=tables)
    assert result.requires_grad
    return sum(seen.values())


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_layer_saves_what_is_planned(targets: list[str], kind: str, dropout: float) -> None:
    """X once for all adapters, with dropout a dropped X for each and no mask; X A; nothing of a frozen
    product; of dora a result of each adapter, and the norms of its rows."""
    job = job_of(SHAPES["llama"], {"targets": targets, "dropout": dropout, "kind": kind})
    layout, module = JobLayout.of(job), made(job.model, job.training)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not layout.table.is_frozen(name))
    layer, samples = module.get_submodule("layers.1"), job.training.micro_batch_size
    x = torch.randn(samples, job.model.seq_length, job.model.hidden, dtype=torch.float64, requires_grad=True)
    tables = module._table(layer, job.model.seq_length, x)
    found = saved_bytes(layer, x, CounterRNG(0, 1, torch.arange(samples)), tables)
    shapes, kept = activation_shapes(layout), set[str]()
    saved = (tensor for one in layout.table.stacks[0].block_of(1).flat for tensor in one.saved(shapes, kept))
    assert found == shapes.bytes_of(saved)


def test_every_adapter_draws_its_own_mask() -> None:
    job = job_of(SHAPES["llama"], {"targets": ["q_proj", "v_proj"], "dropout": 0.5})
    module = made(job.model, job.training)
    layer = module.get_submodule("layers.0")
    layer.adapter_rng.rng = CounterRNG(0, 1, torch.arange(2)).within("layers.0")
    x = torch.ones(2, job.model.seq_length, job.model.hidden, dtype=torch.float64)
    query, value = (each.dropout(x) for each in layer.attention.qkv.lora.values())
    assert not torch.equal(query, value)
    assert query.mean().item() == pytest.approx(1, abs=0.1)
    assert module.rng_sites()["layers.0"][-2:] == ("attention.qkv.lora.query", "attention.qkv.lora.value")
    layer.adapter_rng.rng = None
    assert layer.attention.qkv.lora["query"].dropout(x) is x
