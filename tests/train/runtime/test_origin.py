"""Ranks whose hosts see different states of one run directory."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import RunFailed
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.rundir.origin import Origin
from mpctl.spec.load import parse
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from tests.ranks import run_ranks
from tests.train.runtime.tiny import tiny_job, train

Steps = list[int | None]


@pytest.fixture(scope="module")
def views(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two views of a run that has saved steps 2 and 4: the second does not show step 4 yet."""
    folder = tmp_path_factory.mktemp("views")
    job = tiny_job(data, dp=2, training__steps=4, checkpoint__interval=2)
    train(job, folder / "now")
    shutil.copytree(folder / "now", folder / "stale")
    shutil.rmtree(folder / "stale/checkpoints/step-4")
    yield [folder / "now", folder / "stale"]


def start(
    rank: int, size: int, raw: dict[str, Any], views: list[str], steps: Steps, wait: float, save: str = ""
) -> list[float]:
    """The step from which a rank starts, in its own view, after trying for `wait` seconds."""
    job, run_dir = parse(raw), Path(views[rank])
    origin = Origin(steps[rank], hashlib.sha256(b"job").hexdigest(), save, wait)
    environment = RuntimeEnvironment.of_machine(job, run_dir, local_rank=rank, origin=origin)
    trainer = build_trainer(run_dir, JobLayout.of(job), rank, environment)
    return [trainer.step, sum(p.detach().double().sum().item() for p in trainer.model.parameters())]


def started(data: Path, views: list[Path], steps: Steps, wait: float, save: str = "") -> list[Any]:
    raw = tiny_job(data, dp=2, training__steps=6).model_dump(mode="json")
    return run_ranks(start, 2, raw, [str(view) for view in views], steps, wait, save)


def test_a_rank_waits_until_its_host_shows_the_named_checkpoint(data: Path, views: list[Path]) -> None:
    def show() -> None:
        time.sleep(2)
        shutil.copytree(views[0] / "checkpoints/step-4", views[1] / "checkpoints/.copy")
        (views[1] / "checkpoints/.copy").rename(views[1] / "checkpoints/step-4")

    thread = threading.Thread(target=show)
    thread.start()
    try:
        first, second = started(data, views, [4, 4], 40)
    finally:
        thread.join()
        shutil.rmtree(views[1] / "checkpoints/step-4")
    assert first == second and first[0] == 4


def test_ranks_take_the_named_checkpoint_and_no_newer_one(data: Path, views: list[Path]) -> None:
    """A launcher whose listing is late names an older one: all the ranks use that."""
    first, second = started(data, views, [2, 2], 40)
    assert first == second and first[0] == 2


def test_one_that_is_never_shown_ends_the_start(data: Path, views: list[Path]) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2.*does not show step-4 to this host"):
        started(data, views, [4, 4], 1)


def test_another_save_of_the_named_step_is_not_taken(data: Path, views: list[Path]) -> None:
    """After a rollback step 4 was trained and saved again; the second host still shows the old."""
    saved, old = (views[0] / "checkpoints/step-4", views[1] / "checkpoints/step-4")
    save = read_manifest(saved).save
    shutil.copytree(saved, old)
    document = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(document | {"save": "0" * 16}))
    try:
        with pytest.raises(AssertionError, match=rf"(?s)rank 1.*not show step-4 of save {save}"):
            started(data, views, [4, 4], 1, save)
        shutil.copy(saved / "manifest.json", old)
        first, second = started(data, views, [4, 4], 1, save)
    finally:
        shutil.rmtree(old)
    assert first == second and first[0] == 4


def test_ranks_that_were_named_different_steps_do_not_train(data: Path, views: list[Path]) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 is to resume .* step 2, rank 0 .* step 4"):
        started(data, views, [4, 2], 1)


def test_where_nobody_names_one_rank_0_decides(data: Path, views: list[Path]) -> None:
    first, second = started(data, list(reversed(views)), [None, None], 40)
    assert first == second and first[0] == 2


def test_job_json_is_read_once_it_is_the_one_that_the_launcher_wrote(tmp_path: Path) -> None:
    path, origin = tmp_path / "job.json", replace(Origin.of_attempt(tmp_path, "new"), patience=0.1)
    path.write_text("old")
    with pytest.raises(RunFailed, match="is not the job that the launcher wrote"):
        origin.read_job(path)
    timer = threading.Timer(1, path.write_text, ["new"])
    timer.start()
    assert Origin.of_attempt(tmp_path, "new").read_job(path) == b"new"
    timer.join()
    assert Origin().read_job(path) == b"new"


def test_an_origin_survives_the_environment(tmp_path: Path, views: list[Path]) -> None:
    origin = Origin.of_attempt(tmp_path, "{}")
    assert Origin.from_environment(origin.variables) == origin
    assert origin.variables["MPCTL_RESUME_STEP"] == "0"
    origin = Origin.of_attempt(views[0] / "checkpoints", "{}")
    assert Origin.from_environment(origin.variables) == origin
    assert (origin.step, len(origin.save)) == (4, 16)
    assert Origin.from_environment({}) == Origin() and Origin().variables == {}
