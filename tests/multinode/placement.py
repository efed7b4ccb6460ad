"""Where the ranks of a launch by node agents were, as the launcher recorded it."""

from __future__ import annotations

import json
from pathlib import Path


def recorded_hosts(run: Path) -> dict[int, str]:
    """The host of each rank in RUN/nodes/hosts.json."""
    document = json.loads((run / "nodes" / "hosts.json").read_text())
    return {
        rank: entry["host"]
        for entry in document["hosts"]
        for rank in range(entry["ranks"]["first"], sum(entry["ranks"].values()))
    }
