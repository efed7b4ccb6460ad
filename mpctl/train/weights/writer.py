"""Import and export of full weights: a checkpoint of mpctl from Hugging Face's files, and back.

Import writes OUT/checkpoints/step-0 (one shard, values only, in the dtype that was stored),
OUT/model.toml (a job fragment that launches from it) and the tokenizer. Export writes what
the classes of names.py load: config.json, safetensors in the hub's layout, tokenizer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from mpctl.core.errors import InputError, Issue
from mpctl.core.shard import Shard
from mpctl.model.families import get_table
from mpctl.records.checkpoint.folder import staged_folder
from mpctl.records.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    OnBytes,
    ParameterPlacement,
    ShardFile,
    ShardRecord,
    damage_error,
    read_shard_record,
)
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.verify import Progress, checkpoint_bytes, counted, ignore_progress
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.model import ModelSpec
from mpctl.train.checkpoint.tensor_file import DTYPES, Entry, write_file
from mpctl.train.weights.hub import INDEX, SINGLE, Hub, open_hub
from mpctl.train.weights.names import Piece, Row, biases_of, get_scheme, rows_of
from mpctl.train.weights.origin import FRAGMENT, longest_sequence, open_origin
from mpctl.train.weights.reader import as_pairs, fill, router_biases
from mpctl.train.weights.tokens import TOKENIZER, find_tokens, token_settings, write_tokenizer
from mpctl.train.weights.values import Values, require_mergeable, router_biases_of, widest

MERGED_INTO_UNPACKED = (
    "adapters were trained over a base in {}, and are merged into the weights that it was made of: losses differ a "
    "little from validation's"
)
NO_TOKENIZER = "no tokenizer is known: text and the ids of special tokens are left out"
SHARD_BYTES = 5_000_000_000  # transformers' own default for max_shard_size was 5GB
TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Written(BaseModel):
    """Result of an import or an export, schema mpctl.weights/1. notes: messages for the user."""

    source: Path
    out: Path
    architecture: str
    parameters: int
    bytes: int
    dtype: str
    step: int = 0
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    model: ModelSpec

    def as_dict(self) -> dict[str, Any]:
        """Return the output of `mpctl checkpoint import --json` and `export --json`."""
        return {"schema": "mpctl.weights/1", **self.model_dump(mode="json", exclude_none=True)}


def import_weights(source: Path, out: Path, *, on_progress: Progress = ignore_progress) -> Written:
    """A checkpoint of ours at `out` from the Hugging Face directory `source`; or InputError."""
    with staged_folder(out) as work:
        hub = open_hub(source)
        checkpoint = work / "checkpoints" / "step-0"
        checkpoint.mkdir(parents=True)
        issues: list[Issue] = []
        entries, placements = _entries_of_ours(hub, issues)
        counter = counted("import", total_bytes(entries), on_progress)
        shard = ShardFile(name="shard-0", coords={"pp": 0, "tp": 0})
        digest = write_file(shard.path(checkpoint), entries, counter)
        ShardRecord.of(digest, placements, []).write(shard.record_path(checkpoint))
        Manifest(step=0, shards=[shard], router_bias=router_biases(hub)).write(checkpoint)
        if issues:
            raise InputError(issues)
        has_tokenizer = (source / TOKENIZER).is_file()
        if has_tokenizer:
            shutil.copyfile(source / TOKENIZER, work / TOKENIZER)
        (work / FRAGMENT).write_text(fragment(hub.model, out.resolve(), tokenizer=has_tokenizer), "utf-8")
        files = files_of(work)
    return Written(
        source=source,
        out=out,
        architecture=get_scheme(hub.model).architecture,
        parameters=_numel(hub.rows.values()),
        bytes=total_bytes(entries),
        dtype=_dtype(entries),
        files=files,
        notes=hub.notes,
        model=hub.model,
    )


def _entries_of_ours(hub: Hub, issues: list[Issue]) -> tuple[list[Entry], dict[str, ParameterPlacement]]:
    """The tensors to write and their placement; `issues` is filled as each tensor is made."""
    table = get_table(hub.model, tp=1)
    entries, placements = list[Entry](), dict[str, ParameterPlacement]()
    for weight in table.weights():
        dtype = widest(hub.tensors[piece.name].dtype for piece in hub.rows[weight.name].pieces)
        placements[weight.name] = ParameterPlacement.of(Shard(weight.shape))
        make = partial(_tensor, hub, weight.name, weight.shape, dtype, issues)
        entries.append(Entry(f"{weight.name}/value", dtype, weight.shape, make))
    return entries, placements


def _tensor(hub: Hub, name: str, shape: tuple[int, ...], dtype: str, issues: list[Issue]) -> Tensor:
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    try:
        fill(hub, {name: (Shard(shape), tensor)})
    except InputError as error:
        issues += error.issues
    return tensor


def fragment(model: ModelSpec, out: Path, *, tokenizer: bool, adapter: AdapterSpec | None = None) -> str:
    """The text of model.toml: a job that starts from `out`."""
    lines = ["[model]"]
    for key, value in model.model_dump(exclude_none=True).items():
        lines.append(f"{key} = {_toml(value)}")
    lines += ["", "[training]", f"init_from = {_toml(str(out))}"]
    if adapter is not None:
        lines += ["", "[training.adapter]"]
        lines += [f"{key} = {_toml(value)}" for key, value in adapter.model_dump(exclude_defaults=True).items()]
    if tokenizer:
        lines += ["", "[data]", f"tokenizer = {_toml(str(out / TOKENIZER))}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


# ---------------------------------------------------------------- export


def export_weights(
    run: Path,
    out: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    on_progress: Progress = ignore_progress,
) -> Written:
    """A Hugging Face directory at `out` from a run's newest checkpoint, or an import's; its adapters are merged into
    the weights that they add to. dtype: to write, in safetensors' words; as stored when absent."""
    with staged_folder(out) as work:
        saved = open_run(run)
        model = saved.model
        if model.position == "rotary":  # a learned table has its rows
            model = model.model_copy(update={"max_positions": longest_sequence(saved)})
        scheme, rows = get_scheme(model), rows_of(model)
        tokens = None if saved.tokenizer is None else find_tokens(model, saved.tokenizer)
        ids = token_settings(tokens, scheme)
        counter = counted("verify", checkpoint_bytes(saved.checkpoint), on_progress)
        for shard in saved.shards:  # InputError if its bytes are damaged
            read_shard_record(saved.checkpoint, shard.file, on_bytes=counter)
        values = Values.of(saved)
        require_mergeable(values)
        entries = [entry for row in rows.values() for entry in _entries_of_theirs(values, row, dtype)]
        dtype = _dtype(entries)  # of the parameters: biases are float32 in every model
        entries += _bias_entries(saved, model)
        _write_sharded(work, entries, shard_bytes, counted("export", total_bytes(entries), on_progress))
        write_json(work / "config.json", hub_config(model, dtype, ids))
        notes = [NO_TOKENIZER] if tokens is None else write_tokenizer(work, tokens, model, scheme)
        if saved.adapter is not None and saved.adapter.is_quantized:
            notes = [*notes, MERGED_INTO_UNPACKED.format(saved.adapter.stored_as)]
        files = files_of(work)
    return Written(
        source=run,
        out=out,
        architecture=scheme.architecture,
        parameters=_numel(rows.values()),
        bytes=total_bytes(entries),
        dtype=dtype,
        step=saved.step,
        files=files,
        notes=tuple(notes),
        model=saved.model,
    )


def total_bytes(entries: Iterable[Entry]) -> int:
    """Bytes of some tensors."""
    return sum(entry.bytes for entry in entries)


def open_run(run: Path) -> SavedModel:
    """A run or an import to export. Raises InputError for what is in Hugging Face's format already."""
    saved = open_origin(run)
    if isinstance(saved, Hub):
        raise InputError.of("no-run", str(run), "is a Hugging Face directory already", "name a run of mpctl")
    return saved


def _entries_of_theirs(values: Values, row: Row, dtype: str | None) -> list[Entry]:
    make, dtype = partial(_piece, values, row), dtype or values.dtype(row.name)
    return [Entry(p.name, dtype, p.shape, partial(make, p)) for p in row.pieces]


def _bias_entries(saved: SavedModel, model: ModelSpec) -> Iterator[Entry]:
    """The correction biases of routers; zeros, their initial values, for a layer that has none."""
    count, known = model.experts or 0, router_biases_of(saved)
    for layer, name in biases_of(model).items():
        values = known.get(layer, [0.0] * count)
        if len(values) != count:
            why = f"router_bias of {layer} has {len(values)} values, the model {count} experts"
            raise damage_error(saved.checkpoint / MANIFEST, why)
        yield Entry(name, "F32", (count,), partial(torch.tensor, values, dtype=torch.float32))


def _piece(values: Values, row: Row, piece: Piece) -> Tensor:
    """A tensor of theirs from our checkpoint."""
    part = Shard(row.shape, {dim: (span,) for dim, span in enumerate(piece.box)})
    ours = values.part(row.name, part, merged=True)
    ours = ours.reshape(piece.shape[::-1] if piece.transposed else piece.shape)
    if piece.pairs is not None:
        return as_pairs(ours, piece.pairs)
    return ours.T if piece.transposed else ours


def _write_sharded(work: Path, entries: list[Entry], limit: int, counter: OnBytes) -> None:
    """One file, or several of at most `limit` bytes (one tensor at least) and their index."""
    groups: list[list[Entry]] = [[]]
    for entry in entries:
        if groups[-1] and sum(e.bytes for e in groups[-1]) + entry.bytes > limit:
            groups.append([])
        groups[-1].append(entry)
    if len(groups) == 1:
        write_file(work / SINGLE, entries, counter)
        return
    placed: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        write_file(work / name, group, counter)
        placed |= {entry.name: name for entry in group}
    write_json(work / INDEX, {"metadata": {"total_size": sum(entry.bytes for entry in entries)}, "weight_map": placed})


def hub_config(model: ModelSpec, dtype: str, ids: Mapping[str, int | None]) -> dict[str, Any]:
    """The config.json of a model, which shape_from_hf reads back as the same model.

    ids: of special tokens, by the keys of config.json (tokens.py).
    """
    scheme = get_scheme(model)
    shared = {
        "architectures": [scheme.architecture],
        "model_type": scheme.model_type,
        "vocab_size": model.vocab,
        "tie_word_embeddings": model.tied_embeddings,
        "dtype": TORCH_NAMES[dtype],
        "torch_dtype": TORCH_NAMES[dtype],
    }
    return {**shared, **ids, **scheme.config(model)}


def _numel(rows: Iterable[Row]) -> int:
    return sum(torch.Size(row.shape).numel() for row in rows)


def _dtype(entries: list[Entry]) -> str:
    """The widest stored dtype, which a loader needs to lose nothing."""
    return widest(entry.dtype for entry in entries)


def files_of(folder: Path) -> tuple[str, ...]:
    """The files of a folder by their paths in it."""
    return tuple(sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()))


def write_json(path: Path, document: Any) -> None:
    """Write a document as JSON."""
    path.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
