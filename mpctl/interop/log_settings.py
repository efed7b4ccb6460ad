"""The settings that launchers print at the start of a log, and the job that they are.

* Megatron-LM: a block headed `---- arguments ----`, a line `name ..... value` each
  (megatron/training/arguments.py, _print_args), and `> padded vocab (size: 50257) ...`. They are
  those after its parser and validation: the flag `--name value`, a switch where the value is True.
  Read are the flags that `--from megatron` reads, unless their value is the parser's default. A few
  have another name there (NAMES), or are printed as what they switch off (SWITCHED_OFF).
* Megatron-Bridge: a block headed `---- Task Configuration ----`, YAML of a table for each part
  (training/config.py, ConfigContainer.print_yaml); numbers, words and lists of words become
  Megatron-LM's arguments (BRIDGE). A sample's length is the data's, the model's the most positions.
* nanotron: `Config(general=GeneralArgs(project='p', ...), parallelism=ParallelismArgs(dp=2, ...`,
  as pprint breaks it over lines (trainer.py).
* torchtitan: with print_config `Running with configs: {` and JSON; always `Building device mesh
  with parallelism: pp=1, dp_replicate=1, ...` and `Trainer is initialized with local batch size 8,
  global batch size 64, ... sequence length 2048` (trainer.py, parallel_dims.py).

Values are text under dotted names, at most MOST of them, of LONGEST_VALUE characters each.

>>> config = PrintedConfig()
>>> for line in ("  tensor_model_parallel_size ...... 4", "  bf16 ............ True"):
...     _ = read_megatron(line, "", [], config)
>>> printed_flags({**config.values, "add_bias_linear": "False"})
{'--bf16': (), '--disable-bias-linear': (), '--tensor-model-parallel-size': ('4',)}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mpctl.interop.command_line import CommandLine
from mpctl.interop.config_text import Flags
from mpctl.interop.from_megatron import OLDER, READ, read_command
from mpctl.interop.from_torchtitan import read_printed_torchtitan
from mpctl.interop.mapping import ReadJob
from mpctl.interop.megatron_experts import LATENT_FLAGS, POSITIONS
from mpctl.interop.megatron_experts import READ as EXPERTS
from mpctl.interop.megatron_flags import CHUNKS, LAYERS_A_CHUNK
from mpctl.interop.megatron_others import is_neutral, parser_flags, refusal_of
from mpctl.interop.nanotron import read_values

MOST, LONGEST_VALUE, DEEPEST = 5_000, 2_000, 20
OF_LAYOUT = re.compile(
    r"parallel|batch|seq_len|sequence_length|num_(?:hidden_)?layers|hidden_size|world_size|^mesh\.|"
    r"recompute|activation_checkpoint|zero_stage|distributed_optimizer|reshard|overlap|expert|"
    r"dtype|precision|(?:^|\.)(?:bf16|fp16|fp8|fp4)"
)
"""Names of values that make another run of a log's later part where they change: what a step's time
depends on, and not steps, rates, folders and the like, which a restart may change."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{1,16}")
_ARGUMENT = re.compile(r"(?:^|[ :\]])([A-Za-z]\w{1,80}) \.{3,80} ?(.{0,2000})")
_PART = re.compile(r"(\w{1,60})=(?:[A-Za-z_.]{1,60}\(|([^,()]{0,200}))|([()])")
_MESH = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(\d{1,6})")
_OLD_MESH = re.compile(r"device mesh with \[([a-z_', ]{1,200})\], \[([\d, ]{1,100})\]")
_TRAINER = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),"
    r"(?: gradient.accumulation.steps:? \d{1,9},)? sequence length (\d{1,9})"
)
_RECOMPUTED = re.compile(r"Applied (\w{1,40}) activation checkpointing")
_FLAVOR = re.compile(r"Building (\w{1,40}) (\w{1,40}) with")
_TABLE = re.compile(r"(\w{1,40}):$")
_ENTRY = re.compile(r"  (\w{1,80}):(?: (.{1,2000}))?$")


@dataclass
class PrintedConfig:
    """The settings that a log prints. kind: the launcher that prints them, empty where there are
    none; values: as text, by dotted name."""

    kind: str = ""
    values: dict[str, str] = field(default_factory=dict)

    def begin(self, kind: str) -> None:
        """A dump of a launcher begins; what another one printed is no longer of this run."""
        if kind != self.kind:
            self.kind, self.values = kind, {}

    def add(self, name: str, value: str) -> None:
        if len(self.values) < MOST:
            self.values[name] = value[:LONGEST_VALUE].strip()

    def changes(self, other: PrintedConfig) -> str:
        """`tensor_model_parallel_size 4 becomes 8`, the first of those of the layout; empty where
        none changes."""
        for name, old in self.values.items() if self.kind == other.kind else ():
            new = other.values.get(name, old)
            is_other = old != new and _ADDRESS.sub("", old) != _ADDRESS.sub("", new)
            if is_other and OF_LAYOUT.search(name):
                return f"{name} {old} becomes {new}"
        return ""


def read_megatron(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of Megatron-LM's arguments; False for the last."""
    if " ..." in text and (found := _ARGUMENT.search(text)):
        config.add(found[1], found[2])
    return "end of arguments" not in text


def read_bridge(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of Megatron-Bridge's YAML. state: the table and the key that it is in."""
    name = ".".join(state)
    if text.startswith("----"):
        return bool(head)
    if found := _TABLE.match(text):
        state[:] = [found[1]]
    elif state and (found := _ENTRY.match(text)):
        state[1:] = [found[1]]
        config.add(".".join(state), found[2] or "")
    elif text.startswith("  - ") and config.values.get(name, name)[:1] in ("", "["):
        listed = config.values[name].strip("[]")
        config.add(name, f"[{listed}{', ' if listed else ''}'{text[4:]}']")
    return True


def read_nanotron(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of nanotron's Config(...). state: the names of the calls that it is in, empty for
    those of no keyword."""
    for found in _PART.finditer(text[text.index("]: ") + 3 :] if "]: " in text else text):
        name, value, bracket = found.groups()
        if bracket == "(":
            state.append("")
        elif bracket == ")" and state:
            state.pop()
        elif name and value is None:
            state.append(name)
        elif name and "" not in state[1:]:
            config.add(".".join([*state[1:], name]), value.strip("'\""))
        if (bracket == ")" and not state) or len(state) > DEEPEST:
            return False
    return True


def read_torchtitan(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of torchtitan's start, whose end no line says. state: the JSON so far."""
    if head.startswith("Running"):
        state[:] = [text[text.index("{") :]]
    elif state:
        state.append(text[:LONGEST_VALUE])
        if text.startswith("}"):
            _add_json("\n".join(state), config)
        if text.startswith("}") or len(state) > MOST:
            state.clear()
    if "device mesh with" in text:
        if old := _OLD_MESH.search(text):
            names = [name.strip(" '") for name in old[1].split(",")]
            for name, size in zip(names, old[2].split(","), strict=False):
                config.add(f"mesh.{name if name != 'dp' else 'dp_shard'}", size)
        for name, size in _MESH.findall(text):
            config.add(f"mesh.{name}", size)
    elif found := _TRAINER.search(text):
        for name, size in zip(("local_batch_size", "global_batch_size", "seq_len"), found.groups(), strict=True):
            config.add(f"training.{name}", size)
    elif found := _RECOMPUTED.search(text):
        config.add("activation_checkpoint.mode", found[1].lower())
    elif found := _FLAVOR.search(text):
        config.add("model.name", found[1])
        config.add("model.flavor", found[2])
    return True


def _add_json(text: str, config: PrintedConfig) -> None:
    try:
        tables = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while tables:
        name, value = tables.pop()
        if isinstance(value, dict):
            tables += [(f"{name}.{key}".strip("."), inner) for key, inner in value.items()]
        else:
            config.add(name, value if isinstance(value, str) else json.dumps(value))


def nanotron_job(values: Mapping[str, str]) -> ReadJob | None:
    return read_values({name: (value,) for name, value in values.items()})


def torchtitan_job(values: Mapping[str, str]) -> ReadJob | None:
    return read_printed_torchtitan(
        {name: _json_words(text) for name, text in values.items() if text not in ("None", "null")}
    )


def _json_words(text: str) -> tuple[str, ...]:
    """The elements of a list of torchtitan's JSON, such as the modules of each part of a pipeline;
    another value is one word."""
    try:
        listed = json.loads(text) if text.startswith("[") else text
    except (ValueError, RecursionError):
        listed = text
    return tuple(map(str, listed)) if isinstance(listed, list) else (text,)


NAMES = {"--fp8-format": "fp8", "--fp4-format": "fp4", CHUNKS: "virtual_pipeline_model_parallel_size"}
SWITCHED_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
}
"""Flags without a value, and what is printed as False where they are given."""
_DERIVED = {
    LAYERS_A_CHUNK,
    "--recompute-activations",
    "--no-position-embedding",
    "--use-flash-attn",
    "--use-rotary-position-embeddings",
    "--lr-warmup-fraction",
    "--train-samples",
    "--ckpt-format",
    "--encoder-num-layers",
    "--encoder-seq-length",
    "--decoder-num-layers",
    "--decoder-seq-length",
    *OLDER,
}
"""Not read, as validation put what they say into others."""
_LATENT = {*(flag.key for flag in LATENT_FLAGS), *POSITIONS}
_OF_EXPERTS = (
    {*EXPERTS}
    - _LATENT
    - {"--multi-latent-attention", "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-experts"}
)


def megatron_job(values: Mapping[str, str]) -> ReadJob | None:
    if "num_layers" not in values or "tensor_model_parallel_size" not in values:
        return None
    ranks: Flags = {"--world-size": (values["world_size"],)} if "world_size" in values else {}
    read = read_command(CommandLine(printed_flags(values), ranks))
    stage = values.get("zero_stage", "")  # Megatron-DeepSpeed's
    if stage in ("0", "1", "2", "3") and values.get("deepspeed") == "True":
        read = read._replace(
            settings={**read.settings, "parallel.zero": int(stage), "training.runtime": "megatron-deepspeed"}
        )
    return read


TABLES = ("optimizer", "scheduler", "rng", "mixed_precision", "model", "train", "dist", "ddp")
"""Tables of Megatron-Bridge's config; where several have a key, the last one counts."""
BRIDGE = {
    "gated_linear_unit": "swiglu",
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "seq_length": "max_position_embeddings",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "bias_activation_fusion": "bias_gelu_fusion",
}
"""Names of Megatron-LM's arguments, where Megatron-Bridge has another."""
_WORDS = {"true": "True", "false": "False", "null": "None"}


def bridge_job(values: Mapping[str, str]) -> ReadJob | None:
    return megatron_job(bridge_arguments(values))


def bridge_arguments(values: Mapping[str, str]) -> dict[str, str]:
    """The arguments of Megatron-LM that the tables of Megatron-Bridge's config are."""
    found = {
        BRIDGE.get(key, key): _WORDS.get(value, value)
        for table in TABLES
        for name, value in values.items()
        for first, _, key in [name.partition(".")]
        if first == table
    }
    found["seq_length"] = values.get("dataset.sequence_length", found.get("max_position_embeddings", "None"))
    shared = found.get("share_embeddings_and_output_weights")
    found["untie_embeddings_and_output_weights"] = str(shared == "False")
    groups = found.get("num_query_groups", "None")
    found["group_query_attention"] = str(groups not in ("None", found.get("num_attention_heads")))
    found["grad_reduce_in_bf16"] = str(found.get("grad_reduce_in_fp32") == "False")
    if found.get("vocab_size", "None") == "None":
        found["vocab_size"] = values.get("tokenizer.vocab_size", "None")
    return found


def printed_flags(values: Mapping[str, str]) -> Flags:
    """The flags of Megatron-LM that printed arguments stand for, in the order of their names, then
    those that no setting says and that change the layout or the model."""
    flags: Flags = {}
    unread = (flag for flag in parser_flags() if flag not in READ)
    for flag in (*sorted(READ), *unread):
        if flag in _DERIVED:
            continue
        if flag in SWITCHED_OFF:
            if values.get(SWITCHED_OFF[flag]) == "False":
                flags[flag] = ()
            continue
        value = values.get(NAMES.get(flag, flag.removeprefix("--").replace("-", "_")), "None")
        if value in ("None", "False", "") or (flag == CHUNKS and value == "1"):
            continue
        words = () if value == "True" else _words(value)
        if flag in _LATENT or (not is_neutral(flag, words) and (flag in READ or refusal_of(flag, words) is not None)):
            flags[flag] = words
    left_out = set() if "--num-experts" in flags else _OF_EXPERTS
    if "--multi-latent-attention" not in flags:
        left_out = left_out | _LATENT
    if "--vocab-size" in flags:
        left_out = left_out | {"--padded-vocab-size"}
    if values.get("transformer_impl") == "local" and values.get("use_flash_attn") == "True":
        left_out = left_out | {"--transformer-impl"}  # before 2024: flash attention in local layers
    return {flag: words for flag, words in flags.items() if flag not in left_out}


def _words(value: str) -> tuple[str, ...]:
    """The words that a printed value was parsed from: `['core_attn', 'mlp']`, `AttnBackend.flash`,
    `(127, 0)`; a list of numbers, as of the layers with experts, is one word."""
    value = re.sub(r"^[A-Za-z]{1,40}\.(?=[a-z])", "", value)
    if value.startswith("[") and "'" in value:
        return tuple(word.strip(" '\"") for word in value.strip("[]").split(",") if word.strip())
    return (value.replace(" ", ""),) if value.startswith(("[", "(")) else (value,)
