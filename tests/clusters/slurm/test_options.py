"""launch.slurm.extra: which options of sbatch are taken, and how they are quoted."""

from __future__ import annotations

import shlex

import pytest

from mpctl.clusters.slurm.options import extra_issues, read_options


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("--exclusive", "--exclusive"),
        ("--mail-type=END", "--mail-type=END"),
        ("--nodelist n[1-2]", "--nodelist 'n[1-2]'"),
        ("-w n1", "-w n1"),
        ("-wn1", "-wn1"),
        ("--comment=it's # $HOME", "--comment='it'\"'\"'s # $HOME'"),
        ("--time-min=10", "--time-min=10"),
        ("--wait-all-nodes=1", "--wait-all-nodes=1"),
    ],
)
def test_an_option_is_quoted(text: str, written: str) -> None:
    assert list(extra_issues([text])) == []
    (option,) = read_options([text])
    assert option.text == written
    assert len(shlex.split(option.text, comments=True)) == 1 + (option.separator == " ")


@pytest.mark.parametrize(
    "text",
    ["", "x", "--", "-", "exclusive", "--a\n#SBATCH --b", "--a=1\nrm -rf x", "-w n1\r", "- w",
     "--comment=\x1b[0m"],
)  # fmt: skip
def test_text_that_is_no_option_is_refused(text: str) -> None:
    (issue,) = extra_issues([text])
    assert "is not an option of sbatch" in issue.message
    assert read_options([text]) == []


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("--nodes=4", "cluster.nodes"),
        ("-N4", "cluster.nodes"),
        ("-N 4", "cluster.nodes"),
        ("--part=x", "launch.slurm.partition"),  # sbatch takes the beginning of an option
        ("--out=x", "--run-dir"),
        ("-c2", "launch.threads_per_rank"),
        ("--no-requeue", "launch.slurm.requeue"),
        ("--array=1-4", "leave it out"),
        ("--export=NONE", "leave it out"),
    ],
)
def test_options_of_the_plan_are_refused_with_their_setting(text: str, way_out: str) -> None:
    (issue,) = extra_issues([text])
    assert way_out in issue.hint
    assert issue.where == "launch.slurm.extra"


def test_all_are_named_at_once() -> None:
    assert len(list(extra_issues(["x", "-N4", "--exclusive", "--array=1"]))) == 3
