"""New pieces for an existing byte-level BPE tokenizer, learned on a new corpus, and
`extension.json`, which lists the old ids that each new one stands for.

BPE training is continued (Purason et al., arXiv 2512.03989): words of the corpus are cut by the old
tokenizer, and merges of what it leaves apart are learned on top. They follow all old merges, so
they act where no old one does any more: a text becomes its old ids, some neighbours inside a word
joined, and never other old ids. So old ids mean what they meant, old text changes only in words
that hold a new piece, and each new piece stands for the old ids that it was joined from. A pair
that spells an entry of the old vocabulary stays apart: as an old id it could call for old merges.
With ids b 0, j 1, n 2, o 3, r 4, u 5, on 6 and the corpus `bonjour`, 0 6 1 3 5 4: bon is 7 for 0 6,
jo 8 for 1 3, ur 9 for 5 4, bonjo 10 for 0 6 1 3.

The `tokenizers` library's trainer cannot start from existing merges, and new training would cut
words at other places than the old merges do, so many of its pieces would never be used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.core.errors import InputError
from mpctl.train.data.tokenizer import Progress, alphabet, load_tokenizer, vocabulary_size

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SCHEMA = "mpctl.extension/1"
EXTENSION = "extension.json"
LONGEST_EXTENSION = 2**28
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenizerExtension:
    """The old ids that each new id stands for: pieces[k] for id old_vocab_size + k.

    The two hashes are those of the tokenizer.json that was extended and of the result.
    """

    old_vocab_size: int
    old_tokenizer_sha256: str
    tokenizer_sha256: str
    pieces: tuple[tuple[int, ...], ...]

    @property
    def vocab_size(self) -> int:
        """Entries of the extended tokenizer, old and new."""
        return self.old_vocab_size + len(self.pieces)

    def to_json(self) -> str:
        """The text of extension.json, as read_extension reads it."""
        document = {
            "schema": SCHEMA,
            "old_vocab_size": self.old_vocab_size,
            "old_tokenizer_sha256": self.old_tokenizer_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "pieces": self.pieces,
        }
        return json.dumps(document) + "\n"


def read_extension(path: Path) -> TokenizerExtension:
    """An extension.json; InputError unless every new id stands for two or more old ones."""
    try:
        if path.stat().st_size > LONGEST_EXTENSION:
            raise ValueError(f"longer than {LONGEST_EXTENSION} bytes")
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"damaged: {type(error).__name__}: {error}"
        hint = "run `mpctl data prepare --extend-tokenizer` again"
        raise InputError.of("data-extension", str(path), message, hint) from None


def _parse(read: Any) -> TokenizerExtension:
    if read["schema"] != SCHEMA:
        raise ValueError(f"schema {read['schema']!r}, expected {SCHEMA!r}")
    size, pieces = read["old_vocab_size"], tuple(map(tuple, read["pieces"]))
    if type(size) is not int or not 0 < size < 2**31 or not 0 < len(pieces) < 2**31:
        raise ValueError(f"{len(pieces)} pieces added to {size!r}")
    for number, piece in enumerate(pieces, start=size):
        if len(piece) < 2 or not all(type(i) is int and 0 <= i < size for i in piece):
            raise ValueError(f"id {number} does not stand for two or more ids below {size}")
    old, new = str(read["old_tokenizer_sha256"]), str(read["tokenizer_sha256"])
    if not (SHA256.fullmatch(old) and SHA256.fullmatch(new)):
        raise ValueError("holds no sha256 of its tokenizers")
    return TokenizerExtension(size, old, new, pieces)


def find_extension(tokenizer: Path) -> TokenizerExtension | None:
    """The content of the extension.json next to a tokenizer.json; None where there is none.

    It is copied into data that are prepared with the extended tokenizer.
    """
    path = tokenizer.with_name(EXTENSION)
    if not path.is_file():
        return None
    extension = read_extension(path)
    return extension if extension.tokenizer_sha256 == sha256(tokenizer.read_bytes()) else None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


Pair = tuple[int, int]
LEAST_COUNT = 2  # a pair that occurs once is a copy of its text, no piece of the language


class PairCounts:
    """Adjacent pairs of all words: how often each occurs, and in which words."""

    def __init__(self, words: Mapping[tuple[int, ...], int]) -> None:
        self._words = [list(word) for word in words]
        self._weights = list(words.values())
        self._counts: dict[Pair, int] = {}
        self._places: dict[Pair, set[int]] = {}
        for number in range(len(self._words)):
            self._add(number)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapify(self._heap)

    def pop(self) -> tuple[Pair, int] | None:
        """The most frequent pair and its count, once; None when all that is left is rare."""
        while self._heap:
            negative, pair = heappop(self._heap)
            count = self._counts.get(pair, 0)
            if count == -negative:
                return (pair, count) if count >= LEAST_COUNT else None
            # Its count has fallen since; one that rose has another entry before this one.
            if LEAST_COUNT <= count < -negative:
                heappush(self._heap, (-count, pair))
        return None

    def merge(self, pair: Pair, made: int) -> None:
        """Join `pair` into `made` wherever it occurs, from left to right."""
        risen: set[Pair] = set()
        for number in sorted(self._places.get(pair, ())):
            self._remove(number)
            self._words[number] = joined(self._words[number], pair, made)
            risen |= self._add(number)
        for new in risen:
            heappush(self._heap, (-self._counts[new], new))

    def _add(self, number: int) -> set[Pair]:
        word, weight = self._words[number], self._weights[number]
        for pair in pairwise(word):
            self._counts[pair] = self._counts.get(pair, 0) + weight
            self._places.setdefault(pair, set()).add(number)
        return set(pairwise(word))

    def _remove(self, number: int) -> None:
        for pair in pairwise(self._words[number]):
            self._counts[pair] -= self._weights[number]
            self._places[pair].discard(number)
            if not self._counts[pair]:
                del self._counts[pair]


def joined(word: Sequence[int], pair: Pair, made: int) -> list[int]:
    """
    >>> joined([1, 1, 1, 2], (1, 1), 9)
    [9, 1, 2]
    """
    result: list[int] = []
    skip = False
    for left, right in pairwise([*word, -1]):
        if skip:
            skip = False
        elif skip := (left, right) == pair:
            result.append(made)
        else:
            result.append(left)
    return result


def learn_merges(
    words: Mapping[tuple[int, ...], int], join: Callable[[int, int], int | None]
) -> Iterator[tuple[Pair, int]]:
    """(pair, the merged id), most frequent first, until the pairs are rare or the caller stops.

    words: pieces of each word -> how often it occurs. `join` returns the id of a merged pair, None
    for one that must not be merged.
    """
    pairs = PairCounts(words)
    while (best := pairs.pop()) is not None:
        pair, _ = best
        made = join(*pair)
        if made is not None:
            pairs.merge(pair, made)
            yield pair, made


LONGEST_WORD = 1024  # in pieces: the cost of a merge grows with the length of its words


@dataclass(frozen=True, slots=True)
class Extended:
    """The text of an extended tokenizer.json and what its new ids stand for."""

    text: str
    extension: TokenizerExtension


def check_extendable(path: Path, vocab_size: int) -> None:
    """InputError unless `path` is a byte-level BPE tokenizer of fewer than vocab_size entries."""
    tokenizer = load_tokenizer(path)
    why = _foreign(json.loads(path.read_text(encoding="utf-8")))
    if why is not None:
        hint = "extend a byte-level BPE, as GPT-2, Llama 3 and `mpctl data prepare` have; others "
        hint += "can be used as they are, without --extend-tokenizer"
        raise InputError.of("tokenizer-not-extendable", str(path), why, hint)
    size = vocabulary_size(tokenizer)
    if vocab_size <= size:
        message = f"{vocab_size} entries leave no room: {path} has {size}"
        hint = f"use {size + 1} or more, which counts old and new ones together"
        raise InputError.of("vocab-too-small", "data.vocab_size", message, hint)


def _foreign(document: Any) -> str | None:
    """Return the reason why merges cannot be appended to a tokenizer; None if they can."""
    model = document["model"]
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        return f"its model is {model.get('type')}, not BPE"
    for part, inner in (("pre_tokenizer", "pretokenizers"), ("decoder", "decoders")):
        if "ByteLevel" not in _kinds(document.get(part), inner):
            return f"its {part} does not work on bytes"
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "dropout"):
        if model.get(key):
            return f"its pieces are not plain bytes: {key} is {model[key]!r}"
    missing = len(set(alphabet()) - model["vocab"].keys())
    return f"{missing} of the 256 bytes are not in its vocabulary" if missing else None


def _kinds(part: Any, inner: str) -> set[str]:
    if not isinstance(part, dict):
        return set()
    return {str(step.get("type")) for step in (part, *part.get(inner, ()))}


def extend_tokenizer(
    path: Path, texts: Iterable[str], *, vocab_size: int, total: int = 0, on_progress: Progress | None = None
) -> Extended:
    """The tokenizer at `path` with pieces of `texts` added, up to vocab_size entries in all.

    `total` is the number of texts, for the progress calls alone. A small corpus may yield fewer.
    InputError when there is nothing to learn, or the tokenizer cannot be extended.
    """
    check_extendable(path, vocab_size)
    report: Progress = on_progress or (lambda stage, done, total: None)
    tokenizer = load_tokenizer(path)
    content = path.read_bytes()
    document = json.loads(content)
    old_size = vocabulary_size(tokenizer)
    pieces = _Pieces(tokenizer.get_vocab(with_added_tokens=True), old_size)
    words = _cut(tokenizer, _count_words(tokenizer, texts, total, report))
    merges = _learn(words, pieces, vocab_size - old_size, report)
    if not merges:
        message = f"holds no two neighbours that {path} leaves apart twice"
        raise InputError.of("corpus-too-small", "data.sources", message, "add more text")
    text = _appended(document, pieces, merges)
    _check_kept(path, text, pieces.vocab | pieces.names)
    old, new = sha256(content), sha256(text.encode())
    return Extended(text, TokenizerExtension(old_size, old, new, tuple(pieces.made)))


@dataclass(slots=True)
class _Pieces:
    """Old vocabulary and the pieces added to it, whose ids follow the largest old id."""

    vocab: dict[str, int]
    first: int
    strings: dict[int, str] = field(init=False)
    made: list[tuple[int, ...]] = field(default_factory=list)  # old ids, by new piece
    names: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.strings = {number: string for string, number in self.vocab.items()}

    def join(self, left: int, right: int) -> int | None:
        """The id of what two pieces spell together: a new one, or one made by another way."""
        string = self.strings[left] + self.strings[right]
        if string in self.vocab:
            return None
        if string not in self.names:
            number = self.names[string] = self.first + len(self.made)
            self.strings[number] = string
            self.made.append((*self.old_ids(left), *self.old_ids(right)))
        return self.names[string]

    @property
    def newest(self) -> int:
        return self.first + len(self.made) - 1

    def old_ids(self, number: int) -> tuple[int, ...]:
        return (number,) if number < self.first else self.made[number - self.first]


def _count_words(tokenizer: Tokenizer, texts: Iterable[str], total: int, report: Progress) -> Counter[str]:
    """Count the words of texts, normalized as for the model. Merges stay inside a word."""
    words: Counter[str] = Counter()
    normalizer, cutter = tokenizer.normalizer, tokenizer.pre_tokenizer
    for done, text in enumerate(texts, start=1):
        plain = text if normalizer is None else normalizer.normalize_str(text)
        words.update(word for word, _ in cutter.pre_tokenize_str(plain))
        report("count words", done, total)
    return words


def _cut(tokenizer: Tokenizer, words: Counter[str]) -> dict[tuple[int, ...], int]:
    """Words by their old ids; those of one piece have nothing to join."""
    cut: Counter[tuple[int, ...]] = Counter()
    model = tokenizer.model
    for word, count in words.items():
        ids = tuple(token.id for token in model.tokenize(word))
        if 1 < len(ids) <= LONGEST_WORD:
            cut[ids] += count
    return dict(cut)


def _learn(words: dict[tuple[int, ...], int], pieces: _Pieces, wanted: int, report: Progress) -> list[Pair]:
    """Merges that make `wanted` new pieces, or as many as there are."""
    merges: list[Pair] = []
    for pair, made in learn_merges(words, pieces.join):
        merges.append(pair)
        if made == pieces.newest:
            report("learn pieces", len(pieces.made), wanted)
        if len(pieces.made) == wanted:
            break
    return merges


def _appended(document: Any, pieces: _Pieces, merges: list[Pair]) -> str:
    """The tokenizer.json with new entries and merges at the end; all else is unchanged.

    Tokens outside of the model's vocabulary are added to it with their ids: the library would
    number tokens that it does not find there from the vocabulary's size, which has grown.
    """
    model = document["model"]
    model["vocab"] |= dict(sorted(pieces.vocab.items(), key=lambda entry: entry[1]))
    model["vocab"] |= pieces.names
    spelled = [[pieces.strings[left], pieces.strings[right]] for left, right in merges]
    as_text = bool(model["merges"]) and isinstance(model["merges"][0], str)  # the older notation
    model["merges"] += [" ".join(pair) for pair in spelled] if as_text else spelled
    return json.dumps(document, ensure_ascii=False, indent=2)


def _check_kept(path: Path, text: str, vocabulary: dict[str, int]) -> None:
    """InputError if the library, which renumbers some added tokens, changes an id of the result."""
    from tokenizers import Tokenizer

    read = Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    moved = sorted(name for name, number in vocabulary.items() if read.get(name) != number)
    if moved:
        message = f"{moved[0]!r} would not keep its id {vocabulary[moved[0]]}"
        hint = "save it once more with the tokenizers library, then extend that"
        raise InputError.of("tokenizer-not-extendable", str(path), message, hint)
