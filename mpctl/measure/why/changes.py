"""Changes of the observed job that would save time, each planned, with what to type.

Settings that the job lacks (levels.py) and layouts that differ in one setting, or in two where that
saves more than any one (plan/search/nearest.py).
A change of another launcher is what differs in the two texts that `--emit` writes.

>>> text_changes("train.py --bf16 --tp 2", "train.py --bf16 --tp 4 --sp", "shell")
['--sp', '--tp 4', 'without --tp 2']
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.interop.emitted import emit_plan
from mpctl.measure.why.levels import WORTH, missing_settings
from mpctl.measure.why.planned import Planned
from mpctl.plan.planning.layout_settings import changes_text
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.search.nearest import faster_nearby

MOST = 5


class ChangeEntry(TypedDict):
    """words: the change. settings: by full name. seconds: that it saves of the planned step; memory_bytes:
    on the fullest rank after it. flags: what changes in the launcher's command line or file."""

    words: str
    settings: dict[str, Any]
    seconds: float
    memory_bytes: int
    flags: list[str]


def find_changes(planned: Planned, launcher: str) -> list[ChangeEntry]:
    """The changes that save at least WORTH of the planned step, the most first. launcher: a target of
    `--emit`, empty for mpctl itself."""
    found: dict[str, ChangeEntry] = {}
    for settings in _candidates(planned):
        words = changes_text(settings)
        other = None if words in found else planned.with_settings(settings)
        if other is None or other.estimate.fits is False:
            continue
        saved = planned.time.total - other.time.total
        if saved >= WORTH * planned.time.total:
            flags = _flags(planned, other, launcher) if launcher else []
            found[words] = ChangeEntry(
                words=words,
                settings=dict(settings),
                seconds=saved,
                memory_bytes=other.estimate.device_bytes,
                flags=flags,
            )
    return _chosen(list(found.values()), WORTH * planned.time.total)


def _chosen(found: Sequence[ChangeEntry], worth: float) -> list[ChangeEntry]:
    """The best change of each setting, and the best of two settings where it saves `worth` more."""
    by_names: dict[tuple[str, ...], ChangeEntry] = {}
    for change in sorted(found, key=lambda change: -change["seconds"]):
        by_names.setdefault(tuple(change["settings"]), change)
    single = [change for names, change in by_names.items() if len(names) == 1]
    best = max((change["seconds"] for change in single), default=0.0)
    double = [c for names, c in by_names.items() if len(names) > 1 and c["seconds"] >= best + worth]
    return sorted([*single, *double[:1]], key=lambda change: -change["seconds"])[:MOST]


def _candidates(planned: Planned) -> Iterator[Mapping[str, Any]]:
    for setting, _ in missing_settings(planned):
        yield {setting.name: setting.good}
    for near in faster_nearby(planned.job):
        if near.step_seconds < planned.time.total:
            yield near.changes


def _flags(before: Planned, after: Planned, launcher: str) -> list[str]:
    """What differs in the texts for a launcher; empty where it cannot say one of them."""
    try:
        texts = [emit_plan(make_plan(one.job), launcher) for one in (before, after)]
    except InputError:
        return []
    return text_changes(texts[0].body, texts[1].body, texts[0].language)


def text_changes(before: str, after: str, language: str) -> list[str]:
    """The flags, or the lines of another language, that the later text has, then those that it lacks."""
    old, new = (_pieces(text, language) for text in (before, after))
    return [*(piece for piece in new if piece not in old), *(f"without {piece}" for piece in old if piece not in new)]


def _pieces(text: str, language: str) -> list[str]:
    if language != "shell":
        return [line.strip() for line in text.splitlines() if line.strip()]
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    starts = [n for n, word in enumerate(words) if word.startswith("--")]
    ends = [*starts[1:], len(words)]
    return sorted(" ".join(words[first:last]) for first, last in zip(starts, ends, strict=True))
