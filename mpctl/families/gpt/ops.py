"""The operator table of GPT: embeddings, L equal blocks, a final norm and the output head.

Letters: b batch, s seq, h hidden; `heads` is the width of all heads together, q, k and v fused;
v vocab, padded. Parameters of a GPT-2 shape: v h + s h + L (12 h^2 + 13 h) + 2 h
(Narayanan et al., arXiv 2104.04473, eq. 2, exact form).
"""

from __future__ import annotations

from mpctl.families.table import Dims, OperatorTable, Product, Weight
from mpctl.sharding import padded_vocab
from mpctl.spec.model import Model

HIDDEN: Dims = ("batch", "seq", "hidden")
HEADS: Dims = ("batch", "seq", "heads")
FFN: Dims = ("batch", "seq", "ffn")
LOGITS: Dims = ("batch", "seq", "vocab")

BLOCK = (
    Product("attention.qkv", "attention", HIDDEN, ("hidden", "heads"), HEADS),
    Product("attention.output", "attention", HEADS, ("heads", "hidden"), HIDDEN),
    Product("mlp.up", "mlp", HIDDEN, ("hidden", "ffn"), FFN),
    Product("mlp.down", "mlp", FFN, ("ffn", "hidden"), HIDDEN),
)
LOOKUP = Product("embedding.word", "embedding", LOGITS, ("vocab", "hidden"), HIDDEN, False, True)
HEAD = Product("head", "head", HIDDEN, ("vocab", "hidden"), LOGITS)


def operator_table(model: Model, *, tp: int) -> OperatorTable:
    """tp only matters to how far the vocabulary is padded."""
    vocab = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    word = Weight("embedding.word.weight", (vocab, model.hidden), ("vocab", "hidden"))
    head = () if model.tied_embeddings else (Weight("head.weight", word.shape, word.dims),)
    return OperatorTable(
        layers=model.layers,
        block=BLOCK,
        block_weights=_block_weights(model),
        first=(LOOKUP,),
        first_weights=(word, *_positions(model)),
        last=(HEAD,),
        last_weights=(*_norm("final_norm", model), *head),
        tied=word if model.tied_embeddings else None,
    )


def _positions(model: Model) -> tuple[Weight, ...]:
    if model.position != "learned":
        return ()
    shape = (model.max_positions, model.hidden)
    return (Weight("embedding.position.weight", shape, ("positions", "hidden")),)


def _norm(name: str, model: Model) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (model.hidden,), ("hidden",))
    bias = Weight(f"{name}.bias", (model.hidden,), ("hidden",))
    return (weight, bias) if model.norm == "layernorm" else (weight,)


def _linear(
    name: str, outputs: tuple[str, int], inputs: tuple[str, int], model: Model
) -> tuple[Weight, ...]:
    weight = Weight(f"{name}.weight", (outputs[1], inputs[1]), (outputs[0], inputs[0]))
    bias = Weight(f"{name}.bias", (outputs[1],), (outputs[0],))
    return (weight, bias) if model.bias else (weight,)


def _block_weights(model: Model) -> tuple[Weight, ...]:
    hidden = ("hidden", model.hidden)
    width = model.heads * model.head_size
    fused = width + 2 * model.kv_heads * model.head_size
    inner = model.ffn * (2 if model.gated else 1)
    return (
        *_norm("attention_norm", model),
        *_linear("attention.qkv", ("heads", fused), hidden, model),
        *_linear("attention.output", hidden, ("heads", width), model),
        *_norm("mlp_norm", model),
        *_linear("mlp.up", ("ffn", inner), hidden, model),
        *_linear("mlp.down", hidden, ("ffn", model.ffn), model),
    )
