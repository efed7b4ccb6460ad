"""Adapters of a run as a folder that Hugging Face's peft loads: adapter_config.json, adapter_model.safetensors.

A module of theirs that several adapters of ours meet (queries, keys and values in GPT-2's c_attn; gate and up of fused
experts) gets one of their ranks together: A is theirs stacked, B has each in its block, alpha grows with the rank. A
module that is a part of what one adapter of ours covers gets all of its A and some rows of its B. Neither loses a bit.
Experts' A [E, r, in] is stored as [E r, in], their B [E, out, r] as [out, r E].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpctl.core.errors import InputError
from mpctl.core.shard import Shard
from mpctl.model.operators.adapters import MAGNITUDE, saved_patterns
from mpctl.records.checkpoint.folder import staged_folder
from mpctl.records.checkpoint.manifest import BaseReference
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.verify import Progress, counted, ignore_progress
from mpctl.spec.adapter import AdapterSpec
from mpctl.train.checkpoint.tensor_file import DTYPES, Entry, in_file_order, write_file
from mpctl.train.weights.names import get_scheme, rows_of
from mpctl.train.weights.peft_config import CONFIG, TENSORS, config_document
from mpctl.train.weights.peft_modules import PeftModule, SharedRows, peft_modules
from mpctl.train.weights.reader import as_pairs
from mpctl.train.weights.values import Values
from mpctl.train.weights.writer import Written, files_of, open_run, total_bytes, write_json

PREFIX = "base_model.model."
DIGEST = "mpctl.base"
"""The key of the file's metadata with the digest of the base's values."""


def export_adapters(run: Path, out: Path, *, on_progress: Progress = ignore_progress) -> Written:
    """A folder of peft's at `out` from the adapters of a run's newest checkpoint, or of an import's."""
    with staged_folder(out) as work:
        saved = open_run(run)
        values, adapter = Values.of(saved), saved.adapter
        if adapter is None:
            raise InputError.of("no-adapter", str(run), "was trained without adapters", "export its weights")
        entries, config = adapter_entries(saved, values, adapter)
        metadata = {DIGEST: _digest(values)}
        write_file(work / TENSORS, entries, counted("export", total_bytes(entries), on_progress), metadata)
        write_json(work / CONFIG, config)
        files = files_of(work)
    return Written(
        source=run,
        out=out,
        architecture=get_scheme(saved.model).architecture,
        parameters=sum(torch.Size(entry.shape).numel() for entry in entries),
        bytes=total_bytes(entries),
        dtype=max({entry.dtype for entry in entries}, key=list(reversed(DTYPES)).index),
        step=saved.step,
        files=files,
        notes=tuple(_notes(config, adapter)),
        model=saved.model,
    )


def _digest(values: Values) -> str:
    origin = values.origin
    known = origin.base if isinstance(origin, SavedModel) else None
    return known.digest if known is not None else values.digest()


def _notes(config: dict[str, Any], adapter: AdapterSpec) -> Iterator[str]:
    base = Path(config["base_model_name_or_path"])
    if not (base / "config.json").is_file():
        yield f"{base} is no Hugging Face directory: peft needs one, `mpctl checkpoint export {base} HF_BASE`"
    if config["lora_dropout"] != adapter.dropout:
        yield "lora_dropout is 0, since peft has none in fused experts: it matters only where training goes on"


def adapter_entries(saved: SavedModel, values: Values, adapter: AdapterSpec) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors of adapter_model.safetensors, and adapter_config.json."""
    scheme, modules = get_scheme(saved.model), peft_modules(saved.model)
    names = {name for rows in values.adapted.values() for name in rows}
    found = [(module, module.parts(names)) for module in modules]
    adapted = [(module, parts) for module, parts in found if parts]
    entries: list[Entry] = []
    for module, parts in adapted:
        is_inner = module.parameter.startswith("gate_up") and _has_down(module, adapted)
        entries += _module_entries(module, parts, values, f"{PREFIX}{module.name}{'.base_layer' * is_inner}", adapter)
    entries += _saved_entries(saved, values, adapter)
    document = config_document(
        adapter,
        {module.target: adapter.rank * len(parts) for module, parts in adapted},
        base=_base_path(saved),
        parameters=tuple(module.target for module, _ in adapted if module.parameter),
        others=tuple(module.target for module, parts in found if not parts),
        task=task_of(scheme.continues_text, generates=scheme.generates),
        conv1d=scheme.conv1d,
    )
    return in_file_order(entries), document


def task_of(continues_text: bool, *, generates: bool) -> str | None:
    """peft's word for what a class is for."""
    return "CAUSAL_LM" if continues_text else "SEQ_2_SEQ_LM" if generates else None


def _base_path(saved: SavedModel) -> str:
    """Where the base is; the run itself where its checkpoints hold it."""
    reference: BaseReference | None = saved.base
    return reference.path if reference else str(saved.started_from or saved.folder.resolve())


def _has_down(module: PeftModule, adapted: Sequence[tuple[PeftModule, list[SharedRows]]]) -> bool:
    return any(other.name == module.name and other.parameter != module.parameter for other, _ in adapted)


def _module_entries(
    module: PeftModule, parts: list[SharedRows], values: Values, name: str, adapter: AdapterSpec
) -> Iterator[Entry]:
    rank, lead = adapter.rank * len(parts), module.experts or 1
    dtype = values.dtype(f"{parts[0].adapter}.A.weight")
    make = partial(_factors, module, parts, values)
    yield Entry(f"{name}.lora_A.weight", dtype, (lead * rank, module.inputs), lambda: make()[0])
    yield Entry(f"{name}.lora_B.weight", dtype, (len(module.rows), lead * rank), lambda: make()[1])
    if adapter.kind == "dora":
        if sum(len(part.theirs) for part in parts) < len(module.rows):
            message = f"{module.target} has adapters for a part of its rows, and peft's DoRA for all or none"
            hint = "train with all outputs of the module as targets, or export with --merged"
            raise InputError.of("adapter-unsupported", "training.adapter.targets", message, hint)
        yield Entry(f"{name}.lora_magnitude_vector", dtype, (len(module.rows),), partial(_lengths, parts, values))


def _factors(module: PeftModule, parts: list[SharedRows], values: Values) -> tuple[Tensor, Tensor]:
    """A and B of a module, as peft stores them."""
    downs = [values.factor(f"{part.adapter}.A.weight") for part in parts]
    ups = [values.factor(f"{part.adapter}.B.weight") for part in parts]
    rank = downs[0].shape[-2]
    down = torch.cat(downs, -2)
    up = torch.zeros(*ups[0].shape[:-2], len(module.rows), rank * len(parts), dtype=ups[0].dtype)
    for number, (part, factor) in enumerate(zip(parts, ups, strict=True)):
        rows, columns = slice(part.theirs.start, part.theirs.stop), slice(number * rank, (number + 1) * rank)
        up[..., rows, columns] = factor[..., part.ours.start : part.ours.stop, :]
    if module.pairs is not None:
        up = as_pairs(up, module.pairs)
    if module.experts:  # [E, r, i] -> [E r, i]; [E, o, r] -> [o, r E]
        down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
    return down, up


def _lengths(parts: list[SharedRows], values: Values) -> Tensor:
    found = [values.factor(f"{part.adapter}.{MAGNITUDE}")[part.ours.start : part.ours.stop] for part in parts]
    return torch.cat(found)


def _saved_entries(saved: SavedModel, values: Values, adapter: AdapterSpec) -> Iterator[Entry]:
    """Modules that were trained in full."""
    if not adapter.modules_to_save:
        return
    if saved.model.tied_embeddings:
        message = "the word table is the head too, of which peft would train a copy"
        hint = "export with --merged"
        raise InputError.of("adapter-tied", "training.adapter.modules_to_save", message, hint)
    for row in rows_of(saved.model).values():
        if any(row.name.startswith(start) for start in saved_patterns(adapter)):
            (piece,) = row.pieces
            make = partial(values.part, row.name, Shard(row.shape))
            yield Entry(f"{PREFIX}{piece.name}", values.dtype(row.name), piece.shape, make)
