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


@cache
def parser_flags() -> dict[str, ParserFlag]:
    """All flags of Megatron-LM's parser by name, in the order of their names."""
    text = files("mpctl.interop").joinpath("megatron_parser.txt").read_text("utf-8")
    rows = (line.split() for line in text.splitlines())
    return {
        name: ParserFlag(changes, -1 if count == "+" else int(count), " ".join(default))
        for name, changes, count, *default in rows
    }


def is_neutral(flag: str, values: tuple[str, ...]) -> bool:
    """Whether a flag with these values says what is so without it."""
    if values == NEUTRAL.get(flag):
        return True
    known = parser_flags().get(flag)
    return known is not None and len(values) == 1 and _is_same(values[0], known.default)


def _is_same(text: str, other: str) -> bool:
    """Whether two values are equal as words or as numbers: 1 and 1.0."""
    try:
        return float(text) == float(other)
    except ValueError:
        return text == other


def is_apart(flag: str) -> bool:
    """Whether a flag is for data, checkpoints or logging, which do not change a plan."""
    return parser_flags()[flag].changes == "data"


def misspelt(flag: str) -> Issue | None:
    """The issue of a flag that Megatron-LM does not have, with the nearest that it has."""
    if flag in parser_flags():
        return None
    import difflib  # only where something is wrong

    near = difflib.get_close_matches(flag, parser_flags(), n=1, cutoff=0.75)
    hint = f"did you mean {near[0]}?" if near else "leave it out to plan without it"
    return Issue("megatron-flag", flag, f"is no flag of {SOFTWARE}", hint)


def refusal_of(flag: str, values: tuple[str, ...]) -> Issue | None:
    """The issue of a flag that is not read, if it is none of Megatron-LM's, if Megatron-LM ends on
    it, or if it changes the layout or the model's shape; None of others."""
    if wrong := misspelt(flag):
        return wrong
    if flag in GONE:
        return Issue("megatron-flag", flag, f"{SOFTWARE} ends on it", f"use {GONE[flag]}")
    changes = parser_flags()[flag].changes
    if is_neutral(flag, values) or changes in ("other", "data"):
        return None
    what = "the layout" if changes == "layout" else "the model or its training"
    message = f"{' '.join(values)}: changes {what}, and no setting of a job says it".lstrip(": ")
    return Issue("megatron-flag", flag, message, "leave it out to plan without it")
