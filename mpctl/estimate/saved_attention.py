"""What one attention saves for its backward, and what selective recomputation forms again.

Kernels `mpctl` are this project's, as rehearsals measure them (runtime/memory.py): torch's
fused attention; on CUDA, where there is dropout, a window, slopes, a bias or a mask, our own, which
keeps no more (estimate/attention_kernel.py); on a CPU, where dropout or a learned bias forbids the
fused one, the scores written out. `megatron` keeps queries, keys and values and the context, and
with unfused attention the scores (Korthikanti et al., arXiv 2205.05198, section 4.1).

Letters: b batch, s sequence, a heads, d head size; t tp, c cp. Under cp each rank has two blocks of
queries and meets all keys; with a causal mask each block meets only the keys up to itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpctl.estimate.activation_shapes import ActivationShapes
from mpctl.estimate.attention_kernel import is_plain
from mpctl.operators.matmul import AttentionOp, Dims
from mpctl.operators.saved import SavedPart, SavedTensor, Width

Saved = list[SavedTensor]


def attention_saved(shapes: ActivationShapes, attention: AttentionOp) -> tuple[Saved, Saved]:
    """The tensors that softmax(Q K^T) V saves from forward to backward, and those that selective
    recomputation forms again in their place."""
    tensors = _AttentionTensors(shapes, attention)
    if shapes.kernels != "mpctl":
        return tensors.of_megatron()
    if shapes.fuses_variants and not tensors.is_torchs:
        return tensors.own(), []
    is_written_out = shapes.attention_dropout or (attention.has_bias and not shapes.is_cuda)
    return tensors.written_out() if is_written_out else tensors.fused()


@dataclass(frozen=True, slots=True)
class _AttentionTensors:
    """The tensors around one attention."""

    shapes: ActivationShapes
    attention: AttentionOp

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
        """What norms of queries and keys save: their statistics, a float a head, and what lies
        between them and the kernel, unless that is what rotary positions give."""
        if not self.shapes.qk_norm:
            return []
        heads = SavedTensor("query norm statistics", (*self.rows, "heads"), "float")
        share = 0.5 / self.shapes.head_size
        keys = SavedTensor("key norm statistics", (*self.keys, "kv"), "float", share)
        if self.turned:
            return [heads, keys]
        normed = SavedTensor("normed queries", (*self.rows, "inner"))
        return [heads, keys, normed, SavedTensor("normed keys", (*self.keys, "kv"), times=0.5)]

    @property
    def turned(self) -> Saved:
        """Queries and keys after rotary positions."""
        if not self.shapes.is_rotary or self.shapes.kernels != "mpctl":
            return []
        return [
            SavedTensor("turned queries", (*self.rows, "inner")),
            SavedTensor("turned keys", (*self.keys, "kv"), times=0.5),
        ]

    @property
    def gathered(self) -> Saved:
        """Keys and values of other ranks: of a kv head that several ranks of tp share, and under cp
        of the whole sequence, which other runtimes pass round a ring instead."""
        shapes, tensors = self.shapes, []
        if shapes.kv_heads < shapes.feature_parts:
            tensors.append(SavedTensor("shared keys", (*self.keys, "head_size"), times=2))
        if shapes.cp > 1 and shapes.kernels == "mpctl":
            tensors.append(SavedTensor("gathered keys", (*self.keys, "kv", "cp")))
        return tensors

    @property
    def context(self) -> Saved:
        return [SavedTensor("context", (*self.rows, "inner"))]

    @property
    def projected(self) -> Saved:
        """The context as the product that follows keeps it, where that is a copy of its own; fp8
        kernels keep it as an operand, which the layer counts."""
        return [] if self.shapes.operand < self.shapes.value else self.context

    @property
    def sums(self) -> Saved:
        """The fused kernel's log-sum-exp of each row of scores."""
        return [SavedTensor("sums", (*self.rows, "heads"), "float")]

    def of_megatron(self) -> tuple[Saved, Saved]:
        """Scores are held unless the kernel is fused."""
        saved = self.inputs + self.normed + self.gathered + self.context
        if not self.shapes.holds_scores:
            return saved + self.sums, []
        scores = list(self.pairs.scores(has_dropout=self.shapes.attention_dropout))
        if self.shapes.recompute == "selective":
            return saved, scores
        return saved + scores, []

    def written_out(self) -> tuple[Saved, Saved]:
        """The scores lie in memory, and both products take copies of q, k and v."""
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
        return is_plain(self.attention) and has_kernel and not shapes.attention_dropout

    def own(self) -> Saved:
        """Our kernel saves its inputs, its result, laid out as the next product reads it, and a sum
        a row; masks and biases are those that all layers share (saved_activations.py)."""
        tensors = self._fused_inputs() + self.gathered + self.context + self.sums
        if self.shapes.cp > 1:
            tensors += self.projected
        return tensors + self.normed

    def fused(self) -> tuple[Saved, Saved]:
        """Torch's fused kernel saves its inputs, its result and a sum a row."""
        shapes, attention = self.shapes, self.attention
        # a GPU's result is laid out as its queries, and those of kernels/triton/elementwise.py are
        # so that it needs no copy
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
        """Under cp keys and values are gathered into copies; of the product that made them, only
        what views of the queries hold stays."""
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
        """Whether the products take views and no copies, which hold the result of the product that
        made q, k and v: of one sample or one head, whose batch of matrices is in order as it is."""
        shapes = self.shapes
        is_one = shapes.batch == 1 or shapes.heads == 1
        has_own_heads = shapes.inner * 2 == shapes.kv
        return shapes.cp == 1 and is_one and has_own_heads and not self.attention.is_cross


@dataclass(frozen=True, slots=True)
class _ScorePairs:
    """Tensors with an element for each pair of a query and a key."""

    shapes: ActivationShapes
    attention: AttentionOp

    @property
    def dims(self) -> Dims:
        return (self.attention.queries, self.attention.keys, "cp")

    @property
    def share(self) -> float:
        """The fraction of pairs that is formed: under cp, a causal block of queries meets the
        prefix of keys that it may see, (2 c + 1) / (4 c) of them on average."""
        c = self.shapes.cp
        return (2 * c + 1) / (4 * c) if self.attention.is_causal and c > 1 else 1

    def scores(self, *, has_dropout: bool) -> Iterator[SavedTensor]:
        """The softmax's result, and with dropout its mask and its result as well."""
        dims = ("batch", "heads", *self.dims)
        yield SavedTensor("shares", dims, times=self.share, part=SavedPart.SCORES)
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
        """The bias of each head with the causal mask in it."""
        return [SavedTensor("masked bias", ("heads", *self.dims), times=self.share)]
