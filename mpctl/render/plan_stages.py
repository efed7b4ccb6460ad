"""What a plan sends and holds, stage by stage; stages that are alike, or in between, as one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mpctl.planning.document import stack_layers
from mpctl.render.console import plain_table
from mpctl.render.fold import fold, span_text, stage_layers_text
from mpctl.topology import Topology
from mpctl.units import bytes_span_text, bytes_text, count_text

if TYPE_CHECKING:
    from mpctl.estimate.block_traffic import BlockTraffic, PartTraffic
    from mpctl.estimate.job import Estimate
    from mpctl.estimate.memory import StageMemory
    from mpctl.layout.job_layout import JobLayout

SHOWN_STAGES = 8  # listed one by one; of more, the first SHOWN_ENDS, the last and the fullest
SHOWN_ENDS = 2
SIZES = ("states", "activations", "temporary", "allocated", "on device")


def traffic_part(estimate: Estimate, topology: Topology) -> Iterator[RenderableType]:
    """What a block sends over tp, and stages send each other."""
    for block in estimate.blocks:
        yield _block_table(block) if block.mode == "1d" else _grid_table(block)
    yield from _pipeline(estimate, topology)


def _block_table(block: BlockTraffic) -> RenderableType:
    columns, whole = ("parallel layer", "all-reduces", "volume", "bytes"), block.whole
    table = plain_table(_title(block), columns, left=columns[:1])
    for name, part in block.parts.items():
        volume, size = f"{part.volume_phi:g} Φ", bytes_text(part.volume_bytes)
        table.add_row(name, str(part.all_reduces), volume, size)
    sums = (f"{whole.volume_phi:g} Φ", bytes_text(whole.volume_bytes))
    table.add_row("block", str(whole.all_reduces), *sums, style="bold")
    ring = f"a ring of {block.tp} sends {bytes_text(whole.ring_bytes_per_rank)} a rank"
    note = f"Φ = {bytes_text(whole.phi_bytes)}, one micro batch's hidden states; {ring}"
    return Group(table, Text(note, style="dim"))


def _title(block: BlockTraffic) -> str:
    one_block = f"{block.stack.name} block".lstrip()
    return f"\nTensor-parallel traffic of one {one_block}"


def _grid_table(block: BlockTraffic) -> RenderableType:
    """A row for each axis of the grid and kind of collective of each part of a block."""
    columns = ("part", "axis", "collective", "count", "volume", "a rank sends")
    table = plain_table(_title(block), columns, left=columns[:3])
    for name, part in block.parts.items():
        for row, sent in enumerate(part.by_kind()):
            first = sent.messages[0]
            what = ("" if row else name, first.axis, first.kind.replace("_", "-"))
            table.add_row(*what, *_amounts(sent))
    table.add_row("block", "", "", *_amounts(block.whole), style="bold")
    note = "one micro batch; of a broadcast or a reduce what a rank sends on the average"
    return Group(table, Text(note, style="dim"))


def _amounts(sent: PartTraffic) -> tuple[str, str, str]:
    """How many collectives, their volume, and what a rank of a ring sends of it."""
    count = sum(message.count for message in sent.messages)
    return str(count), bytes_text(sent.volume_bytes), bytes_text(sent.ring_bytes_per_rank)


def _pipeline(estimate: Estimate, topology: Topology) -> Iterator[RenderableType]:
    """What each stage sends its neighbours, and what is summed over the stages that share it."""
    if len(estimate.messages) == 1:
        return
    nodes = _nodes_column(topology)
    columns = ("stage", "messages", "bytes", "shared", *nodes)
    table = plain_table("\nPipeline traffic of one step", columns, left=("stage", "nodes"))
    rows = []
    for messages in estimate.messages:
        sends = [m for m in messages if (m.axis, m.kind) == ("pp", "send")]
        shared = sum(m.bytes for m in messages if m.what == "shared parameters")
        sent = sum(m.bytes * m.count for m in sends)
        rows.append((f"{sum(m.count for m in sends):,}", *map(bytes_text, (sent, shared))))
    for first, last in fold(rows):
        last_cell = [_nodes(topology, first, last)] if nodes else []
        table.add_row(span_text(first, last), *rows[first], *last_cell)
    yield table
    yield Text("shared: gradients of parameters that several stages hold, summed over them",
               style="dim")  # fmt: skip


def memory_part(estimate: Estimate, *, full: bool) -> Table:
    """The memory of one rank of each stage; of many stages those alike together, but for full."""
    memory = estimate.memory
    columns = ("stage", "layers", "params", *SIZES)
    title = "\nMemory of one rank, by stage, at its peak"
    table = plain_table(title, columns, left=("stage", "layers"))
    table.padding = (0, 1, 0, 0)  # eight columns of sizes, in a terminal of 80
    for first, last in _shown(memory, full=full):
        stages = memory[first : last + 1]
        counts = sorted({stage.parameters for stage in stages})
        parameters = "-".join(count_text(count) for count in dict.fromkeys((counts[0], counts[-1])))
        columns_of_sizes = zip(*map(_sizes, stages), strict=True)
        sizes = (bytes_span_text(min(column), max(column)) for column in columns_of_sizes)
        layers = _layers(estimate.layout, first, last)
        table.add_row(span_text(first, last), layers, parameters, *sizes)
    return table


def _shown(memory: Sequence[StageMemory], *, full: bool) -> list[tuple[int, int]]:
    """Spans of stages, a row each: of many the ends and the fullest alone, others together."""
    count = len(memory)
    if full or count <= SHOWN_STAGES:
        return [(stage, stage) for stage in range(count)]
    fullest = max(range(count), key=lambda stage: memory[stage].device_bytes)
    alone = {*range(SHOWN_ENDS), count - 1, fullest}
    return fold([stage if stage in alone else -1 for stage in range(count)])


def _sizes(stage: StageMemory) -> tuple[int, ...]:
    return (stage.state_bytes, stage.activation_bytes, stage.working_bytes + stage.lasting_bytes,
            stage.allocated_bytes, stage.device_bytes)  # fmt: skip


def _layers(layout: JobLayout, first: int, last: int) -> str:
    """The layers of stages first to last, as text; where a stage has several chunks, the layers of
    the first and of the last stage."""
    spans = layout.stages[first], layout.stages[last]
    stacks = [stack_layers(layout, held) for held in spans]
    if first != last and len(spans[0]) == 1 and stacks[0] is None:
        return span_text(spans[0][0][0], spans[1][-1][1] - 1)
    texts = [stage_layers_text(held, parts) for held, parts in zip(spans, stacks, strict=True)]
    return texts[0] if first == last else f"{texts[0]} ... {texts[1]}"


def _nodes_column(topology: Topology) -> tuple[str, ...]:
    """The title of the nodes' column, where a stage's ranks are consecutive and there are several
    nodes."""
    stride = topology.strides["pp"] * topology.sizes["pp"]
    return ("nodes",) if topology.nodes > 1 and stride == topology.world_size else ()


def _nodes(topology: Topology, first: int, last: int) -> str:
    stride = topology.strides["pp"]
    ends = (topology.node(first * stride), topology.node((last + 1) * stride - 1))
    return span_text(*ends)
