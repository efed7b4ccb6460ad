"""Prepared data as a table: what each split holds, the vocabulary, the files, how to use it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mpctl.units import bytes_text, count_text

if TYPE_CHECKING:
    from mpctl.data.extension import Extension
    from mpctl.data.manifest import Prepared


def print_prepared(prepared: Prepared, first_lines: list[str] | None) -> None:
    """The summary on stdout, with the first lines of the text where they were read."""
    console = Console(highlight=False)
    console.print(_splits(prepared))
    console.print(_facts(prepared))
    run = f"mpctl launch demo {usage(prepared)}"
    for name, command in (("made by", command_line(prepared)), ("use it", run)):
        whole = Text.assemble((f"{name:<16}", "dim"), command)
        console.print(whole, soft_wrap=True)  # in one line, to be copied
    if first_lines:
        console.print(Text("\nfirst document", style="dim"))
        for line in first_lines:
            console.print(Text(f"  │ {printable(line)}", no_wrap=True, overflow="ellipsis"))


def _splits(prepared: Prepared) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("split", no_wrap=True)
    for name in ("documents", "tokens", "bytes"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in (("train", prepared.train), ("validation", prepared.validation)):
        size = prepared.files[f"{name}.bin"].bytes
        table.add_row(name, f"{split.documents:,}", f"{split.tokens:,}", bytes_text(size))
    return table


def _facts(prepared: Prepared) -> Table:
    corpus, used = prepared.corpus, prepared.tokenizer_vocab_size
    per_token = corpus["bytes"] / (prepared.train.tokens + prepared.validation.tokens)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    size, files = bytes_text(corpus["bytes"]), count_text(corpus["files"])
    table.add_row("corpus", f"{size}, files: {files}, bytes a token: {per_token:.2f}")
    if corpus["texts"] < corpus["documents"]:
        table.add_row("texts", f"{corpus['texts']:,}, cut into {corpus['documents']:,} documents")
    table.add_row(
        "vocabulary",
        f"{prepared.vocab_size:,} entries, {used:,} of them in use, stored as {prepared.dtype}",
    )
    if prepared.extension is not None:
        table.add_row("extension", _extension(prepared.extension))
    for name, file in prepared.files.items():
        table.add_row(name, f"{bytes_text(file.bytes)}, sha256 {file.sha256[:12]}")
    return table


def _extension(extension: Extension) -> str:
    new, old = len(extension.pieces), extension.old_vocab_size
    mean = sum(map(len, extension.pieces)) / new
    source = f"{old:,} of sha256 {extension.old_tokenizer_sha256[:12]}"
    return f"{new:,} added to {source}, each for {mean:.1f} of those"


def command_line(prepared: Prepared) -> str:
    """The command that makes the same bytes again."""
    options = [
        part
        for name, value in prepared.settings.items()
        if value is not None and value is not False
        for part in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]
    out = ("--out", str(prepared.path))
    return shlex.join(["mpctl", "data", "prepare", *prepared.sources, *out, *options])


def usage(prepared: Prepared) -> str:
    path, size = prepared.path, prepared.vocab_size
    return shlex.join(["--set", f"data.path={path}", "--set", f"model.vocab={size}"])


def printable(text: str) -> str:
    """Text from strangers without what steers a terminal: control characters become U+FFFD."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)
