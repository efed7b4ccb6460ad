"""The collectives that a bench times: every kind, way to send and size along axes of a layout.

`bytes` and `count` are nccl-tests': the whole message, and the elements that a call names, which
are a rank's part of a gather, a scatter and an all-to-all. A size is rounded down to whole elements
for every rank, at least one.

By hand, 1000 bytes of float32 over 3 ranks: an all-reduce of 250 elements, an all-gather of 83
elements a rank, 996 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from mpctl.bench.cases import one_core_each, shared_units
from mpctl.bench.collective_options import (
    ITEM_BYTES,
    CollectiveFlags,
    CollectiveOptions,
    read_options,
)
from mpctl.bench.probe import require_probes
from mpctl.errors import InputError, Issue, attempt
from mpctl.estimate.network import GROUP_AXES
from mpctl.launch.node.machine import Machine
from mpctl.launch.preflight import chosen_device
from mpctl.layout.link_levels import find_span
from mpctl.layout.topology import job_grid
from mpctl.planning.plan import Overrides, Plan, load_plan
from mpctl.rundir.collective_files import (
    ADDING,
    SPLIT,
    CollectiveCase,
    CollectiveKind,
    Transport,
)
from mpctl.topology import Topology
from mpctl.units import bytes_text

BUFFERS = 5
"""Buffers of a message's size that a rank has while it checks a result."""
LAYOUT = ("parallel", "cluster")


@dataclass(frozen=True)
class CollectiveCases:
    """A layout and what is timed along its axes. device: "cpu" or "cuda"; sizes: ranks of a group,
    by axis; is_rehearsal: a node has more ranks than cores (or GPUs)."""

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
    """What the flags ask for along the axes of a job's layout; without a job and a layout, tp over
    the cores (or GPUs) of this machine, two at least. Raises InputError with every issue."""
    if source is None and not any(name.startswith(LAYOUT) for name in settings):
        settings = {"parallel.tp": max(2, machine.gpus or machine.cores), **settings}
    issues: list[Issue] = []
    options = attempt(issues, lambda: read_options(flags))
    plan = attempt(issues, lambda: one_core_each(load_plan(source, settings), machine))
    if options is None or plan is None:
        raise InputError(issues)
    require_probes([plan])
    return collective_cases(plan, options, machine)


def collective_cases(plan: Plan, options: CollectiveOptions, machine: Machine) -> CollectiveCases:
    """The cases of a legal plan; machine: one like those that the ranks are on. Raises InputError
    for axes of one rank, ways to send that the device has not, and messages beyond the memory."""
    topology, device = plan.require_legal(), chosen_device(plan.job, machine)
    sizes = axis_sizes(plan, topology)
    axes = options.axes or tuple(_parallel_axes(plan, sizes))
    issues = [*_axis_issues(options, axes, sizes), *_way_issues(options, device)]
    if device == "cpu" and topology.nodes == 1:
        issues += _memory_issues(options, topology.world_size, machine)
    if issues:
        raise InputError(issues)
    cases = tuple(_cases(plan, topology, options, {axis: sizes[axis] for axis in axes}, device))
    if not cases:
        raise InputError.of("no-collective", "--transports", "shared memory sends nothing from one "
                            "rank to another", "add gloo, or other --kinds")  # fmt: skip
    made = CollectiveCases(plan, topology, options, cases, device, sizes, is_rehearsal=False)
    return made.on_hosts(machine)


def axis_sizes(plan: Plan, topology: Topology) -> dict[str, int]:
    """Ranks of a group over each axis, by the names in plans; dp is all replicas, dp x cp."""
    names = dict.fromkeys(("tp", "cp", "dp", "pp", *job_grid(plan.job).groups, "world"))
    return {name: topology.group_size(*GROUP_AXES.get(name, (name,))) for name in names}


def sent_over(cases: CollectiveCases, kind: str, axis: str) -> Transport:
    """The way that a training run sends such a message."""
    if cases.device == "cuda":
        return "nccl"
    is_shared = kind != "sendrecv" and _shares(cases.plan, cases.topology, axis)
    return "shared" if is_shared else "gloo"


def _shares(plan: Plan, topology: Topology, axis: str) -> bool:
    """Whether CPU ranks of the groups of an axis share memory: all are on one node."""
    span = find_span(topology, GROUP_AXES.get(axis, (axis,)), topology.gpus_per_node)
    return plan.job.launch.shared_memory and span.networks == 1


def _parallel_axes(plan: Plan, sizes: Mapping[str, int]) -> Iterator[str]:
    """Every axis of several ranks; dp only where it is more than cp, whose ranks it has else."""
    for axis, ranks in sizes.items():
        is_own = axis != "dp" or plan.job.sizes["dp"] > 1
        if ranks > 1 and is_own and axis != "world":
            yield axis


def _axis_issues(
    options: CollectiveOptions, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> Iterator[Issue]:
    usable = [axis for axis, ranks in sizes.items() if ranks > 1]
    hint = f"use {', '.join(usable)}" if usable else "give a layout of several ranks: --tp 2"
    if not axes:
        yield Issue("axis-of-one-rank", "--axes", "every axis of the layout has one rank", hint)
    for axis in axes:
        if axis not in sizes:
            yield Issue("unknown-axis", "--axes", f"the layout has no axis {axis!r}", hint)
        elif sizes[axis] == 1:
            yield Issue("axis-of-one-rank", "--axes", f"{axis} has one rank, which sends nothing",
                        hint)  # fmt: skip
        elif not 0 <= options.root < sizes[axis]:
            last = sizes[axis] - 1
            yield Issue("no-such-root", "--root", f"{options.root} is not from 0 to {last}, the "
                        f"ranks of a group of {axis}", "use --root 0")  # fmt: skip


def _way_issues(options: CollectiveOptions, device: str) -> Iterator[Issue]:
    ways = _ways(device)
    for transport in options.transports:
        if transport not in ways:
            yield Issue("no-such-transport", "--transports", f"ranks on {device} do not send over "
                        f"{transport}", f"use {', '.join(ways)}")  # fmt: skip


def _memory_issues(options: CollectiveOptions, ranks: int, machine: Machine) -> Iterator[Issue]:
    needed = BUFFERS * ranks * options.sizes[-1]
    if needed > machine.memory_bytes:
        most = machine.memory_bytes // (BUFFERS * ranks)
        yield Issue("size-beyond-memory", "--maxbytes", f"messages of {options.sizes[-1]:,} bytes "
                    f"take {bytes_text(needed)} on {ranks} ranks, and "
                    f"{bytes_text(machine.memory_bytes)} are free",
                    f"use at most --maxbytes {most}")  # fmt: skip


def _ways(device: str) -> tuple[Transport, ...]:
    return ("nccl",) if device == "cuda" else ("gloo", "shared")


def _cases(
    plan: Plan, topology: Topology, options: CollectiveOptions, axes: Mapping[str, int], device: str
) -> Iterator[CollectiveCase]:
    """Each once: small sizes may be rounded to the same. By default shared memory is left out where
    an axis has none, and for sendrecv always: messages between two ranks go over gloo."""
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
    options: CollectiveOptions, kind: CollectiveKind, axis: str, way: Transport, size: int,
    ranks: int,
) -> CollectiveCase:  # fmt: skip
    blocks, item = ranks if kind in SPLIT else 1, ITEM_BYTES[options.dtype]
    count = max(1, size // (item * blocks))
    return {
        "kind": kind, "axis": axis, "transport": way, "dtype": options.dtype,
        "op": options.op if kind in ADDING else "none", "bytes": count * blocks * item,
        "count": count,
    }  # fmt: skip
