"""A report on a search: one page that is printed, and the same in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpctl.core.units import count_text, days_text, plural, seconds_span_text, seconds_text
from mpctl.plan.planning.summary import training_line
from mpctl.render.markup import Raw, el
from mpctl.render.page import page_text
from mpctl.render.parts import Facts, Figures, Lines, Part, Section, Sentence
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.plan.search.report import OtherEntry, ReportDocument

PAPER = """
@page { margin: 12mm; }
body { max-width: 800px; }
nav { display: none; }
h3 { margin-top: 14px; }
ul { padding: 0; list-style: none; }
dl.facts dd { overflow-wrap: anywhere; }
@media print {
  body, header { padding: 0; }
  h1 { font-size: 18px; }
  h2 { font-size: 13px; margin: 8px 0 2px; padding-top: 4px; }
  p, ul, dl.facts { margin: 2px 0; font-size: 11px; }
  pre { padding: 4px 8px; margin: 2px 0; }
}
"""


def print_report(document: ReportDocument) -> None:
    """Print the report on stdout."""
    print_parts(report_parts(document))


def report_page(document: ReportDocument, command: str) -> str:
    """The report as HTML. command: the line that makes it again."""
    return page_text(report_parts(document), command=command, before=el("style", Raw(PAPER)))


def report_parts(document: ReportDocument) -> Iterator[Part]:
    """What to run, what it costs, why not the next two, the risk, and what to measure first."""
    best, risk = document["recommended"], document["risk"]
    gpus = f"{plural(document['gpus'], 'GPU')} of {document['device']}"
    yield Sentence(f"{document['model']} on {gpus}", "title")
    yield Sentence(f"Run it under {document['launcher']} with {best['layout']}", "passed" if best["fits"] else "failed")
    yield from (Sentence(text, "warning") for text in document["warnings"])
    yield Figures([*_costs(document)])
    yield Facts([*_costs(document)], on="terminal")
    yield Section("report", "Recommendation")
    training = training_line(document["training"])
    facts = [("layout", best["layout"]), ("why", document["why"]), ("memory", best["verdict"]), ("training", training)]
    yield Facts(facts)
    lines = [
        f"{at}. {other['layout']}: {', '.join(_of_run(other))}; {other['loses']}"
        for at, other in enumerate(document["others"], 1)
    ]
    yield Lines("Why not the next two", lines or ["the search found no other tp, pp and ep that fit"])
    span = seconds_span_text(risk["low_seconds"], risk["high_seconds"])
    yield Lines("Risk", [f"9 of 10 such runs take {span} a step, {_percent(document)}", *risk["rests_on"]])
    yield Lines("Measure first", [f"{at}. {text}" for at, text in enumerate(document["measure_first"], 1)])
    verb = best["command"].split()[1]  # launch, or plan where mpctl does not launch it
    yield Facts([(verb, best["command"]), *([("flags", document["emit"])] if document["emit"] else [])], "Commands")


def _of_run(other: OtherEntry) -> Iterator[str]:
    yield f"{seconds_text(other['step_seconds'])} a step"
    if other["days"] is not None:
        yield days_text(other["days"])
    if other["price"] is not None:
        yield f"price {count_text(other['price'])}"


def _percent(document: ReportDocument) -> str:
    step, risk = document["recommended"]["step_seconds"], document["risk"]
    low, high = risk["low_seconds"] / step - 1, risk["high_seconds"] / step - 1
    return f"{low:+.0%} to {high:+.0%}"


def _costs(document: ReportDocument) -> Iterator[tuple[str, str]]:
    """The step, its rate, and the run of the tokens, or of a billion without any."""
    best, risk = document["recommended"], document["risk"]
    span = seconds_span_text(risk["low_seconds"], risk["high_seconds"])
    yield "step", f"{seconds_text(best['step_seconds'])} ({span})"
    if (run := best.get("run")) is not None:
        yield "time", f"{days_text(run['days'])} ({days_text(run['days_low'])} to {days_text(run['days_high'])})"
        price = "unknown: give --price" if run["price"] is None else count_text(run["price"])
        yield "price", f"{price} for {count_text(run['tokens'])} tokens, {count_text(run['gpu_hours'])} GPU-hours"
    else:
        hours = f"{count_text(best['gpu_hours_per_billion_tokens'])} GPU-hours a billion tokens"
        per_billion = best.get("price_per_billion_tokens")
        more = "--tokens 300B says days, --price its price" if per_billion is None else "--tokens 300B says days"
        yield "cost", f"{hours}{'' if per_billion is None else f', price {count_text(per_billion)}'}; {more}"
    yield "speed", f"{count_text(best['tokens_per_second'])} tokens/s, MFU {best['mfu']:.0%}"
