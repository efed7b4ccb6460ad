"""Runtime presets by the release that a user has: `megatron-bridge-26.06`, `nemo:26.06`, `megatron-core-0.18`.

A preset's name says what was fitted, which nobody knows who has a container. presets/releases.toml says which
preset was fitted to which release; a name of a preset is never taken for a release. A job names its preset once it
is loaded (spec/load.py), with a warning that says so; a newer release than the table knows is planned as its newest.

>>> [find_release(text).presets[0] for text in ("megatron-bridge-26.04", "nvcr.io/nvidia/nemo:26.06.01", "mcore_v0.14")]
['megatron-core', 'megatron-core-graphs', 'megatron-core']
>>> find_release("megatron-core-graphs") is None
True
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from functools import cache
from typing import NamedTuple

from pydantic import Field

from mpctl.core.errors import InputError, Issue
from mpctl.spec.base import StrictModel
from mpctl.spec.presets import find_file, nearest_names, presets_root

_TEXT = re.compile(
    r"(?:[\w.-]+/)*(?P<name>[a-z][a-z_-]*?)"  # nvcr.io/nvidia/nemo
    r"(?:(?:==|[:@_-])(?:core_|core-)?[vr]?(?P<version>\d{1,4}(?:\.\d{1,4}){1,3})(?P<rest>[.+-]?[a-z][\w.+-]*)?)?",
    re.ASCII,
)
_DATED = 20  # the least first number of a version that is a date: 24.05, 2026.10


class SoftwareReleases(StrictModel):
    """The releases of a training software and the presets that were fitted to them."""

    names: list[str] = Field(description="what it is called")
    latest: str = Field(description="the newest release known")
    first: dict[str, list[str]] = Field(description="the first release of presets, those of the newest hardware first")
    source: str = Field("", description="where the versions come from")

    @property
    def is_dated(self) -> bool:
        """Whether its versions are dates."""
        return _numbers(self.latest)[0] >= _DATED

    def presets_of(self, version: str) -> list[str]:
        """The presets of a release; [] for one before the first."""
        found = [presets for first, presets in self.first.items() if _numbers(first) <= _numbers(version)]
        return found[-1] if found else []


class Release(NamedTuple):
    """A release that a user named. presets: fitted to it; note: in words, if it is planned as another."""

    text: str
    presets: tuple[str, ...]
    note: str = ""

    def preset_for(self, dtypes: Collection[str] | None) -> str:
        """The preset for a device that multiplies these data types; None: the device is not known."""
        from mpctl.spec.runtime import get_profile

        return next((name for name in self.presets if get_profile(name).runs.is_for(dtypes)), self.presets[-1])

    def warning(self, preset: str) -> Issue:
        """The warning of a plan by the figures of this preset."""
        message = f"{self.text} is planned by the figures of runtime {preset}" + (f"; {self.note}" if self.note else "")
        others = [name for name in self.presets if name != preset]
        hint = f"--runtime {others[0]} for those of {_software(others[0])}" if others else ""
        return Issue("runtime-release", "training.runtime", message, hint)


def find_release(text: str) -> Release | None:
    """The release of this name; None where a runtime preset has the name, or no software in the table.

    Raises InputError for a release before the first one that has a preset."""
    found = _TEXT.fullmatch(text.lower())
    if found is None or find_file("runtimes", text) is not None:
        return None
    name, version = found["name"].replace("_", "-"), found["version"]
    known = [software for software in releases() if name in software.names]
    if not known:
        return None
    if version is None:
        software = known[0]
        note = f"no release is given: the newest, {software.latest}"
        return Release(text, tuple(software.presets_of(software.latest)), note)
    dated = _numbers(version)[0] >= _DATED
    software = next((software for software in known if software.is_dated == dated), known[0])
    if software.is_dated != dated or not (presets := software.presets_of(version)):
        raise _unknown(text, known)
    is_newer = _numbers(version) > (*_numbers(software.latest), 99)
    note = f"newer than the newest known, {software.latest}, and planned as that" if is_newer else ""
    return Release(text, tuple(presets), note)


def preset_named(text: str, dtypes: Collection[str] | None = None) -> str:
    """The preset of a release for devices that multiply these data types; another text unchanged. Raises InputError as
    find_release does."""
    release = find_release(text)
    return text if release is None else release.preset_for(dtypes)


def _unknown(text: str, known: list[SoftwareReleases]) -> InputError:
    spans = [f"{software.names[0]}-{min(software.first, key=_numbers)} to {software.latest}" for software in known]
    message = f"{text!r} is no release that a preset was fitted to"
    return InputError.of("unknown-release", "training.runtime", message, f"known: {', '.join(spans)}")


def release_hint(text: str) -> str:
    """`megatron-bridge-26.06`: the release of the nearest known software in a misspelt name; empty if none is near."""
    found = _TEXT.fullmatch(text.lower())
    if found is None or found["version"] is None:
        return ""
    dated = _numbers(found["version"])[0] >= _DATED
    known = [
        software for software in releases() if software.is_dated == dated and software.presets_of(found["version"])
    ]
    names = [name for software in known for name in software.names]
    return ", ".join(f"{name}-{found['version']}" for name in nearest_names(found["name"].replace("_", "-"), names))


@cache
def releases() -> tuple[SoftwareReleases, ...]:
    """The table of releases, read once."""
    table = tomllib.loads((presets_root() / "releases.toml").read_text("utf-8"))
    return tuple(SoftwareReleases.model_validate(software) for software in table["software"])


def releases_of(preset: str) -> list[str]:
    """The releases that a preset stands for: `megatron-core from 0.18 with nvfp4`, on such devices alone."""
    from mpctl.spec.runtime import get_profile

    texts = []
    for software in releases():
        starts = [start for start, presets in software.first.items() if preset in presets]
        if starts:
            needs = get_profile(preset).runs.needs
            texts.append(f"{software.names[0]} from {starts[0]}" + (f" with {needs}" if needs else ""))
    return texts


def _software(preset: str) -> str:
    from mpctl.spec.runtime import get_profile

    return get_profile(preset).name


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
