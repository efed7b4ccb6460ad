"""The first lines of prepared data, decoded: whether the tokens are the text that was meant."""

from __future__ import annotations

from mpctl.data.manifest import Prepared
from mpctl.data.tokenizer import load_tokenizer
from mpctl.errors import InputError

MOST_LINES = 5
MOST_TOKENS = 400


def first_lines(prepared: Prepared) -> list[str]:
    """Up to five lines of the first training document, as far as its first 400 tokens reach.

    InputError when they hold an id that the model has no row for.
    """
    data = prepared.train.open()
    ids = [int(i) for i in data.document(0, 0, MOST_TOKENS) if i != prepared.end_of_text_id]
    outside = [i for i in ids if not 0 <= i < prepared.vocab_size]
    if outside:
        message = f"token id {outside[0]} is outside the vocabulary of {prepared.vocab_size}"
        hint = "run `mpctl data prepare` with --overwrite"
        raise InputError.of("token-range", f"{prepared.train.prefix}.bin", message, hint)
    lines = load_tokenizer(prepared.tokenizer_path).decode(ids).splitlines()
    return lines[:MOST_LINES]
