"""Every number of a job is bounded, and within its bounds every plan is finite."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any, get_args

import annotated_types as bounds
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mpctl.core.errors import InputError
from mpctl.plan.batch.answers import answers
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.runtime import RuntimeProfile

SMALL: dict[str, Any] = {
    "cluster": {"preset": "selene", "nodes": 2},
    "model": {"family": "gpt", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1024, "seq_length": 128},
    "parallel": {"tp": 2, "pp": 2, "dp": 4, "zero": 1},
    "training": {"micro_batch_size": 2, "global_batch_size": 64, "dtype": "bf16"},
}
OWN_KERNELS = {"products": 0.8, "memory": 0.8, "flash": 0.5, "flash_backward": 0.5, "source": "x"}


def numbers(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[tuple[type, list[Any]]]:
    """Each number type in an annotation with the bounds that stand around it."""
    if annotation in (int, float):
        yield annotation, _bounds(metadata)
        return
    inner = getattr(annotation, "__metadata__", ())
    for part in get_args(annotation):
        if part not in inner:
            yield from numbers(part, (*metadata, *inner))


def _bounds(metadata: tuple[Any, ...]) -> list[Any]:
    """Pydantic keeps bounds in a FieldInfo where they stand inside an Annotated."""
    found: list[Any] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


def fields(table: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in table.model_fields.items():
        yield f"{prefix}{name}", field
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from fields(part, f"{prefix}{name}.")


def limits(field: FieldInfo) -> list[tuple[type, float, float]]:
    """Kind, smallest and largest value of each number that a field may hold."""
    found = []
    for kind, metadata in numbers(field.annotation, tuple(field.metadata)):
        low = [m.ge for m in metadata if isinstance(m, bounds.Ge)]
        low += [math.nextafter(m.gt, math.inf) for m in metadata if isinstance(m, bounds.Gt)]
        high = [m.le for m in metadata if isinstance(m, bounds.Le)]
        high += [
            m.lt - 1 if kind is int else math.nextafter(m.lt, -math.inf) for m in metadata if isinstance(m, bounds.Lt)
        ]
        found.append((kind, low[0] if low else -math.inf, high[0] if high else math.inf))
    return found


def test_every_number_of_a_job_and_a_profile_has_finite_bounds() -> None:
    every = [*fields(JobSpec), *((f"profile.{name}", f) for name, f in fields(RuntimeProfile))]
    found = {f"{name}, {kind}": ends for name, f in every for kind, *ends in limits(f)}
    assert len(found) > 150
    assert {name: ends for name, ends in found.items() if not all(map(math.isfinite, ends))} == {}


def extremes() -> Iterator[tuple[str, float]]:
    """The smallest and the largest value of every number that a plan may read."""
    for name, field in fields(JobSpec):
        if name.split(".")[0] in ("cluster", "model", "parallel", "training"):
            for kind, low, high in limits(field):
                yield name, kind(low)
                yield name, kind(high)


def changed(job: dict[str, Any], name: str, value: float) -> dict[str, Any]:
    """The job with one value changed in place; tables on the way are made."""
    *path, key = name.split(".")
    if path == ["cluster", "fabric"]:
        levels = job["cluster"].setdefault("fabric", [{"name": "leaf", "gpus": 64}])
        levels[0][key] = value
        return job
    if path[:2] == ["cluster", "device"] and "device" not in job["cluster"]:
        job["cluster"]["device"] = {"preset": "h100-sxm"}
    table = job
    for part in path:
        start: dict[str, Any] = dict(OWN_KERNELS) if part == "kernels" else {}
        table = table.setdefault(part, start)
    if name.endswith("peak_flops"):
        table, key = table.setdefault(key, {}), "bf16"
    if path and path[-1] == "rotary_scaling" and not table:
        scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        table.update(scaling, original_max_position=8192.0)
        job["model"]["position"] = "rotary"
    if path and path[-1].endswith("_node") and not table:
        table["bandwidth"] = 1e9
    table[key] = value
    return job


EXTREMES = list(extremes())


def test_a_plan_at_a_bound_is_finite_or_refused_in_words() -> None:
    for name, value in EXTREMES:
        assert_finite(changed(copy.deepcopy(SMALL), name, value))


def assert_finite(job: dict[str, Any]) -> None:
    (answer,) = answers([json.dumps(job).encode()])
    json.dumps(answer, allow_nan=False)
    told = {issue["rule"] for issue in answer["issues"]}
    assert not told & {"unexpected-error", "not-estimated", "bad-value", "unknown-key"}, answer
    if answer["step_seconds"] is not None:
        assert 0 < answer["step_seconds"] < 1e60


@given(st.lists(st.sampled_from(EXTREMES), min_size=2, max_size=8))
@example([("model.attention_window", 1), ("parallel.cp", 2**31 - 1)])
@settings(max_examples=150, deadline=None)
@pytest.mark.slow
def test_several_bounds_at_once_are_finite_or_refused(values: list[tuple[str, float]]) -> None:
    job = copy.deepcopy(SMALL)
    for name, value in values:
        changed(job, name, value)
    assert_finite(job)


BEYOND = (
    ("cluster.intra_node.bandwidth", 1e-300),
    ("cluster.intra_node.bandwidth", 5e-324),
    ("cluster.inter_node.latency", 1e308),
    ("cluster.slowdown", 1e300),
    ("model.layers", 100_000),
    ("model.layers", 10**9),
    ("training.warmup_steps", 10**400),
    ("training.learning_rate", 1e308),
    ("launch.timeout_seconds", 1e300),
)


def test_what_lies_beyond_is_one_issue() -> None:
    for setting, value in BEYOND:
        with pytest.raises(InputError) as caught:
            load_job("megatron-8.3b-512", {setting: value})
        assert [(i.rule, i.where) for i in caught.value.issues] == [("bad-value", setting)]
