"""`extension.json`: what the ids stand for that were added to a tokenizer.

It lies beside the tokenizer.json that it is about, knows it by its sha256, and is read like
anything from strangers. By hand: old_vocab_size 300 and pieces [[5, 9], [5, 9, 7]] say that id 300
stands for the old ids 5, 9 and id 301 for 5, 9, 7. How pieces are found is told in extend.py.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.errors import InputError

SCHEMA = "mpctl.extension/1"
EXTENSION = "extension.json"
LONGEST_EXTENSION = 2**28
SHA256 = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class TokenizerExtension:
    """What new ids stand for: id old_vocab_size + k for the old ids pieces[k].

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
    """What the extension.json beside a tokenizer.json says of it; None where it has none.

    Data prepared with an extended tokenizer then carry what its new ids stand for.
    """
    path = tokenizer.with_name(EXTENSION)
    if not path.is_file():
        return None
    extension = read_extension(path)
    return extension if extension.tokenizer_sha256 == sha256(tokenizer.read_bytes()) else None


def sha256(content: bytes) -> str:
    """The SHA-256 of some bytes in hexadecimal."""
    return hashlib.sha256(content).hexdigest()
