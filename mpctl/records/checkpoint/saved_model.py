"""A checkpoint of mpctl, read from headers and records and checked against its model.

It is the newest of a run, or that of an import (model.toml and a checkpoint). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpctl.core.errors import InputError, Issue
from mpctl.core.shard import Shard, covers
from mpctl.model.families import get_table
from mpctl.records.checkpoint.folder import newest_checkpoint
from mpctl.records.checkpoint.manifest import BaseReference, ShardFile, damage_error, read_manifest, read_shard_record
from mpctl.records.checkpoint.tensor_header import FLOATS, TensorHeader, read_header
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec


@dataclass(frozen=True)
class SavedShard:
    """One shard. values: by parameter the header of its value; parts: which part of it that is."""

    file: ShardFile
    path: Path
    values: dict[str, TensorHeader]
    parts: dict[str, Shard]


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of mpctl: that of an import, or a run's newest. started_from: the origin of the
    run's initial weights, if any. adapter: by which the run trained; base: the weights that it adds
    to, where the checkpoint has its trained parameters alone."""

    folder: Path
    checkpoint: Path
    step: int
    model: ModelSpec
    tokenizer: Path | None
    shards: tuple[SavedShard, ...]
    started_from: Path | None
    adapter: AdapterSpec | None = None
    base: BaseReference | None = None

    @property
    def names(self) -> set[str]:
        """The parameters that it holds."""
        return {name for shard in self.shards for name in shard.parts}


def open_saved(folder: Path, source: Path, checkpoint: Path | None = None) -> SavedModel:
    """A checkpoint of the run or import in `folder`, checked against its model.

    source: the job.json or model.toml that has the model. checkpoint: the newest when absent.
    InputError carries everything wrong with it.
    """
    job = load_job(str(source))
    checkpoint = checkpoint or newest_checkpoint(folder)
    if job.model is None or checkpoint is None:
        lacks = "names no model" if job.model is None else "is a run, but has no checkpoint"
        raise InputError.of("no-weights", str(folder), lacks, "let the run save one")
    manifest = read_manifest(checkpoint)
    issues: list[Issue] = []
    shards: list[SavedShard] = []
    for shard in manifest.shards:
        try:
            shards.append(_read_shard(checkpoint, shard))
        except InputError as error:
            issues += error.issues
    if issues:
        raise InputError(issues)
    data, named = job.data.path, job.data.tokenizer
    places = [folder / "tokenizer.json", folder / "data" / "tokenizer.json"]
    places += [Path(data, "tokenizer.json")] if data else []
    places += [Path(named)] if named else []
    tokenizer = next((file for file in places if file.is_file()), None)
    started_from = None if job.training.init_from is None else Path(job.training.init_from)
    saved = SavedModel(
        folder,
        checkpoint,
        manifest.step,
        job.model,
        tokenizer,
        tuple(shards),
        started_from,
        job.training.adapter,
        manifest.base,
    )
    if issues := list(_placement_issues(saved)):
        raise InputError(issues)
    return saved


def _read_shard(checkpoint: Path, shard: ShardFile) -> SavedShard:
    path = shard.path(checkpoint)
    parameters = read_shard_record(checkpoint, shard, hashed=False).parameters
    try:
        headers = read_header(path)
    except InputError as error:
        raise damage_error(path, error.issues[0].message) from None
    values = {n.removesuffix("/value"): h for n, h in headers.items() if n.endswith("/value")}
    if lacking := sorted(parameters.keys() ^ values.keys()):
        raise damage_error(path, f"{lacking[0]} is not both in it and in its record")
    if wrong := [name for name, value in values.items() if value.dtype not in FLOATS]:
        raise damage_error(path, f"{wrong[0]} is {values[wrong[0]].dtype}")
    return SavedShard(shard, path, values, {name: p.shard for name, p in parameters.items()})


def _placement_issues(saved: SavedModel) -> Iterator[Issue]:
    """Issues where recorded shapes and places differ from the model's; padding depends on tp.

    The shards of one stage together hold all of a parameter, and no other stage does: what several
    stages need, the first of them saves.
    """
    tp = 1 + max(shard.file.coords.get("tp", 0) for shard in saved.shards)
    table = get_table(saved.model, tp=tp, adapter=saved.adapter)
    wanted = {w.name: w.shape for w in table.weights() if saved.base is None or not table.is_frozen(w.name)}
    for name in sorted(wanted.keys() | {name for shard in saved.shards for name in shard.parts}):
        holders = [shard for shard in saved.shards if name in shard.parts]
        if not holders:
            lacking = f"{name} {list(wanted[name])} is in no shard, the model has it"
            yield from damage_error(saved.checkpoint, lacking).issues
            continue
        misfits = [
            damage_error(shard.path, f"{name}: {why}").issues[0]
            for shard in holders
            if (why := _misfit(shard, name, holders[0], wanted.get(name)))
        ]
        yield from misfits
        if not misfits and not covers(wanted[name], [shard.parts[name] for shard in holders]):
            names = [shard.file.name for shard in holders]
            files = ", ".join(names if len(names) < 4 else [*names[:2], "..", names[-1]])
            gaps = f"{name}: not all of it is in {files}"
            yield from damage_error(saved.checkpoint, gaps).issues


def _misfit(shard: SavedShard, name: str, first: SavedShard, wanted: tuple[int, ...] | None) -> str | None:
    """Return the fault of a parameter's part in one shard; None if it is right."""
    part, stored = shard.parts[name], shard.values[name].shape
    if part.shape != wanted:
        return f"holds {part.shape}, the model needs {wanted}"
    if shard.file.stage != first.file.stage:
        return f"{first.file.name} holds it too, as another stage"
    if stored != part.local_shape:
        return f"is {stored}, but its record says {part.local_shape}"
    return None
