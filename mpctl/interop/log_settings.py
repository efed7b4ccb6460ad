"""What a launcher prints of its settings at the start of its log.

* Megatron-LM: a block headed `---- arguments ----`, a line `name ..... value` each
  (megatron/training/arguments.py, _print_args), and `> padded vocab (size: 50257) ...`.
* Megatron-Bridge: a block headed `---- Task Configuration ----`, YAML of a table for each part
  (training/config.py, ConfigContainer.print_yaml); read are numbers, words and lists of words.
* nanotron: `Config(general=GeneralArgs(project='p', ...), parallelism=ParallelismArgs(dp=2, ...`,
  as pprint breaks it over lines (trainer.py).
* torchtitan: with print_config `Running with configs: {` and JSON; always `Building device mesh
  with parallelism: pp=1, dp_replicate=1, ...` and `Trainer is initialized with local batch size 8,
  global batch size 64, ... sequence length 2048` (trainer.py, parallel_dims.py).

Values are text under dotted names, at most MOST of them, of LONGEST_VALUE characters each.

>>> config, reader = PrintedConfig(), DumpReader()
>>> for line in ("---- arguments ----", "  world_size ...... 8", "  bf16 ............ True"):
...     reader.read(line, config)
>>> config.kind, config.world_size, config.values["bf16"]
('megatron', 8, 'True')
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

MOST, LONGEST_VALUE, LONGEST_JSON, DEEPEST = 5_000, 2_000, 2**20, 20
_ARGUMENT = re.compile(r"(?:^|[ :\]])([A-Za-z]\w{1,80}) \.{3,80} ?(.{0,2000})")
_VOCAB = re.compile(r"padded vocab \(size: (\d{1,9})\)")
_PART = re.compile(r"(\w{1,60})=(?:[A-Za-z_.]{1,60}\(|([^,()]{0,200}))|([()])")
_MESH = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(\d{1,6})")
_OLD_MESH = re.compile(r"device mesh with \[([a-z_', ]{1,200})\], \[([\d, ]{1,100})\]")
_TRAINER = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),"
    r"(?: gradient.accumulation.steps:? (\d{1,9}),)? sequence length (\d{1,9})"
)
_RECOMPUTED = re.compile(r"Applied (\w{1,40}) activation checkpointing")
_FLAVOR = re.compile(r"Building (\w{1,40}) (\w{1,40}) with")
_TABLE = re.compile(r"(\w{1,40}):$")
_ENTRY = re.compile(r"  (\w{1,80}):(?: (.{1,2000}))?$")
HEADS = {
    "- Task Configuration -": "megatron-bridge",
    " arguments --": "megatron", "Config(general=": "nanotron", "Running with configs: {":
    "torchtitan", "Building device mesh with": "torchtitan", "-D device mesh with": "torchtitan",
}  # fmt: skip
"""What the dump of a launcher begins with."""
_HEAD = re.compile("|".join(map(re.escape, HEADS)))
LAYOUT = {
    "megatron": (
        "world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "micro_batch_size", "global_batch_size",
        "seq_length", "num_layers", "hidden_size",
    ),
    "megatron-bridge": (
        *(f"model.{axis}_size" for axis in (
            "tensor_model_parallel", "pipeline_model_parallel", "context_parallel",
            "expert_model_parallel", "virtual_pipeline_model_parallel",
        )),
        "model.num_layers", "model.hidden_size", "dataset.sequence_length",
        "train.micro_batch_size", "train.global_batch_size",
    ),
    "nanotron": (
        "parallelism.dp", "parallelism.tp", "parallelism.pp", "parallelism.context_parallel_size",
        "tokens.micro_batch_size", "tokens.batch_accumulation_per_replica",
        "tokens.sequence_length", "model.model_config.num_hidden_layers",
        "model.model_config.hidden_size",
    ),
    "torchtitan": (
        *(f"mesh.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")),
        "training.local_batch_size", "training.global_batch_size", "training.seq_len",
    ),
}  # fmt: skip
"""Values that make another run of a log's later part where they change."""


@dataclass
class PrintedConfig:
    """The settings that a log prints. kind: megatron, nanotron or torchtitan, empty where there are
    none; values: as text, by dotted name."""

    kind: str = ""
    values: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int | None:
        """The ranks that they say, or whose product they are."""
        v = self.values
        if self.kind == "nanotron":
            axes = ("dp", "tp", "pp", "context_parallel_size")
            sizes = [v.get(f"parallelism.{axis}", "1") for axis in axes]
        elif self.kind == "torchtitan":
            sizes = [v[n] for n in LAYOUT["torchtitan"][:5] if n in v]
        else:
            sizes = [v["world_size"]] if "world_size" in v else []
        if not sizes or not v or not all(size.isdecimal() and len(size) < 9 for size in sizes):
            return None
        return prod(map(int, sizes)) or None

    def add(self, name: str, value: str) -> None:
        if len(self.values) < MOST:
            self.values[name] = value[:LONGEST_VALUE].strip()

    def changes(self, other: PrintedConfig) -> str:
        """`tensor_model_parallel_size 4 becomes 8`, the first of those of the layout; empty where
        none changes."""
        for name in LAYOUT.get(self.kind, ()) if self.kind == other.kind else ():
            old, new = self.values.get(name), other.values.get(name)
            if old is not None and new is not None and old != new:
                return f"{name} {old} becomes {new}"
        return ""


def head_of(text: str) -> str:
    """The head of a dump of settings that begins in this line; empty where none does."""
    found = _HEAD.search(text)
    return found[0] if found and "end of arguments" not in text else ""


class DumpReader:
    """Reads the dumps of settings in the lines of a log, one after the other."""

    def __init__(self) -> None:
        self._head = ""
        self._kind = ""
        self._stack: list[str] = []
        self._json: list[str] = []
        self._size = 0

    def read(self, text: str, config: PrintedConfig, head: str | None = None) -> None:
        """Add what a line says to the settings. head: its `head_of`, where that is known."""
        self._head = head_of(text) if head is None else head
        if self._head:
            self._kind = config.kind = HEADS[self._head]
            self._stack, self._json = [], []
        if self._kind:
            _READERS[self._kind](self, text, config)
        elif "padded vocab" in text and (found := _VOCAB.search(text)):
            config.add("vocab_size", found[1])

    def read_megatron(self, text: str, config: PrintedConfig) -> None:
        if "end of arguments" in text:
            self._kind = ""
        elif " ..." in text and (found := _ARGUMENT.search(text)):
            config.add(found[1], found[2])

    def read_bridge(self, text: str, config: PrintedConfig) -> None:
        if self._head:
            return
        if text.startswith("----"):
            self._kind = ""
        elif found := _TABLE.match(text):
            self._stack = [found[1]]
        elif self._stack and (found := _ENTRY.match(text)):
            self._stack[1:] = [found[1]]
            if found[2]:
                config.add(".".join(self._stack), found[2])
        elif text.startswith("  - ") and len(self._stack) == 2:
            name = ".".join(self._stack)
            listed = config.values.get(name, "[]")
            more = ", " if listed != "[]" else ""
            config.add(name, f"{listed[:-1]}{more}'{text[4:]}']")

    def read_nanotron(self, text: str, config: PrintedConfig) -> None:
        if "]: " in text:
            text = text[text.index("]: ") + 3 :]
        for found in _PART.finditer(text):
            name, value, bracket = found.groups()
            if bracket == "(":
                self._stack.append("")
            elif bracket == ")" and self._stack:
                self._stack.pop()
            elif name and value is None:
                self._stack.append(name)
            elif name and "" not in self._stack[1:]:
                config.add(".".join([*self._stack[1:], name]), value.strip("'\""))
            if (bracket == ")" and not self._stack) or len(self._stack) > DEEPEST:
                self._kind = ""
                return

    def read_torchtitan(self, text: str, config: PrintedConfig) -> None:
        if self._head.startswith("Running"):
            self._json, self._size = [text[text.index("{") :]], 0
        elif self._json:
            self._json.append(text)
            self._size += len(text) + 1
            if text.startswith("}"):
                _add_json("\n".join(self._json), config)
                self._json = []
            elif self._size > LONGEST_JSON:
                self._json = []
        if "device mesh with" in text:
            if old := _OLD_MESH.search(text):
                names = [name.strip(" '") for name in old[1].split(",")]
                for name, size in zip(names, old[2].split(","), strict=False):
                    config.add(f"mesh.{name if name != 'dp' else 'dp_shard'}", size)
            for name, size in _MESH.findall(text):
                config.add(f"mesh.{name}", size)
        elif found := _TRAINER.search(text):
            sizes = ("local_batch_size", "global_batch_size", "", "seq_len")
            for name, value in zip(sizes, found.groups(), strict=True):
                if name:
                    config.add(f"training.{name}", value)
        elif found := _RECOMPUTED.search(text):
            config.add("activation_checkpoint.mode", found[1].lower())
        elif found := _FLAVOR.search(text):
            config.add("model.name", found[1])
            config.add("model.flavor", found[2])


_READERS: Mapping[str, Callable[[DumpReader, str, PrintedConfig], None]] = {
    "megatron": DumpReader.read_megatron, "megatron-bridge": DumpReader.read_bridge,
    "nanotron": DumpReader.read_nanotron,
    "torchtitan": DumpReader.read_torchtitan,
}  # fmt: skip


def _add_json(text: str, config: PrintedConfig) -> None:
    try:
        _flatten("", json.loads(text), config)
    except (ValueError, RecursionError):
        return


def _flatten(name: str, value: Any, config: PrintedConfig) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{name}.{key}" if name else str(key), inner, config)
    else:
        config.add(name, value if isinstance(value, str) else json.dumps(value))
