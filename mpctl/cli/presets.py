"""`mpctl presets`: what the tables of devices, clusters, models and jobs hold, with sources."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Show this preset whole.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """List the presets, or show one with the source of its numbers."""
    from mpctl.errors import InputError
    from mpctl.render.json import print_json
    from mpctl.spec.presets import KINDS, find_preset, preset_names

    if name is None:
        listing = {kind: preset_names(kind) for kind in KINDS}
        if as_json:
            print_json({"schema": "mpctl.presets/1", **listing})
            return
        from mpctl.render.presets import print_presets

        print_presets(
            {kind: {n: find_preset(kind, n) or {} for n in listing[kind]} for kind in KINDS}
        )
        return
    found = {kind: table for kind in KINDS if (table := find_preset(kind, name)) is not None}
    if not found:
        import difflib

        every = [n for kind in KINDS for n in preset_names(kind)]
        near = difflib.get_close_matches(name, every, n=4)
        hint = f"did you mean {', '.join(near)}?" if near else "`mpctl presets` lists all"
        raise InputError.of("unknown-preset", "NAME", f"no preset is called {name!r}", hint)
    if as_json:
        print_json({"schema": "mpctl.preset/1", "name": name, **found})
        return
    from mpctl.render.presets import print_preset

    print_preset(name, list(found))
