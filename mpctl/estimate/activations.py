"""What one micro batch takes in a chunk: what is kept until its backward, and the most besides.

Kept is the sum of the operator table's tensors (estimate/saved_activations.py). The most besides is
found by going backward through the chunk, from its exit to its entry: at each point what lies
behind is freed, and there are gradients of the stream, of a layer's products, of weights on their
way to the buffer, and what is computed again. The dW of a tied table waits from the head for the
embedding's.

By hand, gpt of one fp32 layer, rows r = bs, no dropout: leaving the MLP backward there are the
stream's gradient r h, its activation's r f and a matrix's h f beside all that was kept.

Letters: b batch, s sequence, h hidden, f MLP width, v vocabulary; t tp, c cp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from mpctl.estimate.kernel_sets import kernel_set
from mpctl.estimate.saved_activations import (
    ActivationShapes,
    SavedTensor,
    batch_kept,
    entry_kept,
    exit_kept,
    layer_kept,
)
from mpctl.layout.job_layout import JobLayout
from mpctl.operators.matmul import AttentionOp
from mpctl.operators.table import StageSlice
from mpctl.sharding import padded_vocab
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile
from mpctl.spec.runtime_memory import RuntimeMemory
from mpctl.units import DTYPE_BYTES

BLOCK = {False: 1 << 17, True: 1 << 24}  # elements of a loss's working block, on cpu and cuda


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes of activations of one micro batch in one model chunk.

    kept: held from forward until backward. top: most at once during backward, `kept` included.
    Zero-bubble schedules split backward in two; put_off: held from the first part (gradients of
    inputs) until the second (gradients of weights). split_top: most at once during the first part.
    """

    kept: float = 0.0
    top: float = 0.0
    put_off: float = 0.0
    split_top: float = 0.0

    @property
    def work(self) -> float:
        return self.top - self.kept


class LayerBytes(NamedTuple):
    """kept, put_off: as a chunk's; work: the most that its backward has besides; split_work: the
    same of a backward that leaves the weights' gradients, with what it has put off so far."""

    kept: float
    work: float
    put_off: float
    split_work: float


def form_of(layout: JobLayout) -> ActivationShapes:
    """The rank's own sizes; of the ranks of tp the first, which has the most words."""
    job, model = layout.job, layout.model
    t, p, memory = job.training, job.parallel, memory_of(job)
    tp, cp = p.tp, p.cp
    rows = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor) // tp
    assumed = memory.assumes_dropout and model.attention == "unfused"
    return ActivationShapes(
        kernels=kernel_set(memory.kernels, t.runtime), is_cuda=is_cuda(job),
        value=max(2, DTYPE_BYTES[t.dtype]),
        batch=t.micro_batch_size, seq=model.seq_length // cp,
        decoder_seq=(model.decoder_seq_length or 0) // cp, hidden=model.hidden,
        inner=model.heads * model.head_size // tp,
        kv=2 * model.kv_heads * model.head_size // tp, heads=model.heads // tp,
        ffn=model.ffn // tp, vocab=min(rows, model.vocab), table_rows=rows,
        head_size=model.head_size, kv_heads=model.kv_heads, tp=tp, cp=cp,
        splits=p.sequence_parallel, norm=model.norm,
        activation=model.activation, is_gated=model.gated, is_rotary=model.position == "rotary",
        is_flash=model.attention == "flash", dropout=t.dropout > 0 or assumed,
        attention_dropout=t.attention_dropout > 0 or assumed, recompute=t.recompute,
        input_parts=0 if t.offload_activations else tp if t.partition_activations else 1,
    )  # fmt: skip


def memory_of(job: JobSpec) -> RuntimeMemory:
    """The runtime's figures."""
    return get_profile(job.training.runtime).memory


def is_cuda(job: JobSpec) -> bool:
    device = job.cluster.device
    if job.launch.device != "auto":
        return job.launch.device == "cuda"
    return device is None or device.kind == "cuda"


def chunk_bytes(layout: JobLayout, stage: int, chunk: int) -> ChunkBytes:
    """Of one micro batch in one chunk of a stage."""
    form, model = form_of(layout), layout.model
    shape = ModelTraits(model.family, model.norm_order == "post", model.tied_embeddings)
    parts = tuple(map(_StackPart.of, layout.chunk_slices(stage, chunk)))
    return _chunk(form, shape, parts, memory_of(layout.job).logit_bytes)


class ModelTraits(NamedTuple):
    """What of a model decides which tensors there are."""

    family: str
    is_post: bool
    tied: bool


class _StackPart(NamedTuple):
    """What a chunk has of a stack, as far as memory goes. layers: those that keep anything."""

    cores: tuple[AttentionOp, ...]
    is_decoder: bool
    layers: int
    has_entry: bool
    has_exit: bool

    @property
    def seq(self) -> str:
        return self.cores[0].queries

    @classmethod
    def of(cls, held: StageSlice) -> _StackPart:
        kept = sum(count for count, flow in held.blocks if flow.after)
        is_decoder = held.stack.seq == "decoder_seq"
        return cls(held.stack.cores, is_decoder, kept, held.has_entry, held.has_exit)


class _Piece(NamedTuple):
    """`number` equal parts of a chunk. kept: of each; beside: of all together; the rest as a
    layer's."""

    kept: float
    work: float = 0.0
    put_off: float = 0.0
    split_work: float = 0.0
    number: int = 1
    beside: float = 0.0

    @property
    def whole(self) -> float:
        return self.number * self.kept + self.beside

    @property
    def split_top(self) -> float:
        """The most in a backward in two, beyond what was kept: in its first part or its last."""
        done = (self.number - 1) * (self.put_off - self.kept)
        return self.split_work + max(0.0, done)


@lru_cache(maxsize=65536)
def _chunk(
    form: ActivationShapes, shape: ModelTraits, parts: tuple[_StackPart, ...], logit_bytes: float
) -> ChunkBytes:
    """Backward through a chunk: what is there at most, beside and with what it kept."""
    ends_encoder = any(part.has_exit and not part.is_decoder for part in parts)
    pieces = [_pieces(form, shape, part, logit_bytes, ends_encoder=ends_encoder) for part in parts]
    kept = sum(piece.whole for found in pieces for piece in found)
    waits = shape.tied and any(p.has_entry for p in parts) and any(p.has_exit for p in parts)
    table = form.hidden * form.table_rows * form.value
    left = top = split_top = kept
    waiting = put_off = 0.0
    for part, found in zip(reversed(parts), reversed(pieces), strict=True):
        for piece in reversed(found):
            top = max(top, left + waiting + piece.work)
            split_top = max(split_top, left + waiting + put_off + piece.split_top)
            left -= piece.whole
            put_off += piece.number * piece.put_off
            waiting = table if waits else 0.0
        if part.has_entry:
            top = max(top, left + waiting + table)
            split_top = max(split_top, left + waiting + put_off + table)
    batch = form.bytes_of(batch_kept(shape.family))
    return ChunkBytes(kept + batch, top + batch, put_off, split_top + batch)


def _pieces(
    form: ActivationShapes,
    shape: ModelTraits,
    part: _StackPart,
    logit_bytes: float,
    *,
    ends_encoder: bool,
) -> list[_Piece]:
    """The chunk's parts in forward order: what it received, embedding, layers, head.

    ends_encoder: whether the chunk computes the encoder's output. A decoder's chunk that does not
    receives it from another stage and keeps it for the products of its layers.
    """
    found: list[_Piece] = []
    is_bert_post = shape.family == "bert" and shape.is_post
    if len(part.cores) > 1:
        source = form.bytes_of([SavedTensor("source", ("batch", "seq", "hidden"), is_outer=True)])
        found.append(_Piece(0.0 if ends_encoder else source, put_off=source))
    if part.has_entry:
        found.append(_Piece(form.bytes_of(entry_kept(form, part.seq, norm=is_bert_post))))
    if part.layers:
        layer = _layer(form, shape.family, part.cores)
        beside = form.bytes_of(_beside(form, shape.family, part.seq))
        found.append(_Piece(*layer, number=part.layers, beside=beside))
    if part.has_exit:
        is_last = shape.family != "t5" or part.is_decoder
        kept = exit_kept(form, shape.family, part.seq, is_last=is_last, norm=not is_bert_post)
        work = _exit_work(form, part.seq, logit_bytes) if is_last else 0.0
        found.append(_Piece(form.bytes_of(kept), work, split_work=work))
    return found


def _beside(form: ActivationShapes, family: str, seq: str) -> tuple[SavedTensor, ...]:
    """What all layers of a chunk keep together: T5's bias and its places, and GLM's mask where
    layers are given it again."""
    if form.kernels != "mpctl" or family not in ("t5", "glm"):
        return ()
    if family == "glm":
        mask = SavedTensor("mask", ("batch", seq, seq, "cp"), "mask")
        return (mask,) * (form.recompute != "none")
    pairs = (seq, seq, "cp")
    has_bias = form.is_cuda or form.recompute != "none"
    return (
        SavedTensor("places", pairs, "index"),
        *(SavedTensor("bias", ("heads", *pairs)),) * has_bias,
    )


@lru_cache(maxsize=65536)
def _layer(form: ActivationShapes, family: str, cores: tuple[AttentionOp, ...]) -> LayerBytes:
    layer = layer_kept(form, family, cores)
    kept, again = form.bytes_of(layer.always), form.bytes_of(layer.again)
    is_whole = form.recompute == "full" or form.kernels == "half"
    every = layer.again if is_whole else layer.always
    rows: int = form.batch * getattr(form, cores[0].queries)
    stream = rows * form.hidden * form.value
    own = stream / (form.tp if form.splits else 1)
    mlp = form.bytes_of(k for k in every if k.name.startswith("mlp"))
    scores = form.bytes_of(k for k in (*layer.always, *layer.again) if k.name == "shares")
    repeated = again - (own if form.input_parts == 1 else 0) if is_whole else 0.0
    inner, matrix = rows * form.ffn * form.value, form.hidden * form.ffn * form.value
    gathers = 2 * stream if form.splits else 0.0
    product = inner + matrix + gathers
    around_mlp = own * (1 + form.dropout)
    if len(cores) > 1:
        around_mlp += form.batch * form.seq * form.hidden * form.value  # the source's gradient
    in_mlp = around_mlp + max(5 * inner if form.is_gated else 0, product)
    in_core = own + scores * (3 if form.kernels != "mpctl" else 2 if family == "glm" else 1)
    behind = (repeated or again) - mlp + in_core
    work = max(repeated + in_mlp, behind)
    of_mlp = _mlp_put_off(form, rows, own)
    # Put off, the activation's result stays while its gradient is made, and of a row product the
    # gathered gradient.
    row = stream if form.splits else 0.0
    split_mlp = around_mlp + row + (5 if form.is_gated else 2) * inner
    split_work = max(repeated + split_mlp, behind + of_mlp + row)
    return LayerBytes(kept, work, of_mlp + _cores_put_off(form, cores, rows, own), split_work)


def _mlp_put_off(form: ActivationShapes, rows: int, own: float) -> float:
    """Inputs of the MLP's products and the gradients of their results."""
    gated = 2 if form.is_gated else 1
    return own + rows * (form.ffn + gated * form.ffn + form.hidden) * form.value


def _cores_put_off(
    form: ActivationShapes, cores: Sequence[AttentionOp], rows: int, own: float
) -> float:
    """The same of the products around a layer's attentions."""
    found = 0.0
    for core in cores:
        keys = form.batch * getattr(form, core.keys)
        found += own + (rows * (2 * form.inner + form.hidden) + keys * form.kv) * form.value
    return found


def _exit_work(form: ActivationShapes, seq: str, logit_bytes: float) -> float:
    """The loss's working block, then the gradients of the head's input and of its table."""
    rows: int = form.batch * getattr(form, seq)
    logits, stream = rows * form.vocab, rows * form.hidden * form.value
    if form.kernels != "mpctl":
        return logits * logit_bytes + stream
    block = max(form.vocab, BLOCK[form.is_cuda] // form.vocab * form.vocab)
    working = form.wide * (logits if logits <= block else 2 * block)
    if form.wide == form.value and logits <= block:
        working = 0  # in place
    gathers = 2 * stream if form.splits else 0.0
    padded = form.table_rows if form.table_rows > form.vocab else 0
    return max(working, stream + gathers + (form.vocab + padded) * form.hidden * form.value)
