"""Name the user's presets behind a job's figures.

`calibrate --out presets` writes fitted copies under the names of bundled presets, and every later command in
that directory reads them: outputs name them in their heads. Bundled presets are not named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.spec.presets import PresetFile, bundled_names

if TYPE_CHECKING:
    from mpctl.spec.job import JobSpec


class FigureSource(TypedDict):
    """A preset of the user that figures come from. kind: devices, clusters, models, jobs or runtimes; hides:
    whether it hides the bundled preset of its name."""

    path: str
    kind: str
    name: str
    hides: bool


def figure_sources(job: JobSpec, presets: Iterable[PresetFile]) -> list[FigureSource]:
    """Return the user's presets behind a job's figures, each once. presets: those that the job starts from
    (LoadedJob); its runtime's is added."""
    files = [*presets]
    if job.model is not None:
        from mpctl.spec.runtime import profile_file  # a job without a model does not need it

        runtime = profile_file(job.training.runtime)
        files += [] if runtime.is_bundled else [runtime]
    return [
        {
            "path": str(file.path),
            "kind": file.kind,
            "name": file.name,
            "hides": file.hides and file.name in bundled_names(file.kind),
        }
        for file in dict.fromkeys(files)
    ]


def sources_text(sources: Sequence[FigureSource]) -> str:
    """Return the presets in words, those that hide a bundled one first.

    >>> sources_text([{"path": "presets/devices/a100.toml", "kind": "devices", "name": "a100", "hides": True}])
    './presets/devices/a100.toml hides the bundled one'
    """
    hiding, others = ([_shown(s["path"]) for s in sources if s["hides"] is hides] for hides in (True, False))
    verb = "hides the bundled one" if len(hiding) == 1 else "hide the bundled ones"
    parts = [f"{_listed(hiding)} {verb}"] if hiding else []
    return "; ".join([*parts, *([_listed(others)] if others else [])])


def _listed(paths: Sequence[str]) -> str:
    *first, last = paths
    return f"{', '.join(first)} and {last}" if first else last


def _shown(path: str) -> str:
    """`presets/devices/a.toml` -> `./presets/devices/a.toml`."""
    return path if PurePath(path).is_absolute() or path.startswith(".") else f"./{path}"
