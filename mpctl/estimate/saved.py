"""The tensors that forward saves for backward: a fold over the operations of a layer or an end.

Each operation saves what its backward reads, unless an operation before it saved the same tensor: a
product its input, a norm its input and the statistics of each row, an activation its input, a core
queries, keys, values and result (SavedByCore), dropout a mask of a byte an element. Residual sums
and biases save nothing. A tensor outside the tensor-parallel regions is unsharded on every rank of
tp; under sequence parallelism each rank has its positions of it. A kernel set that differs has this
in its row (operators/kernel_sets.py).

By hand, one layer of b 1, s 2, h 4, fp32, no dropout, flash: 4 x 2 x 4 elements of norms and their
results, 4 of q k v and context, 8 of the MLP: 16 x 8 x 4 = 512 bytes, and some of statistics. For
16-bit elements Korthikanti et al. count, in bytes per sbh, norms 4, their results 4, q k v and
context 8, MLP 16, masks 2, and scores 5as/h (arXiv 2205.05198, section 4.1).

Letters: b batch, s sequence, h hidden, a heads, d head size, f MLP width; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpctl.estimate.activation_shapes import ActivationShapes, SavedTensor, Width, is_outer
from mpctl.operators.layer import (
    CONTEXT,
    SOURCE,
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
)
from mpctl.operators.matmul import Dims, MatMul

LOSS_FLOATS = 4  # of each token: its loss, the softmax's maximum and sum, the target's logit

Saved = list[SavedTensor]


class LayerActivations(NamedTuple):
    """saved: held from forward to backward. recomputed: computed again for the backward by a second
    forward of the layer or of its attention."""

    saved: Sequence[SavedTensor]
    recomputed: Sequence[SavedTensor] = ()


def layer_activations(shapes: ActivationShapes, block: OperatorGroup) -> LayerActivations:
    """The activations of one layer."""
    saved, again = forward_activations(shapes, block.operations)
    rows = block.branches[0].reads[:-1]
    if shapes.recompute == "full":
        parts = 1 / shapes.input_parts if shapes.input_parts else 0
        layer_input = SavedTensor("input", (*rows, "hidden"), times=parts, is_outer=True)
        return LayerActivations((layer_input,), saved + again)
    if shapes.recompute == "selective" and shapes.kernels.keeps_second_products:
        return LayerActivations(_second_products(rows), saved + again)
    return LayerActivations(saved, again)


def forward_activations(
    shapes: ActivationShapes, operations: Iterable[Operation]
) -> tuple[Saved, Saved]:
    """The tensors that operations save, in execution order, and those that selective recomputation
    recomputes; a stack's source is saved by the chunk that has it, not by each layer."""
    kept, saved, again = {SOURCE}, Saved(), Saved()
    for operation in operations:
        if isinstance(operation, AttentionOp):
            tensors, formed = SavedByCore(shapes, operation).tensors()
            saved += [tensor._replace(part=operation.part) for tensor in tensors]
            again += [tensor._replace(part=operation.part) for tensor in formed]
            kept.add(CONTEXT)
        elif isinstance(operation, MatMul):
            saved += _product_input(shapes, operation, kept)
            kept.add(operation.value)
        elif isinstance(operation, Norm):
            saved += _norm(operation, kept)
            kept.add(operation.value)
        elif isinstance(operation, Activation):
            saved += _activation(shapes, operation)
        elif isinstance(operation, Dispatch):
            saved += _routing(shapes, operation)
        elif isinstance(operation, Combine):
            saved += _combined(shapes, operation)
        elif isinstance(operation, Residual | Dropout) and shapes.dropout:
            name = f"{operation.part} mask"
            saved.append(SavedTensor(name, operation.reads, "mask", 1, True, operation.part))
        elif isinstance(operation, Loss):
            saved.append(SavedTensor("logits", operation.reads))
            saved.append(SavedTensor("loss", operation.reads[:-1], "float", LOSS_FLOATS))
    return saved, again


def _product_input(shapes: ActivationShapes, product: MatMul, kept: set[str]) -> Saved:
    if product.is_lookup:
        sequence = product.writes[1]
        words = SavedTensor("words", ("looked_up", sequence), "index", 1 if shapes.tp > 1 else 0)
        return [words]
    keeps_shard = shapes.keeps_shards and product.is_column
    width: Width = "value" if keeps_shard or product.is_head else "operand"
    is_copied = width == "operand" and shapes.operand < shapes.value
    if not product.value or (product.value in kept and not is_copied):
        return []
    dims = _columns(product.reads, product.name)
    name, outer = f"{product.name} input", is_outer(product.reads)
    return [SavedTensor(name, dims, width, 1, outer, product.part)]


def _columns(dims: Dims, name: str) -> Dims:
    """Dimensions as ActivationShapes has their sizes. name: of the operation that reads them."""
    latent = "query_latent" if name.startswith("attention.query") else "key_latent"
    return (*dims[:-1], {"heads": "inner", "latent": latent}.get(dims[-1], dims[-1]))


def _norm(norm: Norm, kept: set[str]) -> Saved:
    """Its input and, for each row, a scale and (except for rmsnorm) a mean. Norms of heads: see
    SavedByCore."""
    if not norm.value:
        return []
    reads, statistics = _columns(norm.reads, norm.name), 1 if norm.kind == "rmsnorm" else 2
    rows = reads[:-1]
    tensors = Saved()
    if norm.value not in kept:
        tensors.append(SavedTensor(f"{norm.name} input", reads, "value", 1, True, norm.part))
    name = f"{norm.name} statistics"
    tensors.append(SavedTensor(name, rows, "float", statistics, True, norm.part))
    return tensors


def _activation(shapes: ActivationShapes, activation: Activation) -> Saved:
    """Its input; kernels that save only relu's result compute its gradient from that, and a product
    in fp8 saves another copy of it."""
    kernels, part, is_gated = shapes.kernels, activation.part, activation.is_gated
    outer, value = is_outer(activation.reads), activation.value
    stem = value.removesuffix(".up") if value.endswith(".up") else part

    def tensor(name: str, times: float = 1) -> SavedTensor:
        return SavedTensor(f"{stem} {name}", activation.reads, "value", times, outer, part)

    if activation.kind == "relu" and not is_gated and kernels.relu_by_result:
        return [tensor("result")] if shapes.operand < shapes.value else []
    gates = [tensor("gate")] if is_gated and kernels.keeps_gate else []
    return [tensor("up", 2 if is_gated else 1), *gates]


def _routing(shapes: ActivationShapes, dispatch: Dispatch) -> Saved:
    """The scores of all experts, in float32, and for each expert of a token its number, its weight
    and its place among the rows that are sent."""
    tokens, chosen, part = dispatch.reads[:-1], shapes.experts_per_token, dispatch.part
    return [
        SavedTensor("scores", (*tokens, "experts"), "float", 1, True, part),
        SavedTensor("choice", tokens, "index", 2 * chosen, True, part),
        SavedTensor("router weights", tokens, "float", chosen, True, part),
    ]


def _combined(shapes: ActivationShapes, combine: Combine) -> Saved:
    """The experts' results that come back to a token, where its weights are applied to them; others
    apply the weights to the experts' rows before these are sent back."""
    if not shapes.kernels.weighs_combined:
        return []
    times = shapes.experts_per_token
    return [SavedTensor("combined rows", combine.writes, "value", times, True, combine.part)]


def _second_products(rows: Dims) -> Saved:
    """Products 1, 3, 5, .. of q, k, v, output, gate, up, down, with the layer's input and the
    attention's result."""
    return [
        SavedTensor("input", (*rows, "hidden"), is_outer=True),
        SavedTensor("context", (*rows, "inner")),
        SavedTensor("queries", (*rows, "inner")),
        SavedTensor("values", (*rows, "kv"), times=0.5),
        SavedTensor("gate", (*rows, "ffn")),
        SavedTensor("down", (*rows, "hidden"), is_outer=True),
    ]


def shared_activations(shapes: ActivationShapes, block: OperatorGroup) -> Saved:
    """Tensors that all layers of a stack on one rank share: a mask per sample, which recomputed
    layers read again; a learned bias and the buckets that index it."""
    core = block.cores[0]
    if not shapes.kernels.shares_masks:
        return []
    pairs, tensors = (core.queries, core.keys, "cp"), Saved()
    is_shared = shapes.recompute != "none" or shapes.fuses_variants
    if core.has_sample_mask and is_shared:
        tensors.append(SavedTensor("mask", ("batch", *pairs), "mask"))
    if core.has_bias:
        tensors.append(SavedTensor("places", pairs, "index"))
        if shapes.is_cuda or shapes.recompute != "none":
            tensors.append(SavedTensor("bias", ("heads", *pairs)))
    return tensors


def batch_activations(arrays: Iterable[Dims]) -> Saved:
    """The arrays of a batch with these dimensions, 8 bytes an element; every rank of tp holds those
    of all samples. Arrays with one number per sample are negligible and left out."""
    return [
        SavedTensor("batch", tuple("micro_batch" if d == "batch" else d for d in dims), "index")
        for dims in arrays
        if len(dims) > 1
    ]


class SavedByCore(NamedTuple):
    """Tensors that softmax(Q K^T) V saves for its backward, and those that selective recomputation
    recomputes.

    Our kernels: torch's fused attention; on CUDA, with dropout, a window, slopes, a bias or a mask,
    our own, which saves no more (attention.py); on a CPU, where dropout or a learned bias rules out
    the fused one, the scores are written to memory. Others keep queries, keys, values and context,
    and with unfused attention the scores. Under cp each rank has two blocks of queries and meets
    all keys; with a causal mask each block meets only the keys up to itself.
    """

    shapes: ActivationShapes
    attention: AttentionOp

    def tensors(self) -> tuple[Saved, Saved]:
        """(saved from forward to backward, recomputed)."""
        shapes, core = self.shapes, self.attention
        if core.latent:
            return self.of_latents(), []
        if shapes.kernels.attention != "torch":
            return self.of_papers()
        if shapes.fuses_variants and not self.is_torchs:
            return self.of_our_kernel(), []
        is_written_out = shapes.attention_dropout or (core.has_bias and not shapes.is_cuda)
        return self.written_out() if is_written_out else self.fused()

    @property
    def rows(self) -> Dims:
        return ("batch", self.attention.queries)

    @property
    def keys(self) -> Dims:
        return ("batch", self.attention.keys)

    @property
    def pairs(self) -> _ScorePairs:
        return _ScorePairs(self.shapes, self.attention)

    @property
    def inputs(self) -> Saved:
        return [
            SavedTensor("queries", (*self.rows, "inner")),
            SavedTensor("keys and values", (*self.keys, "kv")),
        ]

    @property
    def normed(self) -> Saved:
        """Tensors that norms of queries and keys save: their statistics, one float per head or, of
        a norm over all heads, per row, and their results, unless rotary positions replace these."""
        if not self.attention.has_norms:
            return []
        heads = SavedTensor("query norm statistics", (*self.rows, "heads"), "float")
        share = 0.5 / self.shapes.head_size
        keys = SavedTensor("key norm statistics", (*self.keys, "kv"), "float", share)
        if self.attention.norms_width:
            heads, keys = heads._replace(dims=self.rows), keys._replace(dims=self.keys, times=1)
        if self.turned:
            return [heads, keys]
        normed = SavedTensor("normed queries", (*self.rows, "inner"))
        return [heads, keys, normed, SavedTensor("normed keys", (*self.keys, "kv"), times=0.5)]

    @property
    def turned(self) -> Saved:
        """Queries and keys after rotary positions."""
        if not self.attention.is_rotary or not self.shapes.kernels.keeps_turned:
            return []
        return [
            SavedTensor("turned queries", (*self.rows, "inner")),
            SavedTensor("turned keys", (*self.keys, "kv"), times=0.5),
        ]

    @property
    def gathered(self) -> Saved:
        """Keys and values of other ranks: of a kv head that several ranks of tp share, and under cp
        of the full sequence, which other runtimes pass round a ring instead."""
        shapes, tensors = self.shapes, []
        if shapes.kv_heads < shapes.feature_parts:
            tensors.append(SavedTensor("shared keys", (*self.keys, "head_size"), times=2))
        if shapes.cp > 1 and shapes.kernels.gathers_keys:
            tensors.append(SavedTensor("gathered keys", (*self.keys, "kv", "cp")))
        return tensors

    @property
    def context(self) -> Saved:
        return [SavedTensor("context", (*self.rows, "inner"))]

    @property
    def projected(self) -> Saved:
        """The context where the next product saves a separate copy of it; fp8 kernels save it as an
        operand, which the layer counts."""
        return [] if self.shapes.operand < self.shapes.value else self.context

    @property
    def sums(self) -> Saved:
        """The fused kernel's log-sum-exp of each row of scores."""
        return [SavedTensor("sums", (*self.rows, "heads"), "float")]

    def of_latents(self) -> Saved:
        """Latent attention: queries and keys of one head have other columns than its values."""
        rows, keys = self.rows, self.keys
        return [
            SavedTensor("queries", (*rows, "queries")),
            SavedTensor("keys", (*keys, "queries")),
            SavedTensor("keys and values", (*keys, "kv")),
            *self.context,
            *self.sums,
        ]

    def of_papers(self) -> tuple[Saved, Saved]:
        """Scores are held unless the kernel is fused."""
        saved = self.inputs + self.normed + self.gathered + self.context
        if not self.shapes.holds_scores:
            return saved + self.sums, []
        scores = list(self.pairs.scores(has_dropout=self.shapes.attention_dropout))
        if self.shapes.recompute == "selective":
            return saved, scores
        return saved + scores, []

    def written_out(self) -> tuple[Saved, Saved]:
        """The scores are written to memory, and both products read copies of q, k and v."""
        shapes, attention, pairs = self.shapes, self.attention, self.pairs
        has_dropout = shapes.attention_dropout
        scores = self._copies()
        if shapes.cp > 1 and not has_dropout:  # torch's own products scale the keys of each block
            dims = (*self.keys, "inner", "cp")
            scores.append(SavedTensor("scaled keys", dims, times=2 * pairs.share))
        scores += pairs.scores(has_dropout=has_dropout)
        if attention.has_sample_mask:
            scores += pairs.masks(2, per_sample=True)
        elif attention.is_causal:
            scores += pairs.masks(1)
        if shapes.recompute == "selective":
            kept = self.inputs + self.normed + self.turned + self.gathered
            return kept + self.projected, scores
        return scores + self.normed + self.projected, []

    @property
    def is_torchs(self) -> bool:
        """Whether torch's fused kernel takes it on CUDA: plain, and in 32 bits with a key-value
        head for each query head."""
        shapes = self.shapes
        has_kernel = shapes.value == 2 or shapes.inner * 2 == shapes.kv
        return self.attention.is_plain and has_kernel and not shapes.attention_dropout

    def of_our_kernel(self) -> Saved:
        """Our kernel saves its inputs, its result in the layout that the next product reads, and
        one sum per row; masks and biases are those that all layers share (shared_activations)."""
        tensors = self._fused_inputs() + self.gathered + self.context + self.sums
        if self.shapes.cp > 1:
            tensors += self.projected
        return tensors + self.normed

    def fused(self) -> tuple[Saved, Saved]:
        """Torch's fused kernel saves its inputs, its result and one sum per row."""
        shapes, attention = self.shapes, self.attention
        # on a GPU the result has the layout of the queries, which kernels/triton/elementwise.py
        # lays out so that no copy is needed
        tensors = self._fused_inputs() + self.gathered + self.context + self.sums
        if (self.turned and not shapes.is_cuda) or shapes.cp > 1:
            tensors += self.projected
        tensors += self.normed
        if attention.has_sample_mask:
            tensors += self.pairs.masks(1, width="value", per_sample=True)
        if attention.has_slopes or (attention.has_bias and attention.is_causal):
            tensors += self.pairs.bias()
        elif attention.window or (attention.is_causal and shapes.cp > 1 and not shapes.is_cuda):
            tensors += self.pairs.masks(1, width="value")
        is_formed_again = attention.has_bias or attention.has_slopes or attention.window
        if shapes.recompute == "selective" and is_formed_again:
            return self.inputs + self.normed + self.gathered + self.projected, tensors
        return tensors, []

    def _fused_inputs(self) -> Saved:
        """Under cp keys and values are gathered into copies; the result of the product that
        computed them stays only as far as views of the queries hold it."""
        if self.shapes.cp == 1:
            return self.inputs + self.turned
        return self.turned[:1] or (self.inputs[:1] if self.attention.is_cross else self.inputs)

    def _copies(self) -> Saved:
        """Copies of q, k and v for the two products; keys and values are expanded to one head for
        each query head, under cp once for each of the rank's two blocks of queries."""
        shapes = self.shapes
        queries = [SavedTensor("scaled queries", (*self.rows, "inner"))]
        if shapes.cp > 1 and shapes.inner * 2 == shapes.kv:
            return queries + self.gathered
        if self._has_views:
            if shapes.recompute == "selective":
                return queries
            return queries + self.inputs + self.turned[1:]
        blocks = 2 * self.pairs.share if shapes.cp > 1 else 1
        expanded = SavedTensor("keys and values", (*self.keys, "inner", "cp"), times=2 * blocks)
        return [*queries, expanded]

    @property
    def _has_views(self) -> bool:
        """Whether the products read views, which keep alive the result of the product that computed
        q, k and v, and no copies: with one sample or one head, whose batch of matrices is
        contiguous already."""
        shapes = self.shapes
        is_one = shapes.batch == 1 or shapes.heads == 1
        has_own_heads = shapes.inner * 2 == shapes.kv
        return shapes.cp == 1 and is_one and has_own_heads and not self.attention.is_cross


class _ScorePairs(NamedTuple):
    """Tensors with an element for each pair of a query and a key."""

    shapes: ActivationShapes
    attention: AttentionOp

    @property
    def dims(self) -> Dims:
        return (self.attention.queries, self.attention.keys, "cp")

    @property
    def share(self) -> float:
        """The fraction of pairs that is computed: under cp, a causal block of queries meets the
        prefix of keys that it may see, (2 c + 1) / (4 c) of them on average."""
        c = self.shapes.cp
        return (2 * c + 1) / (4 * c) if self.attention.is_causal and c > 1 else 1

    def scores(self, *, has_dropout: bool) -> Iterator[SavedTensor]:
        """The softmax's result and, with dropout, the mask and result of that."""
        dims = ("batch", "heads", *self.dims)
        yield SavedTensor("shares", dims, times=self.share, is_scores=True)
        if has_dropout:
            yield SavedTensor("dropped", dims, times=self.share)
            yield SavedTensor("scores mask", dims, "mask", self.share)

    def masks(
        self, times: int, *, width: Width = "mask", per_sample: bool = False
    ) -> Sequence[SavedTensor]:
        """Masks over the pairs, one for all heads."""
        dims = ("batch", *self.dims) if per_sample else self.dims
        return [SavedTensor("attention mask", dims, width, times * self.share)]

    def bias(self) -> Sequence[SavedTensor]:
        """The bias of each head, with the causal mask added."""
        return [SavedTensor("masked bias", ("heads", *self.dims), times=self.share)]
