"""The collectives that a bench times: options as nccl-tests reads them, and cases by axis and size.

Sizes are bytes with K, M, G or T for powers of 1024: -b 1K -e 20K -f 4 is 1024, 4096, 16384. Data
types have nccl-tests' names, or ours. `bytes` is the full message, `count` the elements that a call
names, which are a rank's part of a gather, a scatter and an all-to-all. A size is rounded down to
an integer number of elements for every rank: 1000 bytes of float32 over 3 ranks are an all-reduce
of 250 elements and an all-gather of 83 elements a rank, 996 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import Literal, TypeVar, get_args

from mpctl.core.axes import AXIS_NAMES, UNIONS
from mpctl.core.errors import InputError, Issue, attempt
from mpctl.core.topology import Topology
from mpctl.core.units import bytes_text
from mpctl.measure.bench.cases import one_core_each, shared_units
from mpctl.measure.bench.probe import require_probes
from mpctl.model.layout.link_levels import find_span
from mpctl.model.layout.topology import dense_view, job_grid, other_views
from mpctl.plan.planning.plan import Overrides, Plan, load_plan
from mpctl.records.rundir.requests import ADDING, SPLIT, CollectiveCase, CollectiveKind, Transport
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.preflight import chosen_device

KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]?)", re.ASCII | re.IGNORECASE)
POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
MOST_BYTES, MOST_SIZES = 1024**4, 1000
SIZE_HINT = "give bytes, such as 8, 64K, 1.5M or 1G"
NCCL_NAMES: Mapping[str, str] = {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "uint8": "uint8",
    "int32": "int32",
    "int64": "int64",
}
"""torch's name of each of nccl-tests' data types."""
OWN_NAMES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
ITEM_BYTES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
Op = Literal["sum", "max"]
Word = TypeVar("Word")


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """The options that need no parsing. op: of the kinds that reduce; seconds: limit of all rounds,
    None for no limit; root, iterations, warm_up, rounds, check: as in a CollectivesRequest."""

    op: Op = "sum"
    root: int = 0
    iterations: int = 20
    warm_up: int = 5
    rounds: int = 3
    check: bool = True
    seconds: float | None = None


@dataclass(frozen=True)
class CollectiveFlags(CallOptions):
    """The options as typed. minbytes, maxbytes: sizes; stepfactor, stepbytes: from one size to the
    next, one of them; kinds, axes, transports: lists with commas, empty for all."""

    minbytes: str = "1K"
    maxbytes: str = "16M"
    stepfactor: float | None = None
    stepbytes: str | None = None
    kinds: str = ""
    axes: str = ""
    transports: str = ""
    datatype: str = "float"


@dataclass(frozen=True)
class CollectiveOptions(CallOptions):
    """The parsed options. sizes: bytes of full messages; axes, transports: empty for all; dtype:
    torch's name."""

    sizes: tuple[int, ...]
    kinds: tuple[CollectiveKind, ...] = KINDS
    axes: tuple[str, ...] = ()
    transports: tuple[Transport, ...] = ()
    dtype: str = "float32"


def read_options(flags: CollectiveFlags) -> CollectiveOptions:
    """The parsed flags. Raises InputError with every issue."""
    issues: list[Issue] = []
    sizes = attempt(issues, lambda: _sizes(flags))
    kinds = attempt(issues, lambda: _kinds(flags))
    transports = attempt(issues, lambda: _chosen(flags.transports, TRANSPORTS, "--transports"))
    dtype = attempt(issues, lambda: parse_dtype(flags.datatype))
    if issues or sizes is None or kinds is None or transports is None or dtype is None:
        raise InputError(issues)
    axes = tuple(dict.fromkeys(_words(flags.axes)))
    calls = {option.name: getattr(flags, option.name) for option in fields(CallOptions)}
    return CollectiveOptions(sizes, kinds, axes, transports, dtype, **calls)


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
    for an unknown one."""
    name = {**NCCL_NAMES, **OWN_NAMES}.get(text, text)
    if name not in ITEM_BYTES:
        raise InputError.of("bad-datatype", "--datatype", f"{text!r} is no data type", f"use {', '.join(NCCL_NAMES)}")
    return name


def _sizes(flags: CollectiveFlags) -> tuple[int, ...]:
    issues: list[Issue] = []
    first = attempt(issues, lambda: parse_size(flags.minbytes, "--minbytes"))
    last = attempt(issues, lambda: parse_size(flags.maxbytes, "--maxbytes"))
    grow = attempt(issues, lambda: _growth(flags))
    if first is None or last is None or grow is None:
        raise InputError(issues)
    if first > last:
        raise InputError.of(
            "bad-size",
            "--minbytes",
            f"{flags.minbytes} is more than --maxbytes {flags.maxbytes}",
            "give sizes that grow",
        )
    return _series(first, last, grow)


def _growth(flags: CollectiveFlags) -> Callable[[int], int]:
    if flags.stepbytes is None:
        factor = 4.0 if flags.stepfactor is None else flags.stepfactor
        if not 1 < factor < float("inf"):
            raise InputError.of(
                "bad-step", "--stepfactor", f"sizes times {factor:g} do not grow", "give a factor above 1, such as 2"
            )
        return lambda size: max(size + 1, int(min(size * factor, 2.0 * MOST_BYTES)))
    if flags.stepfactor is not None:
        raise InputError.of("bad-step", "--stepbytes", "--stepfactor is given too", "give one of them")
    step = parse_size(flags.stepbytes, "--stepbytes")
    return lambda size: size + step


def _series(first: int, last: int, grow: Callable[[int], int]) -> tuple[int, ...]:
    sizes = [first]
    while (following := grow(sizes[-1])) <= last:
        sizes.append(following)
        if len(sizes) > MOST_SIZES:
            raise InputError.of(
                "bad-step", "--stepbytes", f"there are more than {MOST_SIZES} sizes", "take larger steps"
            )
    return tuple(sizes)


def _kinds(flags: CollectiveFlags) -> tuple[CollectiveKind, ...]:
    """The chosen kinds. Only the all-reduce has `max`; by default the other kinds that reduce are
    then left out."""
    chosen = _chosen(flags.kinds.replace("-", "_"), KINDS, "--kinds") or KINDS
    if flags.op == "sum":
        return chosen
    unable = [kind for kind in chosen if kind in ADDING - {"all_reduce"}]
    if unable and flags.kinds:
        raise InputError.of(
            "no-such-op",
            "--op",
            f"{', '.join(unable)} add up, and have no {flags.op}",
            "use --op sum, or --kinds all_reduce",
        )
    return tuple(kind for kind in chosen if kind not in unable)


def _chosen(text: str, known: Sequence[Word], where: str) -> tuple[Word, ...]:
    words = _words(text)
    if unknown := [word for word in words if word not in known]:
        raise InputError.of(
            "unknown-word", where, f"there is no {', '.join(map(repr, unknown))}", f"use {', '.join(map(str, known))}"
        )
    return tuple(name for name in known if name in words)


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


BUFFERS = 5
"""Buffers of a message's size that a rank has while it checks a result."""
LAYOUT, OF_EXPERTS = ("parallel", "cluster"), ("parallel.ep", "parallel.etp")


@dataclass(frozen=True)
class CollectiveCases:
    """A layout and the cases along its axes. device: "cpu" or "cuda"; sizes: ranks of a group, by
    axis; is_rehearsal: a node has more ranks than cores (or GPUs)."""

    plan: Plan
    topology: Topology
    options: CollectiveOptions
    cases: tuple[CollectiveCase, ...]
    device: str
    sizes: Mapping[str, int]
    is_rehearsal: bool

    def on_hosts(self, machine: Machine) -> CollectiveCases:
        """The same on hosts like this one."""
        ranks = min(self.topology.gpus_per_node, self.topology.world_size)
        return replace(self, is_rehearsal=ranks > shared_units(self.plan.job, machine))


def plan_collectives(
    source: str | None, settings: Overrides, flags: CollectiveFlags, machine: Machine
) -> CollectiveCases:
    """The cases of the flags along the axes of a job's layout; without a job and a layout, tp over
    the cores (or GPUs) of this machine, at least two, or the ranks of ep and etp. Raises InputError
    with every issue."""
    named = [name for name in settings if name.startswith(LAYOUT) and name not in OF_EXPERTS]
    if source is None and not named:
        sizes = [size for name in OF_EXPERTS if isinstance(size := settings.get(name), int)]
        most = max(2, machine.gpus or machine.cores)
        settings = {"parallel.dp": prod(sizes), **settings} if sizes else {"parallel.tp": most, **settings}
    issues: list[Issue] = []
    options = attempt(issues, lambda: read_options(flags))
    plan = attempt(issues, lambda: one_core_each(load_plan(source, settings), machine))
    if options is None or plan is None:
        raise InputError(issues)
    require_probes([plan])
    return collective_cases(plan, options, machine)


def collective_cases(plan: Plan, options: CollectiveOptions, machine: Machine) -> CollectiveCases:
    """The cases of a legal plan; machine: the hosts' kind of machine. Raises InputError for axes of
    one rank, transports that the device does not have, and messages larger than the memory."""
    topology, device = plan.require_legal(), chosen_device(plan.job, machine)
    sizes = axis_sizes(plan, topology)
    chosen = options.axes or tuple(_parallel_axes(plan, sizes))
    is_dp = plan.job.sizes["cp"] == 1  # where dp is all of the group dp_cp
    axes = tuple("dp_cp" if axis == "dp" and is_dp else axis for axis in chosen)
    issues = [*_axis_issues(options, axes, sizes), *_way_issues(options, device)]
    if device == "cpu" and topology.nodes == 1:
        issues += _memory_issues(options, topology.world_size, machine)
    if issues:
        raise InputError(issues)
    cases = tuple(_cases(plan, topology, options, {axis: sizes[axis] for axis in axes}, device))
    if not cases:
        raise InputError.of(
            "no-collective",
            "--transports",
            "shared memory sends nothing from one rank to another",
            "add gloo, or other --kinds",
        )
    made = CollectiveCases(plan, topology, options, cases, device, sizes, is_rehearsal=False)
    return made.on_hosts(machine)


def axis_sizes(plan: Plan, topology: Topology) -> dict[str, int]:
    """Ranks of a group over each axis, by the names in plans."""
    axes = ("dp_cp" if axis == "dp" else axis for axis in AXIS_NAMES)
    other = [name for view in other_views(plan.job) for name in (*view.sizes, view.shard_group, view.replica_group)]
    cut = [view for view in (dense_view(plan.job), *other_views(plan.job)) if view.copies > 1]
    other += [name for view in cut for name in (view.zero_group, view.copies_group)]
    names = dict.fromkeys((*axes, *job_grid(plan.job).groups, *other, "world"))
    return {name: topology.group_size(name) for name in names}


def sent_over(cases: CollectiveCases, kind: str, axis: str) -> Transport:
    """The transport that a training run uses for such a message."""
    if cases.device == "cuda":
        return "nccl"
    is_shared = kind != "sendrecv" and _shares(cases.plan, cases.topology, axis)
    return "shared" if is_shared else "gloo"


def _shares(plan: Plan, topology: Topology, axis: str) -> bool:
    """Whether CPU ranks of the groups of an axis share memory: all are on one node."""
    span = find_span(topology, UNIONS.get(axis, (axis,)), topology.gpus_per_node)
    return plan.job.launch.shared_memory and span.networks == 1


def _parallel_axes(plan: Plan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Every group of several ranks; dp_cp only where it differs from cp, etp_ep from ep and etp."""
    for axis, ranks in sizes.items():
        is_own = axis != "dp_cp" or plan.job.sizes["dp"] > 1
        if axis == "etp_ep":
            is_own = 1 not in (sizes["etp"], sizes["ep"])
        if ranks > 1 and is_own and axis != "world":
            yield axis


def _axis_issues(options: CollectiveOptions, axes: tuple[str, ...], sizes: Mapping[str, int]) -> Iterator[Issue]:
    usable = [axis for axis, ranks in sizes.items() if ranks > 1]
    hint = f"use {', '.join(usable)}" if usable else "give a layout of several ranks: --tp 2"
    if not axes:
        yield Issue("axis-of-one-rank", "--axes", "every axis of the layout has one rank", hint)
    for axis in axes:
        if axis not in sizes:
            yield Issue("unknown-axis", "--axes", f"the layout has no axis {axis!r}", hint)
        elif sizes[axis] == 1:
            yield Issue("axis-of-one-rank", "--axes", f"{axis} has one rank, which sends nothing", hint)
        elif not 0 <= options.root < sizes[axis]:
            last = sizes[axis] - 1
            yield Issue(
                "no-such-root",
                "--root",
                f"{options.root} is not from 0 to {last}, the ranks of a group of {axis}",
                "use --root 0",
            )


def _way_issues(options: CollectiveOptions, device: str) -> Iterator[Issue]:
    ways = _ways(device)
    for transport in options.transports:
        if transport not in ways:
            yield Issue(
                "no-such-transport",
                "--transports",
                f"ranks on {device} do not send over {transport}",
                f"use {', '.join(ways)}",
            )


def _memory_issues(options: CollectiveOptions, ranks: int, machine: Machine) -> Iterator[Issue]:
    needed = BUFFERS * ranks * options.sizes[-1]
    if needed > machine.memory_bytes:
        most = machine.memory_bytes // (BUFFERS * ranks)
        yield Issue(
            "size-beyond-memory",
            "--maxbytes",
            f"messages of {options.sizes[-1]:,} bytes "
            f"take {bytes_text(needed)} on {ranks} ranks, and "
            f"{bytes_text(machine.memory_bytes)} are free",
            f"use at most --maxbytes {most}",
        )


def _ways(device: str) -> tuple[Transport, ...]:
    return ("nccl",) if device == "cuda" else ("gloo", "shared")


def _cases(
    plan: Plan, topology: Topology, options: CollectiveOptions, axes: Mapping[str, int], device: str
) -> Iterator[CollectiveCase]:
    """The cases without duplicates, as small sizes may be rounded to the same. By default shared
    memory is left out where an axis has none, and for sendrecv always: messages between two ranks
    go over gloo."""
    seen: set[tuple[str, str, str, int]] = set()
    for axis, kind in product(axes, options.kinds):
        ways = list(options.transports or _ways(device))
        has_shared = bool(options.transports) or _shares(plan, topology, axis)
        if "shared" in ways and (kind == "sendrecv" or not has_shared):
            ways.remove("shared")
        for way, size in product(ways, options.sizes):
            case = _case(options, kind, axis, way, size, axes[axis])
            key = axis, kind, way, case["bytes"]
            if key not in seen:
                seen.add(key)
                yield case


def _case(
    options: CollectiveOptions, kind: CollectiveKind, axis: str, way: Transport, size: int, ranks: int
) -> CollectiveCase:
    blocks, item = ranks if kind in SPLIT else 1, ITEM_BYTES[options.dtype]
    count = max(1, size // (item * blocks))
    return {
        "kind": kind,
        "axis": axis,
        "transport": way,
        "dtype": options.dtype,
        "op": options.op if kind in ADDING else "none",
        "bytes": count * blocks * item,
        "count": count,
    }
