"""A system that was never measured is said to be unknown, and its estimate shifted and wide."""

from __future__ import annotations

from math import exp, hypot, log
from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.advice import next_measurement
from mpctl.plan.estimate.explain import explain_time
from mpctl.plan.estimate.network import CROWD, crowding
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.estimate.system import SPREAD, find_system, layer_shape, unknown_parts
from mpctl.plan.estimate.time import find_step_time, step_time_model
from mpctl.plan.planning.document import plan_document
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.cluster import LinkSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile
from tests.jobs import GPT, job_of

SELENE = {
    "cluster": "selene",
    "cluster.nodes": 4,
    "training.dtype": "fp16",
    "training.runtime": "megatron-2021",
    "training.micro_batch_size": 2,
}

THIN = {"cluster": "mosaic-a100-80gb", "cluster.inter_node.bandwidth": 5e9, "parallel.zero": 3}


def time_of(job: JobSpec) -> StepTime:
    time = find_step_time(JobLayout.of(job))
    assert isinstance(time, StepTime)
    return time


def test_a_measured_system_is_its_profile_its_device_and_its_cluster_over_the_same_links() -> None:
    profile = get_profile("megatron-2021")
    known = job_of(SELENE).cluster
    assert unknown_parts(known, profile) == () and find_system(known, profile).factor == 1
    slower = job_of({**SELENE, "cluster.inter_node.bandwidth": 50e9}).cluster
    assert unknown_parts(slower, profile) == ("Selene was measured over links of another bandwidth",)
    other_device = job_of({**SELENE, "cluster.device": "h100-sxm"}).cluster
    assert "was never measured on NVIDIA H100" in unknown_parts(other_device, profile)[0]
    assert "never measured on Selene" in unknown_parts(known, get_profile("torchtitan"))[1]


def test_nodes_and_efficiencies_do_not_make_another_system() -> None:
    """A job on a part of a cluster, and a fit that moves a link's efficiency."""
    profile = get_profile("megatron-2021")
    for more in ({"cluster.nodes": 1}, {"cluster.inter_node.efficiency": 0.5}):
        assert find_system(job_of({**SELENE, **more}).cluster, profile).is_measured, more


def test_layers_take_what_own_runs_found_of_their_shape_on_their_cluster() -> None:
    """By a half more in a pipeline of micro batches of 2, and nothing else."""
    job = job_of({**SELENE, "parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 8})
    layout, profile = JobLayout.of(job), get_profile("megatron-2021")
    found = {"Selene": {layer_shape(job): 1.5}}
    slow = profile.model_copy(update={"seen": profile.seen.model_copy(update={"layer_factors": found})})
    before, after = step_time_model(layout, profile), step_time_model(layout, slow)
    assert after.layer().forward == pytest.approx(1.5 * before.layer().forward)
    assert before.seconds < after.seconds < 1.5 * before.seconds
    for other in ({"training.micro_batch_size": 1}, {"cluster.name": "another"}):
        changed = JobLayout.of(job_of({**SELENE, "parallel.tp": 2, "parallel.pp": 2, **other}))
        assert step_time_model(changed, slow).seconds == step_time_model(changed, profile).seconds, other


def test_everything_of_an_unknown_system_lasts_as_many_times_as_long() -> None:
    """Kernels, messages and host alike, so that no layout gains on another by it."""
    layout = {**SELENE, "parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 8}
    plain = time_of(job_of(layout))
    shifted = time_of(job_of({**layout, "cluster.step_factor": 1.25}))
    assert shifted.total == pytest.approx(1.25 * plain.total)
    for name, seconds in plain.parts().items():
        assert shifted.parts()[name] == pytest.approx(1.25 * seconds), name
    unknown = job_of({**layout, "cluster.name": "ours"})
    factor = get_profile("megatron-2021").shift_apart
    assert time_of(unknown).total == pytest.approx(factor * plain.total) and factor > 1


def test_the_band_of_an_unknown_system_is_at_least_that_of_whole_systems_left_out() -> None:
    profile = get_profile("megatron-core")
    time = time_of(job_of({**SELENE, "training.runtime": "megatron-core", "cluster.name": "ours"}))
    assert profile.spread_apart < SPREAD
    assert time.band.factor == pytest.approx(exp(1.645 * SPREAD))
    assert time.extrapolates == (
        "Megatron-Core was never measured on ours",
        f"so all times are multiplied by {profile.shift_apart:g}, as is typical of systems never measured",
    )


def test_own_runs_replace_the_shift_and_make_changed_links_known() -> None:
    own = job_of({**SELENE, "cluster.inter_node.bandwidth": 50e9, "cluster.step_factor": 1.05})
    system = find_system(own.cluster, get_profile("megatron-2021"))
    assert system == (True, 1.05)
    assert time_of(own).extrapolates == ()


def test_a_copy_of_an_own_cluster_has_the_factor_that_own_runs_found() -> None:
    """A job may name the file that it named before `mpctl calibrate`, which states no factor."""
    profile, cluster = get_profile("megatron-2021"), job_of(SELENE).cluster
    seen = profile.seen.model_copy(update={"step_factors": {"Selene": 1.07}})
    own = profile.model_copy(update={"seen": seen})
    assert find_system(cluster, own).factor == 1.07
    stated = cluster.model_copy(update={"step_factor": 1.2})
    assert find_system(stated, own).factor == 1.2


def test_large_groups_on_an_unmeasured_network_by_hand() -> None:
    """566 ranks are CROWD more than those of two nodes: a byte takes twice as long."""
    unknown, flat = LinkSpec(bandwidth=1e9), LinkSpec(bandwidth=1e9, decay=0)
    assert crowding(unknown, 16 + int(CROWD), 16) == 2
    assert crowding(unknown, 16, 16) == crowding(unknown, 8, 16) == 1
    assert crowding(flat, 1024, 16) == 1
    assert crowding(LinkSpec(bandwidth=1e9, decay=0.5), 64, 16) == 2


def test_what_to_measure_next_is_what_the_step_rests_on() -> None:
    """Few ranks compute; ZeRO 3 at one sample over a thin network waits for it."""
    assert next_measurement(JobLayout.of(job_of(SELENE))) is None
    alone: dict[str, Any] = {**SELENE, "cluster.name": "ours", "training.runtime": "fsdp"}
    few = next_measurement(JobLayout.of(job_of({**alone, "cluster.nodes": 1})))
    assert few is not None and few.startswith("five runs")
    thin = {**alone, **THIN}
    waits = next_measurement(JobLayout.of(job_of(thin)))
    assert waits is not None and waits.startswith("`mpctl bench collectives`")


def test_a_band_widens_by_what_the_step_rests_on_a_network_that_nobody_measured() -> None:
    """Messages 1.35 times as long: as much longer as the step is then, beside the usual spread."""
    job = job_of({**SELENE, **THIN, "training.runtime": "fsdp", "cluster.nodes": 8})
    time_model = step_time_model(JobLayout.of(job))
    doubt = log(time_model.slower(1.35).seconds / time_model.seconds)
    assert time_model.network_doubt == pytest.approx(doubt) and doubt > SPREAD
    reasons = sum("measured has" in text or "at fp16" in text for text in time_model.step().extrapolates)
    spread = hypot(SPREAD, doubt) * time_model.operators.profile.widening**reasons
    assert time_model.step().band.factor == pytest.approx(exp(1.645 * spread))
    for known in ({"cluster.inter_node.decay": 0.0}, {"cluster.nodes": 1}):
        assert step_time_model(JobLayout.of(job_of({**SELENE, **THIN, **known}))).network_doubt == 0


def test_a_document_says_whether_a_system_was_measured() -> None:
    for more, known, factor in (({}, True, 1.0), ({"cluster.name": "ours"}, False, 1.18)):
        plan = load_plan(None, {**GPT, **SELENE, **more})
        time = plan_document(plan, plan.require_legal(), kinds=(), ranks=False)["time"]
        assert (time["is_measured"], time["step_factor"]) == (known, factor)
        assert (time["measure_next"] is None) is known


def test_explain_states_the_shift_its_reason_and_what_narrows_the_band() -> None:
    unknown = JobLayout.of(job_of({**SELENE, "cluster.name": "ours"}))
    figures = {figure.name: figure for figure in explain_time(unknown)}
    shown = figures["time.system"]
    assert shown.value == get_profile("megatron-2021").shift_apart
    assert "never measured on ours" in shown.numbers and "five runs" in shown.source
    known = explain_time(JobLayout.of(job_of(SELENE)))
    assert "time.system" not in {figure.name for figure in known}
