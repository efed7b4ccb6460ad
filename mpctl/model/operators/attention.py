"""An attention between its products: which tensors it saves for backward, and what that needs.

Our kernels: torch's fused attention; on CUDA, with dropout, a window, slopes, a bias or a mask, our
own, which saves no more (attention.py); on a CPU, where dropout or a learned bias rules out the
fused one, the scores are written to memory. Others keep queries, keys, values and context, and with
unfused attention the scores. Under cp each rank has two blocks of queries and meets all keys; with
a causal mask each block meets only the keys up to itself.

In latent attention (train/layers/latent_attention.py) queries and keys have other columns than values,
and every head has keys and values of its own, which are computed from a latent on each rank of cp:
of the full sequence. A CPU's fused kernel has one width of head, to which values are padded.

By hand, latent attention of 2 heads, 3 columns of queries and 2 of values, b 1, s 4, fp32: queries
and keys 2 x 96 bytes, values and context 2 x 64 on a GPU, and 96 + 96 + 64 on a CPU.

Letters: b batch, s sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpctl.model.operators.activation_shapes import OF_LATENTS, ActivationShapes, Dims, Saved, SavedTensor, Width

SCORES = "shares"  # the softmax of attention scores, as large as their gradients


class AttentionOp(NamedTuple):
    """softmax(Q K^T + bias) V of one attention of a layer.

    part: name of the attention, as its matrix products have it. queries, keys: the sequence
    dimensions of the two sides, equal for self-attention. query_product, key_product: names of the
    matrix products that write queries, and keys with values. is_causal: a query sees no later key.
    has_bias: a learned bias per head is added to the scores (T5's relative positions).
    has_slopes: a bias per head that follows from the distance is added to them (ALiBi).
    has_sample_mask: each sample has a different mask [s, s] (GLM), so that masks have a batch
    dimension. segment: in rows of several samples, of which a query sees its own, the mean length
    of these where kernels skip the other keys; 0 for the full row. window: the number of keys that a
    query of a causal attention sees, itself included; 0
    for all. is_rotary: rotary positions are applied to queries and keys. has_norms: queries and
    keys are normalized; norms_width: over all heads together. latent: multi-head
    latent attention: width of what keys and values are computed from, positions included, which cp
    exchanges in their place; 0 for others. keeps_copy: whether an adapter of a frozen product keeps the
    context as that product reads it; None of a product that is trained.
    """

    part: str
    queries: str = "seq"
    keys: str = "seq"
    query_product: str = "attention.qkv"
    key_product: str = "attention.qkv"
    is_causal: bool = False
    has_bias: bool = False
    has_slopes: bool = False
    has_sample_mask: bool = False
    segment: float = 0.0
    window: int = 0
    is_rotary: bool = False
    has_norms: bool = False
    norms_width: bool = False
    latent: int = 0
    keeps_copy: bool | None = None

    @property
    def result(self) -> str:
        """Name of its result, the context, which the next product reads."""
        return f"{self.part} context"

    @property
    def is_cross(self) -> bool:
        """Whether the keys come from another stack than the queries."""
        return self.queries != self.keys

    @property
    def is_plain(self) -> bool:
        """Whether it has no variant other than being causal or not."""
        return not (self.has_bias or self.has_slopes or self.window or self.has_sample_mask)

    def counted_pairs(self, queries: int, keys: int) -> int:
        """Pairs of a query and a key that FLOP are counted for. Those of a causal attention count
        in full; those of a window twice the ones it sees, 2 s w - w^2, which for w = s is s^2 as
        well. queries: of this rank; keys: of the full sequence.

        >>> AttentionOp("attention", is_causal=True, window=2).counted_pairs(8, 8)
        28
        >>> AttentionOp("attention", is_causal=True, segment=2.5).counted_pairs(8, 8)
        20
        """
        if self.segment and keys:
            length = min(self.segment, keys)
            seen = min(self.window or length, length)
            return round(queries * (2 * length - seen) * seen / length)
        if not self.window or not keys:  # cp may be larger than the sequence, which a rule refuses
            return queries * keys
        return queries * (2 * keys - self.window) * self.window // keys

    def seen_pairs(self, queries: int, keys: int) -> float:
        """Pairs of a query and a key that it may see, without the half of the diagonal."""
        return self.counted_pairs(queries, keys) * (0.5 if self.is_causal else 1.0)

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Its tensors (SavedByCore); what reads the context finds it saved."""
        of_core = SavedByLatentCore if self.latent else SavedByCore
        tensors, formed = of_core(shapes, self).tensors()
        kept.add(self.result)
        return tensors + [tensor._replace(is_formed=True) for tensor in formed]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Copies of the scores where they are written to memory, else gradients of the context, of
        queries, keys and values. defers: the gradient of the next product's result waits."""
        waits = shapes.stream_bytes(self.queries) if defers and shapes.splits else 0.0
        scores = shapes.bytes_of(t for t in self.saved(shapes, set()) if t.name == SCORES)
        if scores:
            return scores * shapes.kernels.score_copies[not self.has_sample_mask] + waits
        rows, keys = ("batch", self.queries), ("batch", self.keys)
        queries = shapes.count((*rows, "inner")) + shapes.count((*rows, "queries" if self.latent else "inner"))
        own = queries + shapes.count((*keys, "kv"))
        exchanging = self._exchanging(shapes) if shapes.exchanges else 0.0
        return max(own * shapes.value, exchanging) + self._met_keys(shapes) + waits

    def _exchanging(self, shapes: ActivationShapes) -> float:
        """Bytes of the exchanges. Gradients of queries, keys and values on their way back are there computed, packed,
        received and, with mpctl's kernels, laid out; all that the core saved is gone by then. A forward that runs
        again may need more: its layer still refers to what it exchanged while the result is packed, received
        and laid out."""
        rows, keys = ("batch", self.queries), ("batch", self.keys)
        columns = [(*rows, "queries"), (*keys, "queries"), (*keys, "inner")]
        columns = columns if self.latent else [(*rows, "inner"), (*keys, "kv")]
        repeated = (shapes.kv_copies - 1) * shapes.count((*keys, "kv"))
        parts = float((sum(map(shapes.count, columns)) + repeated) * shapes.value)
        if shapes.kernels.attention != "torch":
            return 3 * parts
        core = self._replace(has_norms=False)  # whose own backward comes later
        result = shapes.count((*rows, "inner")) * shapes.value
        if self.latent:
            before = parts + shapes.count((*rows, "queries")) * shapes.value
        else:  # norms save the product's result
            turned = result + shapes.count((*keys, "kv")) * shapes.value / 2
            before = parts * (not self.has_norms) + turned * self.is_rotary
        return max(4 * parts - shapes.bytes_of(core.saved(shapes, set())), before + 2 * result)

    def _met_keys(self, shapes: ActivationShapes) -> float:
        """Bytes of keys and values of other ranks of cp in backward, where a job says how they come: around
        a ring two parts, the next two and their gradients; gathered and ordered, with their gradients."""
        if shapes.cp_comm in (None, "a2a") or shapes.kernels.gathers_keys:
            return 0.0
        parts = 3 * shapes.cp if shapes.cp_comm == "all_gather" else 4
        return float(parts * shapes.count(("batch", self.keys, "kv")) * shapes.value)


class SavedByCore(NamedTuple):
    """Tensors that softmax(Q K^T) V saves for its backward, and those that selective recomputation
    recomputes."""

    shapes: ActivationShapes
    attention: AttentionOp

    def tensors(self) -> tuple[Saved, Saved]:
        """(saved from forward to backward, recomputed)."""
        shapes, core = self.shapes, self.attention
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
        return [SavedTensor("queries", (*self.rows, "inner")), SavedTensor("keys and values", (*self.keys, "kv"))]

    @property
    def normed(self) -> Saved:
        """Tensors that norms of queries and keys save: their statistics, one float per head or, of
        a norm over all heads, per row, and their results, unless rotary positions replace these."""
        if not self.attention.has_norms:
            return []
        heads = SavedTensor("query norm statistics", (*self.rows, "heads"), "float")
        share = 0.5 / self.shapes.dims["head_size"]
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
    def exchanged(self) -> Saved:
        """Queries, keys and values of a part of the heads and the full sequence, which cp exchanged: as
        many elements as this rank's."""
        return [tensor._replace(name=f"exchanged {tensor.name}") for tensor in self.inputs]

    def _met(self, columns: str) -> Dims:
        """Keys that a rank's queries meet, under cp of the full sequence; an exchange has as many of fewer heads."""
        return (*self.keys, columns) if self.shapes.exchanges else (*self.keys, columns, "cp")

    @property
    def gathered(self) -> Saved:
        """Keys and values of other ranks: of a kv head that several ranks of tp share, and under cp
        of the full sequence, which other runtimes pass round a ring instead."""
        shapes, tensors = self.shapes, []
        if shapes.kv_heads < shapes.feature_parts:
            tensors.append(SavedTensor("shared keys", (*self.keys, "head_size"), times=2))
        if shapes.meets_blocks and shapes.kernels.gathers_keys:
            tensors.append(SavedTensor("gathered keys", (*self.keys, "kv", "cp")))
        return tensors

    @property
    def _met_inputs(self) -> Saved:
        """What a core that runs again in backward reads."""
        if self.shapes.exchanges:
            return self.exchanged + (self.inputs if self.attention.has_norms else []) + self.normed
        return self.inputs + self.normed + self.gathered

    @property
    def context(self) -> Saved:
        return [SavedTensor("context", (*self.rows, "inner"))]

    @property
    def projected(self) -> Saved:
        """The context where the next product, or its adapter, saves a separate copy of it; fp8 kernels save
        it as an operand, which the layer counts."""
        kept = self.attention.keeps_copy
        return self.context if (self.shapes.operand == self.shapes.value if kept is None else kept) else []

    @property
    def repeated(self) -> Saved:
        """Copies of keys and values for ranks that share a kv head, made before they are exchanged."""
        more = self.shapes.kv_copies - 1
        return [SavedTensor("repeated keys and values", (*self.keys, "kv"), times=more)] if more else []

    @property
    def sums(self) -> Saved:
        """The fused kernel's log-sum-exp of each row of scores."""
        return [SavedTensor("sums", (*self.rows, "heads"), "float")]

    def of_papers(self) -> tuple[Saved, Saved]:
        """Scores are held unless the kernel is fused."""
        saved = self.inputs + self.normed + self.gathered + self.context
        return _with_scores(self, saved + self.repeated + (self.projected if self.shapes.exchanges else []))

    def written_out(self) -> tuple[Saved, Saved]:
        """The scores are written to memory, and both products read copies of q, k and v."""
        shapes, attention, pairs = self.shapes, self.attention, self.pairs
        has_dropout = shapes.attention_dropout
        scores = self._copies()
        if shapes.meets_blocks and not has_dropout:  # torch's own products scale the keys of each block
            dims = (*self.keys, "inner", "cp")
            scores.append(SavedTensor("scaled keys", dims, times=2 * pairs.share))
        scores += pairs.scores(has_dropout=has_dropout)
        if attention.has_sample_mask:
            scores += pairs.masks(2, per_sample=True)
        elif attention.is_causal:
            scores += pairs.masks(1)
        if shapes.recompute == "selective":
            turned = [] if shapes.exchanges else self.turned
            return self._met_inputs + turned + self.projected, scores
        # norms read the product's result itself, and of theirs only the copies stay
        read = self.inputs if attention.has_norms and not self._has_views else []
        statistics = self.normed[:2]
        return scores + read + statistics + self.projected, []

    @property
    def is_torchs(self) -> bool:
        """Whether torch's fused kernel takes it on CUDA: plain, and in 32 bits with a key-value
        head for each query head."""
        shapes = self.shapes
        has_kernel = shapes.value == 2 or shapes.dims["inner"] * 2 == shapes.dims["kv"]
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
        # on a GPU the result has the layout of the queries, which train/kernels/triton/elementwise.py
        # lays out so that no copy is needed
        inputs = self._expanded_inputs() if self._is_expanded else self._fused_inputs() + self.gathered
        tensors = inputs + self.context + self.sums
        if (self.turned and not shapes.is_cuda) or shapes.cp > 1:
            tensors += self.projected
        tensors += self.normed
        cuts_prefixes = attention.is_causal and shapes.meets_blocks and not shapes.is_cuda
        if attention.has_sample_mask:  # the causal one and a window are in it
            tensors += self.pairs.masks(1, width="value", per_sample=True)
        if attention.has_slopes or (attention.has_bias and attention.is_causal):
            tensors += self.pairs.bias()
        elif not attention.has_sample_mask and (attention.window or cuts_prefixes):
            tensors += self.pairs.masks(1, width="value")
        is_formed_again = attention.has_bias or attention.has_slopes or attention.window
        if shapes.recompute == "selective" and is_formed_again:
            return self._met_inputs + self.projected, tensors
        return tensors, []

    @property
    def _is_expanded(self) -> bool:
        """Whether keys and values are expanded to one head for each query head, which torch's kernel with a mask of
        each sample needs on a CPU."""
        shapes = self.shapes
        return self.attention.has_sample_mask and not shapes.is_cuda and shapes.dims["inner"] * 2 != shapes.dims["kv"]

    def _expanded_inputs(self) -> Saved:
        """Queries, and expanded keys and values, under cp for each of the rank's two blocks of queries."""
        blocks = 2 * self.pairs.share if self.shapes.meets_blocks else 1
        expanded = SavedTensor("expanded keys and values", self._met("inner"), times=2 * blocks)
        return [*(self.turned[:1] or self.inputs), expanded]

    def _fused_inputs(self) -> Saved:
        """Under cp keys and values are gathered into copies; the result of the product that
        computed them stays only as far as views of the queries hold it, or norms read it."""
        if self.shapes.cp == 1:
            return self.inputs + self.turned
        if self.shapes.exchanges:
            return self.exchanged + (self.inputs if self.attention.has_norms else [])
        if self.attention.has_norms:
            return self.inputs + self.turned[:1]
        return self.turned[:1] or (self.inputs[:1] if self.attention.is_cross else self.inputs)

    def _copies(self) -> Saved:
        """Copies of q, k and v for the two products; keys and values are expanded to one head for
        each query head, under cp once for each of the rank's two blocks of queries."""
        shapes = self.shapes
        queries = [SavedTensor("scaled queries", (*self.rows, "inner"))]
        if shapes.cp > 1 and shapes.dims["inner"] * 2 == shapes.dims["kv"]:
            return queries + (self.exchanged[1:] if shapes.exchanges else self.gathered)
        if self._has_views:
            if shapes.recompute == "selective":
                return queries
            return queries + self.inputs + self.turned[1:]
        blocks = 2 * self.pairs.share if shapes.meets_blocks else 1
        expanded = SavedTensor("keys and values", self._met("inner"), times=2 * blocks)
        return [*queries, expanded]

    @property
    def _has_views(self) -> bool:
        """Whether the products read views, which keep alive the result of the product that computed
        q, k and v, and no copies: with one sample or one head, whose batch of matrices is
        contiguous already."""
        shapes = self.shapes
        is_one = shapes.dims["batch"] == 1 or shapes.dims["heads"] == 1
        has_own_heads = shapes.dims["inner"] * 2 == shapes.dims["kv"]
        return shapes.cp == 1 and is_one and has_own_heads and not self.attention.is_cross


class SavedByLatentCore(NamedTuple):
    """The same of latent attention."""

    shapes: ActivationShapes
    attention: AttentionOp

    def tensors(self) -> tuple[Saved, Saved]:
        """(saved from forward to backward, recomputed)."""
        shapes = self.shapes
        if shapes.kernels.attention != "torch":
            return self.of_papers()
        if shapes.attention_dropout and not shapes.fuses_variants:
            return self.written_out()
        return self.fused()

    @property
    def rows(self) -> Dims:
        return ("batch", self.attention.queries)

    @property
    def keys(self) -> Dims:
        exchanges = self.shapes.exchanges  # of fewer heads the keys of all ranks
        return ("batch", self.attention.keys, *(() if exchanges else ("cp",)))

    @property
    def pairs(self) -> _ScorePairs:
        return _ScorePairs(self.shapes, self.attention)

    @property
    def projected(self) -> Saved:
        """The context where the next product, or its adapter, saves a separate copy of it."""
        kept = self.attention.keeps_copy
        is_saved = self.shapes.operand == self.shapes.value if kept is None else kept
        return [SavedTensor("context", (*self.rows, "inner"))] if is_saved else []

    @property
    def sums(self) -> Saved:
        return [SavedTensor("sums", (*self.rows, "heads"), "float")]

    def inputs(self, keys: Dims) -> Saved:
        """Queries, keys and values of their own widths, made of the latents."""
        return [
            SavedTensor("queries", (*self.rows, "queries"), module=OF_LATENTS),
            SavedTensor("keys", (*keys, "queries"), module=OF_LATENTS),
            SavedTensor("values", (*keys, "inner"), module=OF_LATENTS),
        ]

    def of_papers(self) -> tuple[Saved, Saved]:
        """Scores are held unless the kernel is fused."""
        saved = [*self.inputs(self.keys[:2]), SavedTensor("context", (*self.rows, "inner"))]
        return _with_scores(self, saved + (self.projected if self.shapes.exchanges else []))

    def fused(self) -> tuple[Saved, Saved]:
        """A kernel with one width of heads, a CPU's or ours, reads and writes the wider one."""
        shapes, has_parts = self.shapes, self.shapes.cp > 1
        queries, values = shapes.dims["queries"], shapes.dims["inner"]
        tensors = self.sums
        if queries == values or (shapes.is_cuda and self.is_torchs):
            tensors += self.inputs(self.keys)
            tensors.append(SavedTensor("context", (*self.rows, "inner")))
            tensors += self.projected if has_parts else []
        else:
            # what is padded is copied for each block of queries, the rest are views
            wide, padded = ("queries", "values") if queries > values else ("inner", "keys")
            times = {padded: self.blocks}
            tensors.append(SavedTensor("queries", (*self.rows, wide)))
            for name in ("keys", "values"):
                tensors.append(SavedTensor(name, (*self.keys, wide), times=times.get(name, 1)))
            tensors.append(SavedTensor("wide context", (*self.rows, wide)))
            is_copied = has_parts or wide == "queries" or not shapes.is_cuda
            tensors += self.projected if is_copied else []
        has_mask = self.attention.window or (self.attention.is_causal and shapes.meets_blocks)
        if (has_mask or self.attention.has_sample_mask) and not shapes.is_cuda:
            tensors += self.pairs.masks(1, width="value", per_sample=self.attention.has_sample_mask)
        if shapes.recompute == "selective" and self.attention.window and not shapes.is_cuda:
            return [*self.inputs(self.keys), *self.projected], tensors
        return tensors, []

    def written_out(self) -> tuple[Saved, Saved]:
        """The scores are written to memory, and both products read copies of q, k and v."""
        keys = self.keys
        tensors = [
            SavedTensor("scaled queries", (*self.rows, "queries")),
            SavedTensor("keys", (*keys, "queries"), times=self.blocks),
            SavedTensor("values", (*keys, "inner"), times=self.blocks),
            *self.pairs.scores(has_dropout=True),
            *self.pairs.masks(int(self.attention.is_causal)),
        ]
        if self.shapes.recompute == "selective":
            return [*self.inputs(keys), *self.projected], tensors
        return tensors + self.projected, []

    @property
    def blocks(self) -> float:
        """How many copies of the keys the blocks of queries have together, each of those that it
        meets; one sample or head needs none, as its batch of matrices is contiguous already."""
        is_one = self.shapes.dims["batch"] == 1 or self.shapes.dims["heads"] == 1
        return 1 if not self.shapes.meets_blocks or is_one else 2 * self.pairs.share

    @property
    def is_torchs(self) -> bool:
        """Whether torch's fused kernel takes it on CUDA, whose values may have another width."""
        return self.attention.is_plain and not self.shapes.attention_dropout


def _with_scores(core: SavedByCore | SavedByLatentCore, saved: Saved) -> tuple[Saved, Saved]:
    """(saved from forward to backward, recomputed) of other software's kernels, which hold scores
    unless they are fused."""
    shapes = core.shapes
    if not shapes.holds_scores:
        return saved + core.sums, []
    scores = list(core.pairs.scores(has_dropout=shapes.attention_dropout))
    return (saved, scores) if shapes.recompute == "selective" else (saved + scores, [])


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
        return (2 * c + 1) / (4 * c) if self.attention.is_causal and self.shapes.meets_blocks else 1

    def scores(self, *, has_dropout: bool) -> Iterator[SavedTensor]:
        """The softmax's result and, with dropout, the mask and result of that."""
        dims = ("batch", "heads", *self.dims)
        yield SavedTensor(SCORES, dims, times=self.share)
        if has_dropout:
            yield SavedTensor("dropped", dims, times=self.share)
            yield SavedTensor("scores mask", dims, "mask", self.share)

    def masks(self, times: int, *, width: Width = "mask", per_sample: bool = False) -> Sequence[SavedTensor]:
        """Masks over the pairs, one for all heads."""
        dims = ("batch", *self.dims) if per_sample else self.dims
        rows = self.shapes.cp if self.shapes.exchanges else 1  # an exchange brings those of all ranks
        return [SavedTensor("attention mask", dims, width, times * rows * self.share)]

    def bias(self) -> Sequence[SavedTensor]:
        """The bias of each head, with the causal mask added."""
        return [SavedTensor("masked bias", ("heads", *self.dims), times=self.share)]
