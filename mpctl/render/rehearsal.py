"""A rehearsal on a terminal: each rank's peak memory and messages, the verdict.

States, messages and parameters are compared with the plan to the byte (=, ≠); of activations and of
the peak the columns say by how much a step takes more or less. An audit adds the modules that lose
most, and a layer's totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from mpctl.core.units import bytes_text, part_text, plural, ranges_text, seconds_text
from mpctl.records.rundir.rank_files import AuditFigures, AuditRow, StepAudit
from mpctl.records.rundir.summary import PlannedMeasured
from mpctl.render.console import get_console, marked
from mpctl.render.progress import ProgressView, TaskBar
from mpctl.run.launch.rehearse import RankRehearsal, RehearsalDocument

WORST = 10
WIDE = 150  # columns of a terminal that shows the operations too
NARROW = 105  # columns below which a table leaves out what others of it imply


def audit_parts(audit: StepAudit, width: int) -> Iterator[Table | Text]:
    """The output for one rank's audit on a terminal of `width` columns: the rows that lose most, in
    figures of one layer and micro batch; one layer of each kind in each pass, and the rest of a
    step; notes on what they count."""
    is_timed = any(row["seconds"] is not None for row in audit["rows"])
    shown = ["kernels", "moves", "least", "over"]
    if is_timed:
        shown = ["kernels", "moves", "over"] if width < NARROW else [*FIGURES]
    saves, operations = ["saves"][:is_timed], ["most of them"][: width >= WIDE]
    yield _table(
        ("what loses most", "pass", "times", *shown, *saves, *operations),
        (
            (
                row["module"],
                row["phase"],
                f"{row['times']:,.0f}",
                *(FIGURES[name](row) for name in shown),
                *(_saving(row) for _ in saves),
                *(_operations(row["operations"]) for _ in operations),
            )
            for row in audit["rows"][:WORST]
        ),
        left=("what loses most", "pass", "most of them"),
    )
    columns = ("a layer, a micro batch", "pass", *shown)
    totals = (
        (
            total["part"] if "*" in total["part"] else f"{total['part']}, a step",
            total["phase"],
            *(FIGURES[name](total) for name in shown),
        )
        for total in audit["totals"]
    )
    yield _table(columns, totals, left=columns[:2])
    note = (
        "least: every input of a module read once, every tensor that is needed later written "
        "once, in one kernel for each product"
    )
    if is_timed:
        note = note.replace("least:", "over: times the least,", 1) if width < NARROW else note
        note += "; saves: what a step would take less"
    yield Text(f"{note}. {audit['assumption']}", style="dim")
    if audit["unknown"]:
        unknown = ", ".join(audit["unknown"])
        yield Text(f"counted as one kernel each, not known to be: {unknown}", style="yellow")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> Table:
    """A table whose cells are cut rather than broken into lines."""
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _ratio(figures: AuditFigures) -> str:
    moved, least = figures["bytes"], figures["least_bytes"]
    return f"{moved / least:.1f}x" if least else ""


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else seconds_text(seconds)


FIGURES: dict[str, Callable[[AuditFigures], str]] = {
    "kernels": lambda figures: f"{figures['launches']:,.4g}",
    "moves": lambda figures: bytes_text(round(figures["bytes"])),
    "least": lambda figures: bytes_text(round(figures["least_bytes"])),
    "over": _ratio,
    "takes": lambda figures: _seconds(figures["seconds"]),
    "at least": lambda figures: _seconds(figures["least_seconds"]),
}


def _saving(row: AuditRow) -> str:
    if row["seconds"] is None or row["least_seconds"] is None:
        return ""
    return seconds_text(max(0.0, row["seconds"] - row["least_seconds"]) * row["times"])


def _operations(operations: Mapping[str, float]) -> str:
    """`mul 9, _to_copy 5, cat 3`: the operations with most launches."""
    return ", ".join(f"{name} {count:.3g}" for name, count in list(operations.items())[:3])


class RehearsalView(ProgressView):
    """Reports a rehearsal's progress on stderr, rank by rank; a terminal shows the time so far."""

    def __init__(self, ranks: int) -> None:
        super().__init__(TaskBar(), "rehearsing", ranks)
        self.done = 0

    def show(self, rank: RankRehearsal) -> None:
        """Report a rank whose rehearsal has ended."""
        self.done += 1
        self.bar.update(self.stage, self.done, self.total)
        stage, ran = rank["coords"]["pp"], rank["micro_batches_run"]
        self.bar.print(
            f"{self.done}/{self.total}  rank {rank['rank']}, stage {stage}: "
            f"{ran} of {rank['micro_batches']} micro batches in {seconds_text(rank['seconds'])}"
        )


def print_rehearsal(document: RehearsalDocument) -> None:
    """Print a rehearsal on stdout: memory, messages, differences from the plan, the verdict."""
    console = get_console()
    ranks = [rank for rank in document["ranks"] if rank["failure"] is None]
    console.print(Text(f"{document['kind']}, {document['dtype']}", style="dim"))
    if len(ranks) == 1:
        console.print(_one_memory(ranks[0]))
    elif ranks:
        console.print(_memories(ranks))
    if ranks:
        console.print(_messages(ranks))
    if any(rank["micro_batches_run"] < rank["micro_batches"] for rank in ranks):
        console.print(Text(document["law"], style="dim"), soft_wrap=True)
    for rank in ranks:
        if "audit" in rank:
            console.print(Text(f"rank {rank['rank']}, stage {rank['coords']['pp']}", style="bold"))
            for part in audit_parts(rank["audit"], console.width):
                console.print(part, soft_wrap=True)
    for rank in document["ranks"]:
        for line in _differences(rank):
            console.print(marked("✗", line), soft_wrap=True)
        for place in rank.get("host_syncs", ()):
            line = f"rank {rank['rank']}: in every step the host waits for its device at {place}"
            console.print(marked("!", line), soft_wrap=True)
    console.print(_verdict(document, ranks), soft_wrap=True)


def _memories(ranks: list[RankRehearsal]) -> Table:
    """Memory of each rank at its peak."""
    rows = []
    for rank in ranks:
        states = sum(pair["measured"] for pair in rank["state_bytes"].values())
        at_peak, peak = rank["at_peak"], rank["peak_bytes"]
        sizes = (states, at_peak["activations"], at_peak["temporaries"], *_both(peak)[::-1])
        where = (str(rank["rank"]), str(rank["coords"]["pp"]))
        rows.append((*where, *map(bytes_text, sizes), _more(peak)))
    columns = ("rank", "stage", "states", "activations", "temporary", "peak", "plan", "beyond")
    return _table(columns, rows)


def _one_memory(rank: RankRehearsal) -> Table:
    def compared(name: str, pair: PlannedMeasured) -> tuple[str, ...]:
        return name, *map(bytes_text, _both(pair)), _more(pair)

    columns = (f"rank {rank['rank']}, stage {rank['coords']['pp']}", "plan", "step", "beyond")
    rows = [
        *(compared(name, pair) for name, pair in rank["state_bytes"].items()),
        compared("activations, most held", rank["activation_bytes"]),
        *(
            (f"{kind} at the peak", "", bytes_text(rank["at_peak"][kind]), "")
            for kind in ("activations", "temporaries")
        ),
        compared("peak", rank["peak_bytes"]),
        ("while the model is built", "", bytes_text(rank["building_bytes"]), ""),
        ("with allocator and context", "", bytes_text(rank["device_bytes"]), ""),
    ]
    return _table(columns, rows, left=columns[:1])


def _both(pair: PlannedMeasured) -> tuple[int, int]:
    return pair["planned"], pair["measured"]


def _more(pair: PlannedMeasured) -> str:
    """`=`, or the share above the plan."""
    planned, measured = _both(pair)
    if planned == measured:
        return "="
    return f"{_excess(pair):+.1%}" if planned else "≠"


def _excess(pair: PlannedMeasured) -> float:
    """The share of a planned figure by which the measured one exceeds it."""
    return pair["measured"] / pair["planned"] - 1


def _messages(ranks: list[RankRehearsal]) -> Table:
    """Messages of a step, one row for each kind; stages that send the same are one group."""
    columns, rows = ("stages", "axis", "kind", "messages", "bytes a step", "plan"), []
    alike: dict[str, list[RankRehearsal]] = {}
    for rank in ranks:
        alike.setdefault(str(rank["step_traffic"]), []).append(rank)
    for group in alike.values():
        stages = ranges_text([rank["coords"]["pp"] for rank in group], most=len(group))
        planned, measured = (group[0]["step_traffic"][key] for key in ("planned", "measured"))
        for name, sent in measured.items():
            sign = "=" if planned.get(name) == sent else "≠"
            amounts = (f"{sent['count']:,}", bytes_text(sent["bytes"]), sign)
            rows.append((stages, *name.split(" ", 1), *amounts))
            stages = ""
    return _table(columns, rows, left=columns[:3])


def _differences(rank: RankRehearsal) -> Iterator[str]:
    """A sentence on what failed, or on each figure that differs from the plan."""
    who, failure = f"rank {rank['rank']} (stage {rank['coords']['pp']})", rank["failure"]
    if failure is not None:
        yield f"{who} failed at {failure['doing']}: {failure['error']}"
        return
    sent = rank["step_traffic"]
    figures: dict[str, tuple[object, object]] = {"parameters": _both(rank["parameters"])}
    figures |= {f"bytes of {kind}": _both(pair) for kind, pair in rank["state_bytes"].items()}
    for name in sorted({*sent["planned"], *sent["measured"]}):
        figures[name] = (sent["planned"].get(name, "none"), sent["measured"].get(name, "none"))
    for name, (planned, measured) in figures.items():
        if planned != measured:
            yield f"{who}, {name}: {measured}, but {planned} planned"


def _verdict(document: RehearsalDocument, ranks: list[RankRehearsal]) -> Text:
    count = f"{len(document['ranks']):,} of {plural(document['world_size'], 'rank')} rehearsed"
    if len(ranks) < len(document["ranks"]):
        return Text(f"{count}, {len(document['ranks']) - len(ranks)} failed", "bold red")
    fullest = max(ranks, key=_most)
    name = f"rank {fullest['rank']}"
    words = f"{f'the fullest, {name},' if len(ranks) > 1 else name} {_peak(fullest, document)}"
    if document["agrees"]:
        words += "; parameters, states and messages are as planned, byte by byte"
    words += f"; {_beside_plan(ranks)}"
    statuses = {True: "fits", False: "does not fit", None: "not known whether it fits"}
    is_well = document["agrees"] and document["fits"] is not False
    status = (statuses[document["fits"]], "bold green" if is_well else "bold red")
    return Text.assemble(status, f": {count}; {words}")


def _most(rank: RankRehearsal) -> int:
    return int(max(rank["peak_bytes"]["measured"], rank["building_bytes"]))


def _beside_plan(ranks: list[RankRehearsal]) -> str:
    """Differences between the peaks of a step and the plan, with the bytes of the rank furthest
    above."""
    peaks = sorted((_excess(rank["peak_bytes"]), rank["rank"]) for rank in ranks)
    (least, _), (most, number) = peaks[0], peaks[-1]
    pair = next(rank["peak_bytes"] for rank in ranks if rank["rank"] == number)
    planned, measured = map(bytes_text, _both(pair))
    if len(ranks) == 1:
        return f"a step peaks at {measured}, {most:+.1%} off the planned {planned}"
    span = f"{least:+.1%} to {most:+.1%}"
    return f"steps peak {span} off the plan, rank {number} at {measured}, planned {planned}"


def _peak(rank: RankRehearsal, document: RehearsalDocument) -> str:
    most = _most(rank)
    peak = f"peaks at {bytes_text(most)}"
    if most > rank["peak_bytes"]["measured"]:
        peak += " while the model is built"
    memory, taken = document["device_memory_bytes"], rank["device_bytes"]
    if memory is None:
        return peak
    over, headroom = rank["over_bytes"], f"headroom {document['headroom_percent']:g} %"
    left = f"{bytes_text(over)} too much" if over else f"{bytes_text(memory - taken)} free"
    room = f"{part_text(taken, memory)} of {document['device']}"
    return f"{peak} and takes {room}, {left} ({headroom})"
