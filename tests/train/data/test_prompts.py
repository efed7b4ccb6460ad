"""Prompts in each family's form, and texts assembled from written tokens; byte-level ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.model.families import get_prompt_form, special_tokens
from mpctl.spec.model import ModelSpec
from mpctl.train.data.prompts import PromptEncoder, filled_text
from mpctl.train.data.tokenizer import train_tokenizer

SHAPE: dict[str, Any] = {"layers": 1, "hidden": 8, "heads": 2, "vocab": 270, "seq_length": 16, "decoder_seq_length": 8}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["a"], vocab_size=257).save(str(path))
    return path


def encoder(tokenizer: Path, family: str, **changes: Any) -> PromptEncoder:
    model = ModelSpec.model_validate({**SHAPE, "family": family, **changes})
    return PromptEncoder(model, get_prompt_form(model), special_tokens(model), tokenizer)


def ids(tokenizer: Path, text: str) -> list[int]:
    return list(encoder(tokenizer, "gpt").tokenizer.encode(text).ids)


def test_an_empty_prompt_of_a_gpt_begins_a_document(tokenizer: Path) -> None:
    gpt = encoder(tokenizer, "gpt")
    empty, plain = gpt.encode(["", "[MASK]"], max_tokens=None)
    assert empty.tokens == gpt.ends == (0,)
    assert plain.tokens == tuple(ids(tokenizer, "[MASK]"))
    assert (empty.limit, plain.limit, plain.masks) == (15, 10, ())


def test_blanks_of_each_family(tokenizer: Path) -> None:
    """Reserved ids count down from the top of a vocabulary of 270, in the order of their names."""
    glm, bert, t5 = (encoder(tokenizer, name) for name in ("glm", "bert", "t5"))
    a, b = ids(tokenizer, "a")[0], ids(tokenizer, "b")[0]
    blank, none = glm.encode(["a[MASK]b", "ab"], max_tokens=3)
    assert (blank.tokens, blank.masks) == ((a, 269, b), (1,))
    assert (none.tokens, none.masks) == ((a, b, 269), (2,))
    assert glm.ends == (267,)
    (masked,) = bert.encode(["a[MASK]b[MASK]"], max_tokens=None)
    assert (masked.tokens, masked.masks) == ((269, a, 267, b, 267, 268), (2, 4))
    (spans,) = t5.encode(["a<extra_id_0>b"], max_tokens=None)
    assert spans.tokens == (a, 269, b, t5.special["</s>"])
    assert t5.ends == (t5.special["</s>"],)


def test_what_was_written_goes_where_its_blank_was(tokenizer: Path) -> None:
    glm, t5 = encoder(tokenizer, "glm"), encoder(tokenizer, "t5", seq_length=64)
    prompt = "x[MASK]y[MASK]"
    (asked,) = glm.encode([prompt], max_tokens=3)
    one, two = ids(tokenizer, "12"), ids(tokenizer, "3")
    assert filled_text(glm, asked, [one, two], prompt) == "x12y3"
    assert filled_text(glm, asked, [one], prompt) == "x12y[MASK]"
    assert filled_text(glm, glm.encode(["x"], max_tokens=3)[0], [one], "x") == "x12"
    first, second = t5.special["<extra_id_0>"], t5.special["<extra_id_1>"]
    prompt = "x<extra_id_0>y<extra_id_1>"
    (asked,) = t5.encode([prompt], max_tokens=9)
    assert filled_text(t5, asked, [[first, *one, second, *two]], prompt) == "x12y3"
    assert filled_text(t5, asked, [[second, *two]], prompt) == "xy3"
    assert filled_text(t5, t5.encode(["x"], max_tokens=9)[0], [[first, *one]], "x") == "12"


@pytest.mark.parametrize(
    ("family", "prompt", "max_tokens", "words"),
    [
        ("gpt", "a" * 16, None, "16 tokens and 1 to write exceed the model's 16 positions"),
        ("gpt", "a" * 10, 7, "use --max-tokens 6 or a shorter prompt"),
        ("bert", "ab", None, "has no [MASK]"),
        ("bert", "[MASK]" + "a" * 14, None, "17 tokens exceed the model's 16 positions"),
        ("glm", "a", 16, "use --max-tokens 15 or less"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_bound(
    family: str, prompt: str, max_tokens: int | None, words: str, tokenizer: Path
) -> None:
    with pytest.raises(InputError) as caught:
        encoder(tokenizer, family).encode(["[MASK]", prompt], max_tokens=max_tokens)
    (issue,) = caught.value.issues[-1:]
    assert issue.where == "prompt 2"
    assert words in str(issue)


def test_positions_that_follow_from_a_formula_have_no_bound(tokenizer: Path) -> None:
    (prompt,) = encoder(tokenizer, "gpt", position="rotary").encode(["a" * 40], max_tokens=100)
    assert (len(prompt.tokens), prompt.limit) == (40, 100)
