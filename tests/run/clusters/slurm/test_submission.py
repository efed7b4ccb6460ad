"""The request of a plan to Slurm: nodes, GPUs, CPUs, memory, time; every issue at once."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import make_plan
from mpctl.run.clusters.slurm.partitions import read_partitions
from mpctl.run.clusters.slurm.submission import SaveNeed, Submission, default_signal_seconds, limit_issues
from tests.jobs import job_of

# By hand, of the module's docstring: 10 + 80 / (2 x 2) = 30 s at best, 10 + 80 / (2 x 0.2) = 210 s.
NEED = SaveNeed(step_seconds=10, checkpoint_bytes=80 * 10**9, nodes=2)


@pytest.mark.parametrize(
    ("need", "limit", "seconds"),
    [
        (NEED, inf, 420),
        (NEED, 3600, 420),
        (NEED, 600, 300),  # half of the limit
        (SaveNeed(0.1, 1000, 1), inf, 120),
        (SaveNeed(0.1, 1000, 1), 60, 30),
        (SaveNeed(1e6, 1000, 1), inf, 65_535),
    ],
)
def test_the_signal_comes_early_enough_for_a_slow_save(need: SaveNeed, limit: float, seconds: int) -> None:
    assert default_signal_seconds(need, limit) == seconds


def test_a_limit_shorter_than_one_save_is_refused() -> None:
    assert list(limit_issues(NEED, 31, None)) == []
    (issue,) = limit_issues(NEED, 29, None)
    assert issue.where == "launch.slurm.time"
    assert "0:00:29 is shorter than a step of 10.00 s and a checkpoint of 74.5 GiB, 30.00 s" in (issue.message)
    assert issue.hint == "use 0:02:00 or more"


def test_a_signal_must_leave_time_and_come_before_the_end() -> None:
    assert list(limit_issues(NEED, 3600, 60)) == []
    (short,) = limit_issues(NEED, 3600, 29)
    assert (short.where, short.hint) == ("launch.slurm.signal_seconds", "use 60 or more")
    (late,) = limit_issues(NEED, 3600, 3600)
    assert late.message == "3600 s, but the whole time limit is 1:00:00"
    assert len(list(limit_issues(NEED, 20, 25))) == 3


PARTITIONS = read_partitions(
    "main*|up|1:00:00|1-infinite|4|idle|64|257000|gpu:8|g[1-4]\n"
    "cpu|up|infinite|1-infinite|4|idle|16|16000|(null)|c[1-4]\n"
)
TWO: Mapping[str, object] = {"cluster.nodes": 2, "cluster.gpus_per_node": 4, "parallel.tp": 2}


def submission(shell: Mapping[str, str] = MappingProxyType({}), **settings: object) -> Submission:
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    return Submission(make_plan(job_of({**TWO, **dotted})), PARTITIONS, shell)


def test_a_plan_on_gpus_asks_for_whole_nodes() -> None:
    request, job = submission().request, submission().batch_job(Path("runs/demo"))
    assert (request.nodes, request.gpus, request.cpus, request.memory_bytes) == (2, 4, 1, 0)
    assert (job.nodes, job.gpus, job.cpus, job.name) == (2, 4, None, "demo")
    assert job.run == Path("runs/demo").absolute()
    assert job.command[-6:] == ["launch", "--resume", "--run-dir", str(job.run), "--on", "slurm"]
    assert list(submission().issues(Path("runs/demo"))) == []


def test_spare_nodes_are_asked_for_too() -> None:
    spared = submission(launch__device="cuda", launch__spare_nodes=2)
    assert spared.request.nodes == spared.batch_job(Path("/shared/demo")).nodes == 4
    assert spared.save_need.nodes == 2  # spare nodes save nothing


def test_a_plan_on_cpus_asks_for_cores_and_memory() -> None:
    chosen = submission(launch__device="cpu", launch__threads_per_rank=3, launch__slurm__partition="cpu")
    assert (chosen.request.gpus, chosen.request.cpus, chosen.batch_job(Path("r")).cpus) == (0, 12, 12)
    assert chosen.request.memory_bytes > 0
    assert list(chosen.issues(Path("r"))) == []


def test_the_device_follows_from_the_partition_where_the_job_leaves_it_open() -> None:
    assert submission().device == "cuda"
    assert submission(launch__slurm__partition="cpu").device == "cpu"


def test_the_signal_comes_within_the_limit_of_the_partition() -> None:
    assert submission().limit == 3600
    assert submission().batch_job(Path("r")).signal_seconds == 120
    short = submission(launch__slurm__time="3")
    assert (short.limit, short.batch_job(Path("r")).signal_seconds) == (180, 90)
    given = submission(launch__slurm__signal_seconds=77)
    assert given.batch_job(Path("r")).signal_seconds == 77


@pytest.mark.parametrize(
    ("value", "text"), [(datetime.time(12, 0), "12:00:00"), (30, "30"), ("2-00:00:00", "2-00:00:00")]
)
def test_a_time_limit_is_what_sbatch_would_read(value: object, text: str) -> None:
    """`12:00:00` and `30` in a job file, which TOML reads as a time of day and a number."""
    assert submission(launch__slurm__time=value).settings.time == text


def test_a_plan_that_does_not_fit_its_gpus_is_refused() -> None:
    large = {"cluster.device": "h100-sxm", "model.layers": 96, "model.hidden": 12288}
    (issue,) = submission(**large, launch__slurm__time="30:00").issues(Path("r"))
    assert issue.rule == "world-fits-memory"
    assert list(submission(**large, launch__check_memory=False).issues(Path("r"))) == []


def test_every_issue_is_named_at_once() -> None:
    chosen = submission(
        cluster__nodes=5,
        launch__slurm__time="2-0",
        launch__slurm__signal_seconds=65_000,
        launch__slurm__extra=["-N9", "x"],
    )
    issues = list(chosen.issues(Path("a\nb")))
    assert [issue.where for issue in issues] == [
        "cluster.nodes",
        "launch.slurm.time",
        "--run-dir",
        "launch.slurm.extra",
        "launch.slurm.extra",
    ]
    assert all(issue.hint for issue in issues)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"launch__slurm__partition": "nope"}, "launch.slurm.partition"),
        ({"launch__slurm__time": "soon"}, "launch.slurm.time"),
        ({"launch__slurm__time": "0:01", "model.layers": 96, "model.hidden": 12288}, "launch.slurm.time"),
        ({"launch__slurm__partition": "cpu", "launch__device": "cuda"}, "cluster.nodes"),
    ],
)
def test_what_cannot_run_is_refused(settings: dict[str, object], where: str) -> None:
    (issue,) = submission(**settings).issues(Path("r"))
    assert issue.where == where


SITE = {"SBATCH_PARTITION": "cpu", "SBATCH_ACCOUNT": "physics", "SBATCH_TIMELIMIT": "40"}


def test_what_the_job_leaves_open_is_the_shell_s_and_is_checked_and_written() -> None:
    chosen = submission(SITE, launch__device="cpu")
    assert chosen.request.partition == "cpu" and chosen.limit == 2400
    settings = chosen.batch_job(Path("r")).settings
    assert (settings.partition, settings.account, settings.time) == ("cpu", "physics", "40")
    own = submission(SITE, launch__slurm__partition="main", launch__slurm__time="30")
    assert (own.settings.partition, own.settings.account, own.limit) == ("main", "physics", 1800)
    (issue,) = submission({"SBATCH_PARTITION": "closed"}).issues(Path("r"))
    assert issue.rule == "slurm-partition" and "'closed'" in issue.message
    with pytest.raises(InputError, match="SBATCH_QOS"):
        list(submission({"SBATCH_QOS": "a\n#SBATCH -N 9"}).issues(Path("r")))
