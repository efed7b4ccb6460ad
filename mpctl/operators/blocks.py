"""Operations that families have in common: embedding, branches of attention and MLP, head.

Letters: b batch, s seq, h hidden; `heads` is the width of all heads together, q, k and v fused.
A block of GPT-2's shape has 12 h^2 + 13 h parameters (Narayanan et al., arXiv 2104.04473, eq. 2).
"""

from __future__ import annotations

from mpctl.operators.layer import (
    CONTEXT,
    INPUT,
    Activation,
    AttentionOp,
    Dropout,
    Loss,
    Norm,
    Operation,
    OperatorGroup,
    Residual,
    Table,
)
from mpctl.operators.matmul import Dims, MatMul, ParameterSpec
from mpctl.sharding import padded_vocab
from mpctl.spec.model import ModelSpec

Operations = tuple[Operation, ...]


def decoder_layer(model: ModelSpec, hidden: Dims, core: AttentionOp) -> OperatorGroup:
    """A layer of one attention and an MLP over hidden states of these dimensions: (batch, a
    sequence, hidden)."""
    return OperatorGroup((*attention_branch(model, hidden, core), *mlp_branch(model, hidden)))


def attention_branch(model: ModelSpec, hidden: Dims, core: AttentionOp) -> Operations:
    """Self-attention, with its norms and its residual sum."""
    heads, h = (*hidden[:-1], "heads"), ("hidden", model.hidden)
    width = model.heads * model.head_size
    fused = width + 2 * model.kv_heads * model.head_size
    value = INPUT if model.norm_order in ("post", "output") else "attention_norm"
    qkv = MatMul(
        "attention.qkv", core.part, hidden, ("hidden", "heads"), heads, value=value,
        weights=linear_weights("attention.qkv", ("heads", fused), h, bias="qkv" in model.biased),
    )  # fmt: skip
    output = MatMul(
        "attention.output", core.part, heads, ("heads", "hidden"), hidden, value=CONTEXT,
        weights=linear_weights(
            "attention.output", h, ("heads", width), bias="output" in model.biased
        ),
    )  # fmt: skip
    return in_branch(
        model, "attention", core.part, hidden, INPUT,
        (qkv, *query_key_norms(model, core.part, heads), core, output),
    )  # fmt: skip


def mlp_branch(model: ModelSpec, hidden: Dims, behind: str = "attention") -> Operations:
    """The MLP, with its norms and its residual sum; a gated one has twice the columns in its first
    product. behind: the branch before it."""
    ffn, h = (*hidden[:-1], "ffn"), ("hidden", model.hidden)
    inner, has_bias = model.ffn * (2 if model.gated else 1), "mlp" in model.biased
    shares = model.parallel_residual and model.shared_norm
    before = INPUT if model.parallel_residual else behind
    if model.norm_order == "post":
        before = f"{behind}_norm"
    value = "attention_norm" if shares else "mlp_norm"
    up = MatMul(
        "mlp.up", "mlp", hidden, ("hidden", "ffn"), ffn,
        value=before if model.norm_order in ("post", "output") else value,
        weights=linear_weights("mlp.up", ("ffn", inner), h, bias=has_bias),
    )  # fmt: skip
    down = MatMul(
        "mlp.down", "mlp", ffn, ("ffn", "hidden"), hidden, value="activation",
        weights=linear_weights("mlp.down", h, ("ffn", model.ffn), bias=has_bias),
    )  # fmt: skip
    activation = Activation("mlp", ffn, model.activation, model.gated, "mlp.up")
    return in_branch(model, "mlp", "mlp", hidden, "" if shares else before, (up, activation, down))


def in_branch(
    model: ModelSpec, name: str, part: str, hidden: Dims, value: str, operations: Operations
) -> Operations:
    """Operations with the norms and the residual sum of a branch: a norm of what it reads (pre), of
    the sum (post), of its result (output) or of both sides (sandwich).

    value: the tensor that the branch reads; empty where it shares the norm of the branch before.
    """
    order = model.norm_order
    first = () if order == "output" or not value else (name + "_norm",)
    before = [_norm(model, n, part, hidden, value) for n in first if order != "post"]
    result = f"{name}_output_norm"
    if order in ("output", "sandwich"):
        operations = (*operations, _norm(model, result, part, hidden, f"{name}.result"))
    behind = [_norm(model, n, part, hidden, name) for n in first if order == "post"]
    return (*before, *operations, Residual(part, hidden), *behind)


def _norm(model: ModelSpec, name: str, part: str, hidden: Dims, value: str) -> Norm:
    return Norm(name, part, hidden, model.norm, value, norm_weights(name, model))


def query_key_norms(model: ModelSpec, part: str, heads: Dims) -> tuple[Norm, ...]:
    """Norms of queries and of keys: over one head, with weights that all heads share, or over all
    heads together. The attention core saves their inputs."""
    if not model.qk_norm:
        return ()
    of_all, size = model.qk_norm == "width", model.head_size
    widths = {"query": model.heads * size, "key": model.kv_heads * size}
    return tuple(
        Norm(
            f"attention.{name}_norm", part, heads, model.norm, "",
            norm_weights(
                f"attention.{name}_norm", model,
                ("heads", width) if of_all else ("head_size", size),
            ),
        )
        for name, width in widths.items()
    )  # fmt: skip


def embedding(
    hidden: Dims, word: ParameterSpec, *added: ParameterSpec, norm: Norm | None = None
) -> OperatorGroup:
    """The lookup of words, tables whose rows are added, a norm, and dropout."""
    tables = (Table("embedding", added),) * bool(added)
    norms = () if norm is None else (norm,)
    return OperatorGroup((lookup(hidden, word), *tables, *norms, Dropout("embedding", hidden)))


def lookup(hidden: Dims, *word: ParameterSpec) -> MatMul:
    """The lookup of words: the product of one-hot rows with the word table."""
    rows = (*hidden[:-1], "vocab")
    return MatMul(
        "embedding.word", "embedding", rows, ("vocab", "hidden"), hidden, False, True,
        weights=word,
    )  # fmt: skip


def head(hidden: Dims, *weights: ParameterSpec, tied: bool) -> MatMul:
    """The logits: hidden states times the word table, or a separate table of the head."""
    logits, table = (*hidden[:-1], "vocab"), "embedding.word" if tied else "head"
    return MatMul(
        "head", "head", hidden, ("vocab", "hidden"), logits, table=table, is_head=True,
        value="final_norm", weights=weights,
    )  # fmt: skip


def output_head(hidden: Dims, *weights: ParameterSpec, tied: bool) -> Operations:
    """The head with its loss."""
    product = head(hidden, *weights, tied=tied)
    return product, Loss("head", product.writes)


def final_norm(model: ModelSpec, hidden: Dims, name: str = "final_norm") -> Norm:
    """The norm after the last layer."""
    return Norm(name, name, hidden, model.norm, "last", norm_weights(name, model))


def word_table(model: ModelSpec, *, tp: int, name: str = "embedding.word") -> ParameterSpec:
    """The word table [v, h], v padded to a multiple of the model's divisor x tp."""
    vocab = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    return ParameterSpec(f"{name}.weight", (vocab, model.hidden), ("vocab", "hidden"))


def norm_weights(
    name: str, model: ModelSpec, size: tuple[str, int] | None = None
) -> tuple[ParameterSpec, ...]:
    """Scale [h] and, for layernorm, bias [h]; none of a norm without weights. size: name and size
    of the dimension, where it is another than hidden."""
    dim, width = size or ("hidden", model.hidden)
    weight = ParameterSpec(f"{name}.weight", (width,), (dim,), decays=False)
    bias = ParameterSpec(f"{name}.bias", (width,), (dim,), decays=False)
    return {"layernorm": (weight, bias), "rmsnorm": (weight,)}.get(model.norm, ())


def linear_weights(
    name: str, outputs: tuple[str, int], inputs: tuple[str, int], *, bias: bool
) -> tuple[ParameterSpec, ...]:
    """Weight [out, in] and, with bias, [out]; outputs, inputs: (name, size) of each dimension."""
    weight = ParameterSpec(f"{name}.weight", (outputs[1], inputs[1]), (outputs[0], inputs[0]))
    if not bias:
        return (weight,)
    return weight, ParameterSpec(f"{name}.bias", (outputs[1],), (outputs[0],), decays=False)
