"""Errors of a directory name file, tensor and both shapes, all at once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mpctl.core.errors import InputError
from mpctl.records.checkpoint.tensor_header import read_header
from mpctl.train.weights.hub import INDEX, SINGLE, open_hub
from mpctl.train.weights.origin import open_origin
from mpctl.train.weights.writer import export_weights, import_weights
from tests.train.weights.hub import Truth, configure, issues_of

Truths = Callable[[str], Truth]


@pytest.fixture
def llama(truths: Truths, tmp_path: Path) -> Path:
    return Path(shutil.copytree(truths("llama").folder, tmp_path / "hf"))


@pytest.fixture
def sharded(truths: Truths, tmp_path: Path) -> Path:
    return Path(shutil.copytree(truths("gpt2-sharded").folder, tmp_path / "hf-sharded"))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of model.safetensors (None: remove); `__` in a name is a dot."""
    held = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        held.pop(name.replace("__", "."), None)
        if tensor is not None:
            held[name.replace("__", ".")] = tensor
    save_file(held, folder / SINGLE)


def test_a_wrong_shape_names_file_tensor_and_both_shapes(llama: Path) -> None:
    change(llama, model__norm__weight=torch.ones(31), model__layers__1__self_attn__k_proj__weight=torch.ones(32, 32))
    said = [str(issue) for issue in issues_of(llama)]
    assert len(said) == 2
    assert all(str(llama / SINGLE) in line for line in said)
    assert any("model.norm.weight is [31]" in s and "needs [32]" in s for s in said)
    assert any("k_proj.weight is [32, 32]" in s and "needs [16, 32]" in s for s in said)


def test_every_kind_of_bad_tensor_at_once(llama: Path) -> None:
    change(
        llama,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.ones(48, 32, dtype=torch.int8),
        model__layers__0__self_attn__q_proj__bias=torch.ones(32),
        model__layers__7__mlp__up_proj__weight=torch.ones(48, 32),
    )
    issues = issues_of(llama)
    assert sorted(issue.rule for issue in issues) == [
        "weights-dtype",
        "weights-foreign",
        "weights-foreign",
        "weights-missing",
    ]
    said = "\n".join(map(str, issues))
    for words in ("up_proj.weight is I8", "q_proj.bias [32]", "model.norm.weight [32]", "layers.7"):
        assert words in said


def test_a_config_of_another_size_is_a_shape_mismatch(llama: Path) -> None:
    configure(llama, intermediate_size=64)
    issues = issues_of(llama)
    assert len(issues) == 6
    assert all("needs" in issue.message and "64" in issue.message for issue in issues)


def test_a_truncated_file(llama: Path) -> None:
    whole = (llama / SINGLE).read_bytes()
    for length in (len(whole) - 1, 200, 8, 3, 0):
        (llama / SINGLE).write_bytes(whole[:length])
        (issue,) = issues_of(llama)
        assert issue.rule == "weights-damaged"
        assert issue.where == str(llama / SINGLE)
        assert "bytes" in issue.message


def test_a_hostile_header(llama: Path) -> None:
    for header in (
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b"\xff\xfe",
        b"[" * 100_000,
    ):
        (llama / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header)
        assert [issue.rule for issue in issues_of(llama)] == ["weights-damaged"]
    (llama / SINGLE).write_bytes((2**62).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="do not hold the header"):
        read_header(llama / SINGLE)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_missing_and_truncated_shards_at_once(sharded: Path) -> None:
    first, second, *_ = shards(sharded)
    first.unlink()
    second.write_bytes(second.read_bytes()[:-4])
    issues = issues_of(sharded)
    assert [issue.where for issue in issues] == [str(first), str(second)]
    assert "No such file" in issues[0].message


def test_a_foreign_shard(sharded: Path) -> None:
    first, second, *_ = shards(sharded)
    shutil.copyfile(first, second)
    issues = issues_of(sharded)
    assert {issue.rule for issue in issues} == {"weights-foreign", "weights-missing"}
    assert {issue.where for issue in issues} == {str(second)}


def test_a_hostile_index(sharded: Path) -> None:
    for index in (
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": "../model.safetensors"}}',
        '{"weight_map": {"a": "/etc/passwd"}}',
    ):
        (sharded / INDEX).write_text(index)
        (issue,) = issues_of(sharded)
        assert (issue.rule, issue.where) == ("weights-damaged", str(sharded / INDEX))


def test_pickles_are_never_opened(llama: Path) -> None:
    (llama / SINGLE).rename(llama / "pytorch_model.bin")
    (issue,) = issues_of(llama)
    assert issue.rule == "weights-pickled"
    assert "save_pretrained" in issue.hint
    (llama / "pytorch_model.bin").unlink()
    assert [issue.rule for issue in issues_of(llama)] == ["weights-missing"]


def test_a_config_that_we_would_compute_otherwise(llama: Path, sharded: Path) -> None:
    text = (llama / "config.json").read_text()
    for keys in (
        {"model_type": "gemma"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "big"}},
        {"rope_parameters": [1]},
    ):
        (llama / "config.json").write_text(text)
        configure(llama, **keys)
        assert len(issues_of(llama)) == 1
    configure(sharded, scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
    assert len(issues_of(sharded)) == 2


HEADS = {
    "gpt2": ("lm_head.weight", "transformer.wte.weight"),
    "llama31-sharded": ("lm_head.weight", "model.embed_tokens.weight"),
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "t5": ("lm_head.weight", "shared.weight"),
}


def one_file(folder: Path, out: Path) -> Path:
    """The same directory with its shards in one file."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("model*"))
    held: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        held |= load_file(path)
    save_file(held, out / SINGLE)
    return out


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_that_is_not_the_word_table_is_refused(kind: str, truths: Truths, tmp_path: Path) -> None:
    head, table = HEADS[kind]
    folder = one_file(truths(kind).folder, tmp_path / "hf")
    words = load_file(folder / SINGLE)[table]
    for bad in (words[:-1], words.half()):
        change(folder, **{head: bad.clone()})
        (issue,) = issues_of(folder)
        assert issue.rule == "weights-untied" and issue.where == str(folder / SINGLE)
        assert f"{head} is {list(bad.shape)}" in issue.message
        assert f"{table}, which it has to equal, {list(words.shape)} F32" in issue.message
        assert issue.hint
    other = words.clone()
    other[[3, 7]] += 1
    change(folder, **{head: other})
    with pytest.raises(InputError) as caught:
        import_weights(folder, tmp_path / "ours")
    (issue,) = caught.value.issues
    assert f"{head} differs from {table}" in issue.message
    assert issue.message.endswith("in 2 rows")
    assert ("tie_word_embeddings" in issue.hint) == (kind != "bert")
    assert not (tmp_path / "ours").exists()
    change(folder, **{head: words.clone()})  # equal: a second copy
    import_weights(folder, tmp_path / "ours")


def test_a_separate_head_is_read_if_the_config_has_one(truths: Truths, tmp_path: Path) -> None:
    folder = one_file(truths("gpt2").folder, tmp_path / "hf")
    head = load_file(folder / SINGLE)["transformer.wte.weight"] + 1
    change(folder, lm_head__weight=head)
    configure(folder, tie_word_embeddings=False)
    import_weights(folder, tmp_path / "ours")
    export_weights(tmp_path / "ours", tmp_path / "theirs")
    assert torch.equal(load_file(tmp_path / "theirs" / SINGLE)["lm_head.weight"], head)


def test_other_copies_of_a_table(truths: Truths, tmp_path: Path) -> None:
    folder = one_file(truths("t5").folder, tmp_path / "hf")
    words = load_file(folder / SINGLE)["shared.weight"]
    change(folder, encoder__embed_tokens__weight=words.clone(), decoder__embed_tokens__weight=words + 1)
    with pytest.raises(InputError, match=r"decoder.embed_tokens.weight differs from shared"):
        import_weights(folder, tmp_path / "ours")


def test_values_that_are_not_finite_are_all_named(llama: Path, tmp_path: Path) -> None:
    values = torch.ones(32, 32)
    values[0, :5] = float("nan")
    change(
        llama, model__norm__weight=torch.full((32,), float("inf")), model__layers__1__self_attn__o_proj__weight=values
    )
    open_hub(llama)  # headers do not tell
    with pytest.raises(InputError) as caught:
        import_weights(llama, tmp_path / "ours")
    said = sorted(issue.message for issue in caught.value.issues)
    assert said == [
        "model.layers.1.self_attn.o_proj.weight: 5 values are NaN or infinite in float32",
        "model.norm.weight: 32 values are NaN or infinite in float32",
    ]
    assert not (tmp_path / "ours").exists()


def test_an_occupied_out_is_left_alone(llama: Path, tmp_path: Path) -> None:
    for out in (tmp_path / "folder", tmp_path / "file"):
        (out if out.name == "file" else out / "kept").parent.mkdir(exist_ok=True)
        kept = out if out.name == "file" else out / "kept"
        kept.write_text("mine")
        for write in (import_weights, export_weights):
            with pytest.raises(InputError) as caught:
                write(llama, out)
            assert caught.value.issues[0].rule == "out-occupied"
        assert kept.read_text() == "mine"


def test_a_failed_import_leaves_nothing(llama: Path, tmp_path: Path) -> None:
    change(llama, model__norm__weight=None)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError):
        import_weights(llama, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_no_origin(llama: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path, llama / "config.json"):
        with pytest.raises(InputError) as caught:
            open_origin(path)
        assert [issue.rule for issue in caught.value.issues] == ["no-weights"]
    with pytest.raises(InputError, match="already"):
        export_weights(llama, tmp_path / "out")


def test_a_damaged_import(llama: Path, tmp_path: Path) -> None:
    import_weights(llama, tmp_path / "ours")
    shard = tmp_path / "ours" / "checkpoints" / "step-0" / "shard-0.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(InputError, match="bytes"):
        open_origin(tmp_path / "ours")
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    open_origin(tmp_path / "ours")  # headers alone do not tell a flipped bit,
    with pytest.raises(InputError, match="sha256"):
        export_weights(tmp_path / "ours", tmp_path / "out")  # whoever reads the bytes does
    record = json.loads(shard.with_suffix(".json").read_text())
    record["parameters"]["layers.0.mlp.up.weight"]["shape"] = [96, 31]
    shard.with_suffix(".json").write_text(json.dumps(record))
    with pytest.raises(InputError, match=r"layers.0.mlp.up.weight: holds \(96, 31\)"):
        open_origin(tmp_path / "ours")
