"""Rows of prepared chat data: the samples of a job that trains on conversations.

An epoch takes the rows in an order drawn from (seed, epoch), as samples.py draws that of documents. The loss of a step
is the sum over its counted tokens divided by their number in all of the step's rows, whatever the layout: a row's
weights are 1 in counted places times (rows of the step / counted tokens of these rows), and the trainer divides the
sum by the rows. Which rows a step has follows from its number, so that every rank knows the count without a message.
By hand: a step of rows with 3 and 1 counted tokens has weights 2/4 in each of the 4 places.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from mpctl.core.errors import InputError
from mpctl.train.data.indexed import IndexedDataset, damaged
from mpctl.train.data.manifest import MASK, PACKS, Prepared
from mpctl.train.data.packing import COLUMNS
from mpctl.train.data.samples import EPOCHS_KEPT, Fields, stack
from mpctl.train.data.tokenizer import load_tokenizer


class ChatRows:
    """The rows of a split of prepared chat data. Raises InputError where its files disagree."""

    def __init__(self, tokens: IndexedDataset, seq_length: int) -> None:
        self.tokens, self.seq_length = tokens, seq_length
        self.masks, self.packs = (IndexedDataset(Path(f"{tokens.prefix}.{part}")) for part in (MASK, PACKS))
        if not np.array_equal(self.masks.document_lengths, tokens.document_lengths):
            raise damaged(self.masks.prefix, f"its documents are not those of {tokens.prefix.name}")
        self._check()

    def __len__(self) -> int:
        return len(self.packs)

    @cached_property
    def counted(self) -> NDArray[np.int64]:
        """Counted tokens of each row, int64 [rows]."""
        return np.add.reduceat(self._pieces[:, 3], self._starts)

    @cached_property
    def are_packed(self) -> bool:
        """Whether a row holds more than one piece."""
        return bool((self.packs.document_lengths > COLUMNS).any())

    def pieces(self, row: int) -> NDArray[np.int64]:
        """(document, start, length, counted) of a row, int64 [pieces, 4]."""
        return self.packs.document(row).reshape(-1, COLUMNS).astype(np.int64)

    def row(self, number: int) -> dict[str, NDArray[np.int64]]:
        """tokens, targets, mask and places of a row, int64 [s], 0 in its padding. targets: the next token of the
        conversation, where mask is 1; places count from the start of a piece."""
        fields = {name: np.zeros(self.seq_length, np.int64) for name in ("tokens", "targets", "mask", "places")}
        at = 0
        for document, start, length, _ in self.pieces(number):
            ids = self.tokens.document(int(document), start, start + length)
            fields["tokens"][at : at + length] = ids
            fields["targets"][at : at + length - 1] = ids[1:]
            fields["mask"][at : at + length - 1] = self.masks.document(int(document), start + 1, start + length) == 1
            fields["places"][at : at + length] = np.arange(length)
            at += length
        return fields

    @property
    def _pieces(self) -> NDArray[np.int64]:
        return self.packs.all_tokens().reshape(-1, COLUMNS).astype(np.int64)

    @property
    def _starts(self) -> NDArray[np.int64]:
        """The first piece of each row."""
        lengths = self.packs.document_lengths
        return (np.cumsum(lengths) - lengths) // COLUMNS

    def _check(self) -> None:
        prefix, lengths = self.packs.prefix, self.packs.document_lengths
        if (lengths % COLUMNS).any() or (lengths == 0).any():
            raise damaged(prefix, "a row is no list of pieces")
        pieces, documents = self._pieces, self.tokens.document_lengths
        of, start, length, counted = pieces.T
        if (of < 0).any() or (of >= len(documents)).any():
            raise damaged(prefix, f"a piece is of no document of {len(documents)}")
        if (start < 0).any() or (length < 1).any() or (start + length > documents[of]).any():
            raise damaged(prefix, "a piece lies outside its document")
        if (counted < 0).any() or (counted >= length).any():
            raise damaged(prefix, "a piece counts more tokens than it has")
        longest = int(np.add.reduceat(length, self._starts).max())
        if longest > self.seq_length:
            message = f"{self.seq_length}, but a row of {prefix} holds {longest} tokens"
            hint = "use the sequence length of its data.json, or `mpctl data chat` with --seq-length"
            raise InputError.of("chat-seq-length", "model.seq_length", message, hint)


class ChatSamples:
    """tokens, targets and places int64 [b, s], weights float64 [b, s]: functions of the seed and the rows' numbers.

    together: rows over which a loss is averaged: a step's, or those of a validation. is_packed: whether rows hold
    several conversations; a padded row of one needs no places, since none of its tokens looks at those behind it.
    """

    def __init__(
        self, rows: ChatRows, *, seed: int, together: int, is_packed: bool = True, shuffle: bool = True
    ) -> None:
        self.rows, self.dataset, self.seed, self.shuffle = rows, rows.tokens, seed, shuffle
        self.samples_per_epoch = len(rows)
        self.together = together if shuffle else min(together, len(rows))
        self.is_packed = is_packed or rows.are_packed
        self._orders: dict[int, NDArray[np.int64]] = {}
        self._counts: dict[int, int] = {}

    def batch(self, numbers: Sequence[int]) -> Fields:
        """The samples of these numbers, as the class says."""
        samples = []
        for number in numbers:
            row = self.rows.row(self._row(number))
            count = self.count(number // self.together)
            fields: dict[str, NDArray[Any]] = {"tokens": row["tokens"], "targets": row["targets"]}
            fields["weights"] = row["mask"] * (self.together / max(1, count))
            if self.is_packed:
                fields["places"] = row["places"]
            samples.append(fields)
        return stack(samples)

    def count(self, group: int) -> int:
        """Counted tokens of the rows whose losses are averaged together, of group number `group`."""
        if group not in self._counts:
            while len(self._counts) > EPOCHS_KEPT:
                del self._counts[next(iter(self._counts))]
            numbers = range(group * self.together, (group + 1) * self.together)
            self._counts[group] = int(sum(self.rows.counted[self._row(number)] for number in numbers))
        return self._counts[group]

    def _row(self, number: int) -> int:
        if number < 0:
            raise IndexError(f"sample {number}")
        epoch, i = divmod(number, self.samples_per_epoch)
        return int(self._order(epoch)[i]) if self.shuffle else i

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            while len(self._orders) > EPOCHS_KEPT:
                del self._orders[next(iter(self._orders))]
            words = np.random.Philox(key=np.array([self.seed, epoch], np.uint64))
            self._orders[epoch] = np.argsort(words.random_raw(self.samples_per_epoch), kind="stable")
        return self._orders[epoch]


def find_rows(tokens: IndexedDataset, seq_length: int) -> ChatRows | None:
    """The rows of a split of prepared data; None where it holds text. Raises InputError as ChatRows."""
    is_chat = Path(f"{tokens.prefix}.{PACKS}.idx").is_file()
    return ChatRows(tokens, seq_length) if is_chat else None


class TextRun(TypedDict):
    """Consecutive tokens of a conversation as text, and whether the loss counts them."""

    text: str
    counted: bool


MOST_TOKENS = 2000


def row_texts(prepared: Prepared, number: int) -> list[list[TextRun]]:
    """The conversations of row `number` of the training split, as far as its first 2,000 tokens reach. Raises
    InputError where there is no such row."""
    assert prepared.chat is not None, "text has no rows"
    rows = ChatRows(prepared.train.open(), prepared.chat.seq_length)
    if not 0 <= number < len(rows):
        message, hint = f"there is no row {number}", f"use one of 0 to {len(rows) - 1}"
        raise InputError.of("no-such-row", str(prepared.path), message, hint)
    tokenizer, left = load_tokenizer(prepared.tokenizer_path), MOST_TOKENS
    shown: list[list[TextRun]] = []
    for document, start, length, _ in rows.pieces(number).tolist():
        stop = start + min(length, left)
        ids, mask = (each.document(document, start, stop).tolist() for each in (rows.tokens, rows.masks))
        mask[:1] = [0]  # nothing stands before it
        runs = groupby(zip(ids, mask, strict=True), key=lambda one: bool(one[1]))
        shown.append(
            [
                TextRun(text=tokenizer.decode([token for token, _ in run], skip_special_tokens=False), counted=counted)
                for counted, run in runs
            ]
        )
        if not (left := left - (stop - start)):
            break
    return shown
