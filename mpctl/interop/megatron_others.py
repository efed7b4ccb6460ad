"""The flags of Megatron-LM that have no setting of a job: which are refused, which change something
other than the layout, and which do not change a plan.

megatron_parser.txt lists all flags of its parser (megatron-core 0.19.2), a line each: name, what it
changes, number of values (+ for one or more), default. A flag with its default value is ignored. One
that changes the `layout` or the `model` is refused; so is a name that the parser does not have, as it
may be a misspelt flag of the layout. One of `data`, checkpoints, logs and the like does not change a
plan (`is_apart`); any `other` is assumed to change training, memory or speed.

By hand, `--moe-latent-size 64` and `--sequence-parralel` are refused, `--optimizer-cuda-graph`
changes speed, `--log-interval 10` nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import NamedTuple

from mpctl.core.errors import Issue

SOFTWARE = "Megatron-LM (megatron-core 0.19.2)"
NEUTRAL = {"--tensor-parallel-num-weight-shards": ("1",), "--expert-tensor-parallel-num-weight-shards": ("1",)}
"""Values that mean the same as leaving the flag out, where the parser's default is another or
none."""
GONE = {
    "--checkpoint-activations": "--recompute-activations, or --recompute-granularity full",
    "--batch-size": "--micro-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}
"""Flags that the parser accepts and Megatron-LM then rejects, and their replacements."""


class ParserFlag(NamedTuple):
    """A flag of Megatron-LM's parser. changes: layout, model, other or data, as above; values: how
    many it takes, -1 for any number; default: as a word of the command line, empty where it has
    none."""

    changes: str
    values: int
    default: str


FORK_FLAGS = {
    **dict.fromkeys(
        ("--enable-zero-bubble", "--zero-bubble-v-schedule", "--allow-padding-num-layers", "--enable-1f1b-v"),
        ParserFlag("layout", 0, ""),
    ),
    "--zero-bubble-v-schedule-mem-setup": ParserFlag("layout", 1, "zb"),
    "--zero-bubble-max-pending-backward": ParserFlag("layout", 1, "auto"),
    "--num-seq-splits": ParserFlag("layout", 1, "1"),
    "--interleave-group-size": ParserFlag("layout", 1, "0"),
    "--use-legacy-models": ParserFlag("model", 0, ""),
    "--enable-zb-runtime": ParserFlag("other", 0, ""),
    "--no-pre-communication-optimization": ParserFlag("other", 0, ""),
    "--enable-optimizer-post-validation": ParserFlag("other", 0, ""),
    "--enable-exactly-numeric-match": ParserFlag("other", 0, ""),
    "--zero-bubble-adaptive-memory-limit-percentile": ParserFlag("other", 1, "85"),
    "--cpu-offload": ParserFlag("other", 0, ""),
    "--offload-chunk-num": ParserFlag("other", 1, "0"),
    "--offload-time": ParserFlag("other", 1, "1.0"),
    "--auto-offload-time": ParserFlag("other", 0, ""),
    "--offload-overlap-sr": ParserFlag("other", 0, ""),
    "--zero-bubble-pipeline-timers-start-iter": ParserFlag("data", 1, "100"),
    "--zero-bubble-pipeline-timers-end-iter": ParserFlag("data", 1, "110"),
    "--profile-memory-iter": ParserFlag("data", 1, "-1"),
}
"""What sail-sg's zero-bubble fork of Megatron-LM adds (commit 39f2c186, on core 0.9); megatron_fork.py reads
some of them."""


@cache
def parser_flags() -> dict[str, ParserFlag]:
    """All flags of Megatron-LM's parser by name, in the order of their names."""
    text = files("mpctl.interop").joinpath("megatron_parser.txt").read_text("utf-8")
    rows = (line.split() for line in text.splitlines())
    return {
        name: ParserFlag(changes, -1 if count == "+" else int(count), " ".join(default))
        for name, changes, count, *default in rows
    }


def known_flags() -> dict[str, ParserFlag]:
    """Megatron-LM's and the fork's flags."""
    return parser_flags() | FORK_FLAGS


def is_neutral(flag: str, values: tuple[str, ...]) -> bool:
    """Whether a flag with these values says what is so without it."""
    if values == NEUTRAL.get(flag):
        return True
    known = known_flags().get(flag)
    return known is not None and len(values) == 1 and _is_same(values[0], known.default)


def _is_same(text: str, other: str) -> bool:
    """Whether two values are equal as words or as numbers: 1 and 1.0."""
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


def is_apart(flag: str) -> bool:
    """Whether a flag is for data, checkpoints or logging, which do not change a plan."""
    return known_flags()[flag].changes == "data"


def misspelt(flag: str) -> Issue | None:
    """The issue of a flag that Megatron-LM does not have, with the nearest that it has."""
    if flag in known_flags():
        return None
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(flag, known_flags(), n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "leave it out to plan without it"
    return Issue("megatron-flag", flag, f"is no flag of {SOFTWARE}", hint)


def refusal_of(flag: str, values: tuple[str, ...]) -> Issue | None:
    """The issue of a flag that is not read, if it is none of Megatron-LM's, if Megatron-LM ends on
    it, or if it changes the layout or the model's shape; None of others."""
    if wrong := misspelt(flag):
        return wrong
    if flag in GONE:
        return Issue("megatron-flag", flag, f"{SOFTWARE} ends on it", f"use {GONE[flag]}")
    changes = known_flags()[flag].changes
    if is_neutral(flag, values) or changes in ("other", "data"):
        return None
    what = "the layout" if changes == "layout" else "the model or its training"
    message = f"{' '.join(values)}: changes {what}, and no setting of a job says it".lstrip(": ")
    return Issue("megatron-flag", flag, message, "leave it out to plan without it")
