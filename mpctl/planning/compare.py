"""Plans side by side: the settings in which they differ and what each costs.

A variant is a job, `demo`; a job with settings, `demo,tp=1,dp=2`; or settings alone, over the first
job: `tp=1,dp=2`. Settings are named as for --set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mpctl.errors import InputError, Issue
from mpctl.estimate.memory import peak_bytes
from mpctl.planning.plan import Plan, load_plan
from mpctl.planning.summary import training_settings
from mpctl.spec.load import parse_settings

SAID_ELSEWHERE = ("name", "description", "source")


def load_variants(texts: Sequence[str], overrides: Mapping[str, Any]) -> list[tuple[str, Plan]]:
    """Legal plans by what was typed for each; overrides hold for all. Raises InputError with every
    variant's issues."""
    if len(texts) < 2:
        raise InputError.of("usage", "--compare", f"{len(texts)} job is nothing to compare",
                            "name two or more: mpctl plan --compare demo tp=1,dp=2")  # fmt: skip
    found, issues, first = [], list[Issue](), texts[0].split(",")[0]
    for text in texts:
        source, *settings = _split(text, first)
        try:
            values = {**overrides, **parse_settings(settings)}
            found.append((text, load_plan(source, values)))
        except InputError as error:
            issues += [Issue(i.rule, f"{text}: {i.where}", i.message, i.hint) for i in error.issues]
    if issues:
        raise InputError(issues)
    return found


def _split(text: str, first: str) -> list[str]:
    """The job and its settings; commas inside a list's brackets part nothing."""
    words: list[str] = []
    for word in text.split(","):
        if words and words[-1].count("[") > words[-1].count("]"):
            words[-1] += f",{word}"
        else:
            words.append(word)
    return words if "=" not in words[0] else [first, *words]


def compare_document(variants: Sequence[tuple[str, Plan]]) -> dict[str, Any]:
    """Schema mpctl.compare/1. settings: those that differ, a value of each job."""
    settings = [_flat(plan.job.model_dump()) for _, plan in variants]
    names = dict.fromkeys(name for own in settings for name in own)
    differ = [n for n in names if len({repr(own.get(n)) for own in settings}) > 1]
    return {
        "schema": "mpctl.compare/1",
        "jobs": [name for name, _ in variants],
        "training": [training_settings(plan.job) for _, plan in variants],
        "fits": [plan.fits for _, plan in variants],
        "settings": {name: [own.get(name) for own in settings] for name in differ},
        "figures": [_figures(plan) for _, plan in variants],
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"parallel": {"tp": 2}}` -> `{"parallel.tp": 2}`; a source is no setting."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}.")
        elif key not in SAID_ELSEWHERE:
            found[prefix + key] = value
    return found


def _figures(plan: Plan) -> dict[str, float | None]:
    estimate, job = plan.estimate, plan.job
    found: dict[str, float | None] = {"ranks": job.world_size}
    if estimate is None:
        return found
    time = estimate.time
    found |= {"parameters": estimate.parameters, "peak_bytes": peak_bytes(estimate.memory)}
    if not isinstance(time, str):
        tokens = estimate.layout.tokens_per_step
        found |= {"step_seconds": time.total, "tokens_per_second": tokens / time.total}
        found["mfu"] = time.mfu
        found |= {f"seconds.{name}": seconds for name, seconds in time.parts().items()}
    for axis in ("tp", "cp", "dp", "pp"):
        own = (m for stage in estimate.messages for m in stage if m.axis == axis)
        found[f"bytes.{axis}"] = sum(m.bytes * m.count for m in own)
    return found
