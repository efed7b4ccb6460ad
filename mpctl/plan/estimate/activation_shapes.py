"""Saved tensors, and the sizes that decide how many bytes of them a rank keeps of a micro batch.

By hand, one tensor [b, s, h] of b 1, s 2, h 4 in fp32: 1 x 2 x 4 x 4 = 32 bytes; outside the
tensor-parallel regions under sequence parallelism with tp 2, 16; of 2 samples on a square of 2 x 2
ranks, 1 x 2 x 2 x 4 = 16 as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Literal, NamedTuple

from mpctl.core.sharding import padded_vocab
from mpctl.core.tensor_grid import FEATURES
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.kernel_sets import KernelSet
from mpctl.model.operators.matmul import Dims
from mpctl.plan.estimate.attention import fuses_variants, kernels_of
from mpctl.plan.estimate.communication import Sizes, local_sizes
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.training import CORE, TrainingSpec

Width = Literal["value", "operand", "float", "mask", "index"]
"""Bytes of an element: of activations, of a product's operands, of float32 at least, 1, 8."""


def is_outer(dims: Dims) -> bool:
    """Whether a tensor of these dimensions is outside the parallel regions of tp, where sequence
    parallelism leaves each rank 1/tp of it: without features, and not of rows sent to experts."""
    return dims[-1] not in FEATURES and "routed" not in dims


class SavedTensor(NamedTuple):
    """A tensor that is kept from forward to backward.

    dims: names of its dimensions, sizes as this rank holds them. times: how many such tensors there
    are, a fraction for a part of one. is_outer: whether it is outside the parallel regions of tp,
    where sequence parallelism leaves each rank 1/tp of it. part: the branch of the layer that saves
    it. is_scores: whether it is a softmax of attention scores, as large as their gradients.
    """

    name: str
    dims: Dims
    width: Width = "value"
    times: float = 1
    is_outer: bool = False
    part: str = ""
    is_scores: bool = False


class ActivationShapes(NamedTuple):
    """Everything that decides what a rank saves of one micro batch; sizes are this rank's.

    kernels: the software whose kernels run. fuses_variants: whether attention of any kind is one
    kernel (plan/estimate/attention.py). value: bytes of an element of the training dtype; operand: bytes
    of an element of a product's saved operand, fewer where fp8 kernels keep the 8-bit operand.
    micro_batch: samples of a micro batch; looked_up: samples whose words this rank of tp looks up
    in its part of the table; batch: samples that it computes. seq, decoder_seq: positions of this
    rank of cp. hidden: columns of hidden states on this rank, between the layers. inner: columns of
    the queries on this rank of tp; kv: of keys and values together; heads, ffn, vocab: likewise;
    table_rows: rows of the word table, with padding. kv_heads: of the unsharded model. mode: the
    tensor mode; side: ranks along an axis of its grid, q or l, 1 in 1d. feature_parts: into how
    many parts heads are cut. splits: whether sequence parallelism is on. input_parts: into how many
    parts the saved input of a recomputed layer is cut among the ranks of tp; 0 where it is
    offloaded from the device. fetched_parts: the same for the input that backward prefetches from
    the host (train/layers/recompute.py); 0 where nothing is prefetched. queries: columns of queries and
    of keys in latent attention, where inner are those of the values; latents: of what queries, and
    what keys with values, are computed from, and of the keys' part with positions. routed: rows
    that the experts of the fullest rank compute; experts: of a layer, on all ranks; expert_ffn,
    shared_ffn: columns of one expert and of the shared ones. modules: what selective recomputation
    repeats besides attention's scores. score_tensors: tensors with a number for each token and
    expert that the router keeps; token_weights: numbers of each token that it keeps besides.
    adds_products: products add to a matrix's gradient, so that no dW is made. sums: bytes of an
    element of the gradients of a step.
    """

    kernels: KernelSet
    is_cuda: bool
    fuses_variants: bool
    value: int
    operand: int
    micro_batch: int
    looked_up: int
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
    queries: int = 0
    latents: tuple[int, int, int] = (0, 0, 0)
    routed: int = 0
    experts_per_token: int = 0
    experts: int = 0
    ep: int = 1
    etp: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0
    modules: frozenset[str] = frozenset()
    score_tensors: int = 0
    token_weights: int = 0
    adds_products: bool = False
    sums: int = 4

    @property
    def gate(self) -> int:
        """Columns of the gate of shared experts."""
        return 1

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.experts // self.ep

    @property
    def query_latent(self) -> int:
        """Columns of the latent of queries."""
        return self.latents[0]

    @property
    def key_latent(self) -> int:
        """Columns of the latent of keys and values, without the part with positions."""
        return self.latents[1]

    @property
    def key_columns(self) -> int:
        """Columns of the product that computes it: with the part that has positions."""
        return sum(self.latents[1:])

    @property
    def joined(self) -> int:
        """Columns of hidden states and embeddings side by side (multi-token prediction)."""
        return 2 * self.hidden

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
            float(prod(getattr(self, dim) for dim in tensor.dims))
            * widths[tensor.width]
            * tensor.times
            / (self.tp if self.splits and tensor.is_outer else 1)
            for tensor in tensors
        )


def activation_shapes(layout: JobLayout) -> ActivationShapes:
    """The sizes of the first tp rank of the layout, which has the most words of the vocabulary."""
    job, model = layout.job, layout.model
    t, p, memory = job.training, job.parallel, layout.profile.memory
    tp, cp, grid = p.tp, p.cp, layout.grid
    kernels = kernels_of(layout)
    value = t.value_bytes
    operand = 1 if kernels.keeps_narrow and DTYPE_BYTES[t.dtype] <= 1 else value
    is_added = kernels.adds_products and is_cuda(job) and operand == value
    vocab = padded_vocab(model.vocab, tp=tp, divisor=model.vocab_divisor)
    features, sizes = grid.feature_parts, local_sizes(layout)
    table_parts = grid.parts(grid.weight_axes(("vocab", "hidden"))[0])
    input_parts = tp if t.partition_activations else 1
    assumed = memory.assumes_dropout and model.attention == "unfused"
    return ActivationShapes(
        kernels=kernels,
        is_cuda=is_cuda(job),
        fuses_variants=fuses_variants(layout),
        value=value,
        operand=operand,
        micro_batch=t.micro_batch_size,
        looked_up=sizes["batch"] * table_parts if grid.mode != "1d" else sizes["batch"],
        batch=sizes["batch"],
        seq=sizes["seq"],
        decoder_seq=sizes["decoder_seq"],
        hidden=sizes["hidden"],
        inner=model.heads * model.v_size // features,
        kv=key_value_columns(model) // features,
        heads=model.heads // features,
        ffn=model.ffn // features,
        vocab=vocab // features,
        table_rows=vocab // table_parts,
        head_size=model.head_size,
        kv_heads=model.kv_heads,
        mode=grid.mode,
        side=grid.hidden_parts,
        feature_parts=features,
        tp=tp,
        cp=cp,
        splits=p.sequence_parallel,
        is_flash=model.attention == "flash",
        dropout=t.dropout > 0 or assumed,
        attention_dropout=t.attention_dropout > 0 or assumed,
        recompute="none" if t.repeated_modules and CORE not in t.repeated_modules else t.recompute,
        input_parts=0 if t.offload_activations else input_parts,
        fetched_parts=input_parts if _fetches_ahead(layout) else 0,
        queries=model.heads * model.qk_size // features,
        latents=latent_columns(model),
        modules=t.repeated_modules - {CORE},
        adds_products=is_added and not job.launch.compile and adds_products(layout),
        sums=t.reduced_bytes,
        **_experts_sizes(layout, sizes),
    )


def adds_products(layout: JobLayout) -> bool:
    """Whether a matrix's gradient is a product of 16-bit operands in backward, which mpctl's
    products on an accelerator add to the step's gradient themselves."""
    is_narrow = layout.job.training.chosen_dtype in ("bf16", "fp16")
    splits = SCHEDULES[layout.job.parallel.schedule].splits_backward
    return is_narrow and not splits and layout.grid.mode == "1d"


def latent_columns(model: ModelSpec) -> tuple[int, int, int]:
    """Columns of the latent of queries, of that of keys and values, and of the keys' part with
    positions; 0 where there are none."""
    columns = (model.q_lora_rank, model.kv_lora_rank, model.qk_rope_head_dim)
    own = (columns[0] or 0, columns[1] or 0, columns[2] or 0)
    return own if model.is_mla else (0, 0, 0)


def key_value_columns(model: ModelSpec) -> int:
    """Columns of the product that computes keys and values, of all heads."""
    if model.is_mla:
        return model.heads * ((model.qk_nope_head_dim or 0) + model.v_size)
    return 2 * model.kv_heads * model.head_size


def _experts_sizes(layout: JobLayout, sizes: Sizes) -> dict[str, int]:
    """The sizes of a layer with experts on this rank; none of other models."""
    model, parallel = layout.model, layout.job.parallel
    if model.experts is None:
        return {}
    return {
        "routed": sizes["routed"],
        "experts_per_token": model.experts_per_token,
        "experts": model.experts,
        "ep": parallel.ep,
        "etp": parallel.etp,
        "expert_ffn": model.expert_width // parallel.etp,
        "shared_ffn": model.shared_expert_ffn // layout.grid.feature_parts,
        **_router_sizes(model, layout.job.training),
    }


def _router_sizes(model: ModelSpec, training: TrainingSpec) -> dict[str, int]:
    """What the router of mpctl's layers keeps (train/kernels/routing.py): of a renormalized softmax the
    logits, of others the scores; both where the losses of balance and of z need the other too."""
    is_of_logits = model.router_score == "softmax" and model.router_renormalize
    balances = training.moe_aux_loss_coeff > 0 and training.moe_load_balancing != "none"
    has_z, chosen = training.moe_z_loss_coeff > 0, model.experts_per_token
    divides = model.router_renormalize and not is_of_logits  # by a sum, of numbers that it keeps
    sums = divides + (balances and model.router_score == "sigmoid")
    return {
        "score_tensors": (is_of_logits or has_z) + (balances or not is_of_logits),
        "token_weights": chosen * (1 + divides) + sums + has_z,
    }


def _fetches_ahead(layout: JobLayout) -> bool:
    """Whether our workers fetch offloaded inputs back before they are needed."""
    job = layout.job
    return job.training.offload_activations and kernels_of(layout).fetches_ahead and is_cuda(job)


def is_cuda(job: JobSpec) -> bool:
    """Whether the job runs on accelerators, where torch's caching allocator holds the memory: as
    the job states, else by its device."""
    return job.device_kind != "cpu"
