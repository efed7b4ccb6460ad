"""A command line of Megatron-LM as the settings of a job.

What the flags leave open has Megatron's defaults (dropout 0.1, weight decay 0.01, ...), so that the
plan is of what would run. dp follows from the ranks: torchrun's --nnodes and --nproc-per-node,
where the text has them, else --nodes and --gpus-per-node. Flags that change the layout or the
model's shape and that no setting says are errors; others that are unknown (data, logging, ...) are
named in one warning. Names are those of megatron-core 0.19.2.

By hand, `--tensor-model-parallel-size 2 --bf16` is {"parallel.tp": 2, "training.dtype": "bf16"} and
the defaults beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mpctl.errors import InputError, Issue
from mpctl.interop.command_line import Flags, split_command
from mpctl.interop.megatron_flags import (
    BATCH_FLAGS,
    FP16_FLAGS,
    FSDP_STRATEGIES,
    LAYOUT_FLAGS,
    MODEL_FLAGS,
    PLAIN_FLAGS,
    ROPE_SCALING,
    TRAINING_FLAGS,
    MegatronFlag,
)
from mpctl.interop.megatron_layout import pipeline_settings
from mpctl.interop.megatron_others import neutral, refusal_of
from mpctl.interop.megatron_variants import SWITCHES as SWITCHES_OF_VARIANTS
from mpctl.interop.megatron_variants import VALUES as OF_VARIANTS
from mpctl.interop.megatron_variants import read_variants
from mpctl.planning.plan import Overrides
from mpctl.rules.check import Check

Settings = dict[str, object]

SWITCHES = (
    "--sequence-parallel", "--use-tp-pp-dp-mapping", "--use-distributed-optimizer",
    "--use-megatron-fsdp", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16", "--fp16",
    "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16", "--recompute-activations",
    "--distribute-saved-activations", "--group-query-attention", "--swiglu",
    "--disable-bias-linear", "--no-bias-gelu-fusion",
    "--untie-embeddings-and-output-weights", "--use-rope-scaling",
    "--use-rotary-position-embeddings", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split", "--no-gradient-accumulation-fusion",
    "--use-mcore-models", "--use-flash-attn", "--no-async-tensor-model-parallel-allreduce",
)  # fmt: skip
VALUES = (
    "--data-parallel-sharding-strategy", "--ckpt-format", "--fp8-format", "--fp8-recipe",
    "--fp8-amax-history-len", "--fp8-amax-compute-algo",
    "--fp4-format", "--fp4-recipe", "--recompute-granularity",
    "--recompute-method", "--recompute-num-layers", "--num-query-groups", "--rotary-base",
    "--rope-scaling-factor", "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-per-virtual-pipeline-stage", "--pipeline-model-parallel-layout",
    "--transformer-impl",
)  # fmt: skip
COUNTS = {
    **{flag.flag: 1 for flag in PLAIN_FLAGS}, **dict.fromkeys((*VALUES, *OF_VARIANTS), 1),
    **dict.fromkeys((*SWITCHES, *SWITCHES_OF_VARIANTS), 0), "--recompute-modules": -1,
}  # fmt: skip


@dataclass
class _Reader:
    """The flags that are being read, the settings found so far, and what is wrong with them."""

    flags: Flags
    settings: Settings = field(default_factory=dict)
    issues: list[Issue] = field(default_factory=list)

    def has(self, flag: str) -> bool:
        return flag in self.flags

    def value(self, flag: str, default: str = "") -> str:
        return self.flags[flag][0] if flag in self.flags else default

    def wrong(self, flag: str, message: str, hint: str = "") -> None:
        self.issues.append(Issue("megatron-flag", flag, message, hint))

    def number(self, flag: str, kind: type[int] | type[float], default: int | float) -> int | float:
        """The flag's value as a number; the default where it is absent or is none, an issue."""
        if flag not in self.flags:
            return default
        try:
            return kind(self.flags[flag][0])
        except ValueError:
            noun = "an integer" if kind is int else "a number"
            self.wrong(flag, f"{self.flags[flag][0]!r} is not {noun}")
            return default


class ReadJob(NamedTuple):
    """A job that was read: its settings by full name, and warnings of what was passed over."""

    settings: Overrides
    warnings: tuple[Check, ...]


def read_megatron(text: str) -> ReadJob:
    """The job that a command line of Megatron-LM is.

    text: the flags alone, or the whole command with torchrun and the program. Raises InputError
    with every flag that is wrong or none of Megatron-LM's, or that changes the layout and is not
    understood.
    """
    line = split_command(text, COUNTS)
    reader = _Reader(line.flags)
    unknown = [flag for flag in line.flags if flag not in COUNTS]
    reader.issues += [issue for flag in unknown if (issue := refusal_of(flag, line.flags[flag]))]
    _read_cluster(reader, line.launcher)
    _read_layout(reader)
    _read_precision(reader)
    _read_recompute(reader)
    _read_model(reader)
    _read_plain(reader, TRAINING_FLAGS)
    pipeline, wrong = pipeline_settings(line.flags, reader.settings)
    reader.settings |= pipeline
    reader.issues += wrong
    if reader.issues:
        raise InputError(reader.issues)
    ignored = [flag for flag in unknown if not neutral(flag, line.flags[flag])]
    settings = {**reader.settings, "training.runtime": "megatron-core"}
    return ReadJob(settings, tuple(_warnings(ignored)))


def _warnings(ignored: list[str]) -> Iterator[Check]:
    if ignored:
        message = f"{', '.join(ignored)}: not read, as no setting of a job says the same"
        hint = "none of them is known to change the layout or the model"
        yield Check("megatron-flags", "warning", "--from", message, hint)


def _read_cluster(reader: _Reader, launcher: Flags) -> None:
    """torchrun's nodes and ranks a node, where they are numbers and not a shell's variables."""
    for names, setting in (
        (("--nnodes", "--nnode"), "cluster.nodes"),
        (("--nproc-per-node", "--nproc_per_node"), "cluster.gpus_per_node"),
    ):
        for name in names:
            if name in launcher and launcher[name] and launcher[name][0].isdecimal():
                reader.settings[setting] = int(launcher[name][0])


def _read_plain(reader: _Reader, flags: Iterable[MegatronFlag], *, defaults: bool = True) -> None:
    """Flags that are one setting each; where one is absent Megatron's default, if it has one."""
    for flag in flags:
        value: object = flag.default if defaults else None
        if reader.has(flag.flag):
            value = _plain_value(reader, flag)
        elif isinstance(value, str) and flag.words:
            value = _word(flag, value)
        if value is not None:
            reader.settings[flag.setting] = value


def _plain_value(reader: _Reader, flag: MegatronFlag) -> object:
    text = reader.value(flag.flag)
    if flag.kind is not str:
        return reader.number(flag.flag, int if flag.kind is int else float, 1)
    if flag.words is None:
        return text
    value = _word(flag, text)
    if value is None:
        known = ", ".join(flag.words.values())
        reader.wrong(flag.flag, f"{text!r} is none of those that a job can say", f"use {known}")
    return value


def _word(flag: MegatronFlag, theirs: str) -> str | None:
    """Our word for theirs; `auto` and `fused` attention are flash."""
    words = {value: key for key, value in (flag.words or {}).items()}
    if flag.setting == "model.attention":
        words |= {"auto": "flash", "fused": "flash"}
    return words.get(theirs)


def _read_layout(reader: _Reader) -> None:
    _read_plain(reader, LAYOUT_FLAGS)
    _read_plain(reader, BATCH_FLAGS)
    s = reader.settings
    s["parallel.sequence_parallel"] = (
        reader.has("--sequence-parallel") and s.get("parallel.tp") != 1
    )
    s["parallel.overlap_gradients"] = reader.has("--overlap-grad-reduce")
    s["parallel.embedding_is_layer"] = reader.has("--account-for-embedding-in-pipeline-split")
    s["parallel.loss_is_layer"] = reader.has("--account-for-loss-in-pipeline-split")
    if reader.has("--use-tp-pp-dp-mapping"):
        s["parallel.order"] = "tp-cp-pp-dp"
    s["parallel.zero"] = _zero(reader)


def _zero(reader: _Reader) -> int:
    """The distributed optimizer is ZeRO 1; Megatron-FSDP says its stage, 3 by default."""
    if not reader.has("--use-megatron-fsdp"):
        return int(reader.has("--use-distributed-optimizer"))
    stages = {"no_shard": 0, "optim": 1, **{name: n for n, name in FSDP_STRATEGIES.items()}}
    strategy = reader.value("--data-parallel-sharding-strategy", FSDP_STRATEGIES[3])
    if strategy not in stages:
        message = f"{strategy!r} is no strategy of Megatron-FSDP"
        reader.wrong("--data-parallel-sharding-strategy", message, f"use {', '.join(stages)}")
    return stages.get(strategy, 3)


def _read_precision(reader: _Reader) -> None:
    s = reader.settings
    if reader.has("--fp16"):
        s["training.dtype"] = "fp16"
        _read_plain(reader, FP16_FLAGS)
        if not reader.has("--accumulate-allreduce-grads-in-fp32"):
            s["training.gradient_dtype"] = "fp16"
    elif reader.has("--bf16") or reader.has("--fp8-format") or reader.has("--fp4-format"):
        s["training.dtype"] = _narrow_dtype(reader) or "bf16"
        if s["training.dtype"] == "fp8":
            _read_fp8(reader)
        if reader.has("--grad-reduce-in-bf16"):
            s["training.gradient_dtype"] = "bf16"
    else:
        s["training.dtype"] = "fp32"


def _read_fp8(reader: _Reader) -> None:
    """Where scales come from; other recipes of Megatron are planned as its delayed one."""
    if reader.value("--fp8-recipe") == "tensorwise":
        reader.settings["training.fp8_recipe"] = "tensorwise"
    elif reader.has("--fp8-amax-history-len"):
        length = reader.number("--fp8-amax-history-len", int, 1)
        reader.settings["training.fp8_amax_history_len"] = length


def _narrow_dtype(reader: _Reader) -> str | None:
    """The dtype of products of fewer than 16 bits; None where there are none."""
    if reader.has("--fp4-format"):
        return "nvfp4"
    if reader.has("--fp8-format"):
        return "mxfp8" if reader.value("--fp8-recipe") == "mxfp8" else "fp8"
    return None


def _read_recompute(reader: _Reader) -> None:
    given = reader.value("--recompute-granularity")
    if reader.has("--recompute-activations"):
        given = "selective"
    if given not in ("", "selective", "full"):
        reader.wrong("--recompute-granularity", f"{given!r} is not known", "use selective or full")
    modules = reader.flags.get("--recompute-modules", ("core_attn",))
    if given == "selective" and modules != ("core_attn",):
        message = f"{' '.join(modules)}: a job recomputes core_attn alone"
        reader.wrong("--recompute-modules", message, "use core_attn, or granularity full")
    method = reader.value("--recompute-method", "uniform")
    per = reader.value("--recompute-num-layers", "1")
    if given == "full" and (method, per) != ("uniform", "1"):
        message = f"{method} with {per} layers: a job recomputes every layer from its input"
        reader.wrong("--recompute-method", message, "use uniform with --recompute-num-layers 1")
    reader.settings["training.recompute"] = given or "none"
    reader.settings["training.partition_activations"] = reader.has("--distribute-saved-activations")


def _read_model(reader: _Reader) -> None:
    """The shape; without --num-layers only what is said, for a model that is named elsewhere."""
    has_shape = reader.has("--num-layers")
    _read_plain(reader, MODEL_FLAGS, defaults=has_shape)
    if not has_shape:
        return
    s = reader.settings
    has_bias = not reader.has("--disable-bias-linear")
    is_tanh = has_bias and not reader.has("--no-bias-gelu-fusion")
    s["model.bias"] = has_bias
    s["model.activation"] = "gelu_tanh" if is_tanh else "gelu"
    if reader.has("--swiglu"):
        s["model.activation"] = "swiglu"
    s |= read_variants(reader.flags, reader.wrong)
    s["model.tied_embeddings"] = not reader.has("--untie-embeddings-and-output-weights")
    if reader.has("--group-query-attention"):
        s["model.kv_heads"] = reader.number("--num-query-groups", int, 1)
    if reader.has("--use-rotary-position-embeddings"):
        s["model.position"] = "rotary"
    if s.get("model.position") == "rotary":
        s["model.rotary_base"] = float(reader.number("--rotary-base", float, 10000.0))
    if reader.has("--use-rope-scaling"):
        factor = float(reader.number("--rope-scaling-factor", float, 8.0))
        s["model.rotary_scaling"] = {"factor": factor, **ROPE_SCALING}
