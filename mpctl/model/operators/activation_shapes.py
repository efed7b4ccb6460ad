"""Saved tensors, and the sizes that decide how many bytes of them a rank keeps of a micro batch.

By hand, one tensor [b, s, h] of b 1, s 2, h 4 in fp32: 1 x 2 x 4 x 4 = 32 bytes; outside the
tensor-parallel regions under sequence parallelism with tp 2, 16; of 2 samples on a square of 2 x 2
ranks, 1 x 2 x 2 x 4 = 16 as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from mpctl.core.tensor_grid import FEATURES
from mpctl.model.operators.kernel_sets import KernelSet
from mpctl.model.operators.loss import LossChunks
from mpctl.spec.parallel import EXCHANGES, CpComm

Dims = tuple[str, ...]

Width = Literal["value", "operand", "float", "mask", "index"]
"""Bytes of an element: of activations, of a product's operands, of float32 at least, 1, 8."""


LOSS_BLOCK = 1 << 17  # elements of a loss's working block on a CPU
OF_LATENTS = "mla_up_proj"  # the module whose products read latents and write queries, keys, values


def gathers_latents(comm: CpComm | None, kernels: KernelSet) -> bool:
    """Whether ranks of cp share latents in place of keys and values: where the job does not say how they
    meet, and in mpctl's all_gather."""
    return comm is None or (comm == "all_gather" and kernels.gathers_keys)


def is_outer(dims: Dims) -> bool:
    """Whether a tensor of these dimensions is outside the parallel regions of tp, where sequence
    parallelism leaves each rank 1/tp of it: without features, and not of rows sent to experts."""
    return dims[-1] not in FEATURES and "routed" not in dims


class SavedTensor(NamedTuple):
    """A tensor that is kept from forward to backward.

    dims: names of its dimensions, sizes as this rank holds them. times: how many such tensors there
    are, a fraction for a part of one. is_outer: whether it is outside the parallel regions of tp,
    where sequence parallelism leaves each rank 1/tp of it. is_formed: whether selective
    recomputation forms it again instead of keeping it. module: the part of a layer that can be
    recomputed by itself (training.recompute_modules) and forms it, if any. branch: number of the
    branch of its layer.
    """

    name: str
    dims: Dims
    width: Width = "value"
    times: float = 1
    is_outer: bool = False
    is_formed: bool = False
    module: str = ""
    branch: int = 0


Saved = list[SavedTensor]


class LocalDims(dict[str, int]):
    """Sizes of named dimensions on one rank. Hashed as a value: never changed once made."""

    @cached_property
    def _hash(self) -> int:
        return hash(frozenset(self.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return self._hash


class AdapterShapes(NamedTuple):
    """What adapters and a frozen base keep of a micro batch in one software (AdapterCosts).

    value: bytes of an element of X A. input_copy: bytes of an element of the copy that each
    adapter keeps of its input, 0 where all share the product's. mask: bytes of an element of its
    dropout's mask; dropout: whether it has one. remakes: the input of an MLP's last product is
    computed again. results: results of a product that dora keeps; formed: matrices as large as W that it
    makes. dequantizes: the base is stored in fewer bits than its products' operands have; copies: it is
    stored in more, so that forward makes a copy, which backward reads. base_inputs: bytes kept for each
    element of the input of a product that is dequantised. narrow_activation: an activation's input is kept
    as narrow as the operands of fp8 products. adds: dX is added to that of the product in place.
    """

    value: int
    input_copy: int = 0
    mask: float = 0.0
    dropout: bool = False
    remakes: bool = False
    results: float = 0.0
    formed: int = 0
    dequantizes: bool = False
    copies: bool = False
    base_inputs: float = 0.0
    narrow_activation: bool = False
    adds: bool = True


class ActivationShapes(NamedTuple):
    """Everything that decides what a rank saves of one micro batch.

    dims: this rank's size of every dimension that a tensor may have. `batch` are the samples that it
    computes, `micro_batch` all of them, `looked_up` those whose words it looks up; seq and
    decoder_seq positions of this rank of cp; hidden columns between the layers, joined two of them
    side by side; inner, queries and kv columns of values, of queries, of keys with values; routed
    rows of its experts.

    kernels: the software whose kernels run. fuses_variants: whether attention of any kind is one
    kernel (plan/estimate/attention.py). value: bytes of an element of the training dtype; operand: bytes
    of an element of a product's saved operand, fewer where fp8 kernels keep the 8-bit operand.
    table_rows: rows of the word table, with padding. kv_heads: of the unsharded model. mode: the
    tensor mode; side: ranks along an axis of its grid, q or l, 1 in 1d. feature_parts: into how
    many parts heads are cut. splits: whether sequence parallelism is on. input_parts: into how many
    parts the saved input of a recomputed layer is cut among the ranks of tp; 0 where it is
    offloaded from the device. fetched_parts: the same for the input that backward prefetches from
    the host (train/layers/recompute.py); 0 where nothing is prefetched. modules: what selective
    recomputation repeats besides attention's scores. score_tensors: tensors with a number for each
    token and expert that the router keeps; token_weights: numbers of each token that it keeps
    besides. adds_products: products add to a matrix's gradient, so that no dW is made. sums: bytes
    of an element of the gradients of a step. logit_bytes: bytes of a logit's element that a loss
    takes at once (the runtime's profile). loss_chunks: of a loss that makes logits chunk by chunk.
    tiles: of the tokens, in which MLPs are computed, and again in backward; 0 where they are not.
    adapter: of a model that adapters train. cp_comm: how keys and values meet queries under cp, if
    the job says it. kv_copies: of each kv head that an exchange of heads brings.
    """

    dims: LocalDims
    kernels: KernelSet
    is_cuda: bool
    fuses_variants: bool
    value: int
    operand: int
    table_rows: int
    kv_heads: int
    mode: str
    side: int
    feature_parts: int
    tp: int
    cp: int
    splits: bool
    is_flash: bool
    dropout: bool
    attention_dropout: bool
    recompute: str
    input_parts: int
    fetched_parts: int
    experts_per_token: int = 0
    ep: int = 1
    etp: int = 1
    modules: frozenset[str] = frozenset()
    score_tensors: int = 0
    token_weights: int = 0
    adds_products: bool = False
    sums: int = 4
    logit_bytes: float = 0.0
    loss_chunks: LossChunks | None = None
    tiles: int = 0
    adapter: AdapterShapes | None = None
    cp_comm: CpComm | None = None
    kv_copies: int = 1

    @property
    def exchanges(self) -> bool:
        """Whether ranks of cp exchange sequence for heads before attention, and back behind it."""
        return self.cp_comm in EXCHANGES

    @property
    def gathers_latents(self) -> bool:
        """Whether cp gathers the latents of keys and values, of which each rank makes those of the full
        sequence: mpctl's layers do; other types send keys and values."""
        return self.cp > 1 and gathers_latents(self.cp_comm, self.kernels)

    @property
    def meets_blocks(self) -> bool:
        """Whether attention has two blocks of queries, which meet keys of all ranks of cp."""
        return self.cp > 1 and not self.exchanges

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.dims["experts"] // self.ep

    @property
    def wide(self) -> int:
        """Bytes of an element that is computed in float32 at least."""
        return max(4, self.value)

    @property
    def makes_table_gradient(self) -> bool:
        """Whether the head makes the dW of its table instead of adding it to the gradient."""
        adds = self.sums == self.value or (self.is_cuda and self.kernels.adds_products)
        return not (adds and self.kernels.adds_rows and self.mode == "1d")

    @property
    def keeps_shards(self) -> bool:
        """Whether column products save only this rank's shard of their input: ours do under
        sequence parallelism, and backward gathers it again."""
        return self.splits and self.kernels.keeps_shards

    @property
    def holds_scores(self) -> bool:
        """Whether the score matrix is written to memory instead of being formed block by block."""
        if self.kernels.attention == "torch":
            return self.attention_dropout and not self.fuses_variants
        return not self.is_flash

    def bytes_of(self, tensors: Iterable[SavedTensor]) -> float:
        """Bytes of saved tensors together on this rank."""
        widths = {"value": self.value, "operand": self.operand, "float": self.wide, "mask": 1, "index": 8}
        return sum(
            float(self.count(tensor.dims))
            * widths[tensor.width]
            * tensor.times
            / (self.tp if self.splits and tensor.is_outer else 1)
            for tensor in tensors
        )

    def count(self, dims: Iterable[str]) -> int:
        """Elements of a tensor of these dimensions."""
        return prod([self.dims[dim] for dim in dims])

    @property
    def of_tile(self) -> ActivationShapes:
        """The sizes of one tile of the tokens."""
        seqs = {dim: -(-self.dims[dim] // self.tiles) for dim in ("seq", "decoder_seq")}
        return self._replace(dims=LocalDims({**self.dims, **seqs}), tiles=0)

    def logits(self, dims: Dims) -> int:
        """Elements of the logits of these dimensions that are held at once: all, or a chunk's."""
        if self.loss_chunks is None:
            return self.count(dims)
        words = self.dims[dims[-1]]
        return words * self.loss_chunks.rows(self.count(dims[:-1]), words=words, hidden=self.dims["hidden"])

    def loss_block(self, dims: Dims) -> float:
        """Bytes of the block of rows in which a CPU computes a loss over logits of these dimensions."""
        if self.kernels.loss == "logits" or self.is_cuda:
            return 0.0
        logits, vocab = self.logits(dims), self.dims["vocab"]
        block = max(vocab, LOSS_BLOCK // vocab * vocab)
        return float(self.wide * (logits if logits <= block else 2 * block))

    def stream_bytes(self, seq: str = "seq") -> float:
        """Bytes of the hidden states between the layers, not split by sequence parallelism."""
        return float(self.count(("batch", seq, "hidden")) * self.value)

    def own_bytes(self, seq: str = "seq") -> float:
        """The same as this rank holds them."""
        return self.stream_bytes(seq) / (self.tp if self.splits else 1)

    @property
    def recomputes_layers(self) -> bool:
        """Whether a layer's forward runs again before its backward."""
        return self.recompute == "full" or (self.recompute == "selective" and self.kernels.keeps_second_products)
