"""The description of T5 for the planning half (model/families/description.py).

Of n text tokens d = 15 %, rounded, are noise, in k = d / 3 spans, rounded; at least one each. The
encoder reads n - d text tokens, a sentinel a span and </s>; the decoder writes d tokens, the
sentinels and </s>. One token more of text makes the input longer by one or not at all, so some n
fills every seq_length exactly, and the largest of them is taken, as T5's own code does.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from mpctl.model.families.description import BatchArray, ModelFamily
from mpctl.model.families.t5.ops import operator_table
from mpctl.spec.families import PromptForm, PromptKind
from mpctl.spec.model import ModelSpec

PAD, END = "<pad>", "</s>"
SHORTEST_TEXT = 2  # one token kept and one of noise: 3 tokens in, 3 out


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many of `text` tokens are noise, and in how many spans the noise lies."""

    text: int
    noise: int
    spans: int

    @classmethod
    def of(cls, text: int) -> Lengths:
        """The lengths that follow from `text` tokens of text."""
        noise = max(1, (15 * text + 50) // 100)
        return cls(text, noise, max(1, (2 * noise + 3) // 6))

    @property
    def kept(self) -> int:
        """Text tokens that the encoder reads."""
        return self.text - self.noise

    @property
    def inputs(self) -> int:
        """Tokens of the encoder's input: text, a sentinel for each span, </s>."""
        return self.kept + self.spans + 1

    @property
    def targets(self) -> int:
        """Tokens that the decoder writes: noise, a sentinel for each span, </s>."""
        return self.noise + self.spans + 1


def lengths(seq_length: int) -> Lengths:
    """The lengths of the longest text whose input fits seq_length; of the shortest text below 3."""
    texts = range(SHORTEST_TEXT, 2 * max(seq_length, SHORTEST_TEXT))
    fitting = bisect_right(texts, seq_length, key=lambda text: Lengths.of(text).inputs)
    return Lengths.of(texts[max(0, fitting - 1)])


def target_length(seq_length: int) -> int:
    """Tokens that the decoder has to write for an input of seq_length: 114 for 512."""
    return lengths(seq_length).targets


def sentinel(span: int) -> str:
    """Name of the token that stands for span number `span`, from 0."""
    return f"<extra_id_{span}>"


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model contain in addition to text: a sentinel per
    span."""
    spans = lengths(model.seq_length).spans
    return (*(sentinel(span) for span in range(spans)), PAD, END)


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split must hold: one sample and one."""
    return lengths(model.seq_length).text + 1


FAMILY = ModelFamily(
    name="t5",
    operator_table=operator_table,
    implementation="mpctl.train.families.t5.module:IMPLEMENTATION",
    positions=("relative",),
    grouped_queries=False,  # cross attention has a key and a value for every query head
    shortest_sequence=3,  # a token, a sentinel and </s>
    batch_arrays={
        "tokens": BatchArray(("batch", "seq"), is_tokens=True),
        "decoder_tokens": BatchArray(("batch", "decoder_seq"), is_tokens=True),
        "targets": BatchArray(("batch", "decoder_seq")),
        "weights": BatchArray(("batch", "decoder_seq")),
    },
    special_tokens=special_tokens,
    least_tokens=least_tokens,
    target_length=target_length,
    prompt=PromptForm(PromptKind.DECODE, after=(END,), start=PAD, end=END),
    hub="mpctl.model.families.t5.hub",
    synonyms=("mt5", "flan_t5", "ul2", "encoder_decoder", "seq2seq"),
)
