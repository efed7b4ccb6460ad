"""Finds what would break or slow the ranks in the environment of this process: modules that hide
others, the locale, other programs that take the processors.

Ranks are started with the same PYTHONPATH but without the working directory on their path
(PYTHONSAFEPATH), so they may import other modules than this process did.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import mpctl
from mpctl.core.errors import Issue
from mpctl.core.units import plural, seconds_text
from mpctl.spec.job import JobSpec

HINT = "take its folder out of PYTHONPATH, or rename it"
BUSY = 0.5  # of the processors, running in the mean of the last minute: a warning


def environment_issues(job: JobSpec) -> Iterator[Issue]:
    """Every reason why ranks of this job would not start although this process did."""
    yield from hidden_modules()
    yield from _foreign_packages(sys.path if sys.flags.safe_path else sys.path[1:])
    yield from _locale(job)


def hidden_modules() -> Iterator[Issue]:
    """Modules of Python's library that were imported from a folder of PYTHONPATH instead."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = {str(Path(entry).resolve()) for entry in entries if entry}
    for name in sorted(sys.stdlib_module_names & sys.modules.keys()):
        file = getattr(sys.modules[name], "__file__", None)
        if not file:
            continue
        path = Path(file).resolve()
        folder = path.parent.parent if path.name == "__init__.py" else path.parent
        if str(folder) in folders:
            yield Issue(
                "module-hidden",
                "PYTHONPATH",
                f"{path} hides Python's own module {name!r}, which mpctl and torch import",
                HINT,
            )


def _foreign_packages(path: Sequence[str]) -> Iterator[Issue]:
    """Whether ranks would import another mpctl or torch, found without importing either."""
    ours = Path(mpctl.__file__).resolve().parent
    for package in _location("mpctl", path):
        if package != ours:
            yield Issue(
                "other-mpctl",
                "PYTHONPATH",
                f"ranks would import mpctl from {package}, but this command runs from {ours}",
                "take the other one out of PYTHONPATH, or install the one that is meant (pip install -e .)",
            )
    for package in _location("torch", path):
        if not (package / "distributed").is_dir():
            yield Issue("module-hidden", "PYTHONPATH", f"{package} is found as 'torch' and is not PyTorch", HINT)


def _location(name: str, path: Sequence[str]) -> list[Path]:
    """[the folder of a package or the file of a module]; [] when it is not on the path."""
    spec = PathFinder.find_spec(name, path)
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return [Path(next(iter(spec.submodule_search_locations))).resolve()]
    return [Path(spec.origin).resolve()] if spec.origin else []


def _locale(job: JobSpec) -> Iterator[Issue]:
    """A path whose bytes are not text in this locale cannot be written into a job file."""
    text = json.dumps(job.model_dump(), default=str, ensure_ascii=False) + f' in "{Path.cwd()}"'
    try:
        text.encode()
    except UnicodeEncodeError as error:
        begin = text.rfind('"', 0, error.start) + 1
        shown = text[begin : text.find('"', error.end)].encode(errors="backslashreplace").decode()
        yield Issue(
            "path-not-text",
            "LC_ALL",
            f"{shown} is not text in this locale (file names are read as {sys.getfilesystemencoding()})",
            "set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or rename it",
        )


def is_busy(load: float, processors: int) -> bool:
    """Whether a host of so many processors is busy at this load average of a minute."""
    return load > BUSY * processors


def busy_text(load: float, processors: int, predicted: float | None) -> str | None:
    """The warning of a run on this host's processors before its first step; None where they are
    free, or nothing is forecast. predicted: seconds of a step."""
    if predicted is None or not is_busy(load, processors):
        return None
    return (
        f"this host is busy: {load:.1f} processes ran in the last minute, on "
        f"{plural(processors, 'processor')}; the forecast of {seconds_text(predicted)} a step is "
        "for a host that does nothing else"
    )
