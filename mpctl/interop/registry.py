"""The launchers that plans are written for, and those whose flags or files a job is read from.

A new one is a module with its `LAUNCHER` (emitted.py) and a row here. The module is imported when
the launcher is asked for, so that names cost nothing.

>>> sorted(TARGETS)[:2]
['accelerate', 'automodel']
"""

from __future__ import annotations

from typing import NamedTuple


class InteropRow(NamedTuple):
    """Entry of a launcher. module: it defines LAUNCHER; reads: whether jobs are read from its flags or files."""

    module: str
    reads: bool = False


LAUNCHERS = {
    "megatron": InteropRow("mpctl.interop.megatron", reads=True),
    "megatron-bridge": InteropRow("mpctl.interop.bridge", reads=True),
    "torchtitan": InteropRow("mpctl.interop.torchtitan", reads=True),
    "deepspeed": InteropRow("mpctl.interop.deepspeed", reads=True),
    "accelerate": InteropRow("mpctl.interop.accelerate", reads=True),
    "trl": InteropRow("mpctl.interop.trl", reads=True),
    "axolotl": InteropRow("mpctl.interop.axolotl", reads=True),
    "llama-factory": InteropRow("mpctl.interop.llama_factory", reads=True),
    "automodel": InteropRow("mpctl.interop.automodel", reads=True),
    "nanotron": InteropRow("mpctl.interop.nanotron", reads=True),
    "colossalai": InteropRow("mpctl.interop.colossalai"),
    "torch": InteropRow("mpctl.interop.torch_mesh"),
}
"""Keys are the names that `--emit` and `--from` take."""
TARGETS = tuple(LAUNCHERS)
SOURCES = tuple(name for name, row in LAUNCHERS.items() if row.reads)
