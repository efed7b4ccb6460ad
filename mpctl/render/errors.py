"""Issues in words on stderr, or as one JSON document on stdout."""

from __future__ import annotations

from mpctl.errors import Issue
from mpctl.render.json import print_json


def print_issues(issues: list[Issue], *, wants_json: bool) -> None:
    if wants_json:
        document = {"schema": "mpctl.error/1", "issues": [issue.as_dict() for issue in issues]}
        print_json(document)
        return
    from rich.text import Text

    from mpctl.render.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for issue in issues:
        console.print(
            Text.assemble(
                ("✗ ", "bold red"),
                (issue.where, "bold"),
                ": ",
                issue.message,
                (f"  [{issue.rule}]", "dim"),
            )
        )
        if issue.hint:
            console.print(Text.assemble(("  → ", "cyan"), issue.hint))


def print_warnings(messages: list[str]) -> None:
    """One line each on stderr, so that stdout stays the result."""
    from rich.text import Text

    from mpctl.render.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for message in messages:
        console.print(Text.assemble(("! ", "bold yellow"), message))
