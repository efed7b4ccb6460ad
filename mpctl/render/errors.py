"""Issues in words on stderr, or as one JSON document (schema mpctl.error/1) on stdout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpctl.errors import ErrorDocument, Issue
from mpctl.render.json import print_json

if TYPE_CHECKING:
    from rich.text import Text


def print_issues(issues: Sequence[Issue], *, wants_json: bool) -> None:
    """All issues of a command: as JSON on stdout, or else each with its way out on stderr."""
    if wants_json:
        document: ErrorDocument = {
            "schema": "mpctl.error/1",
            "issues": [issue.as_dict() for issue in issues],
        }
        print_json(document)
        return
    from mpctl.render.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for issue in issues:
        console.print(_issue_text(issue))


def _issue_text(issue: Issue) -> Text:
    """`✗ parallel.tp: 8 does not divide 25 heads  [rule]`, and the hint in a line of its own."""
    from rich.text import Text

    rule = (f"  [{issue.rule}]", "dim")
    text = Text.assemble(("✗ ", "bold red"), (issue.where, "bold"), f": {issue.message}", rule)
    return text.append("\n  → ", "cyan").append(issue.hint) if issue.hint else text


def print_warnings(messages: Sequence[str]) -> None:
    """One line each on stderr, so that stdout stays the result."""
    from rich.text import Text

    from mpctl.render.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for message in messages:
        console.print(Text.assemble(("! ", "bold yellow"), message))
