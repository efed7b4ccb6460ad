"""`mpctl presets`: the tables of devices, clusters, models, jobs and runtimes, with sources."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mpctl.errors import InputError
    from mpctl.spec.presets import Kind, PresetFile

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show this preset with all its values.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document on stdout.")
    ] = False,
) -> None:
    """List the presets, or show one with the source of its numbers.

    Folders named by the environment variable MPCTL_PRESETS add presets of your own.
    """
    from mpctl.render.json import print_json
    from mpctl.render.presets import print_preset, print_presets
    from mpctl.spec.presets import KINDS, find_file, preset_files

    if name is None:
        files = {kind: preset_files(kind) for kind in KINDS}
        if as_json:
            print_json(_listing(files))
        else:
            print_presets(files)
        return
    named = [file for kind in KINDS if (file := find_file(kind, name)) is not None]
    if not named:
        raise _unknown(name)
    if as_json:
        tables = {file.kind: file.read() for file in named}
        print_json({"schema": "mpctl.preset/1", "name": name, **tables})
    else:
        print_preset([file.path for file in named])


def _listing(files: Mapping[Kind, Mapping[str, PresetFile]]) -> dict[str, object]:
    """The names of each kind; `user`, where MPCTL_PRESETS brings any, names the files of those."""
    user = {
        kind: {
            name: {"file": str(file.path), "hides_another": file.hides}
            for name, file in named.items()
            if not file.is_bundled
        }
        for kind, named in files.items()
    }
    user = {kind: named for kind, named in user.items() if named}
    listing: dict[str, object] = {"schema": "mpctl.presets/1"}
    listing |= {kind: list(named) for kind, named in files.items()}
    return {**listing, "user": user} if user else listing


def _unknown(name: str) -> InputError:
    """No preset has this name: the nearest ones of any kind."""
    import difflib

    from mpctl.errors import InputError
    from mpctl.spec.presets import KINDS, preset_names

    every = [known for kind in KINDS for known in preset_names(kind)]
    near = difflib.get_close_matches(name, every, n=4)
    hint = f"did you mean {', '.join(near)}?" if near else "`mpctl presets` lists all"
    return InputError.of("unknown-preset", "NAME", f"no preset is called {name!r}", hint)
