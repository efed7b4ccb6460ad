"""Byte-level BPE: any bytes in, no unknown token, one end-of-text token between documents.

Byte-pair encoding is Sennrich et al., arXiv 1508.07909; on bytes, with the regular expression
that keeps words apart, Radford et al. 2019 (GPT-2). The `tokenizers` library does the work. The
alphabet is all 256 bytes, so a vocabulary of 257 is that and `<|endoftext|>`, without merges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
# What others call it: Llama 3; T5 and Llama 2; many small ones.
END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCABULARY = 257
TOKENIZER_HINT = "give a tokenizer.json as the tokenizers library saves it"

Progress = Callable[[str, int, int], None]
"""Called as (stage, done, total): total is 0 when it is not known."""


def check_trainable(vocab_size: int) -> None:
    """InputError for a vocabulary below 257."""
    if vocab_size < SMALLEST_VOCABULARY:
        message = f"{vocab_size} entries do not hold the 256 bytes and {END_OF_TEXT}"
        hint = f"use {SMALLEST_VOCABULARY} or more"
        raise InputError.of("vocab-too-small", "data.vocab_size", message, hint)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """A tokenizer of at most `vocab_size` entries, the same for the same texts.

    A small corpus may yield fewer entries. InputError for a vocabulary below 257. No signal is
    handled before the library is done: train_child.py runs this where that may take long.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    check_trainable(vocab_size)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _plain(tokenizer)


def alphabet() -> list[str]:
    """The 256 characters that stand for the bytes, sorted."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def find_tokenizer(path: Path) -> Path:
    """The tokenizer.json that a path means: itself, or that of prepared data or of a run."""
    files = [path / "tokenizer.json", path / "data" / "tokenizer.json"] if path.is_dir() else []
    return next((file for file in files if file.is_file()), path)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, without its truncation and padding; or InputError."""
    from tokenizers import Tokenizer

    text = tokenizer_text(path)
    try:
        return _plain(Tokenizer.from_str(text))
    except Exception as error:  # the library raises bare Exception
        message = f"not a tokenizer: {error}"
        raise InputError.of("tokenizer-damaged", str(path), message, TOKENIZER_HINT) from None


def tokenizer_text(path: Path) -> str:
    """What a tokenizer.json holds; InputError where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        message = f"not readable: {error}"
        raise InputError.of("tokenizer-unreadable", str(path), message, TOKENIZER_HINT) from None


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Every text whole, and `<|endoftext|>` inside a text spelled out: it must not end it."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """One more than the largest id, added tokens included: ids may leave gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def end_of_text_id(tokenizer: Tokenizer) -> int:
    """The id that ends a document; InputError when the vocabulary knows no such token."""
    for name in END_OF_TEXT_NAMES:
        token = tokenizer.token_to_id(name)
        if token is not None:
            return token
    message = f"the vocabulary holds none of {', '.join(END_OF_TEXT_NAMES)}"
    hint = f"add {END_OF_TEXT} as a special token"
    raise InputError.of("tokenizer-end-of-text", "data.tokenizer", message, hint)


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without end-of-text; InputError where the tokenizer knows no way."""
    try:
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    except Exception as error:  # the library raises bare Exception
        hint = "use a byte-level tokenizer, or one with an unknown token"
        message = f"cannot encode the corpus: {error}"
        raise InputError.of("tokenizer-encode", "data.tokenizer", message, hint) from None
    return [encoding.ids for encoding in encodings]
