"""docs/tour.md: the same losses in five layouts, and the figures that it counts by hand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mpctl.cli.app import run
from mpctl.plan.planning.plan import load_plan
from tests import readme

TOUR = (readme.ROOT / "docs" / "tour.md").read_text("utf-8")
LAUNCHES = readme.SHOWN.findall(TOUR)
LOSSES = re.compile(r"^loss +(\S+)|^validation loss +(.*)$", re.M)
COUNTED = re.compile(r"messages\s+of\s+(\S+)\s+(\S+)\s+a\s+step")


def losses(text: str) -> list[str]:
    """The losses in the summary of a launch, as printed; its last step may be cut off."""
    return ["".join(groups) for groups in LOSSES.findall(text)]


def test_five_layouts_of_the_page_have_the_same_losses() -> None:
    ends = {tuple(losses(block)) for _, block in LAUNCHES}
    assert len(LAUNCHES) == 5 and len(ends) == 1 and len(*ends) == 2


def test_what_the_page_counts_is_what_is_planned_and_was_sent() -> None:
    sent = [" ".join(found) for _, block in LAUNCHES for found in COUNTED.findall(block)]
    assert sent == ["0 B", "72.0 MiB", "16.3 MiB", "8.0 MiB", "80.3 MiB"]  # 64 + 16.3 for cp
    plan = load_plan("demo", {"tp": 1, "cluster.gpus_per_node": 1})
    assert plan.estimate is not None
    (stage,) = plan.estimate.memory
    states = stage.parameter_bytes + stage.gradient_bytes + stage.optimizer_bytes
    assert stage.parameters == 4_273_664 and states == 16 * stage.parameters
    assert "4,273,664" in TOUR and "65.2 MiB" in TOUR and f"{states / 2**20:.1f}" == "65.2"


@pytest.mark.slow
@pytest.mark.parametrize(("command", "block"), LAUNCHES, ids=[c for c, _ in LAUNCHES])
def test_a_training_of_the_page(
    command: str, block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses and messages, and the way on from its checkpoint."""
    monkeypatch.chdir(tmp_path)
    assert run(shlex.split(readme.CUT.sub("", command))[1:]) == 0
    said = capsys.readouterr()
    said_text = said.err + said.out
    assert losses(said_text) == losses(block)
    assert COUNTED.findall(said_text) == COUNTED.findall(block)
    if "--tp 2" in command:
        (again,) = re.findall(r"^mpctl (launch --resume .*)$", TOUR, re.M)
        assert run(shlex.split(again)) == 0


@pytest.mark.slow
def test_the_curves_lie_over_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (show,) = re.findall(r"^mpctl (show .*)$", TOUR, re.M)
    for command, _ in LAUNCHES[:2]:
        assert run(shlex.split(readme.CUT.sub("", command))[1:]) == 0
    names = ("runs/one", "runs/tp")
    words = [word for word in shlex.split(show) if not word.startswith("runs/") or word in names]
    assert run(words) == 0 and "loss" in capsys.readouterr().out
