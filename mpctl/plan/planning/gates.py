"""Gates on a comparison: limits that a job's figures must keep, as `memory>+2%` or `step>16s`.

A gate says when it fails: FIGURE>LIMIT or FIGURE<LIMIT. A limit with a sign and % is the change from the first
job; any other is the figure itself, with its unit. By hand, 100 GiB in the first job and 103 GiB in the second
change by +3 %: `memory>+2%` fails, `memory>104GiB` does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError, Issue, attempt
from mpctl.core.units import MEMORY, NUMBER, TIME, TOKENS, Measure, UnitError, parse_measure

FIGURES = {
    "memory": "peak_bytes",
    "step": "step_seconds",
    "tokens": "tokens_per_second",
    "mfu": "mfu",
    "price": "price_per_billion_tokens",
}
"""Short names of a comparison's figures."""
GRAMMAR = "write FIGURE>LIMIT or FIGURE<LIMIT: memory>+2%, step>16s, tokens<-5%, mfu<40%"
EXPRESSION = re.compile(r"\s*([a-z_.]+)\s*([<>])\s*([^<>=\s].*?)\s*")
CHANGE = re.compile(rf"([+-]{NUMBER})\s*%")
Figures = Mapping[str, float | None]


class Gate(NamedTuple):
    """A limit. figure: as typed; key: of a comparison's figures; is_change: whether the limit is a share of the
    first job's figure, 0.02 for +2%."""

    text: str
    figure: str
    key: str
    is_above: bool
    limit: float
    is_change: bool


class GateEntry(TypedDict):
    """A gate's answer for one job. gate: as typed; limit: of the change as a share, or of the value; change: from
    the first job, None where its figure is 0."""

    gate: str
    job: str
    figure: str
    base: float
    value: float
    change: float | None
    limit: float
    is_change: bool
    failed: bool


def read_gates(texts: Iterable[str]) -> list[Gate]:
    """Read gates such as `memory>+2%`. Raises InputError with every text that is none."""
    issues: list[Issue] = []
    gates = [gate for text in texts if (gate := attempt(issues, partial(_read, text))) is not None]
    if issues:
        raise InputError(issues)
    return gates


def _read(text: str) -> Gate:
    found = EXPRESSION.fullmatch(text)
    if found is None:
        raise _refused(f"{text[:60]!r} is no gate", f"{GRAMMAR}; figures: {', '.join(FIGURES)}")
    figure, sign, limit = found.groups()
    key = FIGURES.get(figure, figure)
    if change := CHANGE.fullmatch(limit):
        return Gate(text, figure, key, sign == ">", float(change[1]) / 100, is_change=True)
    return Gate(text, figure, key, sign == ">", _value(key, limit), is_change=False)


def _value(key: str, text: str) -> float:
    """A limit in the unit of a figure: `70GiB`, `16 s`, `40%`, `70k`."""
    measure, share = _measure(key), text.endswith("%")
    if share and key != "mfu":
        raise _refused(f"{text[:60]!r} has no sign", f"+{text} and -{text} are changes from the first job")
    try:
        return float(parse_measure(text.removesuffix("%").rstrip(), measure)) / (100 if share else 1)
    except UnitError as error:
        example = "70GiB" if measure is MEMORY else "16s" if measure is TIME else "0.4 or 70k"
        raise _refused(f"{text[:60]!r}: {error}", f"use a value such as {example}, or a change such as +2%") from None


def _measure(key: str) -> Measure:
    kind = key.partition(".")[0]
    return MEMORY if kind.endswith("bytes") else TIME if kind.endswith("seconds") else TOKENS


def _refused(message: str, hint: str) -> InputError:
    return InputError.of("bad-gate", "--fail-if", message, hint)


def judge(gates: Sequence[Gate], jobs: Sequence[str], figures: Sequence[Figures]) -> list[GateEntry]:
    """Judge each job but the first by each gate. Raises InputError where a figure is not known: a gate never
    passes for want of one."""
    issues: list[Issue] = []
    pairs = [(gate, at) for at in range(1, len(jobs)) for gate in gates]
    entries = [attempt(issues, partial(_judge, gate, jobs, figures, at)) for gate, at in pairs]
    if issues:
        raise InputError(dict.fromkeys(issues))
    return [entry for entry in entries if entry is not None]


def _judge(gate: Gate, jobs: Sequence[str], figures: Sequence[Figures], at: int) -> GateEntry:
    base, value = (_figure(gate, jobs[n], figures[n]) for n in (0, at))
    change = value / base - 1 if base else None if value else 0.0
    judged = change if gate.is_change else value
    if judged is None:
        raise _refused(f"{gate.text}: {gate.figure} is 0 in {jobs[0]}", "use a limit without a sign, in its unit")
    return {
        "gate": gate.text,
        "job": jobs[at],
        "figure": gate.figure,
        "base": base,
        "value": value,
        "change": change,
        "limit": gate.limit,
        "is_change": gate.is_change,
        "failed": judged > gate.limit if gate.is_above else judged < gate.limit,
    }


def _figure(gate: Gate, job: str, figures: Figures) -> float:
    value = figures.get(gate.key)
    if value is not None:
        return value
    if gate.key in figures or gate.key in FIGURES.values():
        hint = "name a model and a cluster with its links, and for price cluster.operations.price_per_gpu_hour"
        raise _refused(f"{gate.text}: {gate.figure} is not known for {job}", hint)
    raise _refused(f"{gate.figure!r} is no figure", f"use {', '.join(FIGURES)}, or one of {', '.join(figures)}")
