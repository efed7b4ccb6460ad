"""Adapters from and to Hugging Face's peft: the same logits as its own, on random small models."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpctl.core.shard import Shard
from mpctl.model.families import get_table
from mpctl.records.checkpoint.manifest import Manifest, ParameterPlacement, ShardFile, ShardRecord
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.checkpoint.tensor_file import Entry, in_file_order, write_file
from mpctl.train.families.implementation import Batch, build_module
from mpctl.train.layers.parameters import shard_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from mpctl.train.weights.hub import open_hub
from mpctl.train.weights.origin import FRAGMENT, open_origin
from mpctl.train.weights.peft_export import export_adapters
from mpctl.train.weights.peft_import import import_adapters
from mpctl.train.weights.values import Values, base_reference
from mpctl.train.weights.writer import export_weights, fragment
from tests.train.weights.hub import Truth, load, tokens

peft = pytest.importorskip("peft")
Truths = Callable[[str], Truth]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama all-linear, rslora": ("llama31-sharded", {"target_modules": "all-linear", "use_rslora": True}),
    "llama dora": ("llama", {"target_modules": ["q_proj", "o_proj", "up_proj"], "use_dora": True}),
    "gpt2 dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "use_dora": True}),
    "llama head": ("llama", {"target_modules": ["o_proj", "lm_head"]}),
    "llama, saved": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    "llama, one layer": ("llama", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "llama, patterns": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
            "alpha_pattern": {"k_proj": 5},
        },
    ),
    "qwen3": ("qwen3-sharded", {"target_modules": ["q_proj", "k_proj", "gate_proj"]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"]}),
    "gpt2 attention alone": ("gpt2", {"target_modules": ["attn.c_proj", "c_attn"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3"]}),
    "mixtral, attention": ("mixtral", {"target_modules": ["q_proj", "o_proj"]}),
    "mixtral, down": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}),
    "mixtral, up": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}),
    "qwen3_moe": ("qwen3_moe-sharded", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    "deepseek": ("deepseek_v2", {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}),
}
every = pytest.mark.parametrize("kind", KINDS)


def theirs(folder: Path, **keys: Any) -> Any:
    """A model of peft with random adapters."""
    config = peft.LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", base_model_name_or_path=str(folder), **keys)
    model = peft.get_peft_model(load(folder), config).eval()
    randomize(model)
    return model


def randomize(model: Any) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_length = "magnitude" in name
                drawn = torch.rand_like(parameter) + 0.5 if is_length else torch.randn_like(parameter) * 0.2
                parameter.copy_(parameter * drawn if is_length else drawn)


def logits(model: Any) -> Tensor:
    """In float64, in which experts' kernels have no grouped products."""
    model = model.double()
    model.config._experts_implementation = "eager"
    with torch.no_grad():
        found: Tensor = model(tokens()[0]).logits
    return found


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To 1e-6 of the largest logit."""
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.fixture(scope="module")
def made(truths: Truths, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Tensor, Tensor]]:
    """Each kind's folder of peft, with its logits and those of its base, in float64."""
    root, found = tmp_path_factory.mktemp("peft"), dict[str, tuple[Path, Tensor, Tensor]]()

    def get(kind: str) -> tuple[Path, Tensor, Tensor]:
        if kind not in found:
            base, keys = KINDS[kind]
            model = theirs(truths(base).folder, **keys)
            model.save_pretrained(root / kind)
            found[kind] = root / kind, logits(model), truths(base).logits
        return found[kind]

    return get


@every
def test_an_imported_adapter_has_their_logits(
    kind: str, made: Callable[[str], tuple[Path, Tensor, Tensor]], tmp_path: Path
) -> None:
    folder, expected, base = made(kind)
    assert (expected - base).abs().max() > 0.05
    import_adapters(folder, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "merged")
    assert_same(logits(load(tmp_path / "merged")), expected)


@every
def test_an_imported_adapter_goes_back_with_their_logits(
    kind: str, made: Callable[[str], tuple[Path, Tensor, Tensor]], truths: Truths, tmp_path: Path
) -> None:
    folder, expected, _ = made(kind)
    import_adapters(folder, tmp_path / "ours")
    export_adapters(tmp_path / "ours", tmp_path / "theirs")
    again = peft.PeftModel.from_pretrained(load(truths(KINDS[kind][0]).folder), tmp_path / "theirs").eval()
    assert_same(logits(again), expected)


OURS = {
    "gpt2": ["all-linear"],  # q, k and v apart, in c_attn's 3 r
    "llama": ["linear_qkv", "gate_up_proj"],  # fused, of three and two modules
    "mixtral": ["mlp", "k_proj"],
    "qwen2_moe": ["all-linear"],
}


@pytest.mark.parametrize("kind", OURS)
def test_adapters_of_our_targets_have_the_same_logits_in_peft(kind: str, truths: Truths, tmp_path: Path) -> None:
    """A checkpoint with random adapters, merged by us and applied by peft."""
    base = truths(kind).folder
    adapter = AdapterSpec(rank=3, alpha=5.0, targets=OURS[kind])
    ours = save_adapters(tmp_path / "ours", base, adapter)
    export_weights(ours, tmp_path / "merged")
    export_adapters(ours, tmp_path / "theirs")
    expected = logits(load(tmp_path / "merged"))
    assert (expected - truths(kind).logits).abs().max() > 0.05
    assert_same(logits(peft.PeftModel.from_pretrained(load(base), tmp_path / "theirs").eval()), expected)
    import_adapters(tmp_path / "theirs", tmp_path / "again")
    export_weights(tmp_path / "again", tmp_path / "merged-again")
    assert_same(logits(load(tmp_path / "merged-again")), expected)


def save_adapters(out: Path, base: Path, adapter: AdapterSpec) -> Path:
    """An import with random adapters of ours over a Hugging Face directory."""
    hub, checkpoint = open_hub(base), out / "checkpoints" / "step-0"
    checkpoint.mkdir(parents=True)
    table = get_table(hub.model, tp=1, adapter=adapter)
    draw = torch.Generator().manual_seed(7)
    trained = [weight for weight in table.weights() if not table.is_frozen(weight.name)]
    values = {weight.name: 0.2 * torch.randn(weight.shape, generator=draw) for weight in trained}
    entries = in_file_order(
        [Entry(f"{name}/value", "F32", tuple(value.shape), partial(values.get, name)) for name, value in values.items()]
    )
    shard = ShardFile(name="shard-0", coords={"pp": 0, "tp": 0})
    file = write_file(shard.path(checkpoint), entries, lambda count: None)
    placements = {name: ParameterPlacement.of(Shard(tuple(value.shape))) for name, value in values.items()}
    ShardRecord.of(file, placements, []).write(shard.record_path(checkpoint))
    Manifest(step=0, shards=[shard], base=base_reference(base, hub)).write(checkpoint)
    (out / FRAGMENT).write_text(fragment(hub.model, out, tokenizer=False, adapter=adapter))
    return out


def test_a_round_trip_gives_the_same_adapters(truths: Truths, tmp_path: Path) -> None:
    """Ranks of fused modules are split again, so that a run goes on with what it had."""
    adapter = AdapterSpec(rank=3, alpha=5.0, targets=["q_proj", "k_proj", "v_proj", "c_proj"])
    ours = save_adapters(tmp_path / "ours", truths("gpt2").folder, adapter)
    export_adapters(ours, tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    assert (config["r"], config["rank_pattern"], config["alpha_pattern"]) == (3, {"c_attn": 9}, {"c_attn": 15})
    assert config["target_modules"] == ["c_attn", "c_proj"]
    import_adapters(tmp_path / "theirs", tmp_path / "again")
    before, after = open_origin(ours), open_origin(tmp_path / "again")
    assert isinstance(before, SavedModel) and isinstance(after, SavedModel)
    assert after.adapter == adapter
    one, two = Values.of(before), Values.of(after)
    for name in before.names:
        part = Shard(one.checkpoint.shape_of(name)) if one.checkpoint else Shard(())
        assert torch.equal(one.part(name, part), two.part(name, part)), name


@pytest.mark.parametrize(
    "kind", ["llama", "llama dora", "gpt2 dora", "llama, patterns", "qwen3", "gpt2", "mixtral", "qwen2_moe", "deepseek"]
)
def test_our_layers_apply_an_imported_adapter(
    kind: str, made: Callable[[str], tuple[Path, Tensor, Tensor]], tmp_path: Path
) -> None:
    folder, expected, _ = made(kind)
    import_adapters(folder, tmp_path / "ours")
    origin = open_origin(tmp_path / "ours")
    assert isinstance(origin, SavedModel)
    context = ShardContext(Group(), dtype=torch.float64)
    model = build_module(origin.model, TrainingSpec(adapter=origin.adapter), context)
    targets = {name: (shard_of(p), p.data) for name, p in model.named_parameters()}
    assert any(".lora." in name for name in targets)
    Values.of(origin).read(targets)
    with torch.no_grad():
        found = model(Batch(torch.arange(2), {"tokens": tokens()[0]}))
    assert_same(found, expected)
