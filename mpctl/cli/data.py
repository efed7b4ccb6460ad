"""`mpctl data`: turn text once into token files that every launch and layout can read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mpctl.cli.hints import HintingGroup
from mpctl.cli.options import AsJsonOption
from mpctl.spec.chat import LossOn, Overflow, Packing

if TYPE_CHECKING:
    from mpctl.train.data.chat_samples import TextRun
    from mpctl.train.data.manifest import Prepared

app = typer.Typer(cls=HintingGroup, pretty_exceptions_enable=False, no_args_is_help=True, add_completion=False)


@app.callback()
def data() -> None:
    """Prepare text for training, and verify prepared data.

    A launch prepares the corpus of its job by itself; use this command to share it between runs.
    """


OutOption = Annotated[
    Path,
    typer.Option(metavar="DIR", help="Folder for token files, tokenizer and manifest; it appears when it is complete."),
]
SourcesOption = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SOURCE",
        help="Text files, .jsonl files (a document per line), .parquet files (a document per row) "
        "or folders of such files; .gz and .zst are decompressed. Or python-stdlib: Python's "
        "standard library, about 9 MB of text.",
        show_default="python-stdlib",
    ),
]
VocabSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Vocabulary of the tokenizer to train: a larger one gives fewer tokens per text and "
        "a larger embedding. Give the model the same number. With --extend-tokenizer: old and "
        "new entries together.",
        show_default="4096, or as many as --tokenizer has",
    ),
]
TokenizerOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Use this tokenizer.json, or that in a folder of prepared data or of a run, instead "
        "of training one, so that token ids stay valid for a model that uses it.",
    ),
]
ExtendTokenizerOption = Annotated[
    bool,
    typer.Option(
        "--extend-tokenizer",
        help="Add entries learned from this corpus to --tokenizer, up to --vocab-size in total. A "
        "new language then needs fewer tokens, and old ids keep their meaning for a model that "
        "starts from old weights.",
    ),
]
ValidationFractionOption = Annotated[
    float, typer.Option(help="Fraction of the documents that is held back for validation.")
]
MaxBytesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Use at most N bytes of decompressed text, in full files chosen by the hash of their "
        "names, so that a smaller N selects a subset.",
        show_default="all",
    ),
]
TextKeyOption = Annotated[str, typer.Option(help="Key of the text in .jsonl lines, and its column in .parquet files.")]
EncodingOption = Annotated[str, typer.Option(help="Encoding of text and .jsonl files, such as latin-1.")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="Replace the prepared data in DIR; other files stay.")
]


@app.command()
def prepare(
    out: OutOption,
    sources: SourcesOption = None,
    vocab_size: VocabSizeOption = None,
    tokenizer: TokenizerOption = None,
    extend_tokenizer: ExtendTokenizerOption = False,
    validation_fraction: ValidationFractionOption = 0.02,
    max_bytes: MaxBytesOption = None,
    seed: Annotated[int, typer.Option(help="Seed that chooses the validation documents.")] = 1234,
    text_key: TextKeyOption = "text",
    encoding: EncodingOption = "utf-8",
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Split a corpus into documents, train a tokenizer, write tokens for training and validation.

    The same text and settings give the same bytes on every machine. Ctrl-C leaves no files behind.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.render.progress import TaskBar
    from mpctl.spec.paths import PYTHON_STDLIB
    from mpctl.train.data.prepare import prepare as prepare_data

    with ended_by_signals(f"{out} is as it was"), TaskBar(lines=True) as bar:
        prepared = prepare_data(
            sources=sources or [PYTHON_STDLIB],
            out=out,
            tokenizer=tokenizer,
            extend=extend_tokenizer,
            vocab_size=_default_vocab_size(tokenizer) if vocab_size is None else vocab_size,
            max_bytes=max_bytes,
            validation_fraction=validation_fraction,
            seed=seed,
            text_key=text_key,
            encoding=encoding,
            overwrite=overwrite,
            on_progress=bar.update,
        )
    _print(prepared, as_json=as_json, first_lines=None)


@app.command()
def chat(
    out: OutOption,
    tokenizer: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="A tokenizer.json, or a folder with one, such as a Hugging Face model. The chat template is read from "
            "chat_template.jinja or tokenizer_config.json next to it.",
        ),
    ],
    seq_length: Annotated[int, typer.Option(help="Tokens of a row: the model's seq_length.")],
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help=".jsonl files, or folders of some; .gz and .zst are decompressed. A line has `messages` (role, "
            "content), `conversations` (from, value), or `prompt` and `completion`.",
        ),
    ],
    template: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Chat template (Jinja) to use instead of the tokenizer's.")
    ] = None,
    loss_on: Annotated[
        LossOn, typer.Option(help="completions: only what the assistant writes counts.")
    ] = "completions",
    packing: Annotated[
        Packing,
        typer.Option(
            help="best-fit: several conversations a row, none cut; wrapped: end to end; none: one a row, padded. "
            "Attention never crosses from one to another."
        ),
    ] = "best-fit",
    overflow: Annotated[Overflow, typer.Option(help="What to do with conversations longer than a row.")] = "refuse",
    vocab_size: Annotated[
        int | None, typer.Option(help="Vocabulary of the model.", show_default="as the tokenizer has")
    ] = None,
    validation_fraction: ValidationFractionOption = 0.02,
    seed: Annotated[int, typer.Option(help="Seed of the validation split and of the packing.")] = 1234,
    encoding: EncodingOption = "utf-8",
    date: Annotated[
        str | None, typer.Option(help="Date that a template's strftime_now reads.", show_default="today")
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: AsJsonOption = False,
) -> None:
    """Turn conversations into tokens with a loss mask, packed into rows.

    The same lines and settings give the same bytes on every machine. Ctrl-C leaves no files behind.
    """
    from mpctl.cli.signals import ended_by_signals
    from mpctl.render.progress import TaskBar
    from mpctl.train.data.chat_prepare import ChatSettings, prepare_chat

    settings = ChatSettings(
        tokenizer=str(tokenizer),
        seq_length=seq_length,
        template=None if template is None else str(template),
        loss_on=loss_on,
        packing=packing,
        overflow=overflow,
        vocab_size=vocab_size,
        validation_fraction=validation_fraction,
        seed=seed,
        encoding=encoding,
        date=date,
    )
    with ended_by_signals(f"{out} is as it was"), TaskBar(lines=True) as bar:
        prepared = prepare_chat(sources, out, settings, overwrite=overwrite, on_progress=bar.update)
    _print(prepared, as_json=as_json, first_lines=None)


@app.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of prepared data.")],
    hashes: Annotated[
        bool,
        typer.Option(
            "--hashes", help="Also compare the sha256 of every file with the manifest, about a second per GB."
        ),
    ] = False,
    row: Annotated[int, typer.Option(help="Of chat data, the row to show: what the loss counts, and what not.")] = 0,
    as_json: AsJsonOption = False,
) -> None:
    """Verify prepared data against its manifest; show its sizes and first lines."""
    from mpctl.train.data.chat_samples import row_texts
    from mpctl.train.data.manifest import open_prepared
    from mpctl.train.data.prepare import first_lines

    prepared = open_prepared(folder, hashes=hashes)
    if prepared.chat is None:
        _print(prepared, as_json=as_json, first_lines=first_lines(prepared))
    else:
        _print(prepared, as_json=as_json, first_lines=None, row=row_texts(prepared, row))


def _default_vocab_size(tokenizer: Path | None) -> int:
    if tokenizer is None:
        return 4096
    from mpctl.train.data.tokenizer import find_tokenizer, load_tokenizer, vocabulary_size

    return vocabulary_size(load_tokenizer(find_tokenizer(tokenizer)))


def _print(
    prepared: Prepared, *, as_json: bool, first_lines: list[str] | None, row: list[list[TextRun]] | None = None
) -> None:
    from mpctl.render.data import print_prepared
    from mpctl.render.output import print_json

    if not as_json:
        print_prepared(prepared, first_lines, row)
        return
    shown = {"first_lines": first_lines, "row": row}
    print_json({**prepared.as_dict(), **{key: value for key, value in shown.items() if value is not None}})
