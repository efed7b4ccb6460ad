"""A family is one folder: a toy one in a package outside of mpctl is planned and trained.

The package is copied to a temporary folder with the metadata that pip would write, and put on
PYTHONPATH; no file of mpctl/ knows its name.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run.launch.command import Launched, end_all, launch
from tests.train.runtime.tiny import make_data

STEPS = 4
RECURRENT = ("recurrent", "linear", "mlp-first")
TOY = {
    "model.family": "toy",
    "model.position": "none",
    "model.vocab": 310,
    "training.steps": STEPS,
    "training.eval_samples": 0,
    "checkpoint.interval": STEPS,
}
SHAPE = {"model.layers": 3, "model.hidden": 16, "model.heads": 4, "model.seq_length": 8}


ENTRY_POINTS = """[mpctl.families]
toy = toy_family.family:FAMILY
recurrent = toy_family.recurrent:RECURRENT
linear = toy_family.recurrent:LINEAR
mlp-first = toy_family.recurrent:MLP_FIRST
missing = toy_family.nothing:FAMILY
wrong = toy_family.family:BEGIN
"""


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The package with its entry point, where processes that a test starts find it."""
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).with_name("toy_family"), site / "toy_family")
    info = site / "toy_family-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        yield
    end_all()


def mpctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mpctl", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]


def test_it_is_planned() -> None:
    """Word table 512 x 16 (310 padded to 128 x 2), parities 2 x 16, three layers of 12 h^2 + 13 h
    with h 16; with tp 2 each rank has half of all but norms, row biases and parities."""
    sizes = {"cluster.gpus_per_node": 2, "parallel.tp": 2}
    done = mpctl("plan", "--json", *flags({**TOY, **SHAPE, **sizes}))
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["parameters"] == 512 * 16 + 2 * 16 + 3 * (12 * 256 + 13 * 16)
    whole = 2 * 16 + 3 * (4 * 16 + 2 * 16)
    split = 512 * 16 + 3 * (12 * 256 + 13 * 16 - 6 * 16)
    assert plan["memory"]["stages"][0]["parameters"] == whole + split // 2


def test_a_name_like_it_is_hinted_and_its_rules_are_its_own() -> None:
    unknown = mpctl("plan", "--json", *flags({**TOY, **SHAPE, "model.family": "toi"}))
    assert unknown.returncode == 2 and "use toy" in unknown.stdout + unknown.stderr
    rotary = mpctl("plan", "--json", *flags({**TOY, **SHAPE, "model.position": "rotary"}))
    assert rotary.returncode == 2 and "family-positions" in rotary.stdout + rotary.stderr


@pytest.mark.parametrize(("family", "why"), [("missing", "cannot be imported"), ("wrong", "gives a str")])
def test_a_package_that_gives_no_family_is_refused(family: str, why: str) -> None:
    done = mpctl("plan", "--json", *flags({**TOY, **SHAPE, "model.family": family}))
    assert done.returncode == 2
    assert "family-import" in done.stdout + done.stderr and why in done.stdout + done.stderr


def train(folder: Path, data: Path, *layout: str, family: str = "toy") -> Launched:
    settings = {**TOY, "model.family": family}
    run = launch(data, folder / f"{family}{len(layout)}", *layout, *flags(settings)).ended()
    assert run.process.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("toy-data"))


@pytest.fixture(scope="module")
def two_ranks(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Launched:
    return train(tmp_path_factory.mktemp("toy"), data, "--tp", "2")


@pytest.mark.slow
def test_two_ranks_train_it_as_planned(two_ranks: Launched) -> None:
    """Parameters and collectives of the ranks are those of the plan, byte by byte."""
    summary = two_ranks.summary
    assert summary["status"] == "finished"
    assert [rank["agrees"] for rank in summary["plan_beside_run"]] == [True, True]
    assert len(two_ranks.losses) == STEPS and two_ranks.losses[-1] < two_ranks.losses[0]


@pytest.mark.slow
def test_one_rank_trains_it_with_the_same_losses(two_ranks: Launched, data: Path, tmp_path: Path) -> None:
    alone = train(tmp_path, data, "--tp", "1")
    assert alone.losses == pytest.approx(two_ranks.losses, rel=1e-6)


@pytest.mark.parametrize("family", RECURRENT)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.quick(3)
def test_a_layer_without_attention_takes_the_memory_of_its_plan(family: str, ranks: int) -> None:
    """Layers of a recurrence and an MLP, of a recurrence and two products without an activation, and
    with the MLP first: nothing of mpctl knows of attention in the peak of a step."""
    wide = {"model.layers": 2, "model.hidden": 64, "model.ffn": 256, "model.heads": 4, "model.seq_length": 64}
    batch = {"training.micro_batch_size": 8, "training.global_batch_size": 8, "parallel.tp": ranks}
    settings = {**TOY, **wide, **batch, "model.family": family, "cluster.gpus_per_node": ranks}
    done = mpctl("launch", "--rehearse", "--json", *flags(settings))
    assert done.returncode == 0, done.stderr
    (rank,) = json.loads(done.stdout)["ranks"]
    assert rank["agrees"]
    assert rank["peak_bytes"]["planned"] == pytest.approx(rank["peak_bytes"]["measured"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", RECURRENT)
def test_a_layer_without_attention_is_trained(family: str, data: Path, tmp_path: Path) -> None:
    """On one rank and on two, with the parameters, messages and losses that they should have."""
    alone, split = (train(tmp_path, data, *how, family=family) for how in ((), ("--tp", "2")))
    assert all(rank["agrees"] for run in (alone, split) for rank in run.summary["plan_beside_run"])
    assert alone.losses == pytest.approx(split.losses, rel=1e-6)
    assert alone.losses[-1] < alone.losses[0]
