"""The shape of a transformer, and nothing about how it is laid out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from mpctl.spec.base import Count, Positive, Table

FamilyName = Literal["gpt", "bert", "t5", "glm"]


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
    activation: Literal["gelu", "gelu_tanh", "relu", "swiglu", "geglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: Positive = 1e-5
    position: Literal["learned", "rotary", "relative", "none"] = "learned"
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
        hidden, heads = raw.get("hidden"), raw.get("heads")
        derived = {"kv_heads": heads, "max_positions": raw.get("seq_length")}
        if isinstance(hidden, int):
            derived["ffn"] = 4 * hidden
            if isinstance(heads, int) and heads > 0 and hidden % heads == 0:
                derived["head_dim"] = hidden // heads
        return {**{k: v for k, v in derived.items() if v is not None}, **raw}

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden // self.heads

    @property
    def gated(self) -> bool:
        """Whether the MLP's first matrix is two: one of them gates the other."""
        return self.activation in ("swiglu", "geglu")
