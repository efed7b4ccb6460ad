"""Fused attention over a part of the keys, with the log-sums by which parts are merged.

Of the keys' parts p, with L_p the rows' logs of the sums of e^score and O_p the results:

    L = log sum_p e^(L_p)        O = sum_p e^(L_p - L) O_p

Backward of a part is the kernel's own backward with O and L in place of O_p and L_p: its shares
e^(score - L) and the rows' sums of dO O are then those of the softmax over all parts, so that dK
and dV of the part are whole and dQ is the sum over the parts (RingAttention, arXiv 2310.01889, adds
parts up so).

A block of causal rows behind other keys is a prefix, which no mask cuts, and a diagonal, causal
from its first row: two forms that every fused kernel of torch has. Of one call with a mask aligned
to the last key torch's `CausalBias` would take FlashAttention-2, or on a CPU a mask of all pairs.

Torch says which kernel it would choose (`_fused_sdp_choice`: on Hopper cuDNN's), and that one is
called by its own operation, which returns log-sums and whose backward can be called apart. They are
natural logarithms in float32 (float64 for float64), [b, a, q]; cuDNN's [b, a, q, 1], those of the
memory-efficient kernel with rows filled up to 32.

Letters: b batch, a heads, k key-value heads, q queries, s keys, d head size.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys and values
FLASH, EFFICIENT, CUDNN = 1, 2, 3  # of torch.nn.attention.SDPBackend


class KeyPart(NamedTuple):
    """Attention to some of the keys. out: [b, a, q, d]; sums: the rows' log-sums, as their kernel
    lays them out; seeds: what the kernel's backward asks for beside, of no dropout."""

    out: Tensor
    sums: Tensor
    seeds: tuple[Tensor, ...]


class PartialKernel(NamedTuple):
    """One of torch's fused kernels. number: torch's, of SDPBackend. scale: of the scores, None for
    1/sqrt(d)."""

    number: int
    scale: float | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> KeyPart:
        """query [b, a, q, d], key and value [b, k, s, d]; causal from row and key 0 on."""
        aten, scale = torch.ops.aten, self.scale
        if query.device.type == "cpu":
            flash = aten._scaled_dot_product_flash_attention_for_cpu
            out, sums = flash(query, key, value, 0.0, is_causal, scale=scale)
            return KeyPart(out, sums, ())
        if self.number == CUDNN:
            cudnn = aten._scaled_dot_product_cudnn_attention
            found = cudnn(query, key, value, None, True, 0.0, is_causal, False, scale=scale)
            return KeyPart(found[0], found[1], tuple(found[6:8]))
        if self.number == FLASH:
            flash = aten._scaled_dot_product_flash_attention
            found = flash(query, key, value, 0.0, is_causal, False, scale=scale)
            return KeyPart(found[0], found[1], tuple(found[6:8]))
        efficient = aten._scaled_dot_product_efficient_attention
        out, sums, *seeds = efficient(query, key, value, None, True, 0.0, is_causal, scale=scale)
        return KeyPart(out, sums, tuple(seeds))

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: KeyPart, *, is_causal: bool
    ) -> Gradients:
        """The gradients that these keys give. whole: of all parts."""
        aten, scale, (out, sums, seeds) = torch.ops.aten, self.scale, whole
        operands, sizes = (grad, query, key, value), (query.shape[-2], key.shape[-2])
        found: Any
        if query.device.type == "cpu":
            flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
            found = flash(*operands, out, sums, 0.0, is_causal, scale=scale)
        elif self.number == CUDNN:
            cudnn = aten._scaled_dot_product_cudnn_attention_backward
            found = cudnn(*operands, out, sums, *seeds, None, None, None, *sizes, 0.0, is_causal, scale=scale)
        elif self.number == FLASH:
            flash = aten._scaled_dot_product_flash_attention_backward
            found = flash(*operands, out, sums, None, None, *sizes, 0.0, is_causal, *seeds, scale=scale)
        else:
            efficient = aten._scaled_dot_product_efficient_attention_backward
            wanted = [True, True, True, False]
            found = efficient(*operands, None, out, sums, *seeds, 0.0, wanted, is_causal, scale=scale)
        return found[0], found[1], found[2]


def chosen_kernel(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> PartialKernel | None:
    """The kernel that torch would choose, or None for one that keeps scores or pads heads."""
    width = query.shape[-1]
    if width != value.shape[-1] or (width % 8 and query.device.type != "cpu"):
        return None
    is_grouped = query.shape[1] != key.shape[1]
    number = torch._fused_sdp_choice(query, key, value, None, 0.0, False, enable_gqa=is_grouped)
    if number not in (CUDNN, FLASH) and (number != EFFICIENT or is_grouped):
        return None
    return PartialKernel(number, scale)


def use_flash_attention_3(capability: tuple[int, int]) -> bool:
    """Let torch's attention be FlashAttention-3 in place of cuDNN's and of FlashAttention-2 on a
    Hopper, where torch (2.13) takes it and its module, flash_attn_interface, is installed; returns
    whether it is. capability: compute capability of the GPU."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if capability[0] != 9 or activate is None or find_spec("flash_attn_interface") is None:
        return False
    activate("FA3")
    torch.backends.cuda.enable_cudnn_sdp(False)  # which torch prefers otherwise
    return True


def kernel_name(number: int, device: torch.device) -> str:
    """A fused kernel of torch by its number of SDPBackend; 0 is none."""
    if device.type == "cpu" and number == FLASH:
        return "torch's kernel for CPUs"
    if number == FLASH:
        current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # torch 2.13
        return {"FA3": "FlashAttention-3", "FA4": "FlashAttention-4"}.get(
            (current and current()) or "", "FlashAttention-2"
        )
    names = {EFFICIENT: "the memory-efficient kernel", CUDNN: "cuDNN's kernel"}
    return names.get(number, "step by step, with scores in memory")


def merged(first: KeyPart, second: KeyPart) -> KeyPart:
    """Attention to the keys of both, in the memory of the first's log-sums."""
    out, rows = first.out, first.out.shape[-2]
    sums = torch.logaddexp(first.sums, second.sums)
    # [b, a, q, 1]: of the first part
    share = (first.sums - sums).flatten(2)[..., :rows, None].exp_()
    result = torch.mul(out, share).add_(second.out * share.neg().add_(1)).to(out.dtype)
    return KeyPart(result, first.sums.copy_(sums), first.seeds)


def attend_tail(query: Tensor, key: Tensor, value: Tensor, kernel: PartialKernel) -> Tensor:
    """Causal attention of the last q of s positions, q < s: [b, a, q, d] to [b, k, s, d]."""
    result: Tensor = _Tail.apply(query, key, value, kernel)
    return result


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, kernel: PartialKernel) -> Tensor:
        start = key.shape[-2] - query.shape[-2]
        own = kernel.forward(query, key[..., start:, :], value[..., start:, :], is_causal=True)
        prefix = kernel.forward(query, key[..., :start, :], value[..., :start, :], is_causal=False)
        out, sums, seeds = merged(own, prefix)
        ctx.kernel = kernel
        ctx.save_for_backward(query, key, value, out, sums, *seeds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums, *seeds = ctx.saved_tensors
        whole, start = KeyPart(out, sums, tuple(seeds)), key.shape[-2] - query.shape[-2]
        dquery, dkey, dvalue = (torch.empty_like(x) for x in (query, key, value))
        for keys, is_causal in ((slice(start), False), (slice(start, None), True)):
            of_keys = key[..., keys, :], value[..., keys, :]
            dq, dk, dv = ctx.kernel.backward(grad, query, *of_keys, whole, is_causal=is_causal)
            dquery = dquery.add_(dq) if is_causal else dq
            dkey[..., keys, :], dvalue[..., keys, :] = dk, dv
        return dquery, dkey, dvalue, None
