"""`mpctl data`: text to token files once, so that every launch and layout reads the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.hints import HintingGroup

if TYPE_CHECKING:
    from mpctl.data.manifest import Prepared

app = typer.Typer(
    cls=HintingGroup, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=False
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON document, the manifest, on stdout.")]


@app.callback()
def data() -> None:
    """Prepare text for training, and look at what was prepared.

    A launch prepares its own corpus; do it here to share one set of token files between runs.
    """


@app.command()
def prepare(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Where token files, tokenizer and manifest go; whole at the end, or not at all.",
        ),
    ],
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Text files, .jsonl files (a document a line), .parquet files (a document a row) "
            "or folders of them; .gz and .zst are unpacked. Or python-stdlib, some 9 MB of text "
            "that every machine has.",
            show_default="python-stdlib",
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="Entries of the tokenizer to train: more make texts shorter, and the model's "
            "word table larger. Give the model as many. With --extend-tokenizer, old and new "
            "ones together.",
            show_default="4096, or as many as --tokenizer has",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Use this tokenizer.json (or that of a folder of prepared data, or of a run) "
            "instead of training one: token ids then mean what they mean to its model.",
        ),
    ] = None,
    extend_tokenizer: Annotated[
        bool,
        typer.Option(
            "--extend-tokenizer",
            help="Add pieces of this corpus to --tokenizer, up to --vocab-size entries in all: a "
            "new language gets shorter, and old ids keep their meaning for a model that is "
            "started from its old weights.",
        ),
    ] = False,
    validation_fraction: Annotated[
        float,
        typer.Option(
            help="Share of documents held back: loss on text that was never trained on tells "
            "learning from memorizing."
        ),
    ] = 0.02,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Use at most this many bytes of text, unpacked, in whole files drawn by the hash "
            "of their names: less is a subset of more.",
            show_default="all",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides which documents are held back.")] = 1234,
    text_key: Annotated[
        str, typer.Option(help="Key of the text in .jsonl lines, column in .parquet files.")
    ] = "text",
    encoding: Annotated[
        str, typer.Option(help="Of text and .jsonl files, for example latin-1.")
    ] = "utf-8",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what was prepared in DIR; no other file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Cut a corpus into documents, train a tokenizer, write the tokens of both splits.

    The same text and settings give the same bytes on every machine. A stop (Ctrl-C) leaves nothing
    behind.
    """
    from mpctl.cli.stop import ended_by_signals
    from mpctl.data.prepare import prepare as prepare_data
    from mpctl.render.tasks import TaskBar
    from mpctl.spec.paths import PYTHON_STDLIB

    with ended_by_signals(f"{out} is as it was"), TaskBar(lines=True) as bar:
        prepared = prepare_data(
            sources=sources or [PYTHON_STDLIB], out=out, tokenizer=tokenizer,
            extend=extend_tokenizer,
            vocab_size=_default_vocab_size(tokenizer) if vocab_size is None else vocab_size,
            max_bytes=max_bytes,
            validation_fraction=validation_fraction, seed=seed, text_key=text_key,
            encoding=encoding, overwrite=overwrite, on_progress=bar.update,
        )  # fmt: skip
    _print(prepared, as_json=as_json, first_lines=None)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of prepared data.")],
    hashes: Annotated[
        bool,
        typer.Option(
            "--hashes",
            help="Also compare every file's sha256 with the manifest: sizes do not tell a flipped "
            "bit (about a second a GB).",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify prepared data against its manifest and show its sizes and first lines."""
    from mpctl.data.manifest import open_prepared
    from mpctl.data.peek import first_lines

    prepared = open_prepared(folder, hashes=hashes)
    _print(prepared, as_json=as_json, first_lines=first_lines(prepared))


def _default_vocab_size(tokenizer: Path | None) -> int:
    if tokenizer is None:
        return 4096
    from mpctl.data.tokenizer import find_tokenizer, load_tokenizer, vocabulary_size

    return vocabulary_size(load_tokenizer(find_tokenizer(tokenizer)))


def _print(prepared: Prepared, *, as_json: bool, first_lines: list[str] | None) -> None:
    from mpctl.render.data import print_prepared
    from mpctl.render.json import print_json

    if not as_json:
        print_prepared(prepared, first_lines)
    elif first_lines is None:
        print_json(prepared.as_dict())
    else:
        print_json({**prepared.as_dict(), "first_lines": first_lines})
