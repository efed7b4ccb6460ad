"""The log of Megatron-LM: its lines of steps, and its arguments as a job.

Words and units: Megatron-LM core 0.19 (megatron/training/training.py, training_log) and its forks
(Megatron-DeepSpeed; Primus, `current/mean`). The arguments are a block headed `---- arguments ----`, a
line `name ..... value` each (megatron/training/arguments.py, _print_args), after its parser and
validation: the flag `--name value`, a switch where the value is True. Read are the flags that `--from
megatron` reads, unless their value is the parser's default. A few have another name there (NAMES), or
are printed as what they switch off (SWITCHED_OFF).

>>> config = PrintedConfig()
>>> for line in ("  tensor_model_parallel_size ...... 4", "  bf16 ............ True"):
...     _ = _read_dump(line, "", [], config)
>>> printed_flags({**config.values, "add_bias_linear": "False"})
{'--bf16': (), '--disable-bias-linear': (), '--tensor-model-parallel-size': ('4',)}
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from mpctl.interop.command_line import CommandLine
from mpctl.interop.config_text import Flags
from mpctl.interop.from_megatron import OLDER, READ, read_command
from mpctl.interop.log_formats import LauncherLog, PrintedConfig, StepFormat
from mpctl.interop.mapping import ReadJob
from mpctl.interop.megatron_experts import LATENT_FLAGS, POSITIONS
from mpctl.interop.megatron_experts import READ as EXPERTS
from mpctl.interop.megatron_flags import CHUNKS, LAYERS_A_CHUNK
from mpctl.interop.megatron_others import is_neutral, parser_flags, refusal_of

_ARGUMENT = re.compile(r"(?:^|[ :\]])([A-Za-z]\w{1,80}) \.{3,80} ?(.{0,2000})")


def _read_dump(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of Megatron-LM's arguments; False for the last."""
    if " ..." in text and (found := _ARGUMENT.search(text)):
        config.add(found[1], found[2])
    return "end of arguments" not in text


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
"""Flags not read: validation stored their values in other flags."""
_LATENT = {*(flag.key for flag in LATENT_FLAGS), *POSITIONS}
_OF_EXPERTS = (
    {*EXPERTS}
    - _LATENT
    - {"--multi-latent-attention", "--expert-model-parallel-size", "--expert-tensor-parallel-size", "--num-experts"}
)


def printed_job(values: Mapping[str, str]) -> ReadJob | None:
    """The job of the arguments of a dump; None where they have no layout."""
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


LOG = LauncherLog(
    "megatron",
    "Megatron-LM",
    (
        StepFormat(
            "elapsed time per iteration (",
            {
                "number": ("iteration",),
                "milliseconds": ("elapsed time per iteration (ms)",),
                "seconds": ("elapsed time per iteration (s)",),
                "tokens_per_rank": ("tokens per GPU (tokens/s/GPU)", "tokens per gpu per second (tgs)"),
                "samples_per_second": ("samples per second",),
                "batch": ("global batch size",),
                "tflops": ("throughput per GPU (TFLOP/s/GPU)", "TFLOPs"),
            },
        ),
    ),
    heads=(" arguments --",),
    read=_read_dump,
    ranks=("world_size",),
    job=printed_job,
)
