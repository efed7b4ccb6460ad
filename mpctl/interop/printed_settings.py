"""The settings that a log prints (`PrintedConfig`), as the settings of a job.

Megatron-LM prints its arguments after its parser and its validation: `name ..... value` is the flag
`--name value`, a switch where the value is True. Read are the flags that `--from megatron` reads,
unless their value is the parser's default. A few have another name there (NAMES), or are printed
as what they switch off (SWITCHED_OFF); chunks are those that validation derived. The vocabulary is
the tokenizer's, printed with its padding. Megatron-Bridge's tables become such arguments
(BRIDGE); a sample's length is the data's there, the model's is the most positions. nanotron and
torchtitan print values of their configs.

>>> printed_flags({"tensor_model_parallel_size": "4", "bf16": "True", "add_bias_linear": "False"})
{'--bf16': (), '--disable-bias-linear': (), '--tensor-model-parallel-size': ('4',)}
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mpctl.interop.command_line import CommandLine, Flags
from mpctl.interop.flag_reader import ReadJob
from mpctl.interop.from_megatron import (
    CHUNKS,
    LAYERS_A_CHUNK,
    OLDER,
    READ,
    read_command,
)
from mpctl.interop.from_nanotron import read_values
from mpctl.interop.from_torchtitan import read_printed_torchtitan
from mpctl.interop.log_settings import PrintedConfig
from mpctl.interop.megatron_experts import LATENT_FLAGS, POSITIONS
from mpctl.interop.megatron_experts import READ as EXPERTS
from mpctl.interop.megatron_others import is_neutral, parser_flags, refusal_of

NAMES = {
    "--fp8-format": "fp8", "--fp4-format": "fp4", CHUNKS: "virtual_pipeline_model_parallel_size",
}  # fmt: skip
SWITCHED_OFF = {
    "--disable-bias-linear": "add_bias_linear",
    "--no-bias-gelu-fusion": "bias_gelu_fusion",
    "--no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
}
"""Flags without a value, and what is printed as False where they are given."""
_DERIVED = {
    LAYERS_A_CHUNK, "--recompute-activations", "--no-position-embedding", "--use-flash-attn",
    "--use-rotary-position-embeddings", "--lr-warmup-fraction", "--train-samples", "--ckpt-format",
    "--encoder-num-layers", "--encoder-seq-length", "--decoder-num-layers", "--decoder-seq-length",
    *OLDER,
}  # fmt: skip
"""Not read, as validation put what they say into others."""
_LATENT = {*(flag.flag for flag in LATENT_FLAGS), *POSITIONS}
_OF_EXPERTS = {*EXPERTS} - _LATENT - {
    "--multi-latent-attention", "--expert-model-parallel-size", "--expert-tensor-parallel-size",
    "--num-experts",
}  # fmt: skip


def read_printed(config: PrintedConfig) -> ReadJob | None:
    """The job that a log's settings are; None where it prints none that are enough. Raises
    InputError as `--from` does, for settings that no job says."""
    if config.kind == "megatron":
        return _read_megatron(config.values)
    if config.kind == "megatron-bridge":
        return _read_megatron(bridge_arguments(config.values))
    if config.kind == "nanotron":
        return read_values({name: (value,) for name, value in config.values.items()})
    return read_printed_torchtitan(config) if config.kind == "torchtitan" else None


def _read_megatron(values: Mapping[str, str]) -> ReadJob | None:
    if "num_layers" not in values or "tensor_model_parallel_size" not in values:
        return None
    ranks: Flags = {"--world-size": (values["world_size"],)} if "world_size" in values else {}
    read = read_command(CommandLine(printed_flags(values), ranks))
    stage = values.get("zero_stage", "")  # Megatron-DeepSpeed's
    if stage in ("0", "1", "2", "3") and values.get("deepspeed") == "True":
        read = read._replace(settings={**read.settings, "parallel.zero": int(stage),
                                       "training.runtime": "megatron-deepspeed"})  # fmt: skip
    return read


TABLES = ("optimizer", "scheduler", "rng", "mixed_precision", "model", "train", "dist", "ddp")
"""Tables of Megatron-Bridge's config; where several have a key, the last one counts."""
BRIDGE = {
    "gated_linear_unit": "swiglu", "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon", "seq_length": "max_position_embeddings",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "bias_activation_fusion": "bias_gelu_fusion",
}  # fmt: skip
"""Names of Megatron-LM's arguments, where Megatron-Bridge has another."""
_WORDS = {"true": "True", "false": "False", "null": "None"}


def bridge_arguments(values: Mapping[str, str]) -> dict[str, str]:
    """The arguments of Megatron-LM that the tables of Megatron-Bridge's config are."""
    found = {
        BRIDGE.get(key, key): _WORDS.get(value, value)
        for table in TABLES for name, value in values.items()
        for first, _, key in [name.partition(".")] if first == table
    }  # fmt: skip
    found["seq_length"] = values.get(
        "dataset.sequence_length", found.get("max_position_embeddings", "None")
    )
    shared = found.get("share_embeddings_and_output_weights")
    found["untie_embeddings_and_output_weights"] = str(shared == "False")
    groups = found.get("num_query_groups", "None")
    found["group_query_attention"] = str(groups not in ("None", found.get("num_attention_heads")))
    found["grad_reduce_in_bf16"] = str(found.get("grad_reduce_in_fp32") == "False")
    if found.get("vocab_size", "None") == "None":
        found["vocab_size"] = values.get("tokenizer.vocab_size", "None")
    return found


def printed_flags(values: Mapping[str, str]) -> Flags:
    """The flags of Megatron-LM that printed arguments stand for, in the order of their names."""
    flags: Flags = {}
    for flag in sorted(READ - _DERIVED):
        if flag in SWITCHED_OFF:
            if values.get(SWITCHED_OFF[flag]) == "False":
                flags[flag] = ()
            continue
        name = NAMES.get(flag, flag.removeprefix("--").replace("-", "_"))
        value = values.get(name, "None")
        if value in ("None", "False", "") or (flag == CHUNKS and value == "1"):
            continue
        words = () if value == "True" else _words(value)
        if not is_neutral(flag, words) or flag in _LATENT:
            flags[flag] = words
    if values.get("transformer_impl") == "local" and values.get("use_flash_attn") == "True":
        flags.pop("--transformer-impl", None)  # before 2024: flash attention in local layers
    if "--num-experts" not in flags:
        flags = {flag: words for flag, words in flags.items() if flag not in _OF_EXPERTS}
    if "--multi-latent-attention" not in flags:
        flags = {flag: words for flag, words in flags.items() if flag not in _LATENT}
    if "--vocab-size" in flags:
        flags.pop("--padded-vocab-size", None)
    return flags | dict(_refused(values))


def _refused(values: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The flags that no setting says and that change the layout or the model."""
    for flag in parser_flags():
        value = values.get(flag.removeprefix("--").replace("-", "_"), "None")
        if flag in READ or flag in _DERIVED or value in ("None", "False", ""):
            continue
        words = () if value == "True" else _words(value)
        if not is_neutral(flag, words) and refusal_of(flag, words) is not None:
            yield flag, words


def _words(value: str) -> tuple[str, ...]:
    """The words that a printed value was parsed from: `['core_attn', 'mlp']`, `AttnBackend.flash`,
    `(127, 0)`; a list of numbers, as of the layers with experts, is one word."""
    value = re.sub(r"^[A-Za-z]{1,40}\.(?=[a-z])", "", value)
    if value.startswith("[") and "'" in value:
        return tuple(word.strip(" '\"") for word in value.strip("[]").split(",") if word.strip())
    return (value.replace(" ", ""),) if value.startswith(("[", "(")) else (value,)
