"""Questions of the page by their name, as JSON in and out: asked over HTTP (server.py), or of the planner in the
browser (worker.js)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mpctl.cli.ui.answers import choices, emit_answer, plan_answer
from mpctl.cli.ui.layouts import compare_answer, search_answer
from mpctl.core.errors import InputError
from mpctl.plan.search.find import Progress

PINS = 4
Controls = Mapping[str, str]


class PageQuestion(NamedTuple):
    """A question. target: a launcher's name, or the only control whose choices are wanted; is_stale: whether a newer
    question waits; on_progress: as a search reports it."""

    controls: Controls
    target: str = ""
    pins: tuple[Controls, ...] = ()
    is_stale: Callable[[], bool] = lambda: False
    on_progress: Progress = lambda *_: None


ROUTES: Mapping[str, Callable[[PageQuestion], Any]] = {
    "plan": lambda asked: plan_answer(asked.controls),
    "choices": lambda asked: choices(asked.controls, asked.is_stale, asked.target),
    "compare": lambda asked: compare_answer(asked.pins),
    "search": lambda asked: search_answer(asked.controls, asked.on_progress),
    "emit": lambda asked: emit_answer(asked.controls, asked.target),
    "alive": lambda _: {},
}


def read_question(body: str | bytes) -> PageQuestion:
    """`{"controls": {"tp": "8"}, "target": "", "pins": []}`. Raises ValueError for anything else."""
    try:
        asked = json.loads(body)
        pins = tuple(_words(pin) for pin in asked.get("pins", [])[:PINS])
        return PageQuestion(_words(asked.get("controls", {})), str(asked.get("target", "")), pins)
    except (AttributeError, TypeError, LookupError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _words(controls: Any) -> Controls:
    return {str(name): str(word) for name, word in controls.items()}


def answer(name: str, question: PageQuestion) -> dict[str, Any]:
    """The answer to a known question; refused input as its issues."""
    try:
        found: dict[str, Any] = ROUTES[name](question)
    except InputError as error:
        return {"issues": [issue.as_dict() for issue in error.issues]}
    return found


def answer_text(name: str, body: str, on_progress: Progress) -> str:
    """The same as JSON, for the planner in the browser."""
    return json.dumps(answer(name, read_question(body)._replace(on_progress=on_progress)))
