"""The tensors of a Hugging Face directory, by the headers of its safetensors files, without torch.

A directory holds one `model.safetensors`, or several that `model.safetensors.index.json` maps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePath

from mpctl.checkpoint.tensor_header import AGAIN, TensorHeader, read_header, unreadable
from mpctl.errors import InputError, Issue

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_folder(folder: Path) -> tuple[dict[str, TensorHeader], list[Issue]]:
    """Every tensor of a Hugging Face directory, and everything wrong with its files."""
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
        return Issue("weights-pickled", str(folder), "holds weights as pickles only, which can run "
                     "code and are never opened", "save them as safetensors, where you trust them:"
                     " from_pretrained(DIR).save_pretrained(OUT) of their class")  # fmt: skip
    return Issue("weights-missing", str(folder), f"holds neither {SINGLE} nor {INDEX}",
                 "name a directory that save_pretrained wrote")  # fmt: skip


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
        yield Issue("weights-missing", str(path), f"{tensor} is not in it, but {INDEX} says so",
                    AGAIN)  # fmt: skip
    for tensor in sorted(stored - wanted):
        yield Issue("weights-foreign", str(path), f"holds {tensor}, which {INDEX} does not place "
                    "there: the shard of another model", AGAIN)  # fmt: skip
