"""A checkpoint of ours as its headers and records tell it, held against the model it is of.

Of a run, the newest, or of an import (model.toml and a checkpoint). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpctl.errors import InputError, Issue
from mpctl.families import get_table
from mpctl.rundir.checkpoints import newest_checkpoint
from mpctl.rundir.shards import (
    ParameterPlacement,
    damage_error,
    read_manifest,
    read_shard_record,
    shard_path,
)
from mpctl.shard import covers
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.weights.headers import FLOATS, TensorHeader, read_header
from mpctl.weights.hub import find_tokenizer


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of ours: that of an import, or a run's newest.

    tensors, placements: for each shard, by parameter: its values' header, and which part of the
    whole parameter it is. started_from: where the run's initial weights came from, if from
    anywhere.
    """

    folder: Path
    checkpoint: Path
    step: int
    model: ModelSpec
    tokenizer: Path | None
    tensors: tuple[dict[str, TensorHeader], ...]
    placements: tuple[dict[str, ParameterPlacement], ...]
    started_from: Path | None

    def parts(self, name: str) -> list[tuple[TensorHeader, ParameterPlacement]]:
        """The parts of a parameter: for each shard that has one, its tensor and its placement."""
        shards = zip(self.tensors, self.placements, strict=True)
        return [(headers[name], parts[name]) for headers, parts in shards if name in parts]


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
    tensors, placements = [], []
    for index in range(manifest.shards):
        try:
            values, record = _values(checkpoint, index)
        except InputError as error:
            issues += error.issues
            continue
        tensors.append(values)
        placements.append(record)
    if issues:
        raise InputError(issues)
    data, named = job.data.path, job.data.tokenizer
    others = [*([Path(data, "tokenizer.json")] if data else ()), *([Path(named)] if named else ())]
    tokenizer = find_tokenizer(folder, *others)
    saved = SavedModel(
        folder, checkpoint, manifest.step, job.model, tokenizer, tuple(tensors), tuple(placements),
        None if job.training.init_from is None else Path(job.training.init_from),
    )  # fmt: skip
    if issues := list(_placement_issues(saved, manifest.tp)):
        raise InputError(issues)
    return saved


def _values(
    checkpoint: Path, index: int
) -> tuple[dict[str, TensorHeader], dict[str, ParameterPlacement]]:
    """The values of one shard and where each belongs."""
    path = shard_path(checkpoint, index)
    placements = read_shard_record(checkpoint, index, hashed=False).parameters
    try:
        headers = read_header(path)
    except InputError as error:
        raise damage_error(path, error.issues[0].message) from None
    values = {n.removesuffix("/value"): h for n, h in headers.items() if n.endswith("/value")}
    if lacking := sorted(placements.keys() ^ values.keys()):
        raise damage_error(path, f"{lacking[0]} is not both in it and in its record")
    if wrong := [name for name, value in values.items() if value.dtype not in FLOATS]:
        raise damage_error(path, f"{wrong[0]} is {values[wrong[0]].dtype}")
    return values, placements


def _placement_issues(saved: SavedModel, tp: int) -> Iterator[Issue]:
    """Shapes and places as recorded against the model's, whose vocabulary each tp pads otherwise.

    All tp ranks of one stage hold each parameter, and no other stage does: what several stages
    need, the first of them saves.
    """
    wanted = {weight.name: weight.shape for weight in get_table(saved.model, tp=tp).weights()}
    for name in sorted(wanted.keys() | {name for shard in saved.placements for name in shard}):
        holders = [index for index, shard in enumerate(saved.placements) if name in shard]
        if not holders:
            lacking = f"{name} {list(wanted[name])} is in no shard, the model has it"
            yield from damage_error(saved.checkpoint, lacking).issues
            continue
        first = holders[0] // tp * tp
        stage = range(first, first + tp)
        misfits = [
            damage_error(shard_path(saved.checkpoint, index), f"{name}: {why}").issues[0]
            for index in sorted({*stage, *holders})
            if (why := _misfit(saved, name, index, stage, wanted.get(name)))
        ]
        yield from misfits
        if misfits:
            continue
        if not covers(wanted[name], [saved.placements[index][name].shard for index in stage]):
            gaps = f"{name}: the {tp} shards from {first} on do not hold all of it"
            yield from damage_error(saved.checkpoint, gaps).issues


def _misfit(
    saved: SavedModel, name: str, index: int, stage: range, wanted: tuple[int, ...] | None
) -> str | None:
    """Why the part of a parameter in one shard cannot be; None where it can."""
    placement = saved.placements[index].get(name)
    full = None if placement is None else tuple(placement.shape)
    if placement is None or full is None or full != wanted:
        return f"holds {full}, the model needs {wanted}"
    if index not in stage:
        return f"shard {stage.start} holds it too, as another stage"
    local = placement.shard.local_shape
    stored = saved.tensors[index][name].shape
    return None if stored == local else f"is {stored}, but its record says {local}"
