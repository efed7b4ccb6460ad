"""The kernels of a CUDA device: Triton's for operations that are several kernels in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from mpctl.train.kernels.activation import Activation
from mpctl.train.kernels.adamw import AdamWStep
from mpctl.train.kernels.attention import AttentionVariant
from mpctl.train.kernels.backend import KernelBackend
from mpctl.train.kernels.counter_rng import DropoutMask
from mpctl.train.kernels.fp8 import Fp8Cast
from mpctl.train.kernels.triton.adamw import fits, fused_adamw
from mpctl.train.kernels.triton.attention import fused_attention, refusal
from mpctl.train.kernels.triton.attention_tiles import HOPPER, ProgramLimits, current_limits
from mpctl.train.kernels.triton.columns import SUMMED, summed_activation, summed_split
from mpctl.train.kernels.triton.cross_entropy import fused_logits_gradient, own_sums, row_maximum
from mpctl.train.kernels.triton.elementwise import GATES, fused_dropout, fused_rotate, gated, squared_relu
from mpctl.train.kernels.triton.fp8 import fused_cast
from mpctl.train.kernels.triton.norms import fits as norm_fits
from mpctl.train.kernels.triton.norms import fused_norm
from mpctl.train.kernels.triton.rows import row_gradients, sum_of_rows


class TritonKernels(KernelBackend):
    """Fused kernels for tensors of a CUDA device; their values are those of `KernelBackend`, bit
    for bit where the order of additions is the same. limits: of the device; attention that does not
    fit them is torch's."""

    limits = HOPPER  # of what a rehearsal simulates

    def __init__(self, limits: ProgramLimits = HOPPER) -> None:
        self.limits = limits

    def attention(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> Tensor:
        """As `KernelBackend.attention`, in one kernel that saves no tensor of q x s elements.
        Variants that torch's fused kernel supports use that."""
        if self._fuses(query, key, value, variant):
            return fused_attention(query, key, value, variant)
        return super().attention(query, key, value, variant)

    def attention_name(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> str:
        """Name the kernel that computes `attention` of these."""
        if self._fuses(query, key, value, variant):
            return "mpctl's Triton kernel"
        return super().attention_name(query, key, value, variant)

    def keeps_pairs(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> bool:
        """Only where attention is not fused."""
        is_fused = self._fuses(query, key, value, variant)
        return not is_fused and super().keeps_pairs(query, key, value, variant)

    def _fuses(self, query: Tensor, key: Tensor, value: Tensor, variant: AttentionVariant) -> bool:
        # torch's kernel of 32 bits has no shared key-value heads
        has_own = query.dtype != torch.float32 or key.shape[1] == query.shape[1]
        is_torchs = variant.is_plain and has_own
        return not is_torchs and refusal(query, key, value, variant, self.limits) is None

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """As `KernelBackend.layer_norm`, with one kernel backward and a sum of partial sums."""
        if _compiles() or not norm_fits(x, weight):
            return super().layer_norm(x, weight, bias, eps)
        return fused_norm(x, None, weight, bias, eps, centred=True)[1]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `layer_norm`."""
        if _compiles() or not norm_fits(x, weight):
            return super().rms_norm(x, weight, eps)
        return fused_norm(x, None, weight, None, eps, centred=False)[1]

    def residual_norm(
        self,
        x: Tensor,
        branch: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        centred: bool,
        branch_bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As `KernelBackend.residual_norm`, in one kernel, which backward adds the gradient of the
        sum to that of its norm."""
        if _compiles() or not norm_fits(x, weight):
            return super().residual_norm(x, branch, weight, bias, eps, centred=centred)
        return fused_norm(x, branch, weight, bias, eps, centred=centred, branch_bias=branch_bias)

    def sums_biases(self, activation: Activation | None = None) -> bool:
        """Whether the activation is one of SUMMED and no compiler runs, which sums them itself."""
        return not _compiles() and (activation is None or activation in SUMMED)

    def sums_branch(self, bias: Tensor) -> bool:
        """Whether rows fit a program and no compiler runs."""
        return not _compiles() and norm_fits(bias, bias)

    def summed_activation(self, up: Tensor, name: Activation, bias: Tensor) -> Tensor:
        """See `KernelBackend`: backward is one kernel, and a sum of partial sums."""
        return summed_activation(up, bias, name)

    def split_heads(
        self, qkv: Tensor, widths: tuple[int, int, int], head_size: int, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `KernelBackend`: backward is one kernel, and a sum of partial sums."""
        return summed_split(qkv, bias, widths, head_size)

    def dropout(self, x: Tensor, mask: DropoutMask) -> Tensor:
        """As `KernelBackend.dropout`, in one kernel, with the same bits."""
        return fused_dropout(x, mask)

    def dropout_add(self, x: Tensor, mask: DropoutMask, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """As `KernelBackend.dropout_add`, in one kernel, with the same bits."""
        return fused_dropout(x, mask, residual, bias)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As `KernelBackend.rotate`, in one kernel, with the same bits; its gradient is rounded
        once. The result lies in memory as [b, s, a, d]."""
        return fused_rotate(x, cos, sin)

    def fp8_cast(
        self,
        matrix: Tensor,
        scale: Tensor,
        dtype: torch.dtype,
        *,
        rows: bool = True,
        columns: bool = False,
        amax: Tensor | None = None,
        into: Fp8Cast | None = None,
    ) -> Fp8Cast:
        """As `KernelBackend.fp8_cast`, in one kernel, with the same bits; a NaN raises `amax` to
        infinity."""
        return fused_cast(matrix, scale, dtype, rows=rows, columns=columns, amax=amax, into=into)

    def activation(self, up: Tensor, name: Activation) -> Tensor:
        """As `KernelBackend.activation`: gated ones and the squared ReLU in one kernel; the others
        are one of torch's."""
        if name in GATES:
            return gated(up, GATES[name])
        return squared_relu(up) if name == "relu2" else super().activation(up, name)

    def summed_rows(self, rows: Tensor, places: Tensor) -> Tensor:
        """As `KernelBackend.summed_rows`, in one kernel, with the same bits."""
        return sum_of_rows(rows, None, places)

    def weighted_rows(self, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """As `KernelBackend.weighted_rows`, in one kernel, with the same bits."""
        return sum_of_rows(rows, weights, places)

    def weighted_gradients(
        self, grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `KernelBackend.weighted_gradients`, in one kernel."""
        return row_gradients(grad, rows, weights, places, targets)

    def row_maximum(self, logits: Tensor, *, words: int) -> Tensor:
        """As `KernelBackend.row_maximum`, in one kernel; logits have a last stride of 1."""
        return row_maximum(logits, words)

    def own_sums(self, logits: Tensor, column: Tensor, peak: Tensor, *, words: int) -> tuple[Tensor, Tensor]:
        """As `KernelBackend.own_sums`, in one kernel."""
        return own_sums(logits, column, peak, words)

    def logits_gradient(
        self, logits: Tensor, column: Tensor, peak: Tensor, share: Tensor, hit: Tensor, *, words: int, overwrite: bool
    ) -> Tensor:
        """As `KernelBackend.logits_gradient`, in one kernel."""
        return fused_logits_gradient(logits, column, peak, share, hit, words=words, overwrite=overwrite)

    def adds_products(self, operands: torch.dtype, sums: torch.dtype) -> bool:
        """cuBLAS adds products of 16 bits to float32."""
        return operands in (torch.bfloat16, torch.float16) and sums == torch.float32

    def add_product(self, dy: Tensor, x: Tensor, out: Tensor, *, adds: bool) -> None:
        """As `KernelBackend.add_product`, rounded to the dtype of `out` alone."""
        if out.device.type == "cpu" or out.dtype == x.dtype:
            super().add_product(dy, x, out, adds=adds)
        elif adds:
            torch.addmm(out, dy.T, x, out_dtype=out.dtype, out=out)
        else:
            torch.mm(dy.T, x, out_dtype=out.dtype, out=out)

    def adamw(self, step: AdamWStep) -> bool:
        """As `KernelBackend.adamw`, with the copies in one kernel, for float32 values."""
        if not fits(step):
            return super().adamw(step)
        fused_adamw(step)
        return True


def _compiles() -> bool:
    return bool(torch.compiler.is_compiling())


def fused_kernels(device: torch.device) -> KernelBackend:
    """TritonKernels after a first launch on the device, of an attention with dropout where it fits
    one, of dropout alone elsewhere.

    Raises ImportError without triton, and what triton raises where it cannot compile or launch,
    such as RuntimeError without a C compiler or for a device that is too old.
    """
    kernels = TritonKernels(current_limits())
    samples = torch.zeros(1, dtype=torch.int64, device=device)
    mask = DropoutMask(0, 0.5, samples, range(1), range(1), range(1))
    # heads of the size whose blocks need the most shared memory of those that are common
    query = torch.zeros((1, 1, 1, 128), dtype=torch.bfloat16, device=device)
    variant = AttentionVariant(range(1), dropout=mask)
    if refusal(query, query, query, variant, kernels.limits) is None:
        kernels.attention(query, query, query, variant)
    else:
        kernels.dropout(query[..., :1], mask)
    return kernels
