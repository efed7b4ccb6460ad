"""Token files for a benchmark, made in seconds: no tokenizer is trained and nothing is fetched.

The text is words drawn by a fixed seed, word n as often as 1/n (Zipf's law, as in a natural text),
and its tokenizer has one token for each word. So the rows of the embedding that a step reads are as
uneven as of real text, on which the time of its gradient depends; what the losses are does not
matter here.
"""

from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

from mpctl.train.data.prepare import prepare

WORDS, TEXTS, TEXT_WORDS = 4000, 200, 2500
END_OF_TEXT = "<|endoftext|>"


def write_data(folder: Path, vocab: int, *, texts: int = TEXTS) -> Path:
    """FOLDER/data: token files of `texts` texts of TEXT_WORDS words, of at most `vocab` different
    ones; half a million tokens by default."""
    count = min(vocab, WORDS) - 1
    names = [f"w{number}" for number in range(count)]
    draw, weights = random.Random(1), list(accumulate(1 / (n + 1) for n in range(count)))
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(texts):
        words = draw.choices(names, cum_weights=weights, k=TEXT_WORDS)
        (corpus / f"{number}.txt").write_text(" ".join(words), "ascii")
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(json.dumps(word_tokenizer(names)), "ascii")
    prepare(sources=[corpus], out=folder / "data", vocab_size=vocab, tokenizer=tokenizer)
    return folder / "data"


def word_tokenizer(names: list[str]) -> dict[str, object]:
    """A tokenizer.json with a token for each of these words and one that ends a text."""
    end = {
        "id": 0,
        "content": END_OF_TEXT,
        "special": True,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    vocabulary = {END_OF_TEXT: 0} | {name: number for number, name in enumerate(names, start=1)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": END_OF_TEXT},
    }
