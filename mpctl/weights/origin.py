"""Where initial weights come from, known from headers alone, so that a launch can refuse at once.

Three kinds of directory: Hugging Face's (config.json and safetensors), one that `mpctl weights
import` wrote (model.toml and a checkpoint) and a run (job.json and its newest checkpoint). No torch
here: reader.py reads the bytes that this module has checked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mpctl.errors import InputError, Issue
from mpctl.families import get_table
from mpctl.shards import (
    MANIFEST,
    damaged,
    newest_checkpoint,
    read_manifest,
    read_shard_record,
    sha256,
    shard_path,
)
from mpctl.spec.load import load_job
from mpctl.spec.model import Model
from mpctl.weights.headers import FLOATS, Held, read_folder, read_header
from mpctl.weights.names import SCHEMES, Row, as_stored, get_scheme, is_extra, rows_of
from mpctl.weights.scheme import HEAD, Scheme

FRAGMENT = "model.toml"
# What may differ between a model and the one whose weights it starts from.
FREE = ("name", "source", "vocab_divisor", "seq_length", "decoder_seq_length", "attention")


class Extension(Protocol):
    """What weights need of an extended tokenizer: id old_vocab_size + k stands for pieces[k]."""

    @property
    def old_vocab_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def old_tokenizer_sha256(self) -> str: ...
    @property
    def pieces(self) -> tuple[tuple[int, ...], ...]: ...


@dataclass(frozen=True)
class Hub:
    """A Hugging Face directory whose headers agree with its config: tensors by our rows' names."""

    folder: Path
    model: Model
    rows: dict[str, Row]
    tensors: dict[str, Held]

    @property
    def tokenizer(self) -> Path | None:
        return _tokenizer(self.folder, None, None)


@dataclass(frozen=True)
class Saved:
    """A checkpoint of ours: that of an import, or a run's newest."""

    folder: Path
    checkpoint: Path
    step: int
    model: Model
    tokenizer: Path | None
    tensors: tuple[dict[str, Held], ...]  # by shard: the values, by our names
    places: tuple[dict[str, Any], ...]  # by shard: full shape, dim and blocks, by our names

    def parts(self, name: str) -> list[tuple[Held, dict[str, Any]]]:
        """Of a parameter: what each shard of the stage that saved it holds, and its place."""
        shards = zip(self.tensors, self.places, strict=True)
        return [(tensors[name], places[name]) for tensors, places in shards if name in places]


def open_origin(path: Path) -> Hub | Saved:
    """What initial weights are read from; InputError carries everything wrong with it.

    A path may also be one checkpoint of a run or of an import, RUN/checkpoints/step-N.
    """
    if path.parent.name == "checkpoints" and (path / MANIFEST).is_file():
        folder = path.parent.parent
        fragment = folder / FRAGMENT
        return _saved(folder, fragment if fragment.is_file() else folder / "job.json", path)
    if (path / FRAGMENT).is_file():
        return _saved(path, path / FRAGMENT)
    if (path / "job.json").is_file() and (path / "checkpoints").is_dir():
        return _saved(path, path / "job.json")
    if (path / "config.json").is_file():
        return open_hub(path)
    raise InputError.of(
        "no-weights", str(path), "holds no config.json, no import and no run with a checkpoint",
        "name a Hugging Face directory, what `mpctl weights import` wrote, or a run",
    )  # fmt: skip


def origin_issues(
    path: Path, model: Model, extension: Extension | None = None, *, reserved: int = 0
) -> list[Issue]:
    """Everything that keeps `model` from starting from what is at `path`; headers only.

    extension: of the tokenizer of the data to train on, where it adds to an older one; reserved:
    ids at the top of the vocabulary that no text uses.
    """
    try:
        origin = open_origin(path)
    except InputError as error:
        return list(error.issues)
    extended = is_extended(model, origin, extension, reserved=reserved)
    found = differences(model, origin.model, path)
    return [issue for issue in found if not (extended and issue.where == "model.vocab")]


def is_extended(
    model: Model, origin: Hub | Saved, extension: Extension | None, *, reserved: int = 0
) -> bool:
    """Whether the extension starts where the origin ends, so that it explains all new rows.

    The origin's vocabulary is the old tokenizer's by its size; or by its very tokenizer, which may
    leave rows unused. By hand: 300 rows, extended from 300 to 340, a model of 340 to 384 rows.
    """
    if extension is None:
        return False
    words, path = origin.model.vocab - reserved, origin.tokenizer
    if words == extension.old_vocab_size:
        return model.vocab > origin.model.vocab
    if path is None or not extension.old_vocab_size < words <= model.vocab - reserved:
        return False
    return sha256(path) == extension.old_tokenizer_sha256


def differences(ours: Model, theirs: Model, path: Path) -> Iterator[Issue]:
    """Keys in which the models are not the same function of the same shapes."""
    free = FREE if ours.position == "learned" else (*FREE, "max_positions")
    for key in Model.model_fields:
        now, then = getattr(ours, key), getattr(theirs, key)
        if now != then and key not in free:
            hint = f"use model.{key} {then!r}"
            if key == "vocab" and now > then:
                hint += f", or data of a tokenizer of {then} extended to more: `mpctl data prepare"
                hint += " --extend-tokenizer`"
            yield Issue("init-from-model", f"model.{key}", f"{now!r}, but the weights in {path} "
                        f"are of {then!r}", hint)  # fmt: skip


def open_hub(folder: Path) -> Hub:
    """A Hugging Face directory, checked; InputError names file, tensor and both shapes."""
    model = load_job(None, {"model.hf_config": str(folder)}).model
    assert model is not None
    config = json.loads((folder / "config.json").read_text("utf-8"))
    issues = list(_unusual(folder / "config.json", config))
    if issues:
        raise InputError(issues)
    # A path of this machine would travel with whatever is made of it.
    model = model.model_copy(update={"source": None})
    scheme, rows = get_scheme(model), rows_of(model)
    tensors, issues = read_folder(folder)
    if issues and not tensors:
        raise InputError(issues)
    rows = as_stored(rows, tensors, scheme)
    found = _tensor_issues(folder, model, rows, tensors, scheme)
    # What an unreadable file may hold is not called missing.
    whole = not issues
    issues += [issue for issue in found if whole or issue.rule != "weights-missing"]
    if issues:
        raise InputError(issues)
    return Hub(folder, model, rows, tensors)


def _unusual(path: Path, config: dict[str, Any]) -> Iterator[Issue]:
    scheme = SCHEMES.get(kind := config["model_type"])
    if scheme is None:
        yield Issue("no-hub-class", str(path), f"weights of {kind} are not read by this version",
                    f"use {', '.join(SCHEMES)}")  # fmt: skip
        return
    for key, usual in scheme.usual.items():
        if config.get(key, usual) != usual:
            yield Issue("hf-config", str(path), f"{key} {config[key]!r} cannot be expressed")


def _tensor_issues(
    folder: Path, model: Model, rows: dict[str, Row], tensors: dict[str, Held], scheme: Scheme
) -> Iterator[Issue]:
    pieces = {piece.name: piece for row in rows.values() for piece in row.pieces}
    for name, piece in pieces.items():
        held = tensors.get(name)
        if held is None:
            yield Issue("weights-missing", str(folder), f"{name} {list(piece.shape)} is in no file",
                        f"{scheme.architecture} of this config.json has it")  # fmt: skip
        elif held.shape != piece.shape:
            yield Issue("weights-shape", str(held.path), f"{name} is {list(held.shape)}, the shape "
                        f"in config.json needs {list(piece.shape)}")  # fmt: skip
        elif held.dtype not in FLOATS:
            yield Issue("weights-dtype", str(held.path), f"{name} is {held.dtype}, no weight of "
                        "floating point", f"use {', '.join(FLOATS)}")  # fmt: skip
    tied = {f"{HEAD}.weight"} if model.tied_embeddings else set()
    for name in sorted(tensors.keys() - pieces.keys() - tied):
        if not is_extra(name, scheme):
            yield Issue("weights-foreign", str(tensors[name].path), f"holds {name} "
                        f"{list(tensors[name].shape)}, which the shape in config.json "
                        "does not have")  # fmt: skip


def _saved(folder: Path, source: Path, checkpoint: Path | None = None) -> Saved:
    job = load_job(str(source))
    checkpoint = checkpoint or newest_checkpoint(folder)
    if job.model is None or checkpoint is None:
        lacks = "names no model" if job.model is None else "has no checkpoint yet"
        raise InputError.of("no-weights", str(folder), lacks, "let the run save one")
    manifest = read_manifest(checkpoint)
    issues: list[Issue] = []
    tensors, places = [], []
    for index in range(manifest.shards):
        try:
            values, record = _values(checkpoint, index)
        except InputError as error:
            issues += error.issues
            continue
        tensors.append(values)
        places.append(record)
    if issues:
        raise InputError(issues)
    tokenizer = _tokenizer(folder, job.data.path, job.data.tokenizer)
    saved = Saved(
        folder, checkpoint, manifest.step, job.model, tokenizer, tuple(tensors), tuple(places)
    )  # fmt: skip
    if issues := list(_place_issues(saved, manifest.tp)):
        raise InputError(issues)
    return saved


def _tokenizer(folder: Path, data: str | None, named: str | None) -> Path | None:
    """The tokenizer that the model's tokens mean something to, where there still is one."""
    places = [folder / "tokenizer.json", folder / "data" / "tokenizer.json"]
    places += [] if data is None else [Path(data) / "tokenizer.json"]
    places += [] if named is None else [Path(named)]
    return next((place for place in places if place.is_file()), None)


def _values(checkpoint: Path, index: int) -> tuple[dict[str, Held], dict[str, Any]]:
    """The values of one shard and where each belongs."""
    path = shard_path(checkpoint, index)
    places = dict(read_shard_record(checkpoint, index, hashed=False)["parameters"])
    try:
        held = read_header(path)
    except InputError as error:
        raise damaged(path, error.issues[0].message) from None
    values = {n.removesuffix("/value"): h for n, h in held.items() if n.endswith("/value")}
    if lacking := sorted(places.keys() ^ values.keys()):
        raise damaged(path, f"{lacking[0]} is not both in it and in its record")
    if wrong := [name for name, value in values.items() if value.dtype not in FLOATS]:
        raise damaged(path, f"{wrong[0]} is {values[wrong[0]].dtype}")
    return values, places


def _place_issues(saved: Saved, tp: int) -> Iterator[Issue]:
    """Shapes and places as recorded against the model's, whose vocabulary each tp pads otherwise.

    All tp ranks of one stage hold each parameter, and no other stage does: what several stages
    need, the first of them saves.
    """
    wanted = {weight.name: weight.shape for weight in get_table(saved.model, tp=tp).weights()}
    for name in sorted(wanted.keys() | {name for shard in saved.places for name in shard}):
        holders = [index for index, shard in enumerate(saved.places) if name in shard]
        if not holders:
            lacking = f"{name} {list(wanted[name])} is in no shard, the model has it"
            yield from damaged(saved.checkpoint, lacking).issues
            continue
        first = holders[0] // tp * tp
        stage = range(first, first + tp)
        found = [
            damaged(shard_path(saved.checkpoint, index), f"{name}: {why}").issues[0]
            for index in sorted({*stage, *holders})
            if (why := _misfit(saved, name, index, stage, wanted.get(name)))
        ]
        yield from found
        if not found and not _is_whole([places[name] for places in saved.places[first:][:tp]]):
            gaps = f"{name}: the {tp} shards from {first} on do not hold all of it"
            yield from damaged(saved.checkpoint, gaps).issues


def _misfit(
    saved: Saved, name: str, index: int, stage: range, wanted: tuple[int, ...] | None
) -> str | None:
    """Why the part of a parameter in one shard cannot be; None where it can."""
    place = saved.places[index].get(name)
    full = None if place is None else tuple(place["shape"])
    if place is None or full is None or full != wanted:
        return f"holds {full}, the model needs {wanted}"
    if index not in stage:
        return f"shard {stage.start} holds it too, as another stage"
    kept = sum(stop - start for start, stop in place["blocks"])
    local = tuple(kept if dim == place["dim"] else size for dim, size in enumerate(full))
    held = saved.tensors[index][name].shape
    return None if held == local else f"is {held}, its record says {local}"


def _is_whole(places: list[dict[str, Any]]) -> bool:
    """Whether the blocks of all ranks leave no gap in the split dimension."""
    dim, end = places[0]["dim"], 0
    if any(place["dim"] != dim for place in places):
        return False
    for start, stop in sorted(block for place in places for block in place["blocks"]):
        if start > end:
            return False
        end = max(end, stop)
    return dim is None or end == places[0]["shape"][dim]
