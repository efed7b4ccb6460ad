"""Logs with a planted cause, from plans: step times of a healthy run or of a slower plan, noise, and what
the cause adds, in the forms of tests/interop/example_logs.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mpctl.interop.log_rows import LogLayout
from mpctl.measure.why.observed import Observed, observe_log
from mpctl.measure.why.planned import Planned
from mpctl.measure.why.series import find_shape
from mpctl.measure.why.signatures import SIGNATURES, ordered
from mpctl.measure.why.suspects import RunFacts, Suspect
from mpctl.plan.planning.plan import load_plan
from tests.interop import example_logs as logs

LINES = 200
WORLD: dict[str, Any] = {"cluster.nodes": 2, "cluster.gpus_per_node": 8, "training.global_batch_size": logs.BATCH}
DENSE: dict[str, Any] = {
    **WORLD,
    "cluster": "dgx-h100",
    "model": "llama-3-8b",
    "parallel.tp": 4,
    "parallel.pp": 2,
    "parallel.sequence_parallel": True,
    "parallel.zero": 1,
    "training.runtime": "megatron-core",
}
SHARDED = {**WORLD, "cluster": "dgx-h100", "model": "llama-3-8b", "parallel.zero": 3, "training.runtime": "fsdp2"}
EXPERTS = {
    **WORLD,
    "cluster": "dgx-h100",
    "model": "qwen3-30b-a3b",
    "model.seq_length": 8192,
    "parallel.ep": 8,
    "parallel.zero": 1,
    "training.runtime": "megatron-core",
}
Times = list[float]


@cache
def _plan(settings: str) -> Planned:
    estimate = load_plan(None, json.loads(settings)).estimate
    assert estimate is not None
    return Planned(estimate.layout)


def plan_of(settings: dict[str, Any]) -> Planned:
    """The plan of a job of these settings."""
    return _plan(json.dumps(settings, sort_keys=True))


def noisy(seconds: float, seed: int, noise: float, lines: int = LINES) -> Times:
    """Steady steps; the first one compiles."""
    random = Random(seed)
    return [seconds * (4 if not n else 1) * (1 + random.gauss(0, noise)) for n in range(lines)]


def find(
    times: Times, settings: dict[str, Any], path: Path, form: str = "megatron", lines: dict[int, str] | None = None
) -> list[Suspect]:
    """The suspects of a log of these times. lines: what is printed after a step, by its place."""
    return suspects_of(observe(times, settings, path, form, lines))


def observe(
    times: Times, settings: dict[str, Any], path: Path, form: str = "megatron", lines: dict[int, str] | None = None
) -> Observed:
    write: Callable[[Sequence[float]], str] = {**logs.LOGS, "deepspeed": logs.deepspeed_rates}[form]
    mark = {"megatron": "elapsed time", "torchtitan": "tps:", "nanotron": "elapsed_time", "deepspeed": "Curr"}[form]
    found, place = list[str](), 0
    for line in write(times).splitlines():
        found.append(line)
        if mark in line:
            found += [lines[place]] if lines and place in lines else []
            place += 1
    path = path / f"{form}.log"
    path.write_text("\n".join(found) + "\n", encoding="utf-8")
    typed = {name: value for name, value in settings.items() if name != "cluster"}
    job = {"model": typed.pop("model"), "cluster": {"preset": settings["cluster"]}}
    return observe_log(path, LogLayout(job=job, settings=typed, cluster=settings["cluster"]))


def suspects_of(observed: Observed) -> list[Suspect]:
    """All suspects, the likeliest first."""
    facts = RunFacts(observed, Planned(observed.layout), find_shape(observed.points))
    return ordered([suspect for signature in SIGNATURES for suspect in signature(facts)])
