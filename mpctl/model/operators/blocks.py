"""Operations that families have in common: embedding, branches of attention and MLP, head.

Letters: b batch, s seq, h hidden; `heads` is the width of all heads together, q, k and v fused.
A block of GPT-2's shape has 12 h^2 + 13 h parameters (Narayanan et al., arXiv 2104.04473, eq. 2).
"""

from __future__ import annotations

from dataclasses import replace

from mpctl.core.sharding import EXPERTS, padded_vocab
from mpctl.model.operators.layer import (
    INPUT,
    Activation,
    AttentionOp,
    Combine,
    Dispatch,
    Dropout,
    Loss,
    Norm,
    Operation,
    OperatorGroup,
    Residual,
    Table,
)
from mpctl.model.operators.matmul import ROUTED, Dims, MatMul, ParameterSpec
from mpctl.spec.model import ModelSpec

Operations = tuple[Operation, ...]


def decoder_layer(model: ModelSpec, hidden: Dims, core: AttentionOp, *, has_experts: bool = False) -> OperatorGroup:
    """A layer of one attention and an MLP, or experts, over hidden states of these dimensions:
    (batch, a sequence, hidden)."""
    attend = latent_attention_branch if model.is_mla else attention_branch
    feed_forward = experts_branch if has_experts else mlp_branch
    return OperatorGroup((*attend(model, hidden, core), *feed_forward(model, hidden)))


def attention_branch(model: ModelSpec, hidden: Dims, core: AttentionOp) -> Operations:
    """Self-attention, with its norms and its residual sum."""
    heads, h = (*hidden[:-1], "heads"), ("hidden", model.hidden)
    width = model.heads * model.head_size
    fused = width + 2 * model.kv_heads * model.head_size
    value = INPUT if model.norm_order in ("post", "output") else "attention_norm"
    sinks = ParameterSpec("attention.sinks", (model.heads,), ("heads",), decays=False)
    qkv = MatMul(
        "attention.qkv",
        core.part,
        hidden,
        ("hidden", "heads"),
        heads,
        value=value,
        weights=(
            *linear_weights("attention.qkv", ("heads", fused), h, bias="qkv" in model.biased),
            *(sinks,) * model.attention_sinks,
        ),
    )
    output = MatMul(
        "attention.output",
        core.part,
        heads,
        ("heads", "hidden"),
        hidden,
        value=core.result,
        weights=linear_weights("attention.output", h, ("heads", width), bias="output" in model.biased),
    )
    return in_branch(
        model, "attention", core.part, hidden, INPUT, (qkv, *query_key_norms(model, core.part, heads), core, output)
    )


def latent_attention_branch(model: ModelSpec, hidden: Dims, core: AttentionOp) -> Operations:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries from a
    latent, or from the hidden states, and keys and values from another. The latents are whole on
    every rank of tp; what is computed from them is split by heads. The last columns of the keys'
    product are the part with rotary positions, which all heads share."""
    part, h, a = core.part, ("hidden", model.hidden), model.heads
    latent, heads = (*hidden[:-1], "latent"), (*hidden[:-1], "heads")
    value = INPUT if model.norm_order in ("post", "output") else "attention_norm"
    rank, rope = model.kv_lora_rank or 0, model.qk_rope_head_dim or 0
    inner = ("heads", a * model.qk_size)
    queries: Operations
    if model.q_lora_rank:
        queries = (
            _down(part, "query", hidden, latent, model.q_lora_rank, h, value),
            _latent_norm(model, part, "query", latent, model.q_lora_rank),
            _up(part, "query", latent, heads, inner, model.q_lora_rank),
        )
    else:
        name = "attention.query"
        weights = linear_weights(name, inner, h, bias=False)
        queries = (MatMul(name, part, hidden, ("hidden", "heads"), heads, value=value, weights=weights),)
    columns = ("heads", a * ((model.qk_nope_head_dim or 0) + model.v_size))
    keys = (
        _down(part, "key_value", hidden, latent, rank + rope, h, value),
        _latent_norm(model, part, "key_value", latent, rank),
        _up(part, "key_value", latent, heads, columns, rank),
    )
    output = MatMul(
        "attention.output",
        part,
        heads,
        ("heads", "hidden"),
        hidden,
        value=core.result,
        weights=linear_weights("attention.output", h, ("heads", a * model.v_size), bias=False),
    )
    core = core._replace(query_product=queries[-1].name, key_product=keys[-1].name, latent=rank + rope, has_norms=False)
    operations = (*queries, *keys, core, output)
    return in_branch(model, "attention", part, hidden, INPUT, operations)


def _down(part: str, which: str, hidden: Dims, latent: Dims, width: int, h: tuple[str, int], value: str) -> MatMul:
    name = f"attention.{which}_down"
    return MatMul(
        name,
        part,
        hidden,
        ("hidden", "latent"),
        latent,
        value=value,
        weights=linear_weights(name, ("latent", width), h, bias=False),
    )


def _latent_norm(model: ModelSpec, part: str, which: str, latent: Dims, width: int) -> Norm:
    name = f"attention.{which}_latent_norm"
    weights = norm_weights(name, model, ("latent", width))
    return Norm(name, part, latent, model.norm, f"attention.{which}_down", weights)


def _up(part: str, which: str, latent: Dims, heads: Dims, outputs: tuple[str, int], width: int) -> MatMul:
    name = f"attention.{which}_up"
    return MatMul(
        name,
        part,
        latent,
        ("latent", "heads"),
        heads,
        value=f"attention.{which}_latent_norm",
        weights=linear_weights(name, outputs, ("latent", width), bias=False),
    )


def mlp_branch(model: ModelSpec, hidden: Dims, behind: str = "attention") -> Operations:
    """The MLP, with its norms and its residual sum; a gated one has twice the columns in its first
    product. behind: the branch before it."""
    before, value = _read_by_mlp(model, behind)
    has_bias = "mlp" in model.biased
    operations = _mlp(model, "mlp", "ffn", model.ffn, hidden, value, bias=has_bias)
    return in_branch(model, "mlp", "mlp", hidden, before, operations)


def _mlp(model: ModelSpec, name: str, dim: str, width: int, hidden: Dims, value: str, *, bias: bool) -> Operations:
    """Two products and the activation between them; value: the tensor that the first one reads."""
    inner, h = (*hidden[:-1], dim), ("hidden", model.hidden)
    columns = width * (2 if model.gated else 1)
    up = MatMul(
        f"{name}.up",
        "mlp",
        hidden,
        ("hidden", dim),
        inner,
        value=value,
        weights=linear_weights(f"{name}.up", (dim, columns), h, bias=bias),
    )
    result = name.removeprefix("mlp").lstrip(".") + "activation"
    down = MatMul(
        f"{name}.down",
        "mlp",
        inner,
        (dim, "hidden"),
        hidden,
        value=result,
        weights=linear_weights(f"{name}.down", h, (dim, width), bias=bias),
    )
    return up, Activation("mlp", inner, model.activation, model.gated, f"{name}.up"), down


def experts_branch(model: ModelSpec, hidden: Dims, behind: str = "attention") -> Operations:
    """A mixture of experts, with its norms and its residual sum. A router scores the experts of
    each token; its hidden states are sent to the ranks of the best, which are MLPs with stacked
    matrices, without biases unless expert_bias is set; the results are sent back and summed by the
    router's weights. Shared experts are an MLP of all tokens, split over tp. behind: the branch
    before it."""
    assert model.experts is not None
    before, value = _read_by_mlp(model, behind)
    count, f, h = model.experts, model.expert_width, model.hidden
    halves = 2 if model.gated else 1
    rows, inner = (*ROUTED, "hidden"), (*ROUTED, "expert_ffn")
    scores = ParameterSpec("mlp.router.weight", (count, h), ("experts", "hidden"))
    up = ParameterSpec(
        "mlp.experts.up.weight", (count, halves, f, h), ("experts", "halves", "expert_ffn", "hidden"), view=EXPERTS
    )
    down = ParameterSpec("mlp.experts.down.weight", (count, h, f), ("experts", "hidden", "expert_ffn"), view=EXPERTS)
    biases = [
        (
            replace(
                weight,
                name=weight.name.replace("weight", "bias"),
                shape=weight.shape[:-1],
                dims=weight.dims[:-1],
                decays=False,
            ),
        )
        * model.expert_bias
        for weight in (scores, up, down)
    ]
    operations: Operations = (
        MatMul(
            "mlp.router",
            "mlp",
            hidden,
            ("hidden", "experts"),
            (*hidden[:-1], "experts"),
            value=value,
            weights=(scores, *biases[0]),
            is_wide=True,
        ),
        Dispatch("mlp", hidden, rows),
        MatMul(
            "mlp.experts.up", "mlp", rows, ("hidden", "expert_ffn"), inner, value="dispatched", weights=(up, *biases[1])
        ),
        Activation("mlp", inner, model.activation, model.gated, "mlp.experts.up"),
        MatMul(
            "mlp.experts.down",
            "mlp",
            inner,
            ("expert_ffn", "hidden"),
            rows,
            value="experts.activation",
            weights=(down, *biases[2]),
        ),
        Combine("mlp", rows, hidden),
    )
    if model.shared_expert_ffn:
        operations += _mlp(model, "mlp.shared", "shared_ffn", model.shared_expert_ffn, hidden, value, bias=False)
    if model.shared_expert_ffn and model.shared_expert_gate:
        gate = ParameterSpec("mlp.shared_gate.weight", (1, h), ("gate", "hidden"))
        operations += (
            MatMul(
                "mlp.shared_gate",
                "mlp",
                hidden,
                ("hidden", "gate"),
                (*hidden[:-1], "gate"),
                value=value,
                weights=(gate,),
                is_wide=True,
            ),
        )
    return in_branch(model, "mlp", "mlp", hidden, before, operations)


def _read_by_mlp(model: ModelSpec, behind: str) -> tuple[str, str]:
    """(the tensor that the MLP's branch reads, empty where it shares attention's norm; the one that
    its first products read)."""
    shares = model.parallel_residual and model.shared_norm
    before = INPUT if model.parallel_residual else behind
    if model.norm_order == "post":
        before = f"{behind}_norm"
    normed = "attention_norm" if shares else "mlp_norm"
    value = before if model.norm_order in ("post", "output") else normed
    return "" if shares else before, value


def in_branch(model: ModelSpec, name: str, part: str, hidden: Dims, value: str, operations: Operations) -> Operations:
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
            f"attention.{name}_norm",
            part,
            heads,
            model.norm,
            "",
            norm_weights(f"attention.{name}_norm", model, ("heads", width) if of_all else ("head_size", size)),
        )
        for name, width in widths.items()
    )


def embedding(hidden: Dims, word: ParameterSpec, *added: ParameterSpec, norm: Norm | None = None) -> OperatorGroup:
    """The lookup of words, tables whose rows are added, a norm, and dropout."""
    tables = (Table("embedding", added),) * bool(added)
    norms = () if norm is None else (norm,)
    return OperatorGroup((lookup(hidden, word), *tables, *norms, Dropout("embedding", hidden)))


def lookup(hidden: Dims, *word: ParameterSpec) -> MatMul:
    """The lookup of words: the product of one-hot rows with the word table."""
    rows = (*hidden[:-1], "vocab")
    return MatMul("embedding.word", "embedding", rows, ("vocab", "hidden"), hidden, False, True, weights=word)


def head(hidden: Dims, *weights: ParameterSpec, tied: bool) -> MatMul:
    """The logits: hidden states times the word table, or a separate table of the head."""
    logits, table = (*hidden[:-1], "vocab"), "embedding.word" if tied else "head"
    return MatMul(
        "head",
        "head",
        hidden,
        ("vocab", "hidden"),
        logits,
        table=table,
        is_head=True,
        value="final_norm",
        weights=weights,
    )


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


def norm_weights(name: str, model: ModelSpec, size: tuple[str, int] | None = None) -> tuple[ParameterSpec, ...]:
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
