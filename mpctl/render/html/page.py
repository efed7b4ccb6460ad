"""The page of a plan: one file without network, readable without its script, its style or colour.

Its policy (Content-Security-Policy) allows no source but the one script by its hash, so that even a
word that escaped escaping could load and run nothing.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from importlib.resources import files

from mpctl.document import axis_sizes
from mpctl.estimate.job import Estimate
from mpctl.estimate.timeline import find_step_line
from mpctl.plan import Plan
from mpctl.render.html.front import Point, front_section
from mpctl.render.html.layout import layout_data, layout_section
from mpctl.render.html.memory import memory_section
from mpctl.render.html.parts import section, table
from mpctl.render.html.schedule import schedule_section
from mpctl.render.html.time import time_section
from mpctl.render.html.traffic import traffic_section
from mpctl.render.markup import Raw, el
from mpctl.render.svg import picture_css, textures
from mpctl.topology import Topology
from mpctl.units import bytes_text, count_text, seconds_text

MARKS = {"ok": "✓ ok", "warning": "! warning", "error": "✗ error"}


def plan_page(plan: Plan, topology: Topology, *, command: str, points: Sequence[Point] = ()) -> str:
    """command: the line that makes it again; points: of a search, if one was made."""
    parts = list(_sections(plan, topology, points))
    body = el(
        "body", _textures(), _header(plan, topology), _links(parts),
        el("main", *(part for _, part in parts), _again(command)),
        _data(plan, topology), el("script", Raw(_read("page.js"))),
    )  # fmt: skip
    return f"<!doctype html>\n{el('html', _head(plan, topology), body, lang='en')}\n"


def _sections(plan: Plan, topology: Topology, points: Sequence[Point]) -> Iterator[tuple[str, Raw]]:
    yield "Layout", layout_section(plan, topology)
    if plan.estimate is not None and plan.stages is not None:
        estimate = plan.estimate
        step = find_step_line(plan.job, topology, plan.stages)
        yield "Schedule", schedule_section(plan, step, estimate.step_seconds)
        yield "Memory", memory_section(plan, estimate.memory)
        yield "Time", time_section(estimate.time)
        yield "Traffic", traffic_section(plan, topology, estimate)
    if points:
        yield "Front", front_section(points)
    yield "Checks", _checks(plan)


def _head(plan: Plan, topology: Topology) -> Raw:
    script = b64encode(hashlib.sha256(_read("page.js").encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script}'"
    return el(
        "head", el("meta", charset="utf-8"),
        Raw(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", f"{_name(plan)}: {axis_sizes(topology.sizes.items())}"),
        el("style", Raw(picture_css() + _read("page.css"))),
    )  # fmt: skip


def _name(plan: Plan) -> str:
    model = plan.job.model
    return model.name or model.family if model else "A layout"


def _header(plan: Plan, topology: Topology) -> Raw:
    device = plan.job.cluster.device
    where = f" of {device.name}" if device else ""
    said = (f"{topology.world_size:,} ranks on {topology.nodes:,} x {topology.gpus_per_node} "
            f"GPUs{where}, order {'-'.join(topology.order)}")  # fmt: skip
    facts = [el("div", el("dt", name), el("dd", value)) for name, value in _facts(plan)]
    return el(
        "header", el("h1", el("bdi", _name(plan)), ": ", axis_sizes(topology.sizes.items())),
        el("p", said), el("dl", *facts) if facts else "",
    )  # fmt: skip


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    model, estimate = plan.job.model, plan.estimate
    if model is None or estimate is None:
        return
    yield "parameters", count_text(estimate.parameters)
    both = f" + {model.decoder_layers}" if model.decoder_layers else ""
    yield "layers x hidden", f"{model.layers}{both} x {model.hidden}"
    yield "sequence", f"{model.seq_length:,}"
    yield from _costs(estimate)
    yield "micro batches", f"{plan.job.num_microbatches:,}"
    if plan.warnings:
        yield "warnings", str(len(plan.warnings))


def _costs(estimate: Estimate) -> Iterator[tuple[str, str]]:
    yield "fullest rank", bytes_text(max(stage.total_bytes for stage in estimate.memory))
    if estimate.step_seconds is not None:
        yield "step time", seconds_text(estimate.step_seconds)


def _links(parts: Sequence[tuple[str, Raw]]) -> Raw:
    named = [*(name for name, _ in parts), "Command"]
    items = (el("li", el("a", name, href=f"#{name.lower()}")) for name in named)
    return el("nav", el("ul", *items), aria_label="Sections")


def _checks(plan: Plan) -> Raw:
    rows = [
        (MARKS[check.status], check.rule, check.message + (f" → {check.hint}" * bool(check.hint)))
        for check in sorted(plan.checks, key=lambda check: check.status == "ok")
    ]
    return section(
        "checks", "Checks", table("Every rule and its answer", ("", "rule", "answer"), rows, left=3)
    )


def _again(command: str) -> Raw:
    return section(
        "command", "Command", el("p", "This page again:"), el("pre", el("code", command))
    )


def _textures() -> Raw:
    return el("svg", textures(), width=0, height=0, aria_hidden="true", class_="defs")


def _data(plan: Plan, topology: Topology) -> Raw:
    """Numbers for the script; `<` never stands in it, whatever they are."""
    text = json.dumps(layout_data(plan, topology), separators=(",", ":")).replace("<", "\\u003c")
    return el("script", Raw(text), type="application/json", id="data")


def _read(name: str) -> str:
    return files("mpctl.render.html").joinpath(name).read_text("utf-8")
