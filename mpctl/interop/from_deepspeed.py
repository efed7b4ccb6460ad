"""A configuration of DeepSpeed as the settings of a job: JSON, or Python that names it ds_config.

Keys and meanings: deepspeed 0.19.8, runtime/config.py and docs/_pages/config-json.md. The model is
the script's, so that it is named beside it (--model). train_batch_size is micro batch x
gradient_accumulation_steps x dp, and says more than the steps alone. A pipeline is none of the
configuration's: it is read from PipeModelDataParallelTopology in Python, as `--emit deepspeed`
writes it, and ZeRO is 1 at most with one. MiCS splits states over a part of the ranks; the
secondary partition of ZeRO++ (hpZ), a copy of the parameters alone, is not planned. Values `auto`
are those of the program and left out.

>>> read = read_deepspeed('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, '
...                       '"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
>>> read.settings["training.global_batch_size"], read.settings["parallel.zero"]
(64, 2)
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import InputError
from mpctl.interop.command_line import Flags
from mpctl.interop.config_values import flat_values, is_true, python_calls, read_yaml
from mpctl.interop.flag_reader import FlagReader, ReadJob
from mpctl.interop.megatron_flags import MegatronFlag as Key
from mpctl.plan.rules.check import Check

Z, TOPOLOGY = "zero_optimization.", "PipeModelDataParallelTopology"
KEYS = (
    Key("train_batch_size", "training.global_batch_size", int),
    Key("train_micro_batch_size_per_gpu", "training.micro_batch_size", int),
    Key("gradient_clipping", "training.clip_norm", float),
    Key(f"{Z}stage", "parallel.zero", int, 0),
    Key(f"{Z}overlap_comm", "parallel.overlap_gradients", str),
    Key("tensor_parallel.autotp_size", "parallel.tp", int),
    Key("sequence_parallel_size", "parallel.cp", int),
    Key("expert_parallel.autoep_size", "parallel.ep", int),
    Key("optimizer.params.lr", "training.learning_rate", float),
    Key("optimizer.params.eps", "training.epsilon", float),
    Key("optimizer.params.weight_decay", "training.weight_decay", float),
    Key(f"{TOPOLOGY}.num_pp", "parallel.pp", int),
    Key(f"{TOPOLOGY}.num_mp", "parallel.tp", int),
    Key(f"{TOPOLOGY}.num_dp", "parallel.dp", int),
)
DTYPES = {"fp32": "fp32", "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
HOST = ("offload_optimizer.device", "offload_param.device")
READ = ("stage", "overlap_comm", "reduce_bucket_size", "allgather_bucket_size", "mics_shard_size", *HOST)


def read_deepspeed(text: str) -> ReadJob:
    """The job of a configuration. Raises InputError with every value that no setting says."""
    values = {name: words for name, words in _values(text).items() if words != ("auto",)}
    reader = FlagReader(values, software="deepspeed")
    if not any(name.startswith(("train_", Z, "bf16", "fp16")) for name in values):
        message = "a configuration of DeepSpeed has train_batch_size or zero_optimization, and this"
        raise InputError.of("bad-syntax", "--from", f"{message} text neither", "give its JSON as @FILE")
    reader.read_plain(KEYS)
    s = reader.settings
    if "parallel.overlap_gradients" in s:
        s["parallel.overlap_gradients"] = is_true(reader.value(f"{Z}overlap_comm"))
    _read_precision(reader)
    for name in HOST:
        if (device := reader.value(f"{Z}{name}", "none")) != "none":
            reader.wrong(f"{Z}{name}", f"{device}: states on the host are not planned", "use none")
    if (size := int(reader.number(f"{Z}mics_shard_size", int, 0))) > 0:
        s["parallel.zero_size"] = size
    if is_true(reader.value("activation_checkpointing.partition_activations", "false")):
        s["training.partition_activations"] = True
    if is_true(reader.value("activation_checkpointing.cpu_checkpointing", "false")):
        s["training.offload_activations"] = True
    if reader.value("PipelineModule.activation_checkpoint_interval", "0") != "0" or any(
        name.startswith("activation_checkpointing.") for name in values
    ):
        s["training.recompute"] = "full"
    _read_batch(reader)
    if reader.issues:
        raise InputError(reader.issues)
    return ReadJob({**s, "training.runtime": "megatron-deepspeed"}, (*_warnings(reader), *reader.warnings))


def _values(text: str) -> Flags:
    if "ds_config" not in text:
        return read_yaml(text)
    calls, assigned = python_calls(text)
    config = assigned.get("ds_config")
    return flat_values({**(config if isinstance(config, dict) else {}), **calls})


def _read_precision(reader: FlagReader) -> None:
    s = reader.settings
    kinds = [kind for kind in ("bf16", "fp16") if is_true(reader.value(f"{kind}.enabled", "false"))]
    s["training.dtype"] = kinds[0] if kinds else "fp32"
    reduced = reader.value("communication_data_type", reader.value("data_types.grad_accum_dtype"))
    if reduced and reduced not in DTYPES:
        reader.wrong("communication_data_type", f"{reduced!r} is not known", "use fp32 or bf16")
    elif reduced and DTYPES[reduced] != "fp32":
        s["training.gradient_dtype"] = DTYPES[reduced]


def _read_batch(reader: FlagReader) -> None:
    s, name = reader.settings, "gradient_accumulation_steps"
    steps, micro = int(reader.number(name, int, 1)), s.get("training.micro_batch_size")
    if "training.global_batch_size" in s:
        return
    if isinstance(dp := s.get("parallel.dp"), int) and isinstance(micro, int):
        s["training.global_batch_size"] = micro * steps * dp
    elif steps > 1:
        reader.wrong(name, "says nothing of the batch without train_batch_size", "add it")


def _warnings(reader: FlagReader) -> Iterator[Check]:
    rest = [
        " ".join((name, *words))[:80]
        for name, words in reader.flags.items()
        if name.startswith(Z) and name.removeprefix(Z) not in READ
    ]
    if rest:
        message = f"{', '.join(rest[:8])}: not read, and may change memory or speed"
        yield Check("deepspeed-changes", "warning", "--from", message)
