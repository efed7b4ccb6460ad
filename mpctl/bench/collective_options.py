"""The options of `mpctl bench collectives`, read as nccl-tests reads its own.

Sizes are bytes with K, M, G or T for powers of 1024. From the smallest on each is the last times
the factor, or plus the step. Data types have nccl-tests' names, or ours.

By hand, -b 1K -e 20K -f 4: 1024, 4096 and 16384 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from mpctl.errors import InputError, Issue, attempt
from mpctl.rundir.collective_files import ADDING, CollectiveKind, Transport

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", re.ASCII | re.IGNORECASE)
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MOST_BYTES, MOST_SIZES = 1024**4, 1000
SIZE_HINT = "give bytes, such as 8, 64K, 1.5M or 1G"
NCCL_NAMES: Mapping[str, str] = {
    "float": "float32", "double": "float64", "half": "float16", "bfloat16": "bfloat16",
    "int8": "int8", "uint8": "uint8", "int32": "int32", "int64": "int64",
}  # fmt: skip
"""torch's name of each of nccl-tests' data types."""
OWN_NAMES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
ITEM_BYTES = {
    "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4,
    "int64": 8,
}  # fmt: skip
Op = Literal["sum", "max"]
Word = TypeVar("Word")


@dataclass(frozen=True)
class CollectiveFlags:
    """The options as they are typed. minbytes, maxbytes: sizes; stepfactor, stepbytes: from one
    size to the next, one of them; kinds, axes, transports: lists with commas, empty for all; all
    others as in CollectiveOptions."""

    minbytes: str = "1K"
    maxbytes: str = "16M"
    stepfactor: float | None = None
    stepbytes: str | None = None
    kinds: str = ""
    axes: str = ""
    transports: str = ""
    datatype: str = "float"
    op: Op = "sum"
    root: int = 0
    iterations: int = 20
    warm_up: int = 5
    rounds: int = 3
    check: bool = True
    seconds: float | None = None


@dataclass(frozen=True)
class CollectiveOptions:
    """What is timed. sizes: bytes of whole messages; axes, transports: empty for all that there
    are; dtype: torch's name; op: of the kinds that add up; seconds: that rounds may take, None for
    no limit; root, iterations, warm_up, rounds, check: as in a CollectivesRequest."""

    sizes: tuple[int, ...]
    kinds: tuple[CollectiveKind, ...] = KINDS
    axes: tuple[str, ...] = ()
    transports: tuple[Transport, ...] = ()
    dtype: str = "float32"
    op: Op = "sum"
    root: int = 0
    iterations: int = 20
    warm_up: int = 5
    rounds: int = 3
    check: bool = True
    seconds: float | None = None


def read_options(flags: CollectiveFlags) -> CollectiveOptions:
    """The options that the flags mean. Raises InputError with every issue."""
    issues: list[Issue] = []
    sizes = attempt(issues, lambda: _sizes(flags))
    kinds = attempt(issues, lambda: _kinds(flags))
    transports = attempt(issues, lambda: _chosen(flags.transports, TRANSPORTS, "--transports"))
    dtype = attempt(issues, lambda: parse_dtype(flags.datatype))
    if issues or sizes is None or kinds is None or transports is None or dtype is None:
        raise InputError(issues)
    axes = tuple(dict.fromkeys(_words(flags.axes)))
    return CollectiveOptions(
        sizes, kinds, axes, transports, dtype, flags.op, flags.root, flags.iterations,
        flags.warm_up, flags.rounds, flags.check, flags.seconds,
    )  # fmt: skip


def parse_size(text: str, where: str) -> int:
    """Bytes of `64K` or `1.5M`. Raises InputError for other text, for 0 and above a TiB.

    >>> parse_size("1.5K", "--minbytes"), parse_size("8", "--minbytes")
    (1536, 8)
    """
    found = SIZE.fullmatch(text.strip())
    size = float(found[1]) * 1024.0 ** POWERS[found[2].upper()] if found else 0.0
    if not found:
        raise InputError.of("bad-size", where, f"{text!r} is no size", SIZE_HINT)
    if not 1 <= size <= MOST_BYTES:
        raise InputError.of("bad-size", where, f"{text} is not from 1 byte to 1T", SIZE_HINT)
    return int(size)


def parse_dtype(text: str) -> str:
    """torch's name of a data type: `float`, `fp32` and `float32` are the same. Raises InputError
    for one that there is not."""
    name = {**NCCL_NAMES, **OWN_NAMES}.get(text, text)
    if name not in ITEM_BYTES:
        raise InputError.of("bad-datatype", "--datatype", f"{text!r} is no data type",
                            f"use {', '.join(NCCL_NAMES)}")  # fmt: skip
    return name


def _sizes(flags: CollectiveFlags) -> tuple[int, ...]:
    issues: list[Issue] = []
    first = attempt(issues, lambda: parse_size(flags.minbytes, "--minbytes"))
    last = attempt(issues, lambda: parse_size(flags.maxbytes, "--maxbytes"))
    grow = attempt(issues, lambda: _growth(flags))
    if first is None or last is None or grow is None:
        raise InputError(issues)
    if first > last:
        raise InputError.of("bad-size", "--minbytes", f"{flags.minbytes} is more than --maxbytes "
                            f"{flags.maxbytes}", "give sizes that grow")  # fmt: skip
    return _series(first, last, grow)


def _growth(flags: CollectiveFlags) -> Callable[[int], int]:
    """From one size to the next."""
    if flags.stepbytes is None:
        factor = 4.0 if flags.stepfactor is None else flags.stepfactor
        if not 1 < factor < float("inf"):
            raise InputError.of("bad-step", "--stepfactor", f"sizes times {factor:g} do not grow",
                                "give a factor above 1, such as 2")  # fmt: skip
        return lambda size: max(size + 1, int(min(size * factor, 2.0 * MOST_BYTES)))
    if flags.stepfactor is not None:
        raise InputError.of("bad-step", "--stepbytes", "--stepfactor is given too",
                            "give one of them")  # fmt: skip
    step = parse_size(flags.stepbytes, "--stepbytes")
    return lambda size: size + step


def _series(first: int, last: int, grow: Callable[[int], int]) -> tuple[int, ...]:
    sizes = [first]
    while (following := grow(sizes[-1])) <= last:
        sizes.append(following)
        if len(sizes) > MOST_SIZES:
            raise InputError.of("bad-step", "--stepbytes", f"there are more than {MOST_SIZES} "
                                "sizes", "take larger steps")  # fmt: skip
    return tuple(sizes)


def _kinds(flags: CollectiveFlags) -> tuple[CollectiveKind, ...]:
    """The kinds asked for. Under `max` only the all-reduce adds up; by default the other kinds that
    do are left out."""
    chosen = _chosen(flags.kinds.replace("-", "_"), KINDS, "--kinds") or KINDS
    if flags.op == "sum":
        return chosen
    unable = [kind for kind in chosen if kind in ADDING - {"all_reduce"}]
    if unable and flags.kinds:
        raise InputError.of("no-such-op", "--op", f"{', '.join(unable)} add up, and have no "
                            f"{flags.op}", "use --op sum, or --kinds all_reduce")  # fmt: skip
    return tuple(kind for kind in chosen if kind not in unable)


def _chosen(text: str, known: Sequence[Word], where: str) -> tuple[Word, ...]:
    """The words of a list with commas, each once. Raises InputError for one that is not known."""
    words = _words(text)
    if unknown := [word for word in words if word not in known]:
        raise InputError.of("unknown-word", where, f"there is no {', '.join(map(repr, unknown))}",
                            f"use {', '.join(map(str, known))}")  # fmt: skip
    return tuple(name for name in known if name in words)


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]
