"""The schedules of sail-sg's zero-bubble fork of Megatron-LM, read from its flags."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.mapping import ReadJob
from mpctl.model.pipeline.stages import job_stages
from mpctl.plan.planning.plan import make_plan
from mpctl.spec.load import load_job

SHAPE = (
    "--hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 --vocab-size 1000 "
    "--micro-batch-size 1 --global-batch-size 16 --fp16 --untie-embeddings-and-output-weights "
    "--pipeline-model-parallel-size 4 --transformer-impl local --use-legacy-models --use-flash-attn "
)
RANKS = {"cluster.nodes": 1, "cluster.gpus_per_node": 4, "cluster.device": "a100-80gb"}
V, SETUP = "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup"


def read(flags: str, layers: int = 8) -> ReadJob:
    return read_megatron(f"{SHAPE} --num-layers {layers} {flags}")


def said(job: ReadJob) -> str:
    return " ".join(f"{check.rule} {check}" for check in job.warnings)


@pytest.mark.parametrize(
    ("flags", "schedule", "vpp"),
    [
        (V, "zbv", 2),
        (f"{V} {SETUP} zb --enable-zero-bubble --enable-zb-runtime", "zbv", 2),
        (f"{V} {SETUP} half", "v-half", 2),
        (f"{V} {SETUP} min", "v-min", 2),
        ("--enable-zero-bubble --zero-bubble-max-pending-backward 4", "zero-bubble", 1),
    ],
)
def test_schedules(flags: str, schedule: str, vpp: int) -> None:
    job = load_job(None, {**read(flags).settings, **RANKS})
    assert (job.parallel.schedule, job.parallel.vpp) == (schedule, vpp)
    assert job.model is not None and job.model.attention == "flash"
    make_plan(job).require_legal()


@pytest.mark.parametrize(
    ("layers", "stages"),
    [
        (16, [4, 4, 4, 4]),
        (15, [3, 4, 4, 4]),  # stage 0 has both ends
        (14, [2, 4, 4, 4]),
    ],
)
def test_padding_takes_from_the_ends(layers: int, stages: list[int]) -> None:
    job = load_job(None, {**read(f"{V} --allow-padding-num-layers", layers).settings, **RANKS})
    assert [sum(stop - start for start, stop in spans) for spans in job_stages(job, layers)] == stages


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--enable-zero-bubble", "auto pending backwards are planned as pp, 4"),
        (f"{SETUP} half", "half: says nothing without --zero-bubble-v-schedule"),
        ("--zero-bubble-max-pending-backward 8", "8: says nothing without --enable-zero-bubble"),
        (f"{V} --transformer-impl transformer_engine", "does not put weight gradients off"),
        (f"{V} --enable-optimizer-post-validation", "--enable-optimizer-post-validation: not read"),
        (f"{V} --zero-bubble-pipeline-timers-start-iter 5", "timers-start-iter: ignored"),
    ],
)
def test_what_is_not_planned_as_it_runs_is_said(flags: str, words: str) -> None:
    assert words in said(read(flags))


@pytest.mark.parametrize(
    ("flags", "layers", "words"),
    [
        (f"{V} {SETUP} third", 8, "'third' is not known (use zb, half, min)"),
        (f"{V} --num-layers-per-virtual-pipeline-stage 1", 8, "is given together with --zero-bubble-v-schedule"),
        (f"{V} --allow-padding-num-layers", 5, "3 fewer than a multiple of pp 4"),
        ("--enable-1f1b-v", 8, "changes the layout, and no setting of a job says it"),
        ("--num-seq-splits 2", 8, "2: changes the layout"),
        ("--zero-bubble-v-scedule", 8, "did you mean --zero-bubble-v-schedule?"),
    ],
)
def test_what_no_job_says_is_refused(flags: str, layers: int, words: str) -> None:
    with pytest.raises(InputError) as caught:
        read(flags, layers)
    assert words in str(caught.value)


def test_a_job_without_these_flags_is_read_as_before() -> None:
    settings: dict[str, Any] = dict(read("").settings)
    assert "parallel.schedule" not in settings and settings.get("parallel.vpp", 1) == 1
