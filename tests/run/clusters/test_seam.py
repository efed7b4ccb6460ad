"""A front end knows no other one."""

from __future__ import annotations

from pathlib import Path

import mpctl
from tests.house.source import Source

FRONT_ENDS = ("local", "ssh", "slurm", "kubernetes", "torchrun")


def test_front_ends_do_not_import_each_other() -> None:
    modules = Source(Path(mpctl.__file__).parent).modules.values()
    found = {
        (module.name, name)
        for module in modules
        if module.room == "run/clusters"
        for name, _ in module.imports
        for own in FRONT_ENDS
        if module.name.startswith(f"mpctl.run.clusters.{own}")
        and name.startswith(tuple(f"mpctl.run.clusters.{each}" for each in FRONT_ENDS if each != own))
    }
    assert found == set()
