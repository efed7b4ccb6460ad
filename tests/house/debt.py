"""What the house still owes, counted by room; tests/house/debt.json holds what each may owe.

The counts only shrink: a test refuses more than the file allows, and `lower` never raises one.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from tests.house import measures
from tests.house.source import Module, Source

FILE = Path(__file__).with_name("debt.json")
DEBTS = ("undocumented", "riddles", "loose_signatures")
# Modules that read what somebody else wrote: parsed input is `dict[str, Any]` until it is checked.
PARSED_INPUT = (
    "mpctl.spec.", "mpctl.rundir.", "mpctl.calibrate.runs", "mpctl.search.request",
)  # fmt: skip


def count_debts(source: Source, kind: str) -> dict[str, list[str]]:
    """By room, the places of one kind of debt."""
    debts: dict[str, list[str]] = defaultdict(list)
    for module in source.modules.values():
        debts[module.room] += _owed(source, module, kind)
    return {room: owed for room, owed in sorted(debts.items()) if owed}


def _owed(source: Source, module: Module, kind: str) -> list[str]:
    if kind == "undocumented":
        return measures.undocumented(module)
    if kind == "riddles":
        return measures.riddles(module)
    if module.name.startswith(PARSED_INPUT):
        return []
    return measures.loose_signatures(source, module)


def read_allowed() -> dict[str, dict[str, int]]:
    """For each kind of debt, the most that each room may owe; a room that is not named, nothing."""
    return json.loads(FILE.read_text("utf-8"))


def lower(source: Source) -> None:
    """Write today's counts where they are smaller than the allowed ones."""
    allowed = read_allowed()
    for kind in DEBTS:
        counts = {room: len(owed) for room, owed in count_debts(source, kind).items()}
        lowered = {room: min(n, counts.get(room, 0)) for room, n in allowed.get(kind, {}).items()}
        allowed[kind] = {room: n for room, n in lowered.items() if n}
    FILE.write_text(json.dumps(allowed, indent=1) + "\n", "utf-8")
