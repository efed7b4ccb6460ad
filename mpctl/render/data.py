"""Prepared data as a table: the splits, the vocabulary, the files, how to use it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from mpctl.core.units import bytes_text, plural
from mpctl.render.parts import Facts, Lines, Part, Picture, table_of
from mpctl.render.terminal import print_parts

if TYPE_CHECKING:
    from mpctl.train.data.chat_samples import TextRun
    from mpctl.train.data.extend import TokenizerExtension
    from mpctl.train.data.manifest import ChatRecord, Prepared


LINE = 90  # characters of a line of a document that are shown
MOST_HELD_OUT = 0.3  # largest --validation-fraction that is proposed


def print_prepared(
    prepared: Prepared, first_lines: list[str] | None, row: Sequence[Sequence[TextRun]] | None = None
) -> None:
    """Print the summary of prepared data on stdout. first_lines: of its first document, if read; row: one of chat
    data."""
    print_parts(prepared_parts(prepared, first_lines, row))


def prepared_parts(
    prepared: Prepared, first_lines: list[str] | None, row: Sequence[Sequence[TextRun]] | None = None
) -> Iterator[Part]:
    rows = [
        (name, f"{split.documents:,}", f"{split.tokens:,}", bytes_text(prepared.files[f"{name}.bin"].bytes))
        for name, split in (("train", prepared.train), ("validation", prepared.validation))
    ]
    yield table_of("", ("split", "documents", "tokens", "bytes"), rows, left=["split"])
    yield Facts(list(_facts(prepared)))
    yield Lines("Made by", [command_line(prepared)], are_commands=True)
    yield Lines("Use it", list(_use(prepared)), are_commands=True)
    if row:
        yield Picture(letters=lambda: row_letters(row))
    if first_lines:
        yield Lines("First document", [f"│ {_cut(printable(line))}" for line in first_lines])


def row_letters(row: Sequence[Sequence[TextRun]]) -> Iterator[Text]:
    """The conversations of a row: what the loss counts between « and », the rest dimmed."""
    yield Text("Row: the loss counts what stands between « and »", "bold")
    for runs in row:
        shown = Text("│ ")
        for run in runs:
            text = "\n│ ".join(map(printable, run["text"].split("\n")))
            shown.append(f"«{text}»" if run["counted"] else text, None if run["counted"] else "dim")
        yield shown


def _cut(line: str) -> str:
    return line if len(line) <= LINE else f"{line[:LINE]}…"


def _use(prepared: Prepared) -> Iterator[str]:
    """The command that trains the demo on the data; the smaller split can fill its sequence."""
    if prepared.chat is not None:
        yield f"mpctl launch demo {usage(prepared)} --set model.seq_length={prepared.chat.seq_length}"
        return
    from mpctl.model.families import least_tokens, seq_length_for
    from mpctl.spec.load import load_job

    model = load_job("demo").model
    assert model is not None, "the demo is of a model"
    launch = f"mpctl launch demo {usage(prepared)}"
    name, split = min((("train", prepared.train), ("validation", prepared.validation)), key=lambda s: s[1].tokens)
    least, size = least_tokens(model), seq_length_for(model, split.tokens)
    if split.tokens >= least:
        yield launch
        return
    if size is not None:
        yield f"{launch} --set model.seq_length={size}"
    total = prepared.train.tokens + prepared.validation.tokens
    fraction = -(-30 * least // total) / 20  # half as much again, in steps of 0.05
    has_enough = name == "validation" and fraction <= MOST_HELD_OUT
    more = f"with --validation-fraction {fraction:g}, or more text," if has_enough else "more text"
    few = f"{name} has {plural(split.tokens, 'token')}, and a sample of the demo takes {least:,}"
    yield f"# {few}: prepare {more} for its sequence of {model.seq_length}"


def _facts(prepared: Prepared) -> Iterator[tuple[str, str]]:
    yield from _corpus_facts(prepared)
    if prepared.chat is not None:
        yield from _chat_facts(prepared.chat)
    used = prepared.tokenizer_vocab_size
    stored = f"stored as {prepared.dtype}"
    yield "vocabulary", f"{prepared.vocab_size:,} entries, {used:,} of them in use, {stored}"
    if prepared.extension is not None:
        yield "extension", _extension(prepared.extension)
    for name, file in prepared.files.items():
        yield name, f"{bytes_text(file.bytes)}, sha256 {file.sha256[:12]}"


def _chat_facts(chat: ChatRecord) -> Iterator[tuple[str, str]]:
    for name, split in chat.splits.items():
        places = split.rows * chat.seq_length
        yield (
            f"{name} rows",
            f"{split.rows:,} of {chat.seq_length:,} tokens, {split.tokens / places:.1%} filled; the loss counts "
            f"{split.counted:,} of {split.tokens:,} tokens",
        )
        if split.too_long:
            done = {"truncate": "cut", "split": "split"}.get(chat.overflow, "left out")
            done = "split" if chat.packing == "wrapped" else done
            yield f"! {name}", f"{plural(split.too_long, 'conversation')} longer than a row, {done}"
        if split.unused:
            yield f"! {name}", f"{plural(split.unused, 'piece')} left out, of which the loss counts no token"
    yield "packing", f"{chat.packing}, loss on {chat.loss_on}"


def _corpus_facts(prepared: Prepared) -> Iterator[tuple[str, str]]:
    corpus = prepared.corpus
    per_token = corpus["bytes"] / (prepared.train.tokens + prepared.validation.tokens)
    files = plural(corpus["files"], "file")
    yield "corpus", f"{bytes_text(corpus['bytes'])} in {files}, {per_token:.2f} bytes a token"
    if corpus["texts"] < corpus["documents"]:
        yield "texts", f"{corpus['texts']:,}, cut into {corpus['documents']:,} documents"
    for line in _reasons(prepared.skipped):
        yield "! skipped", line
    if prepared.undecodable["count"]:
        yield "! undecodable", undecodable(prepared)


def data_warnings(prepared: Prepared | None) -> list[str]:
    """Return a launch's warnings about the corpus that it prepared: files without text, and bytes that
    are not in its encoding. Hidden files and files beyond the limit of bytes are left out as expected."""
    if prepared is None:
        return []
    expected = ("hidden", "beyond-max-bytes")
    skipped = {why: tally for why, tally in prepared.skipped.items() if why not in expected}
    lines = [f"data: skipped {line}" for line in _reasons(skipped)]
    return [*lines, f"data: {undecodable(prepared)}"] if prepared.undecodable["count"] else lines


def _reasons(skipped: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Files that were skipped, a line for each reason: `2 empty: a.txt, b.txt`."""
    from mpctl.train.data.texts import REASONS

    return [f"{tally['count']:,} {REASONS.get(reason, reason)}: {_names(tally)}" for reason, tally in skipped.items()]


def undecodable(prepared: Prepared) -> str:
    """How many characters could not be decoded, in which files, and what to try."""
    tally, encoding = prepared.undecodable, prepared.settings.get("encoding", "utf-8")
    characters = plural(tally["count"], "character")
    return (
        f"{characters} could not be decoded as {encoding} and became U+FFFD, in {_names(tally)}; "
        "if they are latin-1, say so: --encoding latin-1, data.encoding in a job"
    )


def _names(tally: Mapping[str, Any]) -> str:
    more = " ..." if tally["files"] > len(tally["first"]) else ""
    return printable(", ".join(tally["first"])) + more


def _extension(extension: TokenizerExtension) -> str:
    new, old = len(extension.pieces), extension.old_vocab_size
    mean = sum(map(len, extension.pieces)) / new
    source = f"{old:,} of sha256 {extension.old_tokenizer_sha256[:12]}"
    return f"{new:,} added to {source}, each for {mean:.1f} of those"


def command_line(prepared: Prepared) -> str:
    """The command that prepares the same data again, byte for byte."""
    options = [
        part
        for name, value in prepared.settings.items()
        if value is not None and value is not False
        for part in (f"--{name.replace('_', '-')}", *(() if value is True else (str(value),)))
    ]
    out = ("--out", str(prepared.path))
    verb = "prepare" if prepared.chat is None else "chat"
    return shlex.join(["mpctl", "data", verb, *prepared.sources, *out, *options])


def usage(prepared: Prepared) -> str:
    """The options of `mpctl launch` that train on the prepared data."""
    path, size = prepared.path, prepared.vocab_size
    return shlex.join(["--set", f"data.path={path}", "--set", f"model.vocab={size}"])


def printable(text: str) -> str:
    """A text from outside, safe for a terminal: control characters become U+FFFD."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in text)
