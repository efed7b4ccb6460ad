"""A command line's job as a job file: its source as the preset, and every setting over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from mpctl.core.errors import InputError
from mpctl.core.records import flat


def job_toml(source: str | None, settings: Mapping[str, Any], about: Sequence[str]) -> str:
    """The text of a job file that plans as `source` with these settings, by full name, from any
    folder; None removes what the source sets. Raises InputError for a job on standard input, which no
    file can start from."""
    from mpctl.render.job_file import JobFile, job_text
    from mpctl.spec.load import STDIN
    from mpctl.spec.presets import PRESET_TABLES, lasting_name

    if source == STDIN:
        raise InputError.of("usage", "JOB", "a job on standard input has no file to start from", "name its file")
    kinds = {".".join(path): kind for path, kind in PRESET_TABLES.items() if path}
    removed = {name for name, value in settings.items() if value is None}
    written: dict[str, object] = {} if source is None else _start(source, removed)
    for name, value in sorted(settings.items(), key=lambda item: item[0].partition(".")[0]):
        if name in kinds and isinstance(value, str):
            written[f"{name}.preset"] = lasting_name(kinds[name], value)
        elif value is not None:
            written.update(flat({name: value}))
    return job_text(JobFile(about, written, {}))


def _start(source: str, removed: Set[str]) -> dict[str, object]:
    """Name the source as the file's preset, or copy its tables without the removed settings: a file cannot unset
    what its preset sets."""
    from mpctl.spec.load import read_source
    from mpctl.spec.presets import lasting_name

    named: dict[str, object] = {"preset": lasting_name("jobs", source)}
    if not removed:
        return named
    tables = dict(flat(read_source(source)))
    preset = tables.pop("preset", None)
    start = {} if preset is None else _start(str(preset), removed)
    if removed.isdisjoint(tables) and start.keys() <= {"preset"}:
        return named
    return {**start, **{name: value for name, value in tables.items() if name not in removed}}
