"""Answers on several layouts: pinned ones compared, and a search from here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

from mpctl.cli.ui.answers import BY_SETTING, OF_LAYOUT, RUN, command_of, run_of, run_words, source_of, word_of
from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.plan.planning.summary import sizes_text
from mpctl.plan.search.find import Progress
from mpctl.spec.load import load_partial

if TYPE_CHECKING:
    from mpctl.plan.planning.layout_settings import LayoutSettings
    from mpctl.render.parts import Part

ROWS, DRAWN = 8, 1500


class SearchAnswer(TypedDict):
    """A search, drawn as `search --html` draws it. loads: by the words of a row or point, the controls of its
    layout."""

    html: str
    loads: dict[str, dict[str, str]]
    fastest: dict[str, str]


def compare_answer(pins: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Pinned layouts as `mpctl compare` shows them, and what each costs over the first."""
    from mpctl.plan.planning.compare import compare_document, with_one_batch
    from mpctl.render.compare import comparison_parts
    from mpctl.render.page import fragment
    from mpctl.render.parts import Lines

    plans, sources, issues = list[Plan](), list[tuple[str | None, Mapping[str, Any]]](), list[Issue]()
    for number, controls in enumerate(pins, 1):
        try:
            job = source_of(controls)
            plan = load_plan(job.source, job.overrides)
            plan.require_legal()
            plans.append(plan)
            sources.append((job.source, job.overrides))
        except InputError as error:
            issues += [Issue(one.rule, f"pin {number}: {one.where}", one.message, one.hint) for one in error.issues]
    if issues or not plans:
        raise InputError(issues or [Issue("no-pins", "pins", "nothing is pinned", "pin a layout")])
    plans = with_one_batch(plans, sources)
    document = compare_document([(f"{at}: {sizes_text(plan.job)}", plan) for at, plan in enumerate(plans, 1)])
    runs = [_run_text(controls, plan) for controls, plan in zip(pins, plans, strict=True)]
    lines = [f"{name}: {run}" for name, run in zip(document["jobs"], runs, strict=True) if run]
    parts = [*comparison_parts(document), *([Lines("Whole run", lines)] if lines else [])]
    return {"html": str(fragment(parts))}


def _run_text(controls: Mapping[str, str], plan: Plan) -> str:
    """The whole run of a pinned layout, if its tokens are given and its step is known."""
    if plan.estimate is None or isinstance(plan.estimate.time, str):
        return ""
    run = run_words(run_of(controls, plan))
    return f"{controls[RUN]} tokens: {run}" if run else ""


def search_answer(controls: Mapping[str, str], on_progress: Progress = lambda *_: None) -> SearchAnswer:
    """The best layouts of the same model and GPUs, and every estimated one as a point: each with the controls that
    choose it."""
    from mpctl.plan.planning.layout_settings import changed_settings, layout_of, layout_text
    from mpctl.plan.planning.whole_run import read_tokens
    from mpctl.plan.search.document import search_document
    from mpctl.plan.search.request import gpu_counts, read_request
    from mpctl.plan.search.result import answer_search
    from mpctl.render.page import fragment
    from mpctl.render.search import front_points, names_of, point_text, row_text, search_parts

    free = {name: word for name, word in controls.items() if name not in OF_LAYOUT}
    free.setdefault("global-batch-size", _batch(controls))  # its default follows from the layout
    job, tokens = source_of(free), controls.get(RUN)
    request = read_request(job.source, job.overrides, [], {}, tokens=read_tokens(tokens) if tokens else None)
    counts = gpu_counts(None, "tokens", request.job)
    result = answer_search(
        request, counts, top=ROWS, objective="tokens", exhaustive=False, on_progress=on_progress, on_note=lambda _: None
    )
    base = layout_of(request.job)

    def chosen(layout: LayoutSettings) -> dict[str, str]:
        changed = changed_settings(base, layout)
        return {**free, **{BY_SETTING.get(where, where): word_of(value) for where, value in changed.items()}}

    def line(layout: LayoutSettings) -> str:
        words = chosen(layout)
        return command_of(source_of(words), words)

    document = search_document(result, lambda choice: line(choice.layout))
    points, names, loads = front_points(result), names_of(document), dict[str, dict[str, str]]()
    choices = {line(choice.layout): chosen(choice.layout) for choice in (*result.rows, *result.front)}
    for entry in (*document["rows"], *document["front"]):
        loads[row_text(entry, names.get(entry["command"], ""))] = choices[entry["command"]]
    layouts = {layout_text(seen.layout): seen.layout for seen in result.seen}
    for point in points[:DRAWN] + [point for point in points[DRAWN:] if point.is_on_front]:
        loads[point_text(point)] = loads[point.layout] = chosen(layouts[point.layout])
    fastest = chosen(result.fastest.layout) if result.fastest else {}
    html = fragment(_drawable(search_parts(document, points)))
    return SearchAnswer(html=str(html), loads=loads, fastest=fastest)


def _batch(controls: Mapping[str, str]) -> str:
    """The global batch of the layout as it is; empty where its job cannot be completed."""
    job = source_of(controls)
    loaded = load_partial(job.source, job.overrides).job
    return str((loaded and loaded.training.global_batch_size) or "")


def _drawable(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts below their title, without the chart where matplotlib, which draws it, is not installed."""
    from mpctl.render.charts import Chart
    from mpctl.render.parts import Section, Sentence

    for part in parts:
        if isinstance(part, Section):
            continue
        if isinstance(part, Chart) and find_spec("matplotlib") is None:
            yield Sentence("No picture of time over memory: matplotlib is not installed here.", "note")
        else:
            yield part
