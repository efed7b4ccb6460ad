"""A rehearsal on a terminal: each rank's peak memory and messages, the verdict.

States, messages and parameters are compared with the plan to the byte (=, ≠); of activations and of
the peak the columns say by how much a step takes more or less. An audit adds the modules that lose
most, and a layer's totals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from mpctl.core.units import bytes_text, part_text, plural, ranges_text, seconds_text
from mpctl.records.rundir.rank_files import AuditFigures, AuditRow, AuditTotal, StepAudit
from mpctl.records.rundir.summary import PlannedMeasured
from mpctl.render.console import get_console
from mpctl.render.parts import Column, DataTable, Part, Sentence, table_of
from mpctl.render.progress import ProgressView, TaskBar
from mpctl.render.terminal import print_parts
from mpctl.run.launch.rehearse import RankRehearsal, RehearsalDocument

WORST = 10
WIDE = 150  # columns of a terminal that shows the operations too
NARROW = 105  # columns below which a table leaves out what others of it imply


def audit_parts(audit: StepAudit, width: int) -> Iterator[DataTable | Sentence]:
    """The output for one rank's audit on a terminal of `width` columns: the rows that lose most, in
    figures of one layer and micro batch; one layer of each kind in each pass, and the rest of a
    step; notes on what they count."""
    is_timed = any(row["seconds"] is not None for row in audit["rows"])
    shown = ["kernels", "moves", "least", "over"]
    if is_timed:
        shown = ["kernels", "moves", "over"] if width < NARROW else [*FIGURES]
    figures = [Column(name, FIGURES[name]) for name in shown]
    columns = [
        Column("what loses most", "module", left=True),
        Column("pass", "phase", left=True),
        Column("times", "times", "{:,.0f}".format),
        *figures,
        *[Column("saves", _saving)][:is_timed],
        *[Column("most of them", "operations", _operations, left=True)][: width >= WIDE],
    ]
    yield DataTable("", columns, audit["rows"][:WORST], whole=len(columns))
    part = Column("a layer, a micro batch", _part_text, left=True)
    yield DataTable("", (part, Column("pass", "phase", left=True), *figures), audit["totals"])
    note = (
        "least: every input of a module read once, every tensor that is needed later written "
        "once, in one kernel for each product"
    )
    if is_timed:
        note = note.replace("least:", "over: times the least,", 1) if width < NARROW else note
        note += "; saves: what a step would take less"
    yield Sentence(f"{note}. {audit['assumption']}", "note")
    if audit["unknown"]:
        unknown = ", ".join(audit["unknown"])
        yield Sentence(f"counted as one kernel each, not known to be: {unknown}", "warning")


def _part_text(total: AuditTotal) -> str:
    return total["part"] if "*" in total["part"] else f"{total['part']}, a step"


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
    print_parts(rehearsal_parts(document, get_console().width))


def rehearsal_parts(document: RehearsalDocument, width: int) -> Iterator[Part]:
    """width: of the terminal, in columns."""
    ranks = [rank for rank in document["ranks"] if rank["failure"] is None]
    yield Sentence(f"{document['kind']}, {document['dtype']}", "note")
    if len(ranks) == 1:
        yield _one_memory(ranks[0])
    elif ranks:
        yield DataTable("", MEMORIES, ranks)
    if ranks:
        yield _messages(ranks)
    if any(rank["micro_batches_run"] < rank["micro_batches"] for rank in ranks):
        yield Sentence(document["law"], "note")
    for rank in ranks:
        if "audit" in rank:
            yield Sentence(f"rank {rank['rank']}, stage {rank['coords']['pp']}", "lead")
            yield from audit_parts(rank["audit"], width)
    for rank in document["ranks"]:
        yield from (Sentence(line, "refused") for line in _differences(rank))
        for place in rank.get("host_syncs", ()):
            line = f"rank {rank['rank']}: in every step the host waits for its device at {place}"
            yield Sentence(line, "warning")
    yield _verdict(document, ranks)


def _one_memory(rank: RankRehearsal) -> DataTable:
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
    return table_of("", columns, rows, left=columns[:1])


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


MEMORIES = (
    Column("rank", "rank"),
    Column("stage", lambda rank: rank["coords"]["pp"]),
    Column("states", lambda rank: sum(pair["measured"] for pair in rank["state_bytes"].values()), bytes_text),
    Column("activations", lambda rank: rank["at_peak"]["activations"], bytes_text),
    Column("temporary", lambda rank: rank["at_peak"]["temporaries"], bytes_text),
    Column("peak", lambda rank: rank["peak_bytes"]["measured"], bytes_text),
    Column("plan", lambda rank: rank["peak_bytes"]["planned"], bytes_text),
    Column("beyond", "peak_bytes", _more),
)
"""Memory of each rank at its peak."""


def _messages(ranks: list[RankRehearsal]) -> DataTable:
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
    return table_of("", columns, rows, left=columns[:3])


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


def _verdict(document: RehearsalDocument, ranks: list[RankRehearsal]) -> Sentence:
    count = f"{len(document['ranks']):,} of {plural(document['world_size'], 'rank')} rehearsed"
    if len(ranks) < len(document["ranks"]):
        return Sentence(f"{count}, {len(document['ranks']) - len(ranks)} failed", "failed")
    fullest = max(ranks, key=_most)
    name = f"rank {fullest['rank']}"
    words = f"{f'the fullest, {name},' if len(ranks) > 1 else name} {_peak(fullest, document)}"
    if document["agrees"]:
        words += "; parameters, states and messages are as planned, byte by byte"
    words += f"; {_beside_plan(ranks)}"
    statuses = {True: "fits", False: "does not fit", None: "not known whether it fits"}
    is_well = document["agrees"] and document["fits"] is not False
    status = ("" if document["agrees"] else "not as planned, ") + statuses[document["fits"]]
    return Sentence(f"{status}: {count}; {words}", "passed" if is_well else "failed")


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
