"""Jobs for the unit tests: a small GPT, laid out by dotted settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpctl.plan.rules.check import Check
from mpctl.plan.rules.validate import check_job
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec

Settings = Mapping[str, Any]
GPT: Settings = {
    "model.layers": 12,
    "model.hidden": 768,
    "model.heads": 12,
    "model.vocab": 50257,
    "model.seq_length": 1024,
}


def job_of(settings: Settings, *, model: bool = True) -> JobSpec:
    return load_job(None, {**(GPT if model else {}), **settings})


def shape_of(job: JobSpec) -> ModelSpec:
    assert job.model is not None
    return job.model


def answers(rule: str, settings: Settings, *, model: bool = True) -> list[Check]:
    """What one rule says about a job."""
    return [check for check in check_job(job_of(settings, model=model)) if check.rule == rule]


def statuses(rule: str, settings: Settings, *, model: bool = True) -> set[str]:
    return {check.status for check in answers(rule, settings, model=model)}
