"""Ids of the tokens that an objective adds to text: the tokenizer's own, or reserved ones.

A name among the tokenizer's added tokens keeps its id. The others take ids that no text uses, from
the top of the model's vocabulary downward, as T5's sentinels do (arXiv 1910.10683, section 3.1.4).
By hand: a vocabulary of 100, 97 of them the tokenizer's, [SEP] being 5 there: [CLS], [SEP] and
[MASK] are 99, 5 and 98. Needs neither torch nor numpy, so that a launch may ask before it starts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpctl.data.tokenizer import TOKENIZER_HINT, tokenizer_text
from mpctl.errors import InputError

RULE = "special-tokens-fit"


def special_ids(
    added: Mapping[str, int], names: Sequence[str], *, vocab: int, words: int
) -> dict[str, int]:
    """The id of each name, in the order of `names`; text uses range(words) of range(vocab).

    InputError when the reserved ids would reach into those of the text.
    """
    missing = missing_tokens(added, names)
    if missing and vocab - len(missing) < words:
        raise InputError.of(
            RULE, "model.vocab",
            f"{vocab} ids leave {max(0, vocab - words)} free beside the tokenizer's {words}, "
            f"but {_some(missing)} need {len(missing)}",
            f"use {words + len(missing)} or more, or a tokenizer that has them as added tokens",
        )  # fmt: skip
    reserved = {name: vocab - 1 - index for index, name in enumerate(missing)}
    return {name: reserved[name] if name in reserved else _known(added, name, words)
            for name in names}  # fmt: skip


def missing_tokens(added: Mapping[str, int], names: Sequence[str]) -> list[str]:
    """The names that are not among the tokenizer's added tokens; each reserves an id."""
    return [name for name in names if name not in added]


def added_tokens(path: Path) -> dict[str, int]:
    """Names and ids of the added tokens of a tokenizer.json; InputError for what is none."""
    text = tokenizer_text(path)
    try:
        read = json.loads(text)
        return dict(_entry(entry) for entry in read.get("added_tokens") or [])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        message = f"not a tokenizer: {type(error).__name__}: {error}"
        raise InputError.of("tokenizer-damaged", str(path), message, TOKENIZER_HINT) from None


def _entry(entry: Any) -> tuple[str, int]:
    name, token = entry["content"], entry["id"]
    if type(name) is not str or type(token) is not int or token < 0:
        raise ValueError(f"added token {name!r} has the id {token!r}")
    return name, token


def _known(added: Mapping[str, int], name: str, words: int) -> int:
    if added[name] >= words:  # it could meet a reserved one
        raise InputError.of(
            RULE, "data",
            f"{name} has the id {added[name]}, but the data's tokenizer uses ids below {words}",
            "run `mpctl data prepare` with --overwrite",
        )  # fmt: skip
    return added[name]


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) < 4 else f"{names[0]}, {names[1]} ... {names[-1]}"
