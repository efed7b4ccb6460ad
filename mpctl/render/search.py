"""The answer of a search: the best layouts, why no. 1 is the best, and the cost of less memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpctl.core.records import Json
from mpctl.core.units import bytes_text, count_text, days_text, energy_text, plural, seconds_text
from mpctl.plan.planning.summary import training_line
from mpctl.plan.search.document import LayoutEntry, NoLayoutEntry, SearchDocument
from mpctl.plan.search.find import OPTIMISM, WIDE_BAND, ranking_error
from mpctl.render.console import get_console, marked
from mpctl.render.parts import DataTable, Lines, Part, Section, Sentence, table_of
from mpctl.render.terminal import print_parts
from mpctl.spec.figure_sources import sources_text

if TYPE_CHECKING:
    from mpctl.render.charts import Chart

OBJECTIVES = {
    "tokens": "most tokens a second",
    "memory": "least memory",
    "cost": "fewest GPU-hours a token",
    "days": "fewest days",
    "energy": "least energy",
}
RUN_COLUMNS = ("run", "energy", "useful")
# Titles of settings whose name is not clear enough.
SETTING_NAMES = {
    "micro_batch_size": "micro batch",
    "sequence_parallel": "sequence parallelism",
    "tensor_mode": "tensor mode",
    "tensor_depth": "tensor depth",
    "stage_balance": "stage balance",
    "vpp": "vpp",
    "zero": "ZeRO",
    "zero_size": "ZeRO ranks",
    "order": "rank order",
}


def headline(document: SearchDocument) -> str:
    """`gpt3-175b on 1,024 GPUs of NVIDIA A100-SXM4-80GB: most tokens a second`."""
    name = document["model"] or document["job"] or "the model"
    gpus = document["best"][0]["gpus"] if document["best"] else document["gpus"]
    objective = OBJECTIVES[document["objective"]]
    return f"{name} on {plural(gpus, 'GPU')} of {document['device']}: {objective}"


def header_lines(document: SearchDocument) -> Iterator[str]:
    """Whether no. 1 fits, what all layouts have in common, the number of estimated layouts, and
    what was searched."""
    if document["best"]:
        yield f"no. 1 {document['best'][0]['verdict']}"
    yield training_line(document["training"])
    if document["figures_from"]:
        yield f"figures: {sources_text(document['figures_from'])}"
    headroom = f"headroom {document['headroom_percent']:g} %"
    yield (
        f"{plural(document['estimated'], 'layout')} estimated, "
        f"{document['too_large']:,} left out for memory ({headroom}), the rest by lower bounds"
    )
    if document["best"] and "run" in document["best"][0]:
        run = document["best"][0]["run"]
        yield f"no. 1 for {count_text(run['tokens'])} tokens: {whole_run_text(run)}"
    if document["searched"]:
        names = (SETTING_NAMES.get(name, name) for name in document["searched"])
        yield f"searched: {', '.join(names)}"


def notes(document: SearchDocument) -> Iterator[str]:
    """How far a measured step may be from the first layout's; the meaning of memory."""
    first = document["best"][0]
    low, high = seconds_text(first["step_seconds_low"]), seconds_text(first["step_seconds_high"])
    yield f"no. 1: in 9 of 10 runs a step takes {low} to {high}"
    if first["extrapolates"]:
        yield f"extrapolated: {'; '.join(first['extrapolates'])}"
    yield from _order_notes(document)
    if any(has_price(entry) for entry in document["best"]) or document["by_gpus"]:
        yield "Gtok: a billion tokens"


def _order_notes(document: SearchDocument) -> Iterator[str]:
    """How far the order of the layouts can be trusted (plan/search/find.py)."""
    best = document["best"]
    if any(entry["alike"] for entry in best):
        sizes = "tp, pp and ep" if "ep" in document["searched"] else "tp and pp"
        yield f"a row shows the simplest of the layouts that are about as fast with its {sizes}"
    if document["objective"] == "memory" or len(best) < 2:
        return
    fastest = min(best, key=lambda entry: entry["step_seconds"])
    band = fastest["step_seconds_high"] / fastest["step_seconds_low"]
    error = ranking_error(band)
    is_wide = band >= WIDE_BAND
    share, where = ("7", " of systems as unsure") if is_wide else ("6", "")
    order = f"estimates so close put {share} of 10 published pairs{where} in the right order; measure"
    if document["is_plain_first"]:
        yield (
            f"no. 1 is the simplest layout within {100 * error:g} % of the fastest: {order} it and "
            "a faster one before you choose"
        )
    else:
        most = best[0]["step_seconds"] * (1 + error)
        near = [n for n, entry in enumerate(best, start=1) if entry["step_seconds"] <= most]
        if len(near) > 1:
            link = "and" if near[-1] == 2 else "to"
            yield f"no. 1 {link} {near[-1]} are within {100 * error:g} %: {order} them"
    low, high = (100 * share for share in OPTIMISM)
    yield (f"the lowest of many estimates tends to be too low: in published sweeps by {low:g} to {high:g} %")


def comparison_lines(document: SearchDocument) -> list[str]:
    """Each of the other layouts compared with no. 1, then the job as given."""
    lines = [f"no. {number} {text}" for number, text in enumerate(document["reasons"], start=2)]
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


def row_text(entry: LayoutEntry) -> str:
    """A layout in words, and how many similarly fast ones it represents."""
    return "; ".join(filter(None, (entry["layout"], entry["alike_text"])))


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
    """The best layouts, what sets them apart, and the line that runs each. points: the layouts that were
    estimated, for a page."""
    best, by_gpus = document["best"], document["by_gpus"]
    yield Section("search", "Search")
    yield Sentence(headline(document), "lead")
    yield from map(Sentence, header_lines(document))
    if best:
        yield _table("Best layouts", best, first="#")
        yield from (Sentence(line, "note") for line in notes(document))
        if lines := comparison_lines(document):
            yield Lines("Compared with no. 1", lines)
        yield Lines("Ready to type", [entry["command"] for entry in best], are_commands=True)
    if points:
        yield from front_parts(points)
    if len(document["front"]) > 1:
        yield _table("The fastest layout for less and less memory", document["front"])
    if by_gpus:
        yield _table("Best by number of GPUs", by_gpus, first="GPUs")
        shown = best[0]["gpus"] if best else None
        commands = [
            f"{entry['command']}  # {plural(entry['gpus'], 'GPU')}"  # behind it, a shell's comment
            for entry in by_gpus
            if "command" in entry and entry["gpus"] != shown
        ]
        if commands:
            yield Lines("Ready to type, by number of GPUs", commands, are_commands=True)


def _table(title: str, entries: Sequence[LayoutEntry | NoLayoutEntry], *, first: str = "") -> DataTable:
    """A row for each layout; first: the first column, `#` its place or `GPUs` their number."""
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
            rows.append((*lead, *cells, row_text(entry)))
    return table_of(title, (*figures, "layout"), rows, left=("layout",), whole=len(figures))


FRONT = "no other beats it in both time and memory"
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


def front_parts(points: Sequence[FrontPoint]) -> Iterator[Part]:
    """Time against memory, with the layouts that no other beats in both."""
    front = sorted((p for p in points if p.is_on_front), key=lambda p: p.seconds)
    others = [p for p in points if not p.is_on_front]
    yield front_chart(front, others[:DRAWN])
    rows = [
        (p.label, p.layout, seconds_text(p.seconds), bytes_text(p.bytes), "yes" * p.is_on_front)
        for p in [*front, *sorted(others, key=lambda p: p.seconds)][:LISTED]
    ]
    some = "All" if len(rows) == len(points) else f"The first {len(rows)} of"
    title = f"{some} {len(points)} layouts that were estimated, those on the front first"
    columns = ("name", "layout", "step time", "memory", "front")
    yield table_of(title, columns, rows, left=columns[:2], fold="both")


def front_chart(front: Sequence[FrontPoint], others: Sequence[FrontPoint]) -> Chart:
    """The layouts as points, those of the front on a line."""
    from mpctl.render.charts import Chart, ChartAxis, ChartSeries, Look, Mark, Panel

    def series(name: str, points: Sequence[FrontPoint], colour: int, look: Look) -> ChartSeries:
        marks = (Mark(p.seconds, p.bytes, _point_text(p), is_hollow=not p.is_on_front) for p in points)
        return ChartSeries(name, tuple(marks), look, colour)

    drawn = [series("others", others, 6, "points")] if others else []
    drawn += [series(FRONT, front, 1, "line")] if front else []
    title = f"Step time against memory of {len(front) + len(others)} layouts, {len(front)} of them on the front"
    axes = ChartAxis("step time", seconds_text, base=10), ChartAxis("memory", bytes_text, base=2)
    return Chart("front", title, "", *axes, (Panel("", tuple(drawn)),))


def _point_text(point: FrontPoint) -> str:
    figures = f"{seconds_text(point.seconds)}, {bytes_text(point.bytes)}"
    return f"{point.label}: {point.layout}, {figures}"
