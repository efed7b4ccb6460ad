"""A front end knows no other one."""

from __future__ import annotations

from pathlib import Path

import mpctl
from tests.house.source import Source

FRONT_ENDS = ("local", "ssh", "slurm", "kubernetes", "torchrun")


def test_front_ends_do_not_import_each_other() -> None:
    imported = Source(Path(mpctl.__file__).parent).imported
    found = {
        (name, other)
        for name, targets in imported.items()
        for other in targets
        for own in FRONT_ENDS
        if name.startswith(f"mpctl.run.clusters.{own}")
        and other.startswith(tuple(f"mpctl.run.clusters.{each}" for each in FRONT_ENDS if each != own))
    }
    assert found == set()
