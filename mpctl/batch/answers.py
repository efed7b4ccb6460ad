"""The answers of a batch, in the order of its lines; a million take no more memory than one.

A job's answer is the estimate of `mpctl plan`: `breakdown` sums to `step_seconds`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from mpctl.batch.lines import Raw, parse_line
from mpctl.batch.rows import as_others_run, load_row, require_countable
from mpctl.errors import InputError, Issue, Status
from mpctl.estimate.memory import peak_bytes
from mpctl.planning.plan import Plan, make_plan
from mpctl.rules.validate import with_tried_hints
from mpctl.search.nearest import with_nearest

Found = tuple[Status, Issue]
REMEMBERED_IDS = 2**17  # so that memory stays bounded
FIGURES = (
    "step_seconds", "step_seconds_low", "step_seconds_high", "model_tflops_per_gpu", "mfu", "hfu",
    "tokens_per_second", "peak_memory_bytes", "stage_memory_bytes", "breakdown", "fits",
)  # fmt: skip


def answers(lines: Iterable[bytes | None]) -> Iterator[Raw]:
    """Of each line, in order; None stands for a line that was too long to be read."""
    reader = Reader()
    return (reader.answer(line, number) for number, line in enumerate(lines, start=1))


@dataclass
class Reader:
    """Answers lines; remembers the ids that it has seen, up to a bound."""

    seen: set[str] = field(default_factory=set)

    def answer(self, line: bytes | None, number: int) -> Raw:
        name: Any = None
        try:
            row = parse_line(line, number)
            raw, name, issues = _split(row)
            issues += self._repeated(name)
            if any(status == "error" for status, _ in issues):
                return _answer(name, issues)
            return _estimated(name, raw, issues)
        except InputError as error:
            return _answer(name, [("error", issue) for issue in error.issues])
        except Exception as error:  # of this line alone: the others are still answered
            return _answer(name, [("error", _unexpected(error, number))])

    def _repeated(self, name: Any) -> list[Found]:
        if not isinstance(name, str):
            return []
        if name in self.seen:
            return [("warning", Issue("repeated-id", "id", f"{name[:60]!r} came before"))]
        if len(self.seen) < REMEMBERED_IDS and len(name) <= 200:
            self.seen.add(name)
        return []


def _unexpected(error: Exception, number: int) -> Issue:
    """What no rule foresaw: a fault of mpctl, which says so instead of blaming the line."""
    message = f"mpctl failed on this line: {type(error).__name__}: {str(error)[:200]}"
    return Issue("unexpected-error", f"line {number}", message, "please report it with the line")


def _split(row: Raw) -> tuple[Raw, Any, list[Found]]:
    """The job, the id, and what is wrong with either."""
    name, issues = row.get("id"), list[Found]()
    if name is not None and (isinstance(name, bool) or not isinstance(name, str | int)):
        message = f"a JSON {type(name).__name__} is not allowed"
        issues.append(("error", Issue("bad-value", "id", message, "use a string or an integer")))
        name = None
    raw = row.get("job", {key: value for key, value in row.items() if key != "id"})
    if not isinstance(raw, dict):
        issues.append(("error", Issue("bad-value", "job", "is not an object")))
        raw = {}
    return raw, name, issues


def _estimated(name: Any, raw: Raw, issues: list[Found]) -> Raw:
    loaded = load_row(raw)
    issues += [("warning", issue) for issue in loaded.warnings]
    found: list[Found] = [("error", issue) for issue in loaded.issues]
    if loaded.job is None or found:
        return _answer(name, [*issues, *found])
    job, assumed = as_others_run(loaded.job)
    require_countable(job)
    plan = with_nearest(make_plan(job))
    issues += [("warning", check.issue) for check in assumed]
    checks = with_tried_hints(job, list(plan.checks), loaded.open_settings)
    issues += [(c.status, c.issue) for c in checks if c.status != "ok"]
    if job.model is None:
        issues.append(("error", Issue("no-model", "model", "an estimate needs a model")))
    if plan.estimate is None:
        return _answer(name, issues)
    answer = _answer(name, [*issues, *_more(plan)], figures(plan))
    if plan.nearest:
        answer["nearest_that_fit"] = [near.as_dict() for near in plan.nearest]
    return answer


def _more(plan: Plan) -> Iterator[Found]:
    """What else should be known: no time, or figures that rest on no measurement."""
    assert plan.estimate is not None
    time = plan.estimate.time
    if isinstance(time, str):
        yield "warning", Issue("no-step-time", "cluster", time)
    else:
        for words in time.extrapolates:
            yield "warning", Issue("extrapolates", "time", words)


def figures(plan: Plan) -> Raw:
    """What an estimate gives for a line."""
    assert plan.estimate is not None
    memory, device = plan.estimate.memory, plan.job.cluster.device
    stages = [stage.allocated_bytes for stage in memory]
    peaks = {
        "allocated": max(stages),
        "reserved": max(stage.reserved_bytes for stage in memory),
        "device": peak_bytes(memory),  # with what context and libraries take: nvidia-smi's figure
    }
    return {
        **time_figures(plan),
        "peak_memory_bytes": peaks,
        "stage_memory_bytes": stages,
        "fits": None if device is None else peak_bytes(memory) <= device.memory_bytes,
    }


def time_figures(plan: Plan) -> Raw:
    """Of the step; gathering keys and values over cp is under `other`."""
    assert plan.estimate is not None
    time, tokens = plan.estimate.time, plan.estimate.layout.tokens_per_step
    if isinstance(time, str):
        return {}
    parts = time.parts()
    parts["other"] += parts.pop("cp")
    return {
        "step_seconds": time.total, "step_seconds_low": time.low, "step_seconds_high": time.high,
        "model_tflops_per_gpu": time.model_flops / time.total / 1e12,
        "mfu": time.mfu, "hfu": time.hfu, "tokens_per_second": tokens / time.total,
        "breakdown": parts,
    }  # fmt: skip


def _answer(name: Any, issues: Iterable[Found], found: Raw | None = None) -> Raw:
    """The answer's keys in their order; figures that JSON cannot hold become an issue."""
    told = [*issues]
    if not _is_finite(found):
        told.append(("error", Issue("not-estimated", "time", "the estimate is no finite number")))
        found = None
    shown = [{"status": status, **issue.as_dict()} for status, issue in told]
    return {"id": name, **dict.fromkeys(FIGURES), **(found or {}), "issues": shown}


def _is_finite(value: Any) -> bool:
    """Whether every number in it is one that JSON has, however deep it lies."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or isfinite(value)
