"""What to change in another launcher's flags, on the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.interop.changes import LaunchChanges
from mpctl.render.parts import Lines, Part
from mpctl.render.terminal import print_parts


def print_changes(changes: LaunchChanges) -> None:
    """Print the gain and the keys to change."""
    print_parts(change_parts(changes))


def change_parts(changes: LaunchChanges) -> Iterator[Part]:
    """The gain as the title, and a line for each key."""
    lines = [change.text for change in changes.changes] or ["nothing: it has this layout already"]
    if changes.why_not:
        lines = [f"no flags: {changes.why_not}"]
    yield Lines(changes.headline, lines)
