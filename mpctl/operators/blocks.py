"""Parts that families have in common: norms, linear layers, a block of attention and MLP.

Letters: b batch, s seq, h hidden; `heads` is the width of all heads together, q, k and v fused.
A block of GPT-2's shape has 12 h^2 + 13 h parameters (Narayanan et al., arXiv 2104.04473, eq. 2).
"""

from __future__ import annotations

from mpctl.operators.matmul import Dims, MatMul, ParameterSpec
from mpctl.operators.saved import SavedTensor, hidden_saved, norm_saved
from mpctl.sharding import padded_vocab
from mpctl.spec.model import ModelSpec


def self_attention(hidden: Dims) -> tuple[MatMul, ...]:
    """The two products of self-attention over hidden states of these dimensions: (batch, a
    sequence, hidden)."""
    heads = (*hidden[:-1], "heads")
    return (
        MatMul("attention.qkv", "attention", hidden, ("hidden", "heads"), heads),
        MatMul("attention.output", "attention", heads, ("heads", "hidden"), hidden),
    )


def mlp(hidden: Dims) -> tuple[MatMul, ...]:
    """The two products of an MLP; a gated one has twice the columns in the first."""
    ffn = (*hidden[:-1], "ffn")
    return (
        MatMul("mlp.up", "mlp", hidden, ("hidden", "ffn"), ffn),
        MatMul("mlp.down", "mlp", ffn, ("ffn", "hidden"), hidden),
    )


def lookup(hidden: Dims) -> MatMul:
    """The lookup of words: the product of one-hot rows with the word table."""
    rows = (*hidden[:-1], "vocab")
    return MatMul("embedding.word", "embedding", rows, ("vocab", "hidden"), hidden, False, True)


def head(hidden: Dims, *, tied: bool) -> MatMul:
    """The logits: hidden states times the word table, or a table of the head's own."""
    logits, table = (*hidden[:-1], "vocab"), "embedding.word" if tied else "head"
    weight = ("vocab", "hidden")
    return MatMul("head", "head", hidden, weight, logits, table=table, is_head=True)


def word_table(model: ModelSpec, *, tp: int, name: str = "embedding.word") -> ParameterSpec:
    """The word table [v, h], v padded to a multiple of the model's divisor x tp."""
    vocab = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    return ParameterSpec(f"{name}.weight", (vocab, model.hidden), ("vocab", "hidden"))


def final_norm_saved(model: ModelSpec, hidden: Dims) -> tuple[SavedTensor, ...]:
    """What a norm behind the last layer saves, with its result, the input of what follows."""
    rows = hidden[:-1]
    return (*norm_saved(model.norm, rows, "final norm"), hidden_saved(rows, "normed"))


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


def attention_weights(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Norms, fused q | k | v and output of a layer's self-attention."""
    hidden, width = ("hidden", model.hidden), model.heads * model.head_size
    fused = width + 2 * model.kv_heads * model.head_size
    has_bias = {name: name in model.biased for name in ("qkv", "output")}
    return (
        *_norm_before("attention", model),
        *linear_weights("attention.qkv", ("heads", fused), hidden, bias=has_bias["qkv"]),
        *_query_key_norms(model),
        *linear_weights("attention.output", hidden, ("heads", width), bias=has_bias["output"]),
        *_norm_of_result("attention", model),
    )


def _query_key_norms(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Norms of queries and of keys: of a head, which all heads share, or of all heads together."""
    if not model.qk_norm:
        return ()
    of_all, size = model.qk_norm == "width", model.head_size
    query = ("heads", model.heads * size) if of_all else ("head_size", size)
    key = ("heads", model.kv_heads * size) if of_all else ("head_size", size)
    return (
        *norm_weights("attention.query_norm", model, query),
        *norm_weights("attention.key_norm", model, key),
    )


def mlp_weights(model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """Norms, up and down of a layer's MLP; gate and up are fused."""
    hidden, inner = ("hidden", model.hidden), model.ffn * (2 if model.gated else 1)
    has_bias, shares = "mlp" in model.biased, model.parallel_residual and model.shared_norm
    return (
        *(() if shares else _norm_before("mlp", model)),
        *linear_weights("mlp.up", ("ffn", inner), hidden, bias=has_bias),
        *linear_weights("mlp.down", hidden, ("ffn", model.ffn), bias=has_bias),
        *_norm_of_result("mlp", model),
    )


def _norm_before(branch: str, model: ModelSpec) -> tuple[ParameterSpec, ...]:
    """The norm of a branch that has the branch's name; behind the sum for norm_order post."""
    return () if model.norm_order == "output" else norm_weights(f"{branch}_norm", model)


def _norm_of_result(branch: str, model: ModelSpec) -> tuple[ParameterSpec, ...]:
    has_one = model.norm_order in ("output", "sandwich")
    return norm_weights(f"{branch}_output_norm", model) if has_one else ()
