"""Presets as tables, and one preset as the TOML file that it is."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from math import nan
from pathlib import Path
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import InputError
from mpctl.core.records import Json
from mpctl.core.units import COMPUTE, MEMORY, Measure, UnitError, parse_measure
from mpctl.plan.rules.launched import keys_not_launched
from mpctl.render.console import visible
from mpctl.render.parts import Part, Sentence, table_of
from mpctl.render.terminal import print_parts
from mpctl.spec.load import load_job
from mpctl.spec.presets import Kind, PresetFile, hub_ids
from mpctl.spec.releases import releases_of


class UserPreset(TypedDict):
    """A preset of the user. hides_another: of the same name in a later folder."""

    file: str
    hides_another: bool


class PresetsDocument(TypedDict):
    """Schema mpctl.presets/1: names by kind. files: the path of each, None for a bundled one; hub_ids: names of
    models' presets by id; not_launched: the keys because of which a model is only planned; releases: of software
    that a runtime stands for; user: the user's."""

    schema: Literal["mpctl.presets/1"]
    devices: NotRequired[list[str]]
    clusters: NotRequired[list[str]]
    models: NotRequired[list[str]]
    jobs: NotRequired[list[str]]
    runtimes: NotRequired[list[str]]
    files: dict[Kind, dict[str, str | None]]
    hub_ids: NotRequired[dict[str, str]]
    not_launched: NotRequired[dict[str, list[str]]]
    releases: NotRequired[dict[str, list[str]]]
    user: NotRequired[dict[Kind, dict[str, UserPreset]]]


class PresetDocument(TypedDict):
    """Schema mpctl.preset/1: the preset of this name, by kind."""

    schema: Literal["mpctl.preset/1"]
    name: str
    devices: NotRequired[Json]
    clusters: NotRequired[Json]
    models: NotRequired[Json]
    jobs: NotRequired[Json]
    runtimes: NotRequired[Json]


def presets_document(listing: Mapping[Kind, Mapping[str, PresetFile]]) -> PresetsDocument:
    """Return the listed presets as JSON."""
    user: dict[Kind, dict[str, UserPreset]] = {
        kind: {
            name: {"file": str(file.path), "hides_another": file.hides}
            for name, file in named.items()
            if not file.is_bundled
        }
        for kind, named in listing.items()
    }
    document: PresetsDocument = {
        "schema": "mpctl.presets/1",
        **{kind: list(named) for kind, named in listing.items()},  # type: ignore[typeddict-item]
        "files": {
            kind: {name: None if file.is_bundled else str(file.path) for name, file in named.items()}
            for kind, named in listing.items()
        },
    }
    if models := listing.get("models"):
        document["hub_ids"] = hub_ids()
        keys = {name: not_launched_keys(name) for name in models}
        document["not_launched"] = {name: found for name, found in keys.items() if found}
    if runtimes := listing.get("runtimes"):
        document["releases"] = {name: found for name in runtimes if (found := releases_of(name))}
    if any(user.values()):
        document["user"] = {kind: named for kind, named in user.items() if named}
    return document


RARE = ("maxtext-gpu", "megatron-2020", "megatron-2021", "megatron-2022", "pax-gpu")
"""Bundled runtimes of published runs that few plans name."""


def print_presets(kinds: Mapping[Kind, Mapping[str, PresetFile]], *, show_all: bool) -> None:
    """Print a table for each kind: names, the folder where each was found, and what it is in short. show_all:
    with the runtimes RARE."""
    print_parts(presets_parts(kinds, show_all=show_all))


def presets_parts(kinds: Mapping[Kind, Mapping[str, PresetFile]], *, show_all: bool) -> Iterator[Part]:
    """A table for each kind."""
    for kind, every in kinds.items():
        left_out = [] if show_all or kind != "runtimes" else [n for n in RARE if n in every and every[n].is_bundled]
        files = {name: file for name, file in every.items() if name not in left_out}
        more = {"models": ["trains"], "runtimes": ["releases"]}.get(kind, [])
        about = _trains if kind == "models" else _releases
        columns = ("name", "from", *more, "what")
        rows = ((name, _origin(file), *(about(name) for _ in more), _summary(file)) for name, file in files.items())
        yield table_of(kind, columns, rows, left=columns, whole=1)
        if kind == "runtimes":
            yield Sentence(RELEASES, "note")
        if left_out:
            yield Sentence(f"and {', '.join(left_out)} (--all)", "note")


RELEASES = "--runtime takes a release too: megatron-bridge-26.06, nemo:26.06, megatron-core-0.16"


def _releases(name: str) -> str:
    """The releases of software that a runtime's figures stand for."""
    return ", ".join(releases_of(name))


def _trains(name: str) -> str:
    """Whether `mpctl launch` runs a model, or the keys because of which it is planned alone; empty
    for a preset that cannot be read."""
    if (keys := not_launched_keys(name)) is None:
        return ""
    return f"no: {', '.join(keys)}" if keys else "yes"


def not_launched_keys(name: str) -> list[str] | None:
    """Return keys_not_launched for a preset of a model; None if the preset cannot be read."""
    try:
        model = load_job(None, {"model": name}).model
    except InputError:
        return None
    return None if model is None else keys_not_launched(model)


def _origin(file: PresetFile) -> str:
    """`./presets`, and whether another of the same name is hidden by it."""
    if file.is_bundled:
        return "bundled"
    folder = str(file.path.parent.parent)
    home = str(Path("~").expanduser())
    folder = f"~{folder[len(home) :]}" if folder.startswith(f"{home}/") else folder
    folder = folder if file.path.is_absolute() or folder.startswith("~") else f"./{folder}"
    return f"{folder}, hides another" if file.hides else folder


def print_preset(file: PresetFile) -> None:
    """The file byte for byte, in a terminal too: `mpctl presets NAME > x.toml` is a copy.

    A terminal gets none of the control characters that it would obey.
    """
    content = file.content()
    if sys.stdout.isatty():
        text = content.decode("utf-8", errors="replace").replace("\r\n", "\n")
        content = visible(text).encode("utf-8")
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


def _summary(file: PresetFile) -> str:
    """A preset in a few words; of one that cannot be read why."""
    try:
        return _words(file.kind, file.read())
    except InputError as error:
        return f"✗ {error.issues[0].message}"


def _words(kind: Kind, table: dict[str, Any]) -> str:
    if kind == "devices":
        rates = table.get("peak_flops")
        rates = rates.items() if isinstance(rates, dict) else ()
        peak = ", ".join(f"{dtype} {_number(rate, COMPUTE) / 1e12:g}" for dtype, rate in rates)
        return f"{_number(table.get('memory_bytes'), MEMORY) / 2**30:g} GiB; TFLOP/s: {peak}"
    if kind == "clusters":
        return f"{table.get('nodes')} x {table.get('gpus_per_node')} {table.get('device')}"
    if kind == "models":
        keys = ("layers", "hidden", "heads", "vocab", "seq_length")
        return f"{table.get('family')}: " + ", ".join(f"{k} {table[k]}" for k in keys if k in table)
    return str(table.get("description", table.get("name", "")))


def _number(value: Any, measure: Measure) -> float:
    """A number of a preset that may be written with its unit; nan for what is none."""
    if isinstance(value, int | float):
        return value
    try:
        return float(parse_measure(str(value), measure))
    except UnitError:
        return nan
