"""A profiled step: every pass once, collectives within it, nothing of other steps."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.measure.bench.trace import read_run_profile
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.topology import job_topology
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.records.rundir.profile_files import WORK, profile_path
from mpctl.spec.load import parse
from mpctl.train.runtime.activity import Activity
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.profile import StepProfile, clock_name
from mpctl.train.transport.timing import Collective, SecondsByAxis
from tests.ranks import run_ranks
from tests.train.runtime.tiny import settings, tiny_job

HEAD = {"rank": 0, "world_size": 1, "coords": {"tp": 0}, "host": "here", "clock": "c"}


class Ticking(SecondsByAxis):
    """A clock that a test sets."""

    moment = 0.0

    def now(self) -> float:
        return self.moment


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_the_named_steps_are_recorded_with_what_follows_them(tmp_path: Path) -> None:
    clock, path = Ticking(), tmp_path / "profile" / "rank-0.jsonl"
    profile = StepProfile("2", path, HEAD, clock)
    for step in (1, 2, 3):
        profile.begin_step(step)
        assert list(profile.each("data", iter("ab"))) == ["a", "b"]
        profile.begin(Action("forward", 4, 1))
        clock.moment += 2
        profile.end(Action("forward", 4, 1))
        with profile.span("optimizer"):
            clock.moment += 1
        profile.end_step()
        with profile.span("checkpoint"):
            clock.moment += 5
    profile.finish()
    (line,) = lines(path)
    assert {key: line[key] for key in line if key != "events"} == {**HEAD, "step": 2}
    assert [event for event in line["events"] if event["name"] != "data"] == [
        {"name": "step", "began": 8, "ended": 11},
        {"name": "forward", "began": 8, "ended": 10, "microbatch": 4, "chunk": 1},
        {"name": "optimizer", "began": 10, "ended": 11},
        {"name": "checkpoint", "began": 11, "ended": 16},
    ]
    assert [event["name"] for event in line["events"]].count("data") == 2


def test_a_wait_names_the_start_that_it_belongs_to(tmp_path: Path) -> None:
    timer = SecondsByAxis()
    profile = StepProfile("1", tmp_path / "rank-0.jsonl", HEAD, timer)
    collective = Collective("all_reduce", "tp", 8, "float32")
    timer.spent(collective, timer.now())  # before the step: not recorded
    profile.begin_step(1)
    began = timer.now()
    timer.spent(collective, began)
    timer.spent(collective, timer.now(), began)
    profile.end_step()
    profile.finish()
    timer.spent(collective, timer.now())
    _, start, wait = lines(tmp_path / "rank-0.jsonl")[0]["events"]
    assert (start["phase"], wait["phase"]) == ("start", "wait")
    assert wait["started"] == start["began"] <= start["ended"] <= wait["began"] <= wait["ended"]
    assert (wait["axis"], wait["bytes"], wait["dtype"]) == ("tp", 8, "float32")


def test_a_profile_that_is_off_writes_nothing(tmp_path: Path) -> None:
    profile, items = StepProfile(path=tmp_path / "rank-0.jsonl"), iter("ab")
    profile.begin_step(1)
    assert profile.each("data", items) is items
    with profile.span("optimizer"):
        profile.begin(Action("forward", 0))
        profile.end(Action("forward", 0))
    profile.end_step()
    profile.finish()
    assert not list(tmp_path.iterdir())


class Shifted(SecondsByAxis):
    """The clock of another host, which began 1,000 s earlier."""

    def seconds_at(self, moment: Any) -> float:
        return super().seconds_at(moment) + 1000


def _train(rank: int, size: int, raw: dict[str, Any], run_dir: str, has_two_clocks: bool = False) -> int:
    """Train, profiled; has_two_clocks: rank 1 is as on another host."""
    job, run = parse(raw), Path(run_dir)
    is_elsewhere = has_two_clocks and rank == 1
    topology, timer = job_topology(job), Shifted() if is_elsewhere else SecondsByAxis()
    head = {
        "rank": rank,
        "world_size": size,
        "coords": topology.coords(rank),
        "host": "here",
        "clock": "there" if is_elsewhere else clock_name(),
    }
    activity = Activity()
    profile = StepProfile(job.launch.profile, profile_path(run, rank), head, timer, activity)
    base = RuntimeEnvironment.of_machine(job, run, local_rank=rank, activity=activity)
    environment = replace(base, communication=timer, profile=profile)
    return len(list(build_trainer(run, JobLayout.of(job), rank, environment).run()))


@pytest.mark.parametrize(
    ("tp", "pp", "how"),
    [
        (1, 1, {}),
        (2, 2, {"parallel__vpp": 1}),
        pytest.param(1, 2, {"parallel__schedule": "zero-bubble"}, marks=pytest.mark.slow),
    ],
)
def test_a_step_of_real_ranks(data: Path, tmp_path: Path, tp: int, pp: int, how: dict[str, Any]) -> None:
    job = tiny_job(
        data,
        tp,
        parallel__pp=pp,
        cluster__gpus_per_node=tp * pp,
        training__steps=3,
        training__eval_samples=2,
        checkpoint__interval=0,
        checkpoint__at_end=True,
        launch__profile="2-3",
        **how,
    )
    raw = job.model_dump(mode="json")
    assert run_ranks(_train, tp * pp, raw, str(tmp_path)) == [3] * (tp * pp)
    profile = read_run_profile(tmp_path)
    assert (list(profile.steps), profile.missing, profile.foreign) == ([2, 3], [], 0)
    assert set(profile.offsets.values()) == {0.0}
    for line in profile.lines:
        events = line["events"]
        (step,) = (event for event in events if event["name"] == "step")
        within = [e for e in events if e["began"] >= step["began"] and e["ended"] <= step["ended"]]
        counts = Counter(event["name"] for event in within if "axis" not in event)
        backward = "backward_input" if how.get("parallel__schedule") else "backward"
        assert counts["forward"] == counts[backward] == counts["data"] == job.num_microbatches
        assert counts["optimizer"] == counts["status"] == counts["gradients"] == 1
        after = {e["name"] for e in events if e not in within and "axis" not in e}
        assert after <= {*WORK} and ("validation" in after) == (line["step"] == 3)
        for event in events:
            assert event["began"] <= event["ended"]
            assert event.get("phase") != "wait" or event["started"] <= event["began"]
        sends = [e for e in within if e["name"] == "send" and e["phase"] == "start"]
        assert len(sends) == (job.num_microbatches if pp == 2 else 0)
        assert all(event["peer"] == 1 - line["coords"]["pp"] for event in sends)


def test_settings_of_a_profile_are_ranges() -> None:
    from mpctl.core.errors import InputError
    from mpctl.spec.load import load_job

    assert load_job(None, settings(launch__profile="2, 5-7")).launch.profile == "2, 5-7"
    for wrong in ("7-5", "0", "x", "3-3-3", "5,4", "-1"):
        with pytest.raises(InputError, match="rising order"):
            load_job(None, settings(launch__profile=wrong))


def test_two_hosts_clocks_are_made_one(data: Path, tmp_path: Path) -> None:
    """Rank 1 has another clock; aligned, both ranks were in each step at the same time."""
    job = tiny_job(
        data,
        2,
        training__steps=5,
        training__eval_samples=0,
        checkpoint__interval=0,
        checkpoint__at_end=False,
        launch__profile="2-5",
    )
    assert run_ranks(_train, 2, job.model_dump(mode="json"), str(tmp_path), True) == [5, 5]
    profile = read_run_profile(tmp_path)
    first, second = profile.offsets.values()
    assert first == 0 and second == pytest.approx(-1000, abs=0.2)  # some turns of a loaded core
    for ranks in profile.steps.values():
        steps = [next(e for e in profile.events(line) if e["name"] == "step") for line in ranks.values()]
        assert max(s["began"] for s in steps) < min(s["ended"] for s in steps)
