"""Safetensors files written tensor by tensor, so that no more than one of them is in memory, and
directories that are there whole or not at all. The format is told in headers.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from mpctl.errors import InputError
from mpctl.weights.headers import FLOATS

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Entry:
    """A tensor to be written, and how to come by it when its turn has come."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * FLOATS[self.dtype]


def write_file(path: Path, entries: Sequence[Entry], on_entry: Callable[[Entry], None]) -> None:
    """One safetensors file; the widest types first would align best, all here are of one or two."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        offsets = [end, end := end + entry.bytes]
        header[entry.name] = {
            "dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets,
        }  # fmt: skip
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for entry in entries:
            tensor = entry.make().to(DTYPES[entry.dtype]).contiguous()
            assert tuple(tensor.shape) == entry.shape, entry.name
            stream.write(tensor.view(-1).view(torch.uint8).numpy().data)
            on_entry(entry)


@contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """A directory beside `out` that takes its name at the end; InputError when `out` is occupied
    or cannot be written."""
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise InputError.of("out-occupied", str(out), "already holds something, nothing was "
                            "written", "name a directory that is not there yet")  # fmt: skip
    out = out.absolute()
    work = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        work.mkdir(parents=True)
        yield work
        work.rename(out)
    except OSError as error:
        why = f"cannot be written: {error.strerror or error}"
        hint = "name a directory that can be written"
        raise InputError.of("out-unusable", str(out), why, hint) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
