"""What a search tries under a runtime, its launcher accepts: [runs] and [searched] of the runtime say so."""

from __future__ import annotations

import random
from importlib import import_module

import pytest

from mpctl.interop.registry import LAUNCHERS
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.load import load_job
from mpctl.spec.presets import preset_names
from mpctl.spec.runtime import get_profile

CASES = [(name, emit[0], "llama-3-8b") for name in preset_names("runtimes") if (emit := get_profile(name).runs.emit)]
CASES.append(("megatron-core", "megatron", "qwen3-30b-a3b"))


@pytest.mark.parametrize(("runtime", "launcher", "model"), CASES)
def test_a_launcher_accepts_what_is_searched(runtime: str, launcher: str, model: str) -> None:
    settings = {"cluster": "dgx-h100", "cluster.nodes": 2, "cluster.gpus_per_node": 4, "model.layers": 8}
    settings |= {"training.global_batch_size": 16, "training.dtype": "bf16"}
    space = SearchSpace(load_job(None, {**settings, "model": model, "training.runtime": runtime}))
    layouts = list(space.layouts())
    target = import_module(LAUNCHERS[launcher].module).LAUNCHER
    for layout in random.Random(1).sample(layouts, min(40, len(layouts))):
        assert list(target.refusals(make_plan(space.job_of(layout)))) == []


def test_what_accelerate_cannot_say_is_tried_on_request() -> None:
    """fsdp2 runs pipelines, accelerate's config has none."""
    settings = {"cluster": "dgx-h100", "cluster.nodes": 1, "model": "llama-3-8b", "training.runtime": "fsdp2"}
    job = load_job(None, {**settings, "training.global_batch_size": 16})
    assert {layout.pp for layout in SearchSpace(job).layouts()} == {1}
    assert {layout.pp for layout in SearchSpace(job, {"pp": 2}).layouts()} == {2}
