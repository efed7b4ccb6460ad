"""What stands for the machine that a rehearsal has not: a world, a device, text to read.

Fake tensors have shapes and no values. Those of a CUDA job lie on torch's `meta` device, for which
autograd needs no driver; it takes the same ways as any accelerator (large blocks, host copies
apart). Three things are then answered for it:

- scaled dot product attention is a GPU's fused kernel (FlashAttention, arXiv 2205.14135; with a
  mask or in 32 bit the memory-efficient one, arXiv 2112.05682), which keeps no scores. fp64,
  grouped heads where FlashAttention does not go, and tensors whose last stride is not 1 have no
  fused kernel there: torch's own products.
- RMSNorm is one kernel, which keeps its input.
- a process group (torch's `fake` backend) that answers every message at once and sends none.

By hand: q, k, v [1, 8, 2048, 128] of bf16 keep their 12 MiB, 4 MiB of result, 64 KiB of sums.

Letters: b batch, a heads, s keys, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.nn.attention.bias import CausalBias

from mpctl.data.samples import SampleSource
from mpctl.data.special import special_ids
from mpctl.families import least_tokens, special_tokens
from mpctl.families.modules import get_implementation
from mpctl.kernels.backend import recomputing_rms_norm
from mpctl.runtime.batches import DatasetBatches
from mpctl.spec.job import JobSpec
from mpctl.transport.group import Group

DEVICES = {"cpu": torch.device("cpu"), "cuda": torch.device("meta")}
SAMPLES = 64  # of text, over and over
FLASH_HEAD = 256  # the largest head size of FlashAttention
FLASH_DTYPES = (torch.bfloat16, torch.float16)
_PRODUCTS = F.scaled_dot_product_attention


@contextmanager
def fake_tensors(device: torch.device) -> Iterator[None]:
    """Tensors made inside have no values; backward runs in this thread."""
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        if device.type == "meta":
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", _fused))
            stack.enter_context(patch.object(F, "rms_norm", _fused_norm))
        yield


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """The default process group, as `join` makes it, of peers that are not there. The store is a
    real one: the save that waits at it counts its trainings there."""
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _fused(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention as a GPU of compute capability 8.0 or more runs it."""
    is_masked = attn_mask is not None and not isinstance(attn_mask, CausalBias)
    causal = is_causal or isinstance(attn_mask, CausalBias)
    is_flash = query.dtype in FLASH_DTYPES and query.shape[-1] <= FLASH_HEAD and not is_masked
    held = (query, key, value)
    if is_flash and _have_rows(*held):
        padding = -query.shape[-1] % 8
        padded = tuple(F.pad(x, (0, padding)) for x in held) if padding else held
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        found = flash(*padded, 0.0, causal, False, scale=scale)[0]
        return found[..., : query.shape[-1]] if padding else found
    is_grouped = key.shape[1] != query.shape[1]
    biases = (attn_mask,) if is_masked else ()
    if query.dtype == torch.float64 or is_grouped or not _have_rows(*held, *biases):
        mask = attn_mask if is_masked else None
        return _PRODUCTS(*held, mask, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
    bias = _added(attn_mask, query) if is_masked else None
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(*held, bias, True, 0.0, causal, scale=scale)[0]


def _have_rows(*tensors: Any) -> bool:
    """What torch asks of every fused kernel on CUDA (sdp_utils_cpp.h,
    check_last_dim_stride_equals_1_dense)."""
    return all(tensor.stride(-1) == 1 for tensor in tensors)


def _fused_norm(x: Tensor, _: Any, weight: Tensor, eps: float) -> Tensor:
    """rms_norm as a GPU runs it: the input is kept, and a number a row."""
    return recomputing_rms_norm(x, weight, eps)


def _added(mask: Any, query: Tensor) -> Tensor:
    """A mask as what is added to scores, [b, a, q, s] as a view of what there is of it."""
    bias = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
    return bias.expand(*query.shape[:2], -1, -1)


class _Text:
    """A dataset of one document of zeros that takes no memory."""

    prefix = Path("nowhere")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.document_lengths = np.array([tokens])

    def document(self, i: int, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        return np.broadcast_to(np.uint16(0), self.tokens)[start:stop]


class FakeBatches(DatasetBatches):
    """Micro batches of the job's own objective, made of text that is not there."""

    def __init__(self, job: JobSpec, *, dp: Group, cp: Group, device: torch.device) -> None:
        model = job.model
        assert model is not None
        self.job, self.dp, self.cp, self.device = job, dp, cp, device
        self.model = model
        names = special_tokens(model)
        words = model.vocab - len(names)
        text: Any = _Text(SAMPLES * least_tokens(model))
        special = special_ids({}, names, vocab=model.vocab, words=words)
        source = SampleSource(text, model, job.training.seed, special, words)
        self.train = get_implementation(model.family).samples(source)
        self.validation, self.validations = None, {}
