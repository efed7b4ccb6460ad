"""`--layouts tp=1,2 pp=1,2`: several words behind one option.

A shell hands on the words after the first as it does JOB; they are told apart by their `=`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

import typer

from mpctl.cli.options import JobSource
from mpctl.errors import InputError

LAYOUT_WORD = re.compile(r"\w+=")
LayoutsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="AXIS=SIZES...",
        help="Every combination of these sizes of tp, cp, pp, dp, vpp and zero: tp=1,2 pp=1,2.",
        show_default=False,
    ),
]


def with_layout_words(
    job: JobSource, layouts: list[str] | None, words: list[str]
) -> tuple[JobSource, list[str] | None]:
    """The job, and all words of --layouts; None without that option.

    words: arguments after the first, which is job.source. Raises InputError where --layouts, which
    is of one job, has several beside it.
    """
    free = [*([job.source] if job.source else []), *words]
    named = [word for word in free if LAYOUT_WORD.match(word)] if layouts else []
    jobs = [word for word in free if word not in named]
    if len(jobs) > 1:
        message, hint = f"unexpected {jobs[1]!r} beside {jobs[0]!r}", "give one JOB"
        raise InputError.of("usage", "JOB", message, hint)
    every = [*layouts, *named] if layouts else None
    return replace(job, source=jobs[0] if jobs else None), every
