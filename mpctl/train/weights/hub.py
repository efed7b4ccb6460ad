"""A Hugging Face directory by its headers: its config, its tensors' names, shapes and types.

A directory holds one `model.safetensors`, or several that `model.safetensors.index.json` maps. No
torch here: reader.py reads the bytes that this module has checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.model.families.scheme import HEAD, Scheme
from mpctl.plan.rules.validate import model_issues
from mpctl.records.checkpoint.tensor_header import AGAIN, FLOATS, FP8, TensorHeader, read_header, unreadable
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.train.weights.names import (
    Row,
    as_stored,
    biases_of,
    builtin_schemes,
    get_scheme,
    is_extra,
    num_pieces,
    router_rows,
    rows_of,
)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_folder(folder: Path) -> tuple[dict[str, TensorHeader], list[Issue]]:
    """Return every tensor of a Hugging Face directory, and all faults of its files."""
    if (folder / INDEX).is_file():
        return _sharded(folder)
    if not (folder / SINGLE).is_file():
        return {}, [_nothing(folder)]
    try:
        return read_header(folder / SINGLE), []
    except InputError as error:
        return {}, list(error.issues)


def _nothing(folder: Path) -> Issue:
    if any(any(folder.glob(pattern)) for pattern in PICKLES):
        return Issue(
            "weights-pickled",
            str(folder),
            "holds weights as pickles only, which can run code and are never opened",
            "save them as safetensors, where you trust them: from_pretrained(DIR).save_pretrained(OUT) of their class",
        )
    return Issue(
        "weights-missing",
        str(folder),
        f"holds neither {SINGLE} nor {INDEX}",
        "name a directory that save_pretrained wrote",
    )


def _sharded(folder: Path) -> tuple[dict[str, TensorHeader], list[Issue]]:
    path = folder / INDEX
    try:
        mapped = json.loads(path.read_text("utf-8"))["weight_map"]
        files = sorted({str(name) for name in mapped.values()})
        if outside := [name for name in files if name != PurePath(name).name or name == ".."]:
            raise ValueError(f"{outside[0]!r} is no file of this directory")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return {}, [unreadable(path, f"no index: {type(error).__name__}: {error}").issues[0]]
    tensors: dict[str, TensorHeader] = {}
    issues: list[Issue] = []
    for name in files:
        try:
            stored = read_header(folder / name)
        except InputError as error:
            issues += error.issues
            continue
        wanted = {tensor for tensor, file in mapped.items() if file == name}
        issues += _foreign(folder / name, wanted, set(stored))
        tensors |= {tensor: stored[tensor] for tensor in wanted & stored.keys()}
    return tensors, issues


def _foreign(path: Path, wanted: set[str], stored: set[str]) -> Iterator[Issue]:
    for tensor in sorted(wanted - stored):
        yield Issue("weights-missing", str(path), f"{tensor} is not in it, but {INDEX} says so", AGAIN)
    for tensor in sorted(stored - wanted):
        yield Issue(
            "weights-foreign",
            str(path),
            f"holds {tensor}, which {INDEX} does not place there: the shard of another model",
            AGAIN,
        )


@dataclass(frozen=True)
class Hub:
    """A Hugging Face directory whose headers agree with its config.

    rows: for each of our parameters, by its name, its place in the files. tensors: the files'
    tensors by their names. copies: for each of our parameters, names of tensors that hold it once
    more and must be equal to it. biases: for each of our layers with experts, by its name, the
    tensor of its router's correction biases. notes: what the files have and is not read.
    """

    folder: Path
    model: ModelSpec
    rows: dict[str, Row]
    tensors: dict[str, TensorHeader]
    copies: dict[str, tuple[str, ...]]
    biases: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def tokenizer(self) -> Path | None:
        path = self.folder / "tokenizer.json"
        return path if path.is_file() else None


def open_hub(folder: Path) -> Hub:
    """A Hugging Face directory, checked; InputError names file, tensor and both shapes."""
    model = load_job(None, {"model.hf_config": str(folder)}).model
    assert model is not None
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    if (kind := config["model_type"]) not in builtin_schemes():
        raise InputError.of(
            "no-hub-class",
            str(path),
            f"weights of {kind} are not read by this version",
            f"use {', '.join(builtin_schemes())}",
        )
    if issue := _quantization_issue(path, config.get("quantization_config")):
        raise InputError([issue])
    # Names and paths of this machine would be copied into everything made from it.
    model = model.model_copy(update={"name": None, "source": None})
    if refused := model_issues(model):
        raise InputError(refused)
    scheme = get_scheme(model)
    tensors, issues = read_folder(folder)
    if issues and not tensors:
        raise InputError(issues)
    if issue := _count_issue(path, model, scheme, tensors):
        raise InputError([*issues, issue])
    rows = as_stored(rows_of(model), tensors, scheme)
    # A head that is read as a separate parameter is not a copy.
    unread = tensors.keys() - {piece.name for row in rows.values() for piece in row.pieces}
    copies = {
        name: stored
        for name, names in scheme.copies.items()
        if (stored := tuple(copy for copy in names if copy in unread))
    }
    more = config.get(scheme.predicts_more) if scheme.predicts_more else None
    more = more if type(more) is int else 0
    skipped, tensors = _predicting_layers(tensors, model.layers, more)
    hub = Hub(folder, model, rows, tensors, copies, biases_of(model), skipped)
    # Tensors that may be in an unreadable file are not reported as missing.
    is_complete = not issues
    faults = chain(_tensor_issues(hub, scheme), _copy_issues(hub, scheme))
    issues += [issue for issue in faults if is_complete or issue.rule != "weights-missing"]
    if issues:
        raise InputError(issues)
    return hub


MOST_MISSING = 10_000
"""Number of tensors that a config may imply beyond twice those in the files; missing ones are named.
"""


def _count_issue(path: Path, model: ModelSpec, scheme: Scheme, tensors: Mapping[str, TensorHeader]) -> Issue | None:
    """An issue where a config implies far more tensors than the files hold, found without naming
    them: a config.json may come from anybody, and a few bytes of it may ask for a billion experts.
    It names the first router with another number of experts, or else the numbers of tensors."""
    if model.all_layers > len(tensors):  # each has one at least
        return _too_many(path, plural(model.all_layers, "layer"), tensors)
    implied = num_pieces(model)
    if implied <= 2 * len(tensors) + MOST_MISSING:
        return None
    for row in as_stored(router_rows(model), tensors, scheme).values():
        (piece,) = row.pieces
        stored = tensors.get(piece.name)
        if stored is not None and stored.shape != piece.shape:
            return _misfit(stored, piece.name, piece.shape)
    of = f" of {model.experts:,} experts" if model.experts else ""
    implies = f"{implied:,} tensors ({plural(model.all_layers, 'layer')}{of})"
    return _too_many(path, implies, tensors)


def _too_many(path: Path, implied: str, tensors: Mapping[str, TensorHeader]) -> Issue:
    message = f"implies {implied}, but the files hold {plural(len(tensors), 'tensor')}"
    hint = "use the config.json that belongs to the files"
    return Issue("weights-missing", str(path), message, hint)


def _misfit(stored: TensorHeader, name: str, shape: tuple[int, ...]) -> Issue:
    message = f"{name} is {list(stored.shape)}, the shape in config.json needs {list(shape)}"
    return Issue("weights-shape", str(stored.path), message)


def _quantization_issue(path: Path, stated: Any) -> Issue | None:
    """An issue where config.json says that weights are quantized in another way than by blocks of
    128 x 128 in fp8."""
    table = stated if isinstance(stated, dict) else {}
    method, block = table.get("quant_method", "fp8"), table.get("weight_block_size", [BLOCK, BLOCK])
    if stated is None or (method, block) == ("fp8", [BLOCK, BLOCK]):
        return None
    message = f"weights are quantized by {method!r:.40} in blocks of {block!r:.40}"
    hint = f"use fp8 in blocks of {BLOCK} x {BLOCK}, or weights in 16 bits"
    return Issue("weights-dtype", str(path), message, hint)


def _copy_issues(hub: Hub, scheme: Scheme) -> Iterator[Issue]:
    """Return issues for copies with different headers; reader.py compares the values of the others."""
    for name, names in hub.copies.items():
        (piece,) = hub.rows[name].pieces
        first = hub.tensors.get(piece.name)
        if first is None:
            continue
        for copy in names:
            stored = hub.tensors[copy]
            if (stored.shape, stored.dtype) != (first.shape, first.dtype):
                yield differing(
                    stored.path,
                    f"{copy} is {list(stored.shape)} {stored.dtype}, but "
                    f"{piece.name}, which it has to equal, {list(first.shape)} "
                    f"{first.dtype}",
                    copy,
                    scheme,
                )


def differing(path: Path, message: str, copy: str, scheme: Scheme) -> Issue:
    """The issue of a tensor that should equal another one and does not."""
    again = "save it again with the class that wrote it, which decides what is meant"
    is_head = copy.startswith((HEAD, "cls."))
    return Issue("weights-untied", str(path), message, scheme.untied if is_head else again)


def _predicting_layers(
    tensors: dict[str, TensorHeader], first: int, number: int
) -> tuple[tuple[str, ...], dict[str, TensorHeader]]:
    """A note on `number` layers from `first` on, which predict further tokens, and the tensors
    without them."""
    starts = {f"model.layers.{n}." for n in range(first, first + number)}
    found = {name for name in tensors if name[: name.find(".", len("model.layers.")) + 1] in starts}
    if not found:
        return (), tensors
    note = f"layers {first} to {first + number - 1}" if number > 1 else f"layer {first}"
    note += f" of multi-token prediction, {len(found):,} tensors, is not read"
    return (note,), {name: held for name, held in tensors.items() if name not in found}


def _tensor_issues(hub: Hub, scheme: Scheme) -> Iterator[Issue]:
    pieces = {piece.name: piece for row in hub.rows.values() for piece in row.pieces}
    shapes = {name: piece.shape for name, piece in pieces.items()}
    experts = (hub.model.experts or 0,)
    shapes |= dict.fromkeys(hub.biases.values(), experts)
    yield from _missing(hub, shapes, scheme)
    read = {*shapes, *chain(*hub.copies.values())}
    for name, shape in shapes.items():
        stored = hub.tensors.get(name)
        if stored is None:
            continue
        if stored.shape != shape:
            yield _misfit(stored, name, shape)
        elif stored.dtype == FP8 and len(shape) == 2:
            read.add(scale_of(name))
            yield from _scale_issues(hub, name, shape)
        elif stored.dtype not in FLOATS:
            yield Issue(
                "weights-dtype",
                str(stored.path),
                f"{name} is {stored.dtype}, not a floating-point type",
                f"use {', '.join(FLOATS)}",
            )
    for name in sorted(hub.tensors.keys() - read):
        if not is_extra(name, scheme):
            stored = hub.tensors[name]
            yield Issue(
                "weights-foreign",
                str(stored.path),
                f"holds {name} {list(stored.shape)}, which the shape in config.json does not have",
            )


def _missing(hub: Hub, shapes: Mapping[str, tuple[int, ...]], scheme: Scheme) -> Iterator[Issue]:
    """An issue for each tensor that is in no file, and one for all experts of a layer that lack
    the same one."""
    lacking: dict[str, list[str]] = {}
    for name in shapes.keys() - hub.tensors.keys():
        lacking.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.{}.", name), []).append(name)
    for name in sorted(lacking):
        numbers = sorted(int(found[1]) for one in lacking[name] if (found := re.search(r"\.experts\.(\d+)\.", one)))
        shown, shape = name, list(shapes[lacking[name][0]])
        if numbers:
            few = [*map(str, numbers[:8]), *[".."] * (len(numbers) > 8)]
            shown = f"{name.format('N')} of expert{'s' * (len(few) > 1)} {', '.join(few)}"
        verb = "are" if len(numbers) > 1 else "is"
        yield Issue(
            "weights-missing",
            str(hub.folder),
            f"{shown} {shape} {verb} in no file",
            f"{scheme.architecture} of this config.json has it",
        )


BLOCK = 128  # rows and columns of an fp8 matrix that share a scale (DeepSeek-V3)


def scale_of(name: str) -> str:
    """The tensor with the scales of an fp8 matrix: `up_proj.weight_scale_inv`."""
    return f"{name}_scale_inv"


def _scale_issues(hub: Hub, name: str, shape: tuple[int, ...]) -> Iterator[Issue]:
    wanted, scale = tuple(-(-size // BLOCK) for size in shape), hub.tensors.get(scale_of(name))
    if scale is None:
        yield Issue(
            "weights-missing",
            str(hub.folder),
            f"{scale_of(name)} {list(wanted)} is in no file, but {name} is {FP8}",
            AGAIN,
        )
    elif scale.shape != wanted or scale.dtype not in FLOATS:
        yield Issue(
            "weights-shape",
            str(scale.path),
            f"{scale_of(name)} is {scale.dtype} "
            f"{list(scale.shape)}, blocks of {BLOCK} x {BLOCK} of {name} need "
            f"{list(wanted)}",
        )
