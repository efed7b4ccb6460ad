"""Variables of the shell that sbatch would rank above the script."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mpctl.run.clusters.slurm.script import script_options
from mpctl.run.clusters.slurm.variables import ignored_text, overriding
from mpctl.spec.launch import SlurmSpec
from tests.run.clusters.slurm.test_script import JOB


def options(**settings: object) -> list[str]:
    return list(script_options(replace(JOB, settings=SlurmSpec.model_validate(settings))))


@pytest.mark.parametrize(
    ("settings", "variables", "dropped"),
    [
        ({"partition": "main"}, {"SBATCH_PARTITION": "short"}, True),
        ({"requeue": True}, {"SBATCH_NO_REQUEUE": "1", "SBATCH_REQUEUE": "1"}, True),
        ({}, {"SBATCH_ARRAY_INX": "1-9", "SBATCH_EXPORT": "NONE", "SBATCH_WAIT": "1"}, True),
        ({}, {"SBATCH_OUTPUT": "x", "SBATCH_SIGNAL": "9", "SBATCH_JOB_NAME": "x"}, True),
        ({}, {"SBATCH_GPUS": "1", "SBATCH_GRES": "gpu:1", "SBATCH_MEM_PER_NODE": "1G"}, True),
        ({"extra": ["--reservation=a"]}, {"SBATCH_RESERVATION": "b"}, True),
        ({"extra": ["-m block"]}, {"SBATCH_DISTRIBUTION": "cyclic"}, True),
        ({}, {"SBATCH_RESERVATION": "b", "SBATCH_WAIT_ALL_NODES": "1"}, False),
        ({}, {"SBATCH_DISTRIBUTION": "cyclic", "SLURM_CONF": "/etc/slurm.conf"}, False),
    ],
)
def test_what_a_setting_names_is_not_passed_on(
    settings: dict[str, object], variables: dict[str, str], dropped: bool
) -> None:
    assert overriding(options(**settings), variables) == (variables if dropped else {})


def test_one_line_names_them_but_not_those_that_agree() -> None:
    shell = {"SBATCH_PARTITION": "short", "SBATCH_NO_REQUEUE": "1", "SBATCH_RESERVATION": "r"}
    assert ignored_text(options(partition="main"), shell) == (
        "the job's settings go before SBATCH_PARTITION=short, SBATCH_NO_REQUEUE=1 of this shell"
    )
    assert ignored_text(options(partition="short"), {"SBATCH_PARTITION": "short"}) is None
    assert ignored_text(options(), {"SBATCH_REQUEUE": "1", "SBATCH_EXCLUSIVE": "user"}) is None
