"""The shape of a transformer, and nothing about how it is laid out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mpctl.spec.base import Count, Positive, Table

FamilyName = Literal["gpt", "bert", "t5", "glm"]
DERIVED = ("ffn", "kv_heads", "head_dim", "max_positions", "norm_order")  # see `derived`


class Model(Table):
    """A model of one of the families.

    `layers` counts a decoder's (gpt), an encoder's (bert) or blank-filling blocks (glm); for t5 it
    counts the encoder's, and `decoder_layers` the decoder's.
    """

    name: str | None = None
    family: FamilyName = "gpt"
    layers: Count
    decoder_layers: Count | None = Field(None, description="t5 only: layers of the decoder")
    hidden: Count
    ffn: Count = Field(description="width of the MLP; 4 x hidden when absent")
    heads: Count
    kv_heads: Count = Field(description="heads of keys and values; as many as heads when absent")
    head_dim: Count | None = Field(None, description="hidden / heads when absent")
    vocab: Count = Field(description="tokens that exist; rows added by padding are not counted")
    vocab_divisor: Count = Field(128, description="the table is padded to a multiple of this x tp")
    seq_length: Count
    decoder_seq_length: Count | None = Field(None, description="t5 only")
    max_positions: Count = Field(description="rows of a learned position table")
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu", "geglu_tanh"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_order: Literal["pre", "post"] = Field(
        "pre", description="norms before attention and MLP, or after their sums (bert's way)"
    )
    norm_epsilon: Positive = 1e-5
    position: Literal["learned", "rotary", "relative", "none"] = "learned"
    rotary_base: Positive = Field(10000.0, description="of rotary positions")
    rotary_scaling: dict[str, float] | None = Field(
        None,
        description="Llama 3.1: factor, low_freq_factor, high_freq_factor, original_max_position",
    )
    relative_buckets: Count = Field(32, description="of relative positions: rows of the table")
    relative_max_distance: Count = Field(128, description="beyond it all share the last bucket")
    token_types: Count = Field(2, description="bert only: rows of the table of segments")
    attention: Literal["flash", "unfused"] = Field(
        "flash", description="whether the score matrix is ever held in memory"
    )
    bias: bool = Field(True, description="biases in linear layers")
    tied_embeddings: bool = Field(True, description="the output layer shares the word table")
    source: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given = {key: v for key, v in raw.items() if key not in DERIVED or v is not None}
        return {**derived(raw), **given}

    @property
    def head_size(self) -> int:
        """Columns of one head; for a model whose heads divide hidden (rules/model.py says so)."""
        if self.head_dim is None:
            assert self.hidden % self.heads == 0, "heads-divide-hidden was not asked"
            return self.hidden // self.heads
        return self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP's first matrix is two: one of them gates the other."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def all_layers(self) -> int:
        """Of the encoder and the decoder, where there are two."""
        return self.layers + (self.decoder_layers or 0)

    @property
    def tokens_per_sample(self) -> int:
        """Positions computed for one sample, encoder's and decoder's."""
        return self.seq_length + (self.decoder_seq_length or 0)


def derived(raw: dict[str, Any]) -> dict[str, int | str]:
    """What a raw table leaves to follow from family, hidden, heads and seq_length, where those are
    legal.

    By hand: hidden 64, heads 4 and seq_length 16 give ffn 256, kv_heads 4, head_dim 16 and
    max_positions 16; heads 5 gives no head_dim, and the rules say why.
    """
    hidden, heads, seq_length = (_count(raw.get(key)) for key in ("hidden", "heads", "seq_length"))
    values = {
        "ffn": hidden and 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden and heads and hidden % heads == 0 and hidden // heads,
        "max_positions": seq_length,
        "norm_order": "post" if raw.get("family") == "bert" else "pre",
    }
    return {key: value for key, value in values.items() if value}


def chosen(raw: dict[str, Any]) -> dict[str, Any]:
    """A raw table without what follows from the rest of it, so that keys laid over it derive
    anew: ffn 256 goes where hidden is 64, ffn 170 is a choice and stays."""
    follows = derived(raw)
    return {k: v for k, v in raw.items() if k not in follows or v != follows[k]}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
