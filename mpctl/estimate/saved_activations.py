"""What the forward of a layer leaves for its backward: tensors by named dimensions, without torch.

The third reading of the operator table, beside its products and its parameters. An input of a
product, of a norm and of an activation is kept; a mask takes a byte an element; a residual sum and
a bias nothing. Whole over tp is what stands outside the parallel regions, and under sequence
parallelism each rank has its own positions of it.

`mpctl` is this project's kernels as a rehearsal finds them (runtime/memory_tracker.py). `megatron`
is Korthikanti et al., arXiv 2205.05198, section 4.1, in bytes of 16 bit, units of sbh: norms 4,
their results 4, q k v and context 8, MLP 16, masks 2, and scores 5as/h; without held scores
Transformer Engine's fused kernels. `half` is torchtitan's: of a layer that is recomputed its input,
the core's result and every second product's.

By hand, one layer of b 1, s 2, h 4, fp32, no dropout, flash: 4 x 2 x 4 elements of norms and their
results, 4 of q k v and context, 8 of the MLP: 16 x 8 x 4 = 512 bytes, and some of statistics.

Letters: b batch, s sequence, h hidden, a heads, d head size, f MLP width; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from mpctl.estimate.kernel_sets import KernelSet
from mpctl.operators.matmul import AttentionOp, Dims

Width = Literal["value", "float", "mask", "index"]


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """times: how many of these; is_outer: outside the parallel regions."""

    name: str
    dims: Dims
    width: Width = "value"
    times: float = 1
    is_outer: bool = False


class ActivationShapes(NamedTuple):
    """All that decides what a rank keeps of one micro batch; sizes are the rank's own.

    seq, decoder_seq: positions of this rank of cp; inner, kv: columns of queries, and of keys and
    values together, on this rank of tp; heads, ffn, vocab and, padded, table_rows likewise. splits:
    sequence parallelism. input_parts: in how many a recomputed layer's input is kept, 0 for none
    on the device. value: bytes of the training dtype.
    """

    kernels: KernelSet
    is_cuda: bool
    value: int
    batch: int
    seq: int
    decoder_seq: int
    hidden: int
    inner: int
    kv: int
    heads: int
    ffn: int
    vocab: int
    table_rows: int
    head_size: int
    kv_heads: int
    tp: int
    cp: int
    splits: bool
    norm: str
    activation: str
    is_gated: bool
    is_rotary: bool
    is_flash: bool
    dropout: bool
    attention_dropout: bool
    recompute: str
    input_parts: int

    @property
    def wide(self) -> int:
        """Bytes of what is computed in float32 at least."""
        return max(4, self.value)

    @property
    def holds_scores(self) -> bool:
        return self.attention_dropout or (self.kernels != "mpctl" and not self.is_flash)

    def bytes_of(self, kept: Iterable[SavedTensor]) -> float:
        widths = {"value": self.value, "float": self.wide, "mask": 1, "index": 8}
        return sum(
            float(prod(getattr(self, dim) for dim in k.dims)) * widths[k.width] * k.times
            / (self.tp if self.splits and k.is_outer else 1)
            for k in kept
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """always: from forward to backward; again: what a second forward brings back for it."""

    always: tuple[SavedTensor, ...]
    again: tuple[SavedTensor, ...] = ()


def layer_kept(
    form: ActivationShapes, family: str, cores: Sequence[AttentionOp]
) -> LayerActivations:
    """Of one layer with these attentions, the first one over its own hidden states."""
    stream = ("batch", cores[0].queries)
    always: list[SavedTensor] = []
    again: list[SavedTensor] = []
    for core in cores:
        rows = ("batch", core.queries)
        always += _branch(form, rows, core.part)
        kept, repeated = _core(form, family, core)
        always += kept
        again += repeated
    always += _branch(form, stream, "mlp")
    always += _mlp(form, stream)
    if form.recompute == "full":
        parts = 1 / form.input_parts if form.input_parts else 0
        hidden = SavedTensor("input", (*stream, "hidden"), times=parts, is_outer=True)
        return LayerActivations((hidden,), tuple(always + again))
    if form.recompute == "selective" and form.kernels == "half":
        return LayerActivations(tuple(_half(stream)), tuple(always + again))
    return LayerActivations(tuple(always), tuple(again))


def norm_kept(form: ActivationShapes, rows: Dims, name: str) -> Iterator[SavedTensor]:
    """Its input, and of each row its scale, and its mean where there is one."""
    yield SavedTensor(f"{name} input", (*rows, "hidden"), is_outer=True)
    statistics = 2 if form.norm == "layernorm" else 1
    yield SavedTensor(f"{name} statistics", rows, "float", statistics, is_outer=True)


def _branch(form: ActivationShapes, rows: Dims, name: str) -> Iterator[SavedTensor]:
    """A norm, its result and the mask at the end, whichever comes first."""
    yield from norm_kept(form, rows, f"{name} norm")
    yield SavedTensor(f"{name} input", (*rows, "hidden"), is_outer=True)
    if form.dropout:
        yield SavedTensor(f"{name} mask", (*rows, "hidden"), "mask", is_outer=True)


def _mlp(form: ActivationShapes, rows: Dims) -> Iterator[SavedTensor]:
    """The activation's input, unless its result tells the gradient, and its result."""
    if form.is_gated or form.activation != "relu" or form.kernels != "mpctl":
        yield SavedTensor("mlp up", (*rows, "ffn"), times=2 if form.is_gated else 1)
    yield SavedTensor("mlp activation", (*rows, "ffn"))


def _core(
    form: ActivationShapes, family: str, core: AttentionOp
) -> tuple[list[SavedTensor], list[SavedTensor]]:
    """(kept, made again by selective recomputation) of one attention."""
    is_self = not core.is_cross
    is_causal, is_biased, is_masked = core.is_causal, core.has_bias, core.has_sample_mask
    rows, keys = ("batch", core.queries), ("batch", core.keys)
    split = [
        SavedTensor("queries", (*rows, "inner")),
        SavedTensor("keys and values", (*keys, "kv")),
    ]
    turned = (
        [
            SavedTensor("turned queries", (*rows, "inner")),
            SavedTensor("turned keys", (*keys, "kv"), times=0.5),
        ]
        if form.is_rotary and form.kernels == "mpctl"
        else []
    )
    gathered = list(_gathered(form, keys))
    context = [SavedTensor("context", (*rows, "inner"))]
    sums = [SavedTensor("sums", (*rows, "heads"), "float")]
    pairs = _ScorePairs(form, core, is_causal)
    if form.kernels != "mpctl":
        if not form.holds_scores:
            return split + gathered + context + sums, []
        held = list(pairs.scores(3 if form.attention_dropout else 1))
        is_again = form.recompute == "selective"
        return split + gathered + context + ([] if is_again else held), held if is_again else []
    spelled = form.attention_dropout
    if spelled or (is_biased and not form.is_cuda):
        made = _spelled(form, rows, keys, gathered, pairs.share)
        if form.cp > 1 and not spelled:  # torch's own products scale the keys of each block
            made.append(SavedTensor("scaled keys", (*keys, "inner", "cp"), times=2 * pairs.share))
        made += pairs.scores(3 if spelled else 1)
        made += pairs.masks(2 if is_masked else int(is_causal), batch=is_masked)
        if form.recompute == "selective":
            return split + turned + gathered + context, made
        tables = [SavedTensor("turns", (core.queries, "head_size"), "float")] if turned else []
        return made + context + tables, []
    copies = 2 if turned or form.cp > 1 else 1
    own = split + turned
    if form.cp > 1:  # keys and values were copied: of their product only queries' views are left
        own = turned[:1] or (split if is_self else split[:1])
    held = own + gathered + context * copies + sums
    if is_masked:
        held += pairs.masks(1, width="value", batch=True)
    if is_biased and is_causal:
        held += pairs.bias()
    elif is_causal and form.cp > 1 and not form.is_cuda:
        held += pairs.masks(1, width="value")
    if turned:
        held.append(SavedTensor("turns", (core.queries, "head_size"), "float"))
    if form.recompute == "selective" and is_biased:
        return split + gathered + context, held
    return held, []


def _gathered(form: ActivationShapes, keys: Dims) -> Iterator[SavedTensor]:
    """Keys and values of other ranks: of a head that ranks share, or of the whole sequence, which
    others pass round a ring instead."""
    if form.kv_heads < form.tp:
        yield SavedTensor("shared keys", (*keys, "head_size"), times=2)
    if form.cp > 1 and form.kernels == "mpctl":
        yield SavedTensor("gathered keys", (*keys, "kv", "cp"))


def _spelled(
    form: ActivationShapes, rows: Dims, keys: Dims, gathered: list[SavedTensor], share: float
) -> list[SavedTensor]:
    """Copies of q, k, v for the two products; one head of keys for each of queries, which under cp
    each of the two blocks of queries has its own of."""
    queries = [SavedTensor("scaled queries", (*rows, "inner"))]
    if form.cp > 1 and form.inner * 2 == form.kv:
        return queries + gathered
    blocks = 2 * share if form.cp > 1 else 1
    return [*queries, SavedTensor("keys and values", (*keys, "inner", "cp"), times=2 * blocks)]


@dataclass(frozen=True, slots=True)
class _ScorePairs:
    """Of queries and keys: under cp, a causal query's block meets the prefix of keys it may see."""

    form: ActivationShapes
    core: AttentionOp
    is_causal: bool

    @property
    def dims(self) -> Dims:
        return (self.core.queries, self.core.keys, "cp")

    @property
    def share(self) -> float:
        c = self.form.cp
        return (2 * c + 1) / (4 * c) if self.is_causal and c > 1 else 1

    def scores(self, parts: int) -> Iterator[SavedTensor]:
        """Softmax's result, and with dropout the mask and the dropped."""
        dims = ("batch", "heads", *self.dims)
        for name in ("shares", "dropped")[: 2 if parts > 1 else 1]:
            yield SavedTensor(name, dims, times=self.share)
        if parts > 1:
            yield SavedTensor("scores mask", dims, "mask", self.share)

    def masks(
        self, times: int, *, width: Width = "mask", batch: bool = False
    ) -> Iterator[SavedTensor]:
        if times:
            dims = (*(("batch",) if batch else ()), *self.dims)
            yield SavedTensor("attention mask", dims, width, times * self.share)

    def bias(self) -> Iterator[SavedTensor]:
        yield SavedTensor("masked bias", ("heads", *self.dims), times=self.share)


def _half(rows: Dims) -> Iterator[SavedTensor]:
    """Products 1, 3, 5, .. of q, k, v, output, gate, up, down, with the layer's input and the
    core's result, which both count to what is saved."""
    yield SavedTensor("input", (*rows, "hidden"), is_outer=True)
    yield SavedTensor("context", (*rows, "inner"))
    yield SavedTensor("queries", (*rows, "inner"))
    yield SavedTensor("values", (*rows, "kv"), times=0.5)
    yield SavedTensor("gate", (*rows, "ffn"))
    yield SavedTensor("down", (*rows, "hidden"), is_outer=True)


def entry_kept(form: ActivationShapes, seq: str, *, norm: bool) -> tuple[SavedTensor, ...]:
    """Of the embedding: places that were looked up, and of BERT's norm."""
    rows = ("batch", seq)
    found = [SavedTensor("words", rows, "index", 1 if form.tp > 1 else 0)]
    if form.dropout:
        found.append(SavedTensor("embedding mask", (*rows, "hidden"), "mask", is_outer=True))
    if norm:
        found += norm_kept(form, rows, "embedding norm")
    return tuple(found)


def exit_kept(
    form: ActivationShapes, family: str, seq: str, *, is_last: bool, norm: bool
) -> tuple[SavedTensor, ...]:
    """Behind the last layer of a stack: a norm; of the last stack the head's input and logits."""
    rows = ("batch", seq)
    found = list(norm_kept(form, rows, "final norm")) if norm else []
    if not is_last or norm:
        found.append(SavedTensor("normed", (*rows, "hidden"), is_outer=True))
    if not is_last:
        return tuple(found)
    if family == "bert":
        transformed = SavedTensor("transformed", (*rows, "hidden"), is_outer=True)
        if not norm:
            found.append(SavedTensor("normed", (*rows, "hidden"), is_outer=True))
        found += [transformed, *norm_kept(form, rows, "transform norm"), transformed]
    return (*found, SavedTensor("logits", (*rows, "vocab")), SavedTensor("loss", rows, "float", 4))


ARRAYS: Mapping[str, tuple[int, int]] = {
    "gpt": (2, 0), "bert": (4, 0), "glm": (5, 0), "t5": (1, 3),
}  # fmt: skip


def batch_kept(family: str) -> tuple[SavedTensor, ...]:
    """Token ids and whatever else stands beside them, on the rank of cp."""
    encoder, decoder = ARRAYS[family]
    return (
        SavedTensor("batch", ("batch", "seq"), "index", encoder),
        SavedTensor("batch", ("batch", "decoder_seq"), "index", decoder),
    )
