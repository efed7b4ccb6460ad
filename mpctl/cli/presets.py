"""`mpctl presets`: the tables of devices, clusters, models, jobs and runtimes, with sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli import complete
from mpctl.cli.options import AsJsonOption

if TYPE_CHECKING:
    from mpctl.spec.presets import Kind, PresetFile

KindArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[KIND]",
        help="devices, clusters, models, jobs or runtimes: list only these. May be left out "
        "before a NAME that only one kind has.",
        show_default=False,
        autocompletion=complete.kind_or_preset,
    ),
]
NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="[NAME]",
        help="Print this preset's TOML file; after KIND also by the file's path or, for a model, "
        "its id on Hugging Face's hub.",
        show_default=False,
        autocompletion=complete.preset_of_kind,
    ),
]


def presets(
    kind: KindArgument = None,
    name: NameArgument = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also list runtimes that few plans name.")] = False,
    as_json: AsJsonOption = False,
) -> None:
    """List presets with their folders, or print one unchanged.

    Presets of your own are TOML files in ./presets/KIND, ~/.config/mpctl/presets/KIND
    (XDG_CONFIG_HOME) and KIND of the folders in MPCTL_PRESETS, which are searched first.
    """
    from mpctl.render.output import print_json
    from mpctl.render.presets import PresetDocument, presets_document, print_preset, print_presets
    from mpctl.spec.presets import KINDS, preset_files

    wanted: dict[str, Kind] = {known: known for known in KINDS}
    if name is None and kind is not None and kind not in wanted:
        kind, name = None, kind
    if kind is not None and kind not in wanted:
        raise _unknown_kind(kind)
    kinds = (wanted[kind],) if kind else KINDS
    if name is not None:
        files = _find(kinds, name)
        if as_json:
            tables = {file.kind: file.read() for file in files}
            document: PresetDocument = {"schema": "mpctl.preset/1", "name": name, **tables}  # type: ignore[typeddict-item]
            print_json(document)
        else:
            print_preset(_only(files))
        return
    listing = {known: preset_files(known) for known in kinds}
    if as_json:
        print_json(presets_document(listing))
    else:
        print_presets(listing, show_all=show_all)


def _find(kinds: tuple[Kind, ...], name: str) -> list[PresetFile]:
    """The presets of this name, at most one of each kind. Raises InputError."""
    from mpctl.core.errors import InputError
    from mpctl.spec.paths import is_hub_id, is_path
    from mpctl.spec.presets import KINDS, find_file, get_file, nearest_names, preset_names
    from mpctl.spec.releases import preset_named

    if "runtimes" in kinds and (preset := preset_named(name)) != name:
        kinds, name = ("runtimes",), preset
    if len(kinds) > 1 and is_hub_id(name):
        kinds = ("models",)
    if len(kinds) == 1:
        return [get_file(kinds[0], name, where="NAME")]
    if is_path(name):
        message = f"{name!r} is a file, whose kind of preset is not known"
        raise InputError.of("unknown-preset", "NAME", message, f"mpctl presets KIND {name}")
    if files := [file for kind in KINDS if (file := find_file(kind, name)) is not None]:
        return files
    near = nearest_names(name, [known for kind in KINDS for known in preset_names(kind)])
    hint = f"did you mean {', '.join(near)}?" if near else "`mpctl presets` lists all"
    raise InputError.of("unknown-preset", "NAME", f"no preset is called {name!r}", hint)


def _only(files: list[PresetFile]) -> PresetFile:
    """The only file: two, one after the other, would not be valid TOML."""
    from mpctl.core.errors import InputError

    if len(files) == 1:
        return files[0]
    name, kinds = files[0].name, [file.kind for file in files]
    message = f"there are presets {name!r} of {' and of '.join(kinds)}"
    hint = f"use {' or '.join(f'mpctl presets {kind} {name}' for kind in kinds)}"
    raise InputError.of("several-kinds", "NAME", message, hint)


def _unknown_kind(kind: str) -> Exception:
    from mpctl.core.errors import InputError
    from mpctl.spec.presets import KINDS

    message = f"{kind!r} is not a kind of preset"
    return InputError.of("unknown-kind", "KIND", message, f"use {', '.join(KINDS)}")


SchemaArgument = Annotated[
    str | None,
    typer.Argument(metavar="[SCHEMA]", help="A document, such as mpctl.plan/2; by default a job.", show_default=False),
]


def schema(
    name: SchemaArgument = None,
    list_: Annotated[bool, typer.Option("--list", help="List the documents, and what each is.")] = False,
    find: Annotated[
        str | None, typer.Option("--find", help="Settings of a job with these words in name or description.")
    ] = None,
) -> None:
    """Print the JSON Schema of a job file, or of a document that mpctl prints or writes.

    Each document names its own in its key `schema`.

    mpctl schema --find "activation recompute"
    """
    from mpctl.cli.documents import DOCUMENTS, document_schema
    from mpctl.core.errors import InputError
    from mpctl.render.output import print_json
    from mpctl.spec.schema import find_settings, job_schema

    if find is not None:
        if not (found := find_settings(find)):
            message = f"no setting has {find!r} in its name or description"
            raise InputError.of("no-setting", "--find", message, "use other words, or read docs/reference.md")
        print_json(found)
    elif list_:
        width = max(map(len, DOCUMENTS))
        for known, document in DOCUMENTS.items():
            print(f"{known:{width}}  {document.meaning}")
    else:
        print_json(job_schema() if name is None else document_schema(name))
