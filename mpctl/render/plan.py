"""The plan as people read it: nodes as boxes, GPUs coloured by tensor-parallel group, tables.

Colour is never the only carrier: each GPU's cell names its rank, and its tp group by a letter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from mpctl.axes import GROUP_KINDS
from mpctl.document import TIME_PARTS, axis_sizes, rank_entry, stack_layers
from mpctl.plan import Plan
from mpctl.render.cells import group_number, letters
from mpctl.topology import Topology
from mpctl.units import bytes_text, count_text, rate_text, seconds_text

if TYPE_CHECKING:
    from mpctl.estimate.communication import BlockTraffic
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.time import StepTime

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red", "bright_cyan", "bright_magenta")
MARKS = {"ok": ("✓", "green"), "warning": ("!", "bold yellow"), "error": ("✗", "bold red")}
SHOWN_NODES, SHOWN_GROUPS, SHOWN_STAGES, GPUS_A_ROW = 8, 8, 32, 8


def print_plan(
    plan: Plan,
    topology: Topology,
    *,
    kinds: tuple[str, ...] | None,
    ranks: bool,
) -> None:
    """The whole plan on stdout."""
    parts = _plan_parts(plan, topology, kinds, ranks)
    Console(highlight=False, markup=False, emoji=False).print(*parts, sep="\n")


def _plan_parts(
    plan: Plan, topology: Topology, kinds: tuple[str, ...] | None, ranks: bool
) -> Iterator[RenderableType]:
    yield _headline(plan, topology)
    yield _layout(plan, topology)
    yield _groups(topology, tuple(GROUP_KINDS) if kinds is None else kinds, kinds is not None)
    if ranks:
        yield _ranks(plan, topology)
    if plan.estimate is not None:
        yield _communication(plan, topology)
        yield from _costs(plan)
    yield _checks(plan)


def _headline(plan: Plan, topology: Topology) -> Text:
    device = plan.job.cluster.device
    where = f" of {device.name}" if device else ""
    text = Text.assemble(
        (f"{topology.world_size} ranks", "bold"),
        f" on {topology.nodes} x {topology.gpus_per_node} GPUs{where}: ",
        (axis_sizes(topology.sizes.items()), "bold"),
        (f"   order {'-'.join(topology.order)}", "dim"),
    )
    if plan.job.model is not None:
        model, estimate = plan.job.model, plan.estimate
        size = f", {count_text(estimate.parameters)} parameters" if estimate else ""
        both = f" + {model.decoder_layers}" if model.decoder_layers else ""
        text.append(f"\n{model.name or model.family}{size}: {model.layers}{both} layers, ")
        lengths = f" + {model.decoder_seq_length}" if model.decoder_seq_length else ""
        text.append(f"hidden {model.hidden}, heads {model.heads}, ")
        text.append(f"sequence {model.seq_length}{lengths}")
    return text


def _layout(plan: Plan, topology: Topology) -> RenderableType:
    shown = range(min(topology.nodes, SHOWN_NODES))
    boxes = [_node(plan, topology, node) for node in shown]
    hidden = topology.nodes - len(shown)
    more = [Text(f"... and {hidden} more nodes alike", style="dim")] if hidden else []
    legend = Text(
        "a cell: rank and tp group; below it its dp (d), pp (p) and cp (c) place", style="dim"
    )
    return Group(Columns(boxes, padding=(0, 1)), *more, legend)


def _node(plan: Plan, topology: Topology, node: int) -> Panel:
    first = node * topology.gpus_per_node
    ranks = range(first, min(first + topology.gpus_per_node, topology.world_size))
    wide = min(len(ranks), 4 if len(ranks) <= 8 else GPUS_A_ROW)
    lines = [_row(topology, ranks[at : at + wide]) for at in range(0, len(ranks), wide)]
    title = f"node {node}" + (f" · {_stage_span(plan, topology, ranks)}" if plan.stages else "")
    width = max(len(lines[0]) // 2, len(title) + 2) + 4
    return Panel(Text("\n").join(lines), title=title, border_style="dim", width=width)


def _stage_span(plan: Plan, topology: Topology, ranks: range) -> str:
    """The layers that a node holds, from its lowest to its highest stage."""
    assert plan.stages is not None
    held = {topology.coords(rank)["pp"] for rank in (ranks[0], ranks[-1])}
    spans = [span for stage in range(min(held), max(held) + 1) for span in plan.stages[stage]]
    return f"layers {min(s[0] for s in spans)}-{max(s[1] for s in spans) - 1}"


def _row(topology: Topology, ranks: range) -> Text:
    """GPUs side by side: rank and tp group, and below its place along the other axes."""
    upper, lower = Text(), Text()
    has_cp, digits = topology.sizes["cp"] > 1, len(str(topology.world_size - 1))
    for rank in ranks:
        coords, group = topology.coords(rank), group_number(topology, rank, ("tp",))
        place = f" d{coords['dp']} p{coords['pp']}" + (f" c{coords['cp']}" if has_cp else "")
        head = f" {rank:>{digits}} {letters(group)} "
        wide = max(len(place), len(head))
        upper.append(head.ljust(wide), f"black on {COLOURS[group % len(COLOURS)]}").append(" ")
        lower.append(place.ljust(wide + 1), "dim")
    return upper.append("\n").append_text(lower)


def _table(title: str, *columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        header_style="dim",
        padding=(0, 2, 0, 0),
    )
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _groups(topology: Topology, kinds: tuple[str, ...], whole: bool) -> RenderableType:
    if not kinds:
        return Text("")
    table = _table("\nRank groups", "group", "count", "size", "members", right=("count", "size"))
    for kind in kinds:
        groups = topology.kind_groups(kind)
        shown = groups if whole else groups[:SHOWN_GROUPS]
        members = " ".join(_members(group) for group in shown)
        more = f" ... {len(groups) - len(shown)} more" if len(groups) > len(shown) else ""
        size = len(groups[0])
        table.add_row(kind, str(len(groups)), str(size), members + more)
    return table


def _members(group: Any, limit: int = 16) -> str:
    shown = ",".join(map(str, group[:limit]))
    return f"[{shown},...]".replace(" ", "") if len(group) > limit else f"[{shown}]"


def _ranks(plan: Plan, topology: Topology) -> Table:
    axes = [axis for axis in topology.order if topology.sizes[axis] > 1]
    table = _table("\nRanks", "rank", "node", "local", *axes, "layers", right=("rank", "node"))
    for rank in range(topology.world_size):
        entry = rank_entry(plan, topology, rank)
        places = (str(entry["coords"][axis]) for axis in axes)
        table.add_row(
            str(rank),
            str(entry["node"]),
            str(entry["local_rank"]),
            *places,
            _held(entry.get("layers", []), entry.get("stacks")),
        )
    return table


def _held(spans: list[list[int]], stacks: dict[str, list[list[int]]] | None) -> str:
    """`0-5`; of an encoder and a decoder `enc 4-5, dec 0-3`."""
    if not stacks:
        return _layers(spans)
    return ", ".join(f"{name[:3]} {_layers(own)}" for name, own in stacks.items() if own)


def _layers(spans: list[list[int]]) -> str:
    return " ".join(f"{start}-{stop - 1}" for start, stop in spans)


def _communication(plan: Plan, topology: Topology) -> RenderableType:
    assert plan.estimate is not None
    blocks = [_block_table(block, topology) for block in plan.estimate.blocks]
    return Group(*blocks, *_pipeline(plan.estimate))


def _pipeline(estimate: Estimate) -> Iterator[RenderableType]:
    """What each stage sends its neighbours, and what is summed over the stages that share it."""
    if len(estimate.messages) == 1:
        return
    numbers = ("messages", "bytes", "shared")
    table = _table("\nPipeline traffic of one step", "stage", *numbers, right=numbers)
    for stage, messages in enumerate(estimate.messages[:SHOWN_STAGES]):
        sends = [m for m in messages if (m.axis, m.kind) == ("pp", "send")]
        shared = sum(m.bytes for m in messages if m.what == "shared parameters")
        sent = sum(m.bytes * m.count for m in sends)
        table.add_row(
            str(stage), str(sum(m.count for m in sends)), *map(bytes_text, (sent, shared))
        )
    yield table
    yield Text("shared: gradients of parameters that other stages hold too, summed with them",
               style="dim")  # fmt: skip


def _block_table(block: BlockTraffic, topology: Topology) -> RenderableType:
    numbers, stack = ("all-reduces", "volume", "bytes"), block.title.removesuffix("blocks")
    title = f"\nTensor-parallel traffic of one {stack}block"
    table = _table(title, "parallel layer", *numbers, right=numbers)
    for name, part in block.parts.items():
        volume, size = f"{part.volume_phi:g} Φ", bytes_text(part.volume_bytes)
        table.add_row(name, str(part.all_reduces), volume, size)
    whole = (f"{block.volume_phi:g} Φ", bytes_text(block.volume_bytes))
    table.add_row("block", str(block.all_reduces), *whole, style="bold")
    ring = f"a ring of {topology.sizes['tp']} sends {bytes_text(block.ring_bytes_per_rank)} a rank"
    note = f"Φ = {bytes_text(block.phi_bytes)}, one micro batch's hidden states; {ring}"
    return Group(table, Text(note, style="dim"))


def _costs(plan: Plan) -> Iterator[RenderableType]:
    estimate = plan.estimate
    assert estimate is not None
    sizes = ("states", "activations", "working", "peak", "device")
    title = "\nMemory of one rank, by stage, at its peak"
    table = _table(title, "stage", "layers", "parameters", *sizes, right=("parameters", *sizes))
    for stage in estimate.memory[:SHOWN_STAGES]:
        spans = plan.stages[stage.stage] if plan.stages else ()
        held = (stage.state_bytes, stage.activation_bytes,
                stage.working_bytes + stage.lasting_bytes, stage.allocated_bytes,
                stage.device_bytes)  # fmt: skip
        table.add_row(
            str(stage.stage),
            _held([list(s) for s in spans], stack_layers(plan, spans)),
            count_text(stage.parameters),
            *map(bytes_text, held),
        )
    yield table
    yield _time(estimate.time)


def _time(time: StepTime | str) -> Text:
    if isinstance(time, str):
        return Text(f"\nStep time: not estimated, {time}", style="dim")
    parts = ((name, getattr(time, name)) for name in TIME_PARTS)
    shown = ", ".join(f"{name} {seconds_text(value)}" for name, value in parts if value)
    return Text.assemble(
        ("\nStep time ", "bold"),
        (seconds_text(time.total), "bold"),
        f" ({seconds_text(time.low)} to {seconds_text(time.high)}): {shown}",
        (f"   (model FLOP {rate_text(time.model_flops / time.total)} a rank, "
         f"MFU {100 * time.mfu:.0f} %)", "dim"),
        *((f"\n  extrapolated: {why}", "yellow") for why in time.extrapolates),
    )  # fmt: skip


def _checks(plan: Plan) -> Table:
    table = _table("\nChecks", "", "rule", "answer")
    for check in plan.checks:
        mark, style = MARKS[check.status]
        answer = check.message + (f" → {check.hint}" if check.hint else "")
        table.add_row(Text(mark, style=style), check.rule, Text(answer))
    return table


def print_rank(document: dict[str, Any]) -> None:
    """One rank: place, layers, and the groups that it is in."""
    console = Console(highlight=False)
    coords = ", ".join(f"{axis} {index}" for axis, index in document["coords"].items())
    console.print(
        Text.assemble(
            (f"rank {document['rank']}", "bold"),
            f" of {document['world_size']}: node ",
            f"{document['node']}, local rank {document['local_rank']}; {coords}",
        )
    )
    if "layers" in document:
        console.print(f"layers {_held(document['layers'], document.get('stacks'))}")
    table = _table("", "group", "size", "members", right=("size",))
    for kind, group in document["groups"].items():
        table.add_row(kind, str(len(group)), _members(group, 64))
    console.print(table)
