"""Fakes of the machine for a rehearsal: a world, a device, its kernels, its data.

Fake tensors have shapes and no values. Those of a CUDA job lie on torch's `meta` device, for which
autograd needs no driver; it takes the same ways as any accelerator (large blocks, host copies
apart). Two things are then answered as a GPU would:

- scaled dot product attention is a GPU's fused kernel (FlashAttention, arXiv 2205.14135; with a
  mask, in 32 bit or for values of another head size the memory-efficient one, arXiv 2112.05682),
  which keeps no scores. fp64, grouped heads where FlashAttention does not go, and tensors whose
  last stride is not 1 have no fused kernel there: torch's own products.
- RMSNorm is one kernel, which keeps its input and a number a row.
- What this project has a Triton kernel for (mpctl/train/kernels/triton) is one operation.

Tokens have no values to be routed by: this rank's experts get as many rows as the plan says of the
fullest rank (plan/estimate/routing.py), and all others have equal parts of the rest.

Messages go through torch's `fake` process group, which answers at once and sends nothing.

Letters: b batch, a heads, q queries, s keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.distributed import HashStore
from torch.nn.attention.bias import CausalBias

from mpctl.core.sharding import EXPERTS
from mpctl.model.families import least_tokens, special_tokens
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.routing import expert_load
from mpctl.spec.job import JobSpec
from mpctl.train.data.chat_samples import ChatSamples
from mpctl.train.data.samples import SampleSource
from mpctl.train.data.tokenizer import special_ids
from mpctl.train.families.implementation import get_implementation
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.partial_attention import FLASH, PartialKernel
from mpctl.train.kernels.triton import define_operation
from mpctl.train.kernels.triton.backend import TritonKernels
from mpctl.train.kernels.triton.norms import fits as norm_fits
from mpctl.train.runtime.batches import Batches, model_of
from mpctl.train.runtime.mesh import AxisPosition
from mpctl.train.transport.group import Group

DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("meta")}
SAMPLES = 64  # of text, over and over
FLASH_HEAD = 256  # the largest head size of FlashAttention
FLASH_DTYPES = (torch.bfloat16, torch.float16)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Tensors made inside have no values; backward runs in this thread."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """The default process group as `init_process_group` makes it, of peers that do not exist. The
    store is a real one: a trainer's saver counts its trainings there."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    try:
        with _messages_in_slices():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _messages_in_slices() -> Iterator[None]:
    """Messages of several tensors (train/transport/group.py), which torch's fake tensors do not know,
    answer at once too."""
    library = torch.library.Library("c10d", "IMPL")
    for name in ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "Meta"):
            library.impl(name, lambda *_: FakeWork().boxed(), "Meta")
    try:
        yield
    finally:
        library._destroy()


@dataclass(frozen=True)
class PlannedRows:
    """The rows that the experts of a rank get. parts, index: into how many blocks the experts are
    divided over ep, and which one is this rank's; load: rows over the mean of all ranks."""

    parts: int = 1
    index: int = 0
    load: float = 1.0

    @classmethod
    def of(cls, layout: JobLayout, rank: int) -> PlannedRows:
        """Return the rows planned for a rank of a layout."""
        view = layout.views.get(EXPERTS)
        if view is None or layout.model.experts is None:
            return cls()
        place = layout.topology.group(rank, view.shard_group).index(rank)
        return cls(view.grid.axes["ep"], view.grid.coords(place)["ep"], expert_load(layout).load)

    def counts(self, ranks: int, experts: int, rows: int) -> list[list[int]]:
        """Numbers of rows by rank and expert, [ranks, experts], of ranks that send `rows` each.

        >>> PlannedRows(parts=2, index=0, load=1.5).counts(2, 4, 8)
        [[3, 3, 1, 1], [3, 3, 1, 1]]
        """
        mean = ranks * rows / self.parts
        received = _split(min(ceil(mean * self.load - 1e-6), ranks * rows), ranks)
        held = experts // self.parts
        return [self._of_rank(own, held, rows) for own in received]

    def _of_rank(self, own: int, held: int, rows: int) -> list[int]:
        others = iter(_split(rows - own, held * (self.parts - 1)))
        counts = []
        for part in range(self.parts):
            counts += _split(own, held) if part == self.index else list(islice(others, held))
        return counts


def _split(total: int, parts: int) -> list[int]:
    """An integer in almost equal parts, the larger ones first."""
    if not parts:
        return []
    each, more = divmod(total, parts)
    return [each + (part < more) for part in range(parts)]


class SimulatedCpuKernels(KernelBackend):
    """The kernels of a CPU. rows: those of this rank's experts."""

    def __init__(self, rows: PlannedRows | None = None) -> None:
        self.rows = rows or PlannedRows()

    def host_counts(self, counts: Tensor, rows: int) -> list[list[int]]:
        """As planned, since the counts have no values."""
        ranks, experts = counts.shape
        return self.rows.counts(ranks, experts, rows)


class SimulatedGpuKernels(TritonKernels):
    """The kernels that a GPU of compute capability 8.0 or more runs, on torch's `meta` device.
    rows: those of this rank's experts."""

    def __init__(self, rows: PlannedRows | None = None) -> None:
        self.rows = rows or PlannedRows()

    def host_counts(self, counts: Tensor, rows: int) -> list[list[int]]:
        """As planned, since the counts have no values."""
        ranks, experts = counts.shape
        return self.rows.counts(ranks, experts, rows)

    def scaled_dot_product(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The fused kernel that torch would choose on a GPU, or separate products without one."""
        is_masked = mask is not None and not isinstance(mask, CausalBias)
        is_causal = is_causal or isinstance(mask, CausalBias)
        is_flash = query.dtype in FLASH_DTYPES and query.shape[-1] <= FLASH_HEAD and not is_masked
        is_flash &= query.shape[-1] == value.shape[-1]
        if is_flash and _are_dense(query, key, value):
            return _flash_attention(query, key, value, is_causal=is_causal, scale=scale)
        is_grouped = key.shape[1] != query.shape[1]
        tensors = (query, key, value, mask) if is_masked else (query, key, value)
        if query.dtype == torch.float64 or is_grouped or not _are_dense(*tensors):
            return super().scaled_dot_product(
                query, key, value, mask if is_masked else None, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
            )
        bias = _additive(mask, query) if is_masked else None
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        result: Tensor = efficient(query, key, value, bias, True, 0.0, is_causal, scale=scale)[0]
        return result

    def partial_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> PartialKernel | None:
        """FlashAttention where a GPU has it; cuDNN's keeps as much."""
        is_flash = query.dtype in FLASH_DTYPES and query.shape[-1] <= FLASH_HEAD
        is_flash &= query.shape[-1] == value.shape[-1] and query.shape[-1] % 8 == 0
        is_dense = _are_dense(query, key, value)
        return PartialKernel(FLASH, scale) if is_flash and is_dense else None

    def add_product(self, dy: Tensor, x: Tensor, out: Tensor, *, adds: bool) -> None:
        """One product, as TritonKernels'. Without `out_dtype`, the dtype of `out`, which torch
        2.11 takes for beta where tensors are fake."""
        if adds:
            torch.addmm(out, dy.T, x, out=out)
        else:
            super().add_product(dy, x, out, adds=False)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Simulate torch's norm if rows are too wide for ours: one kernel, which saves its input and
        a number a row; backward is two."""
        if norm_fits(x, weight):
            return super().rms_norm(x, weight, eps)
        result: Tensor = _SimulatedRMSNorm.apply(x, weight)
        return result


def _norm_shapes(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _norm_gradient_shapes(grad: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


# The shapes of torch's fused RMSNorm of CUDA (_fused_rms_norm and its backward), which torch takes
# apart on a device without values.
_simulated_rms_norm = define_operation(
    "simulated_rms_norm(Tensor x, Tensor weight) -> (Tensor, Tensor)", _norm_shapes, _norm_shapes
)
_simulated_rms_norm_backward = define_operation(
    "simulated_rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor inverse) -> (Tensor, Tensor)",
    _norm_gradient_shapes,
    _norm_gradient_shapes,
)


class _SimulatedRMSNorm(torch.autograd.Function):
    """RMSNorm as one kernel, backward as one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        result, inverse = _simulated_rms_norm(x, weight)
        ctx.save_for_backward(x, weight, inverse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        for_dx, for_dw = ctx.needs_input_grad
        dx, dw = _simulated_rms_norm_backward(grad, *ctx.saved_tensors)
        return dx if for_dx else None, dw if for_dw else None


def kernels_of(device: torch.device, rows: PlannedRows | None = None) -> KernelBackend:
    """The simulated kernels of a device of DEVICES. rows: those of the rank's experts."""
    return SimulatedGpuKernels(rows) if device.type == "meta" else SimulatedCpuKernels(rows)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float | None) -> Tensor:
    """The kernel takes heads that are a multiple of 8: others are padded."""
    size = query.shape[-1]
    padding = -size % 8
    tensors = [F.pad(x, (0, padding)) for x in (query, key, value)] if padding else (query, key, value)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    result: Tensor = flash(*tensors, 0.0, is_causal, False, scale=scale)[0]
    return result[..., :size] if padding else result


def _are_dense(*tensors: Any) -> bool:
    """Whether last strides are 1, as every fused kernel on CUDA requires (sdp_utils_cpp.h,
    check_last_dim_stride_equals_1_dense)."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _additive(mask: Any, query: Tensor) -> Tensor:
    """A mask as what is added to scores, [b, a, q, s], expanded without a copy."""
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
    return bias.expand(*query.shape[:2], -1, -1)


class _ZeroText:
    """A dataset of one document of zeros that takes no memory."""

    prefix = Path("nowhere")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.document_lengths = np.array([tokens])

    def document(self, i: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        return np.broadcast_to(np.uint16(0), self.tokens)[start:stop]


class _ZeroRows:
    """Rows of chat data, of zeros, as full as they can be."""

    are_packed = False

    def __init__(self, length: int) -> None:
        self.length, self.tokens = length, _ZeroText(length)
        self.counted = np.full(SAMPLES, length)

    def __len__(self) -> int:
        return SAMPLES

    def row(self, number: int) -> dict[str, NDArray[np.int64]]:
        return dict.fromkeys(("tokens", "targets", "mask", "places"), np.zeros(self.length, np.int64))


def open_fake_batches(job: JobSpec, *, dp: AxisPosition, cp: Group, device: torch.device) -> Batches:
    """Micro batches of the job's own objective, made of text that does not exist; no validation."""
    model, chat = model_of(job), job.data.chat
    if chat is not None:
        rows: Any = _ZeroRows(model.seq_length)
        conversations = ChatSamples(rows, seed=0, together=SAMPLES, is_packed=chat.is_packed)
        return Batches(job, dp, cp, device, train=conversations)
    names = special_tokens(model)
    words = model.vocab - len(names)
    text: Any = _ZeroText(SAMPLES * least_tokens(model))
    special = special_ids({}, names, vocab=model.vocab, words=words)
    source = SampleSource(text, model, job.training.seed, special, words)
    train = get_implementation(model.family).samples(source)
    return Batches(job, dp, cp, device, train=train)
