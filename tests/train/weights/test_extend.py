"""Added rows are means of old rows, the same bits from any file, for any rank of any layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.core.sharding import local_range, padded_vocab
from mpctl.model.families import get_table
from mpctl.records.checkpoint.manifest import MANIFEST, sha256
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.tensor_file import ShardReader
from mpctl.train.data.extend import TokenizerExtension
from mpctl.train.layers.parameters import assemble
from mpctl.train.weights import extend
from mpctl.train.weights.extend import extended_rows, fill_tables, row_reader, vocabulary_tables
from mpctl.train.weights.hub import Hub
from mpctl.train.weights.origin import is_extended, open_origin, origin_issues
from mpctl.train.weights.reader import Targets
from mpctl.train.weights.writer import import_weights
from tests.train.checkpoint.shards import shard_path
from tests.train.weights.hub import VOCAB, Truth, load

Truths = Callable[[str], Truth]
ADDED = 40
PIECES = tuple(tuple((7 * k + 31 * j * j) % VOCAB for j in range(2 + k % 5)) for k in range(ADDED))
EXTENSION = TokenizerExtension(VOCAB, "0" * 64, "f" * 64, PIECES)
SEED = -7.0  # stands for what the seed drew


def tiny(pieces: Sequence[tuple[int, ...]], old: int) -> TokenizerExtension:
    return TokenizerExtension(old, "0" * 64, "f" * 64, tuple(pieces))


def reader(table: Tensor) -> tuple[Callable[[Sequence[int]], Tensor], list[int]]:
    """Reads rows of a tensor, and a list of all that were asked for."""
    asked: list[int] = []

    def read(ids: Sequence[int]) -> Tensor:
        asked.extend(ids)
        return table[list(ids)]

    return read, asked


# ---------------------------------------------------------------- the pure function


def test_by_hand() -> None:
    read, _ = reader(torch.tensor([[1.0], [2.0], [4.0]]))
    extension = tiny([(0, 2), (2, 2, 0)], old=3)
    assert extended_rows(read, range(5), extension).flatten().tolist() == [1, 2, 4, 2.5, 3]
    read, _ = reader(torch.tensor([1.0, 2.0, 4.0]))  # a bias of the head
    assert extended_rows(read, range(2, 5), extension).tolist() == [4, 2.5, 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_new_row_is_the_mean_rounded_once(dtype: torch.dtype) -> None:
    table = torch.randn(VOCAB, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    read, _ = reader(table)
    rows = extended_rows(read, range(VOCAB + ADDED), EXTENSION)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert rows.dtype == kept
    assert torch.equal(rows[:VOCAB], table.to(kept))
    for row, piece in zip(rows[VOCAB:], PIECES, strict=True):
        assert torch.equal(row, table.double()[list(piece)].mean(0).to(kept))


@pytest.mark.parametrize("parts", [1, 2, 4, 17])
def test_a_part_is_a_part_of_the_full_table_and_reads_only_what_it_needs(parts: int) -> None:
    table = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(2))
    read, _ = reader(table)
    whole = extended_rows(read, range(VOCAB + ADDED), EXTENSION)
    found = []
    for part in range(parts):
        own = local_range(VOCAB + ADDED, parts=parts, index=part)
        read, asked = reader(table)
        found.append(extended_rows(read, own, EXTENSION))
        pieces = [set(PIECES[i - VOCAB]) for i in own if i >= VOCAB]
        assert set(asked) == set().union(*pieces, (i for i in own if i < VOCAB))
        assert asked == sorted(set(asked))
    assert torch.equal(torch.cat(found), whole)


# ---------------------------------------------------------------- from files


def model_of(origin: Hub | SavedModel, vocab: int) -> ModelSpec:
    return origin.model.model_copy(update={"vocab": vocab})


def resharded(imported: Path, tp: int) -> Path:
    """The checkpoint of an import, its vocabulary padded and cut as `tp` ranks of a run save it."""
    checkpoint = imported / "checkpoints" / "step-0"
    whole = load_file(shard_path(checkpoint, 0))
    record = json.loads(shard_path(checkpoint, 0).with_suffix(".json").read_text())
    job = load_job(str(imported / "model.toml"))
    assert job.model is not None
    rows = padded_vocab(job.model.vocab, tp=tp)
    for rank in range(tp):
        tensors, places = dict(whole), json.loads(json.dumps(record["parameters"]))
        own = local_range(rows, parts=tp, index=rank)
        for name in vocabulary_tables(job.model):
            table = whole[f"{name}/value"]
            padded = torch.full((rows, *table.shape[1:]), float("nan"))
            padded[: job.model.vocab] = table[: job.model.vocab]
            tensors[f"{name}/value"] = padded[own.start : own.stop].clone()
            places[name] = {"shape": list(padded.shape), "dim": 0, "blocks": [[own.start, own.stop]]}
        path = shard_path(checkpoint, rank)
        save_file(tensors, path)
        new = {"bytes": path.stat().st_size, "sha256": sha256(path), "parameters": places}
        path.with_suffix(".json").write_text(json.dumps(new))
    manifest = {"schema": "mpctl.checkpoint/1", "step": 0, "shards": tp}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    return imported


def origin_at(kind: str, truth: Truth, folder: Path) -> Path:
    """A Hugging Face directory, or a checkpoint of ours of one or two ranks."""
    if kind == "hub":
        return truth.folder
    import_weights(truth.folder, folder / "ours")
    return resharded(folder / "ours", 2) if kind == "two shards" else folder / "ours"


def targets_of(model: ModelSpec, *, tp: int, rank: int) -> Targets:
    """The targets of a rank: its rows of the tables, and one full parameter."""
    targets: Targets = {}
    for weight in get_table(model, tp=tp).weights():
        if weight.dims[0] == "vocab":
            own = local_range(weight.shape[0], parts=tp, index=rank)
            shard = Shard(weight.shape, {0: (own,)})
        elif weight.name == "final_norm.weight":
            shard = Shard(weight.shape)
        else:
            continue
        targets[weight.name] = shard, torch.full(shard.local_shape, SEED)
    return targets


def their_tables(truth: Truth, model: ModelSpec) -> dict[str, Tensor]:
    theirs = load(truth.folder)
    tables = {"embedding.word.weight": theirs.get_input_embeddings().weight}
    if not model.tied_embeddings:
        tables["head.weight"] = theirs.get_output_embeddings().weight
    return {name: table.detach() for name, table in tables.items()}


@pytest.mark.parametrize("source", ["hub", "one shard", "two shards"])
@pytest.mark.parametrize("kind", ["gpt2-sharded", "llama"])
def test_tables_are_old_rows_means_and_what_the_seed_gave(
    kind: str, source: str, truths: Truths, tmp_path: Path, monkeypatch: Any
) -> None:
    """The model has ten rows more than pieces, and padding; rows are read a few at a time."""
    monkeypatch.setattr(extend, "ROWS_AT_ONCE", 50)
    origin = open_origin(origin_at(source, truths(kind), tmp_path))
    model = model_of(origin, VOCAB + ADDED + 10)
    tables = their_tables(truths(kind), model)
    assert tables.keys() == vocabulary_tables(model)
    for tp in (1, 2, 4):
        ranks = [targets_of(model, tp=tp, rank=rank) for rank in range(tp)]
        for targets in ranks:
            left = fill_tables(origin, model, targets, EXTENSION)
            assert left.keys() == {"final_norm.weight"}
            assert bool((left["final_norm.weight"][1] == SEED).all())
        for name, table in tables.items():
            full = assemble([t[name][0] for t in ranks], [t[name][1] for t in ranks])
            assert torch.equal(full[:VOCAB], table)
            means = [table[list(piece)].double().mean(0).float() for piece in PIECES]
            assert torch.equal(full[VOCAB : VOCAB + ADDED], torch.stack(means))
            assert bool((full[VOCAB + ADDED :] == SEED).all())


def test_a_rank_reads_its_own_part_of_the_files(truths: Truths, tmp_path: Path, monkeypatch: Any) -> None:
    origin = open_origin(origin_at("two shards", truths("llama"), tmp_path))
    model, read = model_of(origin, VOCAB + ADDED), list[int]()
    original = ShardReader.read

    def counted(reader: ShardReader, name: str, rows: slice | None = None) -> Tensor:
        found = original(reader, name, rows)
        read.append(len(found))
        return found

    monkeypatch.setattr(ShardReader, "read", counted)
    fill_tables(origin, model, targets_of(model, tp=4, rank=0), EXTENSION)
    assert sum(read) == 2 * 128  # rows 0 to 127 of 512, of both tables
    read.clear()
    fill_tables(origin, model, targets_of(model, tp=4, rank=3), EXTENSION)
    assert sum(read) == 0  # rows 384 to 511: padding


def test_rows_of_a_16_bit_checkpoint_come_as_they_are_stored(truths: Truths, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    load(truths("llama").folder).to(torch.bfloat16).save_pretrained(folder)
    origin = open_origin(folder)
    rows = row_reader(origin, "head.weight")([3, 4, 9])
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, load(folder).lm_head.weight[[3, 4, 9]].to(torch.bfloat16))


def test_a_shard_that_lacks_rows_is_named(truths: Truths, tmp_path: Path) -> None:
    origin = open_origin(origin_at("two shards", truths("llama"), tmp_path))
    assert isinstance(origin, SavedModel)
    manifest = {"schema": "mpctl.checkpoint/1", "step": 0, "shards": 1}
    (origin.checkpoint / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"head\.weight: 32 of its elements are in no shard"):
        row_reader(origin, "head.weight")([1, 256])
    shard_path(origin.checkpoint, 0).write_bytes(b"no")
    with pytest.raises(InputError, match=r"shard-0\.safetensors: has 2 bytes"):
        row_reader(origin, "head.weight")([1])


# ---------------------------------------------------------------- whether it applies


def said(path: Path, model: ModelSpec, extension: TokenizerExtension | None) -> list[str]:
    return [str(issue) for issue in origin_issues(path, model, extension)]


def test_more_rows_need_an_extension_that_starts_where_the_origin_ends(truths: Truths) -> None:
    path = truths("llama").folder
    origin = open_origin(path)
    model = model_of(origin, VOCAB + ADDED)
    assert said(path, model, EXTENSION) == []
    assert said(path, model_of(origin, VOCAB + 999), EXTENSION) == []
    for wrong in (None, replace(EXTENSION, old_vocab_size=VOCAB - 1), replace(EXTENSION, old_vocab_size=VOCAB + 1)):
        (issue,) = said(path, model, wrong)
        assert issue.startswith("model.vocab: 340, but the weights in ")
        assert "use model.vocab 300, or data of a tokenizer of 300 extended to more" in issue
        assert "--extend-tokenizer" in issue
        with pytest.raises(InputError, match="extend-tokenizer"):
            fill_tables(origin, model, targets_of(model, tp=1, rank=0), wrong)
    (issue,) = said(path, model_of(origin, 200), EXTENSION)
    assert "--extend-tokenizer" not in issue
    deeper = model.model_copy(update={"layers": 3})
    (issue,) = said(path, deeper, EXTENSION)
    assert issue.startswith("model.layers: 3")


def test_weights_that_know_all_pieces_are_taken_as_they_are(truths: Truths) -> None:
    origin = open_origin(truths("llama").folder)
    model = origin.model
    for extension in (None, EXTENSION, replace(EXTENSION, old_vocab_size=VOCAB - ADDED)):
        assert not is_extended(model, origin, extension)
        targets = targets_of(model, tp=1, rank=0)
        assert fill_tables(origin, model, targets, extension) is targets
        assert all(bool((tensor == SEED).all()) for _, tensor in targets.values())


def test_rows_that_the_old_tokenizer_left_unused_are_filled_too(truths: Truths, tmp_path: Path) -> None:
    """Recognised by the tokenizer next to the weights: 290 pieces on 300 rows."""
    imported = tmp_path / "ours"
    import_weights(truths("llama").folder, imported)
    (imported / "tokenizer.json").write_text("the old one")
    old = sha256(imported / "tokenizer.json")
    pieces = tuple(tuple(i % 290 for i in piece) for piece in PIECES)
    extension = TokenizerExtension(290, old, "f" * 64, pieces)
    origin = open_origin(imported)
    for vocab in (330, 300):
        model = model_of(origin, vocab)
        assert said(imported, model, extension) == []
        assert is_extended(model, origin, extension)
    assert not is_extended(model, origin, replace(extension, old_tokenizer_sha256="1" * 64))
    model = model_of(origin, 330)
    targets = targets_of(model, tp=1, rank=0)
    fill_tables(origin, model, targets, extension)
    table = their_tables(truths("llama"), model)["head.weight"]
    found = targets["head.weight"][1]
    assert torch.equal(found[:290], table[:290])
    assert torch.equal(found[290], table[list(pieces[0])].double().mean(0).float())
    assert bool((found[330:] == SEED).all())


@pytest.mark.parametrize("tp", [1, 4])
def test_special_tokens_at_the_top_move_up(tp: int, truths: Truths, tmp_path: Path) -> None:
    """297 pieces of text and 3 special tokens become 337 and the same 3."""
    origin = open_origin(origin_at("two shards", truths("llama"), tmp_path))
    pieces = tuple(tuple(i % 297 for i in piece) for piece in PIECES)
    extension, model = tiny(pieces, old=297), model_of(origin, 345)
    (issue,) = origin_issues(origin.folder, model, extension)
    assert issue.where == "model.vocab"
    assert origin_issues(origin.folder, model, extension, reserved=3) == []
    ranks = [targets_of(model, tp=tp, rank=rank) for rank in range(tp)]
    for targets in ranks:
        fill_tables(origin, model, targets, extension, reserved=3)
    for name, table in their_tables(truths("llama"), model).items():
        whole = assemble([t[name][0] for t in ranks], [t[name][1] for t in ranks])
        assert torch.equal(whole[:297], table[:297])
        assert torch.equal(whole[297], table[list(pieces[0])].double().mean(0).float())
        assert bool((whole[337:342] == SEED).all())
        assert torch.equal(whole[342:345], table[297:300])
        assert bool((whole[345:] == SEED).all())
