"""From conversations to a directory to train on: tokens, a mask of those that count, and rows made of them.

As prepare.py: files are made in OUT/.preparing and move up at the end; the same lines and settings give the same
bytes. Next to the tokens, SPLIT.mask has a 0 or 1 for each, and SPLIT.packs the rows: four int32 a piece (packing.py),
both as Megatron's indexed datasets, memory-mapped. Lines are read twice, to count and check them and to encode them;
memory holds a batch of them and a few numbers of each.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mpctl.core.errors import InputError, Issue
from mpctl.core.units import plural
from mpctl.spec.chat import LossOn, Overflow, Packing
from mpctl.train.data.chat_template import ChatTemplate, Rendered, read_template, read_tokenizer_files
from mpctl.train.data.chat_tokens import NO_TEMPLATE, TEMPLATE_HINT, ChatEncoder, last_token_id, named_id, special_texts
from mpctl.train.data.conversations import Conversation, Faults, find_chat_files, read_conversations
from mpctl.train.data.corpus import File
from mpctl.train.data.documents import changed, validates
from mpctl.train.data.extend import EXTENSION, find_extension
from mpctl.train.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from mpctl.train.data.manifest import (
    CHAT_FILES,
    FILES,
    MANIFEST,
    MASK,
    PACKS,
    SPLITS,
    TEMPLATE,
    TOKENIZER,
    ChatRecord,
    ChatSplit,
    FileRecord,
    Prepared,
    Split,
    open_prepared,
)
from mpctl.train.data.packing import pack
from mpctl.train.data.prepare import check_entries, check_outside, publish, remove_others, workplace
from mpctl.train.data.texts import Findings, Reading
from mpctl.train.data.tokenizer import Progress, find_tokenizer, load_tokenizer, vocabulary_size

BATCH = 256  # conversations that are encoded together
UINT8, INT32 = np.dtype("<u1"), np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How conversations are prepared. tokenizer: a tokenizer.json or a folder with one; vocab_size: as many entries as
    the tokenizer has by default; date: what a template's `strftime_now` reads, an ISO date, today by default."""

    tokenizer: str
    seq_length: int
    template: str | None = None
    loss_on: LossOn = "completions"
    packing: Packing = "best-fit"
    overflow: Overflow = "refuse"
    vocab_size: int | None = None
    validation_fraction: float = 0.02
    seed: int = 1234
    encoding: str = "utf-8"
    date: str | None = None

    def check(self) -> None:
        """Raise InputError for values that are out of range."""
        rows = (
            ("seq_length", 1 < self.seq_length < 2**31, "from 2 to 2^31 - 1"),
            ("vocab_size", self.vocab_size is None or 0 < self.vocab_size < 2**31, "from 1 to 2^31 - 1"),
            ("validation_fraction", 0 < self.validation_fraction < 1, "above 0 and below 1"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2^64 - 1"),
            ("date", self.date is None or _date(self.date) is not None, "as 2026-11-27"),
        )
        issues = [
            Issue("data-setting", f"data.{name}", f"{getattr(self, name)!r} is out of range", hint)
            for name, fine, hint in rows
            if not fine
        ]
        if issues:
            raise InputError(issues)


def _date(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def prepare_chat(
    sources: Sequence[str | Path],
    out: Path,
    settings: ChatSettings,
    *,
    on_progress: Progress | None = None,
    overwrite: bool = False,
) -> Prepared:
    """Write prepared chat data to OUT. on_progress(stage, done, total) is called with `read` (bytes), `encode` and
    `pack`. Raises InputError with file and line for lines that cannot be used, for a conversation without a token
    that counts, for one that is longer than a row if overflow refuses it, and as `prepare` does."""
    settings.check()
    given = find_tokenizer(Path(settings.tokenizer))
    encoder = make_encoder(given, settings)
    size = settings.vocab_size or vocabulary_size(encoder.tokenizer)
    check_entries(given, encoder.tokenizer, size)
    report: Progress = on_progress or (lambda stage, done, total: None)
    with workplace(out, overwrite=overwrite) as work:
        findings = Findings()
        reading = Reading(settings.encoding)
        files = find_chat_files(sources, findings, settings.encoding)
        check_outside(out, [file.path for file in files])
        count = _count(files, reading, findings, report)
        held_out = validates(count, settings.validation_fraction, settings.seed)
        lines = _Lines(files, reading, encoder, held_out, settings, report)
        totals = lines.write(work, token_dtype(size))
        shutil.copyfile(given, work / TOKENIZER)
        names = [*FILES, *CHAT_FILES]
        if encoder.template is not None:
            (work / TEMPLATE).write_text(encoder.template.text, encoding="utf-8")
            names.append(TEMPLATE)
        if (extension := find_extension(given)) is not None:
            (work / EXTENSION).write_text(extension.to_json(), encoding="utf-8")
            names.append(EXTENSION)
        splits = {name: _pack(work / name, settings) for name in SPLITS}
        report("pack", count, count)
        dates = encoder.template is not None and encoder.template.reads_date
        prepared = Prepared(
            path=out,
            sources=list(map(str, sources)),
            settings=asdict(settings) | {"date": encoder_date(settings) if dates else None},
            corpus={"files": len(files), "texts": count, "documents": count, "bytes": findings.bytes},
            skipped=findings.report()["skipped"],
            undecodable=findings.report()["undecodable"],
            splits=totals,
            vocab_size=size,
            tokenizer_vocab_size=vocabulary_size(encoder.tokenizer),
            end_of_text_id=encoder.last,
            dtype=token_dtype(size).name,
            files={name: FileRecord.of(work / name) for name in names},
            chat=ChatRecord(
                seq_length=settings.seq_length,
                loss_on=settings.loss_on,
                packing=settings.packing,
                overflow=settings.overflow,
                splits=splits,
            ),
            extension=extension,
        )
        (work / MANIFEST).write_text(json.dumps(prepared.as_dict(), indent=2) + "\n")
        publish(work, out, names, last=MANIFEST)
        remove_others(out, names)
    return open_prepared(out)


def encoder_date(settings: ChatSettings) -> str:
    """The date that templates read, today's by default."""
    return settings.date or datetime.now().date().isoformat()


def make_encoder(tokenizer: Path, settings: ChatSettings) -> ChatEncoder:
    """The encoder of a tokenizer.json with the files next to it. Raises InputError for damaged ones."""
    model, beside = load_tokenizer(tokenizer), read_tokenizer_files(tokenizer)
    found = beside.template
    if settings.template is not None:
        found = read_template(Path(settings.template)), settings.template
    template = None
    if found is not None:
        text, source = found
        date = _date(encoder_date(settings))
        specials = special_texts(model)
        template = ChatTemplate(text, source=source, variables=beside.named, specials=specials, date=date)
    named = beside.named
    last, first = last_token_id(model, named.get("eos_token")), named_id(model, named.get("bos_token"))
    return ChatEncoder(model, template, last, first, settings.loss_on)


def _count(files: Sequence[File], reading: Reading, findings: Findings, report: Progress) -> int:
    """Number of conversations. Raises InputError with all faults of lines, or for fewer than two."""
    faults, count = Faults(), 0
    total, done = sum(file.size for file in files), 0

    def add(read: int) -> None:
        nonlocal done
        done = min(done + read, total)
        report("read", done, total)

    for file in files:
        for _ in read_conversations(file.path, reading, findings, faults, add):
            count += 1
    if findings.issues:
        raise InputError(findings.issues)
    faults.raise_any()
    if count < 2:
        message = f"found {plural(count, 'conversation')}, need 2: one to train on and one to validate"
        raise InputError.of("corpus-too-small", "data.corpus", message, "add lines")
    return count


@dataclass
class _Lines:
    """The conversations of files, which are encoded and written."""

    files: Sequence[File]
    reading: Reading
    encoder: ChatEncoder
    held_out: NDArray[np.bool_]
    settings: ChatSettings
    report: Progress

    def write(self, folder: Path, dtype: np.dtype) -> dict[str, Split]:
        """Write tokens and masks of both splits to a folder. Raises InputError with the faults of lines."""
        faults, done, is_refused = Faults(), 0, self.settings.overflow == "refuse"
        too_long: list[tuple[str, int]] = []
        with ExitStack() as stack:
            pairs = [
                [stack.enter_context(IndexedWriter(folder / name, kind)) for name, kind in both]
                for both in (((name, dtype), (f"{name}.{MASK}", UINT8)) for name in SPLITS)
            ]
            for batch in _batches(self._rendered(faults)):
                conversations, texts = zip(*batch, strict=True)
                for one, tokens in zip(conversations, self.encoder.encode(conversations, texts), strict=True):
                    if not tokens.mask[1:].any():
                        hint = "give it an assistant's turn, or use --loss-on all"
                        faults.add("chat-all-masked", one.place, "the loss counts no token of it", hint)
                    if done == len(self.held_out):
                        raise changed(f"more than {done} conversations now")
                    if is_refused and self.settings.packing != "wrapped" and len(tokens.ids) > self.settings.seq_length:
                        too_long.append((one.place, len(tokens.ids)))
                    if len(tokens.ids):
                        writers = pairs[int(self.held_out[done])]
                        writers[0].add_document(tokens.ids)
                        writers[1].add_document(tokens.mask.astype(UINT8))
                    done += 1
                self.report("encode", done, len(self.held_out))
            faults.raise_any()
            if too_long:
                raise self._too_long(too_long)
            if done != len(self.held_out):
                raise changed(f"{done} conversations now, {len(self.held_out)} a moment ago")
            splits = [Split(documents=len(tokens), tokens=tokens.tokens) for tokens, _ in pairs]
        return dict(zip(SPLITS, splits, strict=True))

    def _rendered(self, faults: Faults) -> Iterator[tuple[Conversation, Rendered]]:
        for file in self.files:
            for one in read_conversations(file.path, self.reading, Findings(), faults):
                try:
                    yield one, self.encoder.rendered(one)
                except ValueError as error:
                    is_missing = str(error) == NO_TEMPLATE
                    hint = TEMPLATE_HINT if is_missing else "mend the line, or name another template: --template FILE"
                    faults.add("chat-template", one.place, str(error), hint)
                    if is_missing:
                        faults.raise_any()

    def _too_long(self, found: Sequence[tuple[str, int]]) -> InputError:
        place, length = max(found, key=lambda one: one[1])
        count, total = plural(len(found), "conversation"), f"{len(self.held_out):,}"
        message = f"{count} of {total} hold more than {self.settings.seq_length} tokens; the longest has {length:,}"
        hint = f"use --seq-length {length} or more, or --overflow drop, truncate or split"
        return InputError.of("chat-too-long", place, message, hint)


def _batches(items: Iterable[tuple[Conversation, Rendered]]) -> Iterator[list[tuple[Conversation, Rendered]]]:
    source = iter(items)
    while batch := list(islice(source, BATCH)):
        yield batch


def _pack(prefix: Path, settings: ChatSettings) -> ChatSplit:
    """Write the rows of a split. Raises InputError where there is none."""
    masks = IndexedDataset(Path(f"{prefix}.{MASK}"))
    packed = pack(
        masks.document_lengths,
        lambda document, start, stop: int(masks.document(document, start, stop).sum(dtype=np.int64)),
        seq_length=settings.seq_length,
        packing=settings.packing,
        overflow=settings.overflow,
        seed=settings.seed,
    )
    if not packed.rows:
        message = f"{prefix.name}: every conversation is left out, {packed.too_long} as longer than a row"
        hint = "add lines, or use a larger --seq-length or another --overflow"
        raise InputError.of("corpus-too-small", "data.corpus", message, hint)
    with IndexedWriter(Path(f"{prefix}.{PACKS}"), INT32) as writer:
        for row in packed.rows:
            writer.add_document(row.reshape(-1))
    pieces = np.concatenate(packed.rows).astype(np.int64)
    return ChatSplit(
        rows=len(packed.rows),
        tokens=int(pieces[:, 2].sum()),
        counted=int(pieces[:, 3].sum()),
        squares=int((pieces[:, 2] ** 2).sum()),
        too_long=packed.too_long,
        unused=packed.unused,
    )
