"""transformers is the oracle: its logits and gradients, from its files and back into them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec
from mpctl.train.families.implementation import Batch, FamilyModule, build_module
from mpctl.train.layers.parameters import assemble, partial_kind, shard_of
from mpctl.train.layers.shard_context import ShardContext
from mpctl.train.transport.group import Group
from mpctl.train.weights.hub import open_hub
from mpctl.train.weights.names import get_scheme, rows_of
from mpctl.train.weights.origin import differences, open_origin
from mpctl.train.weights.reader import fill
from mpctl.train.weights.writer import export_weights, hub_config, import_weights
from tests.ranks import run_ranks
from tests.shards import plain, shard_from
from tests.train.weights.hub import KINDS, VOCAB, Truth, answer, fields, load, summed_loss, tokens

Truths = Callable[[str], Truth]
every = pytest.mark.parametrize("kind", KINDS)


def built(folder: Path, group: Group) -> FamilyModule:
    """The rank's share of the model in a Hugging Face directory; whatever was there is written
    over."""
    hub = open_hub(folder)
    model = build_module(hub.model, TrainingSpec(), ShardContext(group, dtype=torch.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    fill(hub, {name: (shard_of(p), p.data) for name, p in model.named_parameters()})
    return model


def answer_of_ours(model: FamilyModule, asked: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """As hub.answer has it, of this rank's words."""
    with torch.no_grad():
        said = model(Batch(torch.arange(2), asked))
    return list(said) if isinstance(said, tuple) else [said]


def _rank(rank: int, size: int, folder: str, kind: str) -> dict[str, Any]:
    group = Group(rank, size, torch.distributed.group.WORLD) if size > 1 else Group()
    model, asked = built(Path(folder), group), fields(kind)
    said = answer_of_ours(model, asked)
    loss = model.loss(Batch(torch.arange(2), asked), None)
    loss.backward()
    for parameter in model.parameters():
        if partial_kind(parameter):
            parameter.grad = group.all_reduce(parameter.grad)
    return {
        "answer": said,
        "loss": float(loss.detach()),
        "gradients": {name: (plain(shard), p.grad) for name, p in model.named_parameters() for shard in [shard_of(p)]},
    }


def assert_close(found: Any, expected: Any) -> None:
    """Each of a list, to 1e-5 of the largest number in it."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def whole(parts: list[Any]) -> torch.Tensor:
    return assemble([shard_from(shard) for shard, _ in parts], [piece for _, piece in parts])


def theirs(row: Any, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    """Their gradients of one row of ours, laid out as ours."""
    return torch.cat([gradients[p.name].T if p.transposed else gradients[p.name] for p in row.pieces])


def _ranks(rank: int, size: int, folders: dict[str, str]) -> dict[str, Any]:
    return {kind: _rank(rank, size, folder, kind) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def two_ranks(truths: Truths) -> list[dict[str, Any]]:
    """The results of each of two ranks, by kind; they start once for all kinds."""
    return run_ranks(_ranks, 2, {kind: str(truths(kind).folder) for kind in KINDS})


@every
@pytest.mark.parametrize("tp", [1, 2])
def test_logits_and_every_gradient_are_theirs(
    kind: str, tp: int, truths: Truths, request: pytest.FixtureRequest
) -> None:
    truth = truths(kind)
    if tp == 1:
        ranks = [_rank(0, 1, str(truth.folder), kind)]
    else:
        ranks = [rank[kind] for rank in request.getfixturevalue("two_ranks")]
    logits = torch.cat([rank["answer"][0] for rank in ranks], -1)
    assert_close(logits, truth.logits)
    for rank in ranks:
        assert_close(rank["answer"][1:], truth.answer[1:])
        loss = summed_loss(truth.answer, fields(kind))
        assert rank["loss"] == pytest.approx(float(loss), rel=1e-5)
    rows = rows_of(open_hub(truth.folder).model)
    assert rows.keys() == ranks[0]["gradients"].keys()
    for name, row in rows.items():
        ours = whole([rank["gradients"][name] for rank in ranks])[: row.shape[0]]
        expected = theirs(row, truth.gradients)
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-7, name


def test_padding_rows_are_zeros(truths: Truths) -> None:
    for rank in range(2):
        weight = built(truths("gpt2").folder, Group(rank, 2)).embedding.word.weight
        assert len(weight) == 256
        assert weight.isfinite().all()
        assert weight[-(512 - VOCAB) :].eq(0).all() == (rank == 1)


@every
def test_import_then_export_gives_the_same_tensors(kind: str, truths: Truths, tmp_path: Path) -> None:
    truth = truths(kind)
    import_weights(truth.folder, tmp_path / "ours")
    assert [step for step, _ in list_checkpoints(tmp_path / "ours" / "checkpoints")] == [0]
    written = export_weights(tmp_path / "ours", tmp_path / "theirs", shard_bytes=30_000)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    before, after = open_hub(truth.folder), open_hub(tmp_path / "theirs")
    assert after.model == before.model == written.model
    for name, held in before.tensors.items():
        with safe_open(held.path, "pt") as one, safe_open(after.tensors[name].path, "pt") as two:
            assert torch.equal(one.get_tensor(name), two.get_tensor(name)), name
    with torch.no_grad():
        assert_close(answer(load(tmp_path / "theirs"), kind), truth.answer)


def test_an_import_is_one_file_when_it_fits(truths: Truths, tmp_path: Path) -> None:
    import_weights(truths("llama").folder, tmp_path / "ours")
    written = export_weights(tmp_path / "ours", tmp_path / "theirs")
    assert written.files == ("config.json", "model.safetensors")
    assert written.parameters == sum(torch.Size(row.shape).numel() for row in rows_of(written.model).values())
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]


def test_sixteen_bit_weights_stay_sixteen_bit(truths: Truths, tmp_path: Path) -> None:
    model = load(truths("llama").folder).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "bf16")
    import_weights(tmp_path / "bf16", tmp_path / "ours")
    written = export_weights(tmp_path / "ours", tmp_path / "theirs")
    assert written.dtype == "BF16"
    hub = open_hub(tmp_path / "theirs")
    assert {held.dtype for held in hub.tensors.values()} == {"BF16"}


def test_a_model_saved_without_its_head_reads_the_same(truths: Truths, tmp_path: Path) -> None:
    model = load(truths("gpt2").folder)
    model.transformer.save_pretrained(tmp_path / "bare")
    ours = built(tmp_path / "bare", Group())
    with torch.no_grad():
        logits = ours(Batch(torch.arange(2), {"tokens": tokens()[0]}))
    assert torch.allclose(logits, truths("gpt2").logits, rtol=1e-4, atol=1e-5)


SHAPE: dict[str, Any] = {"layers": 2, "hidden": 32, "heads": 4, "vocab": 300, "seq_length": 32}
BERT: dict[str, Any] = {**SHAPE, "family": "bert"}
T5: dict[str, Any] = {
    **SHAPE,
    "family": "t5",
    "position": "relative",
    "norm": "rmsnorm",
    "bias": False,
    "activation": "relu",
    "decoder_layers": 3,
    "decoder_seq_length": 12,
}
ROTARY: dict[str, Any] = {**SHAPE, "position": "rotary", "norm": "rmsnorm", "activation": "swiglu"}


def test_a_shape_that_no_class_expresses_is_refused() -> None:
    for keys, where in (
        ({**SHAPE, "position": "none"}, {"model.position"}),
        ({**SHAPE, "norm": "rmsnorm", "bias": False}, {"model.norm", "model.bias"}),
        ({**SHAPE, "kv_heads": 2, "head_dim": 16}, {"model.kv_heads", "model.head_dim"}),
        ({**SHAPE, "activation": "geglu"}, {"model.activation"}),
        ({**ROTARY, "norm": "layernorm", "activation": "gelu"}, {"model.norm", "model.activation"}),
        ({**SHAPE, "family": "glm"}, {"model.family"}),
        (
            {**BERT, "norm_order": "pre", "tied_embeddings": False, "activation": "geglu_tanh"},
            {"model.norm_order", "model.tied_embeddings", "model.activation"},
        ),
        ({**BERT, "head_dim": 16, "position": "learned"}, {"model.head_dim"}),
        ({**T5, "bias": True, "norm": "layernorm"}, {"model.bias", "model.norm"}),
        ({**T5, "kv_heads": 2}, {"model.kv_heads"}),
        ({**T5, "position": "rotary"}, {"model.position"}),
    ):
        with pytest.raises(InputError) as caught:
            get_scheme(ModelSpec(**keys))
        assert {issue.where for issue in caught.value.issues} == where


def test_our_config_describes_our_model(tmp_path: Path) -> None:
    for keys in (
        SHAPE,
        {**SHAPE, "activation": "gelu_tanh", "tied_embeddings": False, "ffn": 100},
        {**ROTARY, "bias": True, "kv_heads": 2, "rotary_base": 5e5, "norm_epsilon": 1e-6},
        {**ROTARY, "bias": False, "activation": "geglu", "tied_embeddings": False},
        {**ROTARY, "bias": False, "activation": "geglu_tanh"},
        {**BERT, "norm_epsilon": 1e-12},
        {**BERT, "activation": "gelu_tanh", "token_types": 3, "ffn": 100, "max_positions": 64},
        T5,
        {**T5, "activation": "geglu_tanh", "tied_embeddings": False, "head_dim": 16},
        {**T5, "activation": "geglu", "relative_buckets": 8, "relative_max_distance": 20},
        {**T5, "activation": "swiglu", "norm_epsilon": 1e-5},
        {**T5, "activation": "gelu_tanh"},
    ):
        model = ModelSpec(**keys)
        (tmp_path / "config.json").write_text(json.dumps(hub_config(model, "F32", {})))
        again = load_job(None, {"model.hf_config": str(tmp_path)}).model
        assert again is not None
        assert list(differences(model, again, tmp_path)) == []


def limit_of(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])


def save_run(folder: Path, like: Path, **settings: Any) -> Path:
    """A run as a launch leaves it, with the checkpoint of an import."""
    shutil.copytree(like / "checkpoints", folder / "checkpoints")
    (folder / "job.json").write_text(load_job(None, settings).model_dump_json())
    return folder


def test_a_llama_trained_on_shorter_sequences_keeps_its_limit(truths: Truths, tmp_path: Path) -> None:
    hub = truths("llama").folder
    import_weights(hub, ours := tmp_path / "ours")
    shorter = {"model.hf_config": str(hub), "model.seq_length": 16}
    export_weights(save_run(tmp_path / "one", ours, **shorter), tmp_path / "hf-one")
    assert limit_of(tmp_path / "hf-one") == limit_of(hub) == 32
    # A shape that does not name the limit, started from weights that do, and from those again.
    model = open_hub(hub).model.model_dump(exclude={"max_positions", "seq_length"})
    shape = {"model": {**model, "seq_length": 16}}
    two = save_run(tmp_path / "two", ours, **shape, **{"training.init_from": str(ours)})
    three = save_run(tmp_path / "three", ours, **shape, **{"training.init_from": str(two)})
    export_weights(three, tmp_path / "hf-three")
    assert limit_of(tmp_path / "hf-three") == 32
    # On longer ones, and of its own.
    export_weights(save_run(tmp_path / "four", ours, **shape), tmp_path / "hf-four")
    assert limit_of(tmp_path / "hf-four") == 16
    longer = {"model.hf_config": str(hub), "model.seq_length": 64}
    export_weights(save_run(tmp_path / "five", ours, **longer), tmp_path / "hf-five")
    assert limit_of(tmp_path / "hf-five") == 64


def test_an_import_is_an_origin(truths: Truths, tmp_path: Path) -> None:
    import_weights(truths("llama31-sharded").folder, tmp_path / "ours")
    origin = open_origin(tmp_path / "ours")
    assert isinstance(origin, SavedModel)
    assert origin.model == open_hub(truths("llama31-sharded").folder).model
    assert origin.model.rotary_scaling is not None
