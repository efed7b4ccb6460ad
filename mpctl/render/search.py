"""The answers of a search: the fastest layout, the suggested one, the best as rows, and the cost of less memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from mpctl.core.records import Json
from mpctl.core.units import bytes_text, count_text, days_text, energy_text, plural, seconds_text
from mpctl.plan.planning.difference import WIDE_BAND
from mpctl.plan.planning.layout_settings import layout_text
from mpctl.plan.planning.summary import training_line
from mpctl.plan.search.document import LayoutEntry, NoLayoutEntry, SearchDocument
from mpctl.plan.search.find import OPTIMISM
from mpctl.render.console import get_console, marked
from mpctl.render.parts import DataTable, Facts, Lines, Part, Section, Sentence, table_of
from mpctl.render.terminal import print_parts
from mpctl.spec.figure_sources import sources_text

if TYPE_CHECKING:
    from mpctl.plan.search.result import SearchResult
    from mpctl.render.charts import Chart

OBJECTIVES = {
    "tokens": "most tokens a second",
    "memory": "least memory",
    "cost": "fewest GPU-hours a token",
    "days": "fewest days",
    "energy": "least energy",
}
BEST = {"memory": "least memory", "cost": "cheapest", "days": "fewest days", "energy": "least energy"}
"""What the layout that is best by an objective is called; otherwise it is the fastest."""
ORDERS = {
    "time": "fastest first",
    "memory": "least memory first",
    "cost": "fewest GPU-hours first",
    "plain": "plainest first",
}
RUN_COLUMNS = ("run", "energy", "useful")
# Titles of settings whose name is not clear enough.
SETTING_NAMES = {
    "micro_batch_size": "micro batch",
    "sequence_parallel": "sequence parallelism",
    "tensor_mode": "tensor mode",
    "tensor_depth": "tensor depth",
    "stage_balance": "stage balance",
    "pipeline_layout": "pipeline layout",
    "vpp": "vpp",
    "zero": "ZeRO",
    "zero_size": "ZeRO ranks",
    "order": "rank order",
    "cp_comm": "cp by",
    "cp_a2a_size": "cp a2a ranks",
    "moe_overlap": "moe overlap",
}


def best_of(document: SearchDocument) -> LayoutEntry | None:
    """Return the layout that is best by the objective; None where none was found."""
    return document["fastest"] or min(document["rows"], key=lambda entry: entry["peak_bytes"], default=None)


def headline(document: SearchDocument) -> str:
    """`gpt3-175b on 1,024 GPUs of NVIDIA A100-SXM4-80GB: most tokens a second`."""
    name, best = document["model"] or document["job"] or "the model", best_of(document)
    gpus = best["gpus"] if best else document["gpus"]
    objective = OBJECTIVES[document["objective"]]
    return f"{name} on {plural(gpus, 'GPU')} of {document['device']}: {objective}"


def answers(document: SearchDocument) -> Iterator[tuple[str, str]]:
    """The answers with their names: the fastest layout and the suggested one, or that of least memory."""
    best, suggested = best_of(document), document["suggested"]
    if best is None:
        return
    name = best_name(document)
    yield name, f"{best['layout']}: {seconds_text(best['step_seconds'])} a step, {_verdict(best)}"
    if suggested and document["suggestion"]:
        step = seconds_text(suggested["step_seconds"])
        yield "suggested", f"{suggested['layout']}: {step} a step, {document['suggestion']}"
    elif suggested:
        yield "suggested", f"the fastest: none within {100 * document['ranking_error']:g} % of it is plainer"
    if "run" in best:
        tokens = f"{count_text(best['run']['tokens'])} tokens"
        yield tokens, f"{name}: {whole_run_text(best['run'])}"
        if suggested and document["suggestion"] and "run" in suggested:
            yield "", f"suggested: {whole_run_text(suggested['run'])}"


def header_lines(document: SearchDocument) -> Iterator[str]:
    """What all layouts have in common, the number of estimated layouts, and what was searched."""
    yield training_line(document["training"])
    if document["figures_from"]:
        yield f"figures: {sources_text(document['figures_from'])}"
    headroom = f"headroom {document['headroom_percent']:g} %"
    best, here = best_of(document), ""
    if best and document["by_gpus"]:
        here = f" ({document['estimated_here']:,} on {plural(best['gpus'], 'GPU')})"
    yield (
        f"{plural(document['estimated'], 'layout')} estimated{here}, "
        f"{document['too_large']:,} left out for memory ({headroom}), the rest by lower bounds"
    )
    if document["searched"]:
        names = (SETTING_NAMES.get(name, name) for name in document["searched"])
        yield f"searched: {', '.join(names)}"


def notes(document: SearchDocument) -> Iterator[Sentence]:
    """How far a measured step may be from the estimate, and the order of the rows from the true one."""
    best = best_of(document)
    assert best is not None, "there are rows"
    low, high = seconds_text(best["step_seconds_low"]), seconds_text(best["step_seconds_high"])
    far = ", extrapolated" if best["extrapolates"] else ""
    yield Sentence(f"9 of 10 runs of the {best_name(document)} take {low} to {high} a step{far}", "note")
    if document["fastest"] and len(document["rows"]) > 1:
        if document["tied"]:
            yield Sentence(tie_text(document), "note")
        share = "7" if best["step_seconds_high"] / best["step_seconds_low"] >= WIDE_BAND else "6"
        error = f"{100 * document['ranking_error']:g} %"
        order = f"differences below {error} are ranked correctly {share} times out of 10: measure close ones"
        yield Sentence(order, "note")
    if document["has_balanced_steps"] and "moe_load" in document["training"]:
        load = f"{document['training']['moe_load']:g}"
        held = f"steps with balanced routing, memory with {load} times the mean on the fullest rank"
        yield Sentence(f"{held}: --set training.moe_load={load} ranks by steps at that load", "note")
    if document["unsorted"]:
        left_out = plural(document["unsorted"], "layout")
        yield Sentence(f"{left_out} left out that a row below beats in time and memory", "note")
    if best["extrapolates"]:
        yield Sentence(f"extrapolated: {'; '.join(best['extrapolates'])}", "note", on="page")
    low, high = (f"{100 * share:g}" for share in OPTIMISM)
    yield Sentence(
        f"the lowest of many estimates tends to be too low: in published sweeps by {low} to {high} %", "note", on="page"
    )


def tie_text(document: SearchDocument) -> str:
    """Say which rows the estimate cannot tell apart, and which to measure first.

    `no. 1, 2 and 4 are equal within the 10 % that estimates cannot tell apart: measure no. 2 first, which
    leaves most memory free, then no. 1 and 4`.
    """
    first, *others = document["tied"]
    every, then = (_numbers(ranks) for ranks in (sorted(document["tied"]), others))
    error = f"{100 * document['ranking_error']:g} %"
    order = f"measure no. {first} first, which leaves most memory free, then no. {then}"
    return f"no. {every} are equal within the {error} that estimates cannot tell apart: {order}"


def _numbers(ranks: Sequence[int]) -> str:
    *others, last = map(str, ranks)
    return f"{', '.join(others)} and {last}" if others else last


def _verdict(entry: LayoutEntry) -> str:
    return "; ".join(filter(None, (entry["verdict"], entry["room"])))


def best_name(document: SearchDocument) -> str:
    """The name of the layout with which the others are compared: over numbers of GPUs what the objective asks for."""
    return BEST.get(document["objective"], "fastest")


def comparison_lines(document: SearchDocument) -> list[str]:
    """Each of the other layouts compared with the best, then the job as given."""
    rows = enumerate(document["rows"], start=1)
    lines = [f"no. {number} {entry['difference']}" for number, entry in rows if entry["difference"]]
    return [*lines, *([document["own_reason"]] if document["own_reason"] else [])]


def whole_run_text(run: Json) -> str:
    """`61.1 days, 24.02M GPU-hours, 25.5 GWh, 96.1% of the time useful`."""
    parts = [days_text(run["days"]), f"{count_text(run['gpu_hours'])} GPU-hours"]
    parts += [f"price {count_text(run['price'])}"] if run["price"] is not None else []
    parts += [energy_text(run["watt_hours"])] if run["watt_hours"] is not None else []
    return ", ".join([*parts, f"{run['useful']:.1%} of the time useful"])


def has_run(entry: LayoutEntry | NoLayoutEntry) -> bool:
    """Whether the entry has the days and energy of a run."""
    return "run" in entry


def run_cells(entry: LayoutEntry) -> list[str]:
    """Days, energy and useful share of a run; none where no run is asked for."""
    if "run" not in entry:
        return []
    run, energy = entry["run"], entry["run"]["watt_hours"]
    return [days_text(run["days"]), energy_text(energy) if energy else "", f"{run['useful']:.1%}"]


def has_price(entry: LayoutEntry | NoLayoutEntry) -> bool:
    """Whether the entry has the cost of a billion tokens."""
    return "price_per_billion_tokens" in entry


def row_text(entry: LayoutEntry, name: str = "") -> str:
    """A layout in words after its name, how many similarly fast ones it represents, and what lack of room costs."""
    text = f"{name}: {entry['layout']}" if name else entry["layout"]
    room = f"{entry['slowdown'] - 1:.1%} for room" if entry["room"] else ""
    return "; ".join(filter(None, (text, entry["alike_text"], room)))


def names_of(document: SearchDocument) -> dict[str, str]:
    """Return the names of the two answers by the line that plans them."""
    found = ((document["suggested"], "suggested"), (document["fastest"], best_name(document)))
    return {entry["command"]: name for entry, name in found if entry}


def figure_cells(entry: LayoutEntry, *, has_cost: bool) -> list[str]:
    """Step time, tokens/s, MFU and memory of a layout, and what a billion tokens cost."""
    cells = [
        seconds_text(entry["step_seconds"]),
        count_text(entry["tokens_per_second"]),
        f"{entry['mfu']:.0%}",
        bytes_text(entry["peak_bytes"]),
    ]
    if has_cost:
        cells.append(count_text(entry["gpu_hours_per_billion_tokens"]))
    if "price_per_billion_tokens" in entry:
        cells.append(count_text(entry["price_per_billion_tokens"]))
    return cells


def print_search(document: SearchDocument) -> None:
    """Print a search's answer on stdout; that it was stopped before its end, on stderr."""
    if not document["is_complete"]:
        get_console(stderr=True).print(marked("!", "stopped: the best that was found so far"))
    print_parts(search_parts(document))


def search_parts(document: SearchDocument, points: Sequence[FrontPoint] = ()) -> Iterator[Part]:
    """The answers, the best layouts, what sets them apart, and the line that runs each. points: the layouts
    that were estimated, for a page."""
    rows, by_gpus, names = document["rows"], document["by_gpus"], names_of(document)
    yield Section("search", "Search")
    yield Sentence(headline(document), "lead")
    yield Facts(list(answers(document)))
    yield from map(Sentence, header_lines(document))
    if rows:
        where = f" on {plural(rows[0]['gpus'], 'GPU')}" if by_gpus else ""
        room = ", room counted" if document["sort"] == "time" and any(entry["room"] for entry in rows) else ""
        yield _table(f"Layouts{where}, {ORDERS[document['sort']]}{room}", rows, names, first="#")
        yield from notes(document)
        if lines := comparison_lines(document):
            yield Lines(f"Compared with the {best_name(document)}", lines)
        marks = ((entry["command"], names.get(entry["command"], "")) for entry in rows)
        commands = [f"{line}  # {name}" if name else line for line, name in marks]
        yield Lines("Ready to type", commands, are_commands=True)
    if points:
        yield from front_parts(points)
    if len(document["front"]) > 1:
        yield _table("No estimated layout beats one of these in both time and memory", document["front"], names)
    if by_gpus:
        best = "Fastest" if document["objective"] != "memory" else "Least memory"
        yield _table(f"{best} by number of GPUs", by_gpus, first="GPUs")
        shown = rows[0]["gpus"] if rows else None
        commands = [
            f"{entry['command']}  # {plural(entry['gpus'], 'GPU')}"  # behind it, a shell's comment
            for entry in by_gpus
            if "command" in entry and entry["gpus"] != shown
        ]
        if commands:
            yield Lines("Ready to type, by number of GPUs", commands, are_commands=True)


def _table(
    title: str,
    entries: Sequence[LayoutEntry | NoLayoutEntry],
    names: Mapping[str, str] = MappingProxyType({}),
    *,
    first: str = "",
) -> DataTable:
    """A row for each layout; names: of the answers, by their lines; first: the first column, `#` its place or
    `GPUs` their number."""
    is_priced = any(has_price(entry) for entry in entries)
    has_cost = is_priced or first == "GPUs"
    figures = ["step", "tokens/s", "MFU", "memory"] + ["GPU-h/Gtok"] * has_cost
    figures = [*([first] if first else []), *figures, *["price/Gtok"] * is_priced]
    has_runs = first == "GPUs" and any(has_run(entry) for entry in entries)
    figures += RUN_COLUMNS if has_runs else ()
    rows = []
    for number, entry in enumerate(entries, start=1):
        lead = {"#": [str(number)], "GPUs": [f"{entry['gpus']:,}"]}.get(first, [])
        if "reason" in entry:
            rows.append((*lead, *[""] * (len(figures) - len(lead)), entry["reason"]))
        else:
            cells = figure_cells(entry, has_cost=has_cost) + run_cells(entry) * has_runs
            rows.append((*lead, *cells, row_text(entry, names.get(entry["command"], ""))))
    return table_of(title, (*figures, "layout"), rows, left=("layout",), whole=len(figures), is_stacked=True)


FRONT = "no other estimated layout beats it in both"
DRAWN, LISTED = 1500, 200


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """A layout of the picture: seconds of a step and bytes on its fullest rank; layout: its
    settings."""

    label: str
    seconds: float
    bytes: float
    is_on_front: bool
    layout: str


def front_points(result: SearchResult) -> list[FrontPoint]:
    """Every layout that a search estimated, the answers by their names."""
    front = {choice.layout for choice in result.front}
    answers = (("suggested", result.suggested), ("fastest", result.fastest))
    names = {choice.layout: name for name, choice in answers if choice}
    return [
        FrontPoint(names.get(p.layout, ""), p.step_seconds, p.bytes, p.layout in front, layout_text(p.layout))
        for p in result.seen
    ]


def front_parts(points: Sequence[FrontPoint]) -> Iterator[Part]:
    """Time against memory, with the layouts that no other beats in both."""
    front = sorted((p for p in points if p.is_on_front), key=lambda p: p.seconds)
    others = [p for p in points if not p.is_on_front]
    yield front_chart(front, others[:DRAWN])
    rows = [
        (p.label, p.layout, seconds_text(p.seconds), bytes_text(p.bytes), "yes" * p.is_on_front)
        for p in [*front, *sorted(others, key=lambda p: p.seconds)][:LISTED]
    ]
    some = "All" if len(rows) == len(points) else f"The first {len(rows)} of the"
    title = f"{some} {plural(len(points), 'layout')} that were estimated here, those on the front first"
    columns = ("name", "layout", "step time", "memory", "front")
    yield table_of(title, columns, rows, left=columns[:2], fold="both")


def front_chart(front: Sequence[FrontPoint], others: Sequence[FrontPoint]) -> Chart:
    """The layouts as points, those of the front on a staircase: no layout is left of it or below."""
    from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Look, Mark, Panel

    def series(name: str, points: Sequence[FrontPoint], colour: int, look: Look) -> ChartSeries:
        marks = (Mark(p.seconds, p.bytes, point_text(p), is_hollow=not p.is_on_front) for p in points)
        return ChartSeries(name, tuple(marks), look, colour)

    drawn = [series("others", others, 6, "points")] if others else []
    drawn += [series(FRONT, front, 1, "steps")] if front else []
    title = f"Step time against memory of {len(front) + len(others)} layouts, {len(front)} of them on the front"
    axes = ChartAxis("step time", seconds_text, base=10), ChartAxis("memory", bytes_text, base=2)
    return Chart("front", title, "", *axes, (Panel("", tuple(drawn)),))


def point_text(point: FrontPoint) -> str:
    """The name of a mark: its layout with its figures."""
    figures = f"{seconds_text(point.seconds)}, {bytes_text(point.bytes)}"
    return f"{point.label}: {point.layout}, {figures}" if point.label else f"{point.layout}, {figures}"
