"""A config file of nanotron, or the config that its log prints, as the settings of a job.

Keys and meanings: nanotron main of 2026-04, src/nanotron/config/. The global batch is
micro_batch_size x batch_accumulation_per_replica x dp. Stages are cut by nanotron's own estimate of
cost, as plans under its runtime cut them (model/pipeline/filled.py).

By hand, micro batches of 1, 32 of them and dp 4 are a global batch of 128:

>>> read = read_nanotron("parallelism: {dp: 4, tp: 2}\\ntokens: {micro_batch_size: 1, "
...                      "batch_accumulation_per_replica: 32}")
>>> read.settings["training.global_batch_size"], read.settings["parallel.tp"]
(128, 2)
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import InputError
from mpctl.interop.command_line import Flags
from mpctl.interop.config_values import is_true, read_yaml
from mpctl.interop.flag_reader import FlagReader, ReadJob
from mpctl.interop.megatron_flags import MegatronFlag as Key
from mpctl.plan.rules.check import Check

LAYOUT_KEYS = (
    Key("parallelism.dp", "parallel.dp", int),
    Key("parallelism.tp", "parallel.tp", int, 1),
    Key("parallelism.pp", "parallel.pp", int, 1),
    Key("parallelism.context_parallel_size", "parallel.cp", int, 1),
    Key("optimizer.zero_stage", "parallel.zero", int, 0),
    Key("tokens.micro_batch_size", "training.micro_batch_size", int),
    Key("tokens.sequence_length", "model.seq_length", int),
)
TRAINING_KEYS = (
    Key("tokens.train_steps", "training.steps", int),
    Key("general.seed", "training.seed", int),
    Key("optimizer.clip_grad", "training.clip_norm", float),
    Key("optimizer.weight_decay", "training.weight_decay", float),
    Key("optimizer.learning_rate_scheduler.learning_rate", "training.learning_rate", float),
    Key("optimizer.learning_rate_scheduler.min_decay_lr", "training.min_learning_rate", float),
    Key("optimizer.learning_rate_scheduler.lr_warmup_steps", "training.warmup_steps", int),
    Key("optimizer.optimizer_factory.adam_beta1", "training.beta1", float),
    Key("optimizer.optimizer_factory.adam_beta2", "training.beta2", float),
    Key("optimizer.optimizer_factory.adam_eps", "training.epsilon", float),
)
OF_MODEL = "model.model_config."
MODEL_KEYS = tuple(
    Key(f"{OF_MODEL}{name}", f"model.{setting}", kind)
    for name, setting, kind in (
        ("num_hidden_layers", "layers", int),
        ("hidden_size", "hidden", int),
        ("intermediate_size", "ffn", int),
        ("num_attention_heads", "heads", int),
        ("num_key_value_heads", "kv_heads", int),
        ("vocab_size", "vocab", int),
        ("max_position_embeddings", "max_positions", int),
        ("rms_norm_eps", "norm_epsilon", float),
        ("rope_theta", "rotary_base", float),
    )
)
LLAMA = {"model.position": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu"}
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
ENGINES = {"1f1b": "1f1b", "afab": "gpipe", "OneForward": "1f1b", "AllForward": "gpipe"}
EXPERTS = ("moe_config", "num_local_experts", "num_experts_per_tok", "moe_num_experts")


def read_nanotron(text: str) -> ReadJob:
    """The job of a config file. Raises InputError with every key that no setting says."""
    return read_values(read_yaml(text))


def read_values(values: Flags) -> ReadJob:
    """The job of the values of a config, by dotted name, also as its log prints them."""
    reader = FlagReader({name: words for name, words in values.items() if words != ("None",)}, software="nanotron")
    if not any(name.startswith(("parallelism.", "tokens.")) for name in values):
        message = "a config of nanotron has `parallelism` and `tokens`, and this text neither"
        raise InputError.of("bad-syntax", "--from", message, "give its file as @FILE")
    reader.read_plain(LAYOUT_KEYS)
    reader.read_plain(TRAINING_KEYS)
    _read_parallelism(reader)
    _read_batch(reader)
    if reader.has(f"{OF_MODEL}num_hidden_layers"):
        _read_model(reader)
    if reader.issues:
        raise InputError(reader.issues)
    settings = {**reader.settings, "training.runtime": "nanotron"}
    return ReadJob(settings, (*_warnings(reader), *reader.warnings))


def _read_parallelism(reader: FlagReader) -> None:
    s = reader.settings
    is_scattered = "REDUCE_SCATTER" in reader.value("parallelism.tp_mode", "ALL_REDUCE").upper()
    s["parallel.sequence_parallel"] = is_scattered and s.get("parallel.tp") != 1
    engine = reader.value("parallelism.pp_engine", "1f1b")
    found = next((ours for word, ours in ENGINES.items() if word in engine), None)
    if found is None:
        reader.wrong("parallelism.pp_engine", f"{engine!r} is not known", "use 1f1b or afab")
    elif s.get("parallel.pp") != 1:
        s["parallel.schedule"] = found
    if reader.number("parallelism.expert_parallel_size", int, 1) != 1:
        message = "experts over ranks are not read"
        reader.wrong("parallelism.expert_parallel_size", message, "use 1, or a job of your own")
    if is_true(reader.value("parallelism.recompute_layer", "false")):
        s["training.recompute"] = "full"
    dtype = reader.value("model.dtype", "bfloat16").removeprefix("torch.")
    if dtype not in DTYPES:
        reader.wrong("model.dtype", f"{dtype!r} is not known", f"use {', '.join(DTYPES)}")
    s["training.dtype"] = DTYPES.get(dtype, "bf16")
    in_fp32 = is_true(reader.value("optimizer.accumulate_grad_in_fp32", "true"))
    if not in_fp32 and s["training.dtype"] == "bf16":
        s["training.gradient_dtype"] = "bf16"


def _read_batch(reader: FlagReader) -> None:
    s, name = reader.settings, "tokens.batch_accumulation_per_replica"
    micro, dp = s.get("training.micro_batch_size"), s.get("parallel.dp")
    count = reader.number(name, int, 1)
    if isinstance(micro, int) and isinstance(dp, int):
        s["training.global_batch_size"] = micro * int(count) * dp
    elif reader.has(name):
        message = "says nothing without parallelism.dp and tokens.micro_batch_size"
        reader.wrong(name, message, "add them")


def _read_model(reader: FlagReader) -> None:
    reader.read_plain(MODEL_KEYS)
    s = reader.settings
    s |= {**LLAMA, "model.bias": False}
    if is_true(reader.value(f"{OF_MODEL}is_qwen2_config", "false")):
        s["model.bias"] = "qkv"
    elif not is_true(reader.value(f"{OF_MODEL}is_llama_config", "true")):
        reader.wrong(
            f"{OF_MODEL}is_llama_config",
            "false: only Llama's and Qwen2's form is read",
            "name the model: --model NAME, and leave model_config out",
        )
    if (act := reader.value(f"{OF_MODEL}hidden_act", "silu")) != "silu":
        reader.wrong(f"{OF_MODEL}hidden_act", f"{act!r} is not read", "use silu, SwiGLU's")
    for name in EXPERTS:
        if any(key.startswith(f"{OF_MODEL}{name}") for key in reader.flags):
            reader.wrong(f"{OF_MODEL}{name}", "experts are not read", "name the model: --model")
    s["model.tied_embeddings"] = is_true(reader.value(f"{OF_MODEL}tie_word_embeddings", "false"))
    s["model.vocab_divisor"] = reader.number("model.make_vocab_size_divisible_by", int, 1)
    if reader.has(f"{OF_MODEL}rope_scaling"):
        message = "planned with plain rotary positions, of the same shape and speed"
        reader.nearest(f"{OF_MODEL}rope_scaling", message)


READ = (
    *(key.flag for key in (*LAYOUT_KEYS, *TRAINING_KEYS, *MODEL_KEYS)),
    "model.dtype",
    "model.make_vocab_size_divisible_by",
    "tokens.batch_accumulation_per_replica",
    "optimizer.accumulate_grad_in_fp32",
    "parallelism.tp_mode",
    "parallelism.pp_engine",
    "parallelism.recompute_layer",
    "parallelism.expert_parallel_size",
    "parallelism.tp_linear_async_communication",
    "parallelism.tp_recompute_allgather",
)


def _warnings(reader: FlagReader) -> Iterator[Check]:
    """The keys of the layout that are not read; those of data, logs and the like are not named."""
    kinds = ("parallelism.", "tokens.", "optimizer.zero")
    rest = [name for name in reader.flags if name.startswith(kinds) and name not in READ]
    rest = [name for name in rest if not name.startswith(("tokens.limit", "tokens.val"))]
    if rest:
        message = f"{', '.join(rest[:8])}: not read, and may change memory or speed"
        yield Check("nanotron-changes", "warning", "--from", message)
