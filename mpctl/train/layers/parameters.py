"""Parameters with their position in the unsharded parameter, and initial values independent of t.

A rank keeps a shard of the full parameter (mpctl/core/shard.py), or all of it (replicated). The initial
value of an element is a function of (seed, full parameter name, its global coordinates), so a
rank's shard equals, bit for bit, the slice of the unsharded parameter, without drawing and cutting
a full weight or forking a generator (compare arXiv 1909.08053, appendix B).

A weight with a `DeferredWgrad` has its gradient deferred. Backward of Y = X W^T is two products:
dX = dY W, which the previous stage waits for, and dW = dY^T X, which no rank needs before the
update (arXiv 2401.10241, section 2). dY and X are saved, and a later call computes dW: it gathers X
if it is split, and adds dW as backward would have. Gradients of biases and norms are small and are
computed with dX.

A weight with a `GradientSink` has dW added to its gradient by the product itself: matrices where
the device's products add to float32 (`KernelBackend.adds_products`), and word tables always. To a
word table a lookup adds the vectors of its rows. Left to autograd, it would make a gradient of the
full table, and the head's of a tied one would wait for it until the end of backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mpctl.core.shard import Box, Shard
from mpctl.train.kernels import counter_rng as noise

# Elements drawn at a time, some 20 bytes each in temporaries: 20 MiB.
_CHUNK = 1 << 20
_ATTRIBUTES = "parallel_attributes"  # a parameter's attribute


@dataclass(frozen=True)
class Init:
    """The distribution of initial values. std: of `normal`; of `uniform` the largest value, between
    which and its negative values lie. first: (number, std) of the first rows of the full parameter,
    if these have another std."""

    kind: Literal["normal", "uniform", "zeros", "ones"]
    std: float = 0.0
    first: tuple[int, float] | None = None


ZEROS, ONES = Init("zeros"), Init("ones")


def take(shard: Shard, full: Tensor) -> Tensor:
    """A copy of the shard's part of a full tensor."""
    part = full.new_empty(shard.local_shape)
    for box in shard.boxes():
        part[shard.slices(box)] = full[_slices(box)]
    return part


def assemble(shards: Sequence[Shard], pieces: Sequence[Tensor]) -> Tensor:
    """The full tensor from every rank's piece: the inverse of `take`."""
    if not any(shard.cuts for shard in shards):
        return pieces[0]
    full = pieces[0].new_empty(shards[0].shape)
    for shard, piece in zip(shards, pieces, strict=True):
        for box in shard.boxes():
            full[_slices(box)] = piece[shard.slices(box)]
    return full


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(span.start, span.stop) for span in box)


def global_index(shard: Shard, dim: int) -> Tensor:
    """Global coordinates along `dim` of the local elements, in local order."""
    return torch.cat([torch.arange(b.start, b.stop) for b in shard.blocks(dim)])


def shard_parameter(
    shard: Shard,
    *,
    init: Init,
    partial: str = "",
    is_table: bool = False,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """An uninitialised parameter of the shard's local shape, with ParallelAttributes."""
    parameter = nn.Parameter(torch.empty(shard.local_shape, dtype=dtype, device=device))
    _attach(parameter, ParallelAttributes(shard, init, partial, is_table=is_table))
    return parameter


@dataclass
class ParallelAttributes:
    """The role of a parameter in the parallel model.

    shard: the part of the full parameter that this rank holds. init: the distribution of its
    initial values; None for a parameter that `shard_parameter` did not make. partial: the name of
    the tensor-parallel group over which its gradient has to be summed, empty where it is complete.
    Each rank of that group uses the parameter for a part of the activations only: norms, biases of
    row layers and position tables under sequence parallelism (arXiv 2205.05198, section 4.2.2), on
    a grid the parameters that several of its ranks hold (TensorGrid.partial_kind). deferred_wgrad:
    where products put the computation of its gradient; None to compute it in backward. sink: takes
    the operands of dW instead of dW; None to leave dW to autograd. is_table: whether it is a word
    table or an output head, which has a sink wherever gradients are summed. stored: the weight in fewer
    bits, beside which the parameter has no memory.
    """

    shard: Shard
    init: Init | None = None
    partial: str = ""
    deferred_wgrad: DeferredWgrad | None = None
    sink: GradientSink | None = None
    is_table: bool = False
    stored: StoredWeight | None = None


def parallel_attributes(parameter: Tensor) -> ParallelAttributes:
    """The attributes of a parameter; one that `shard_parameter` did not make is replicated.

    They are kept on the tensor, under one name, because a parameter stays the same object under
    ZeRO, compilation and pipeline chunks; a subclass of nn.Parameter would not survive torch's fake
    tensors.
    """
    attributes: ParallelAttributes | None = getattr(parameter, _ATTRIBUTES, None)
    return ParallelAttributes(Shard(tuple(parameter.shape))) if attributes is None else attributes


def _attach(parameter: Tensor, attributes: ParallelAttributes) -> None:
    setattr(parameter, _ATTRIBUTES, attributes)


def defer_wgrad(weight: nn.Parameter, deferred: DeferredWgrad) -> None:
    """From the next forward on, products defer this weight's gradient to `deferred`."""
    _attach(weight, replace(parallel_attributes(weight), deferred_wgrad=deferred))


def deferred_wgrad_of(weight: Tensor) -> DeferredWgrad | None:
    """Return the queue for this weight's deferred gradient; None to compute it in backward."""
    attributes: ParallelAttributes | None = getattr(weight, _ATTRIBUTES, None)
    return None if attributes is None else attributes.deferred_wgrad


def set_sink(weight: Tensor, sink: GradientSink) -> None:
    """From the next forward on, products give the operands of this weight's gradient to `sink`."""
    _attach(weight, replace(parallel_attributes(weight), sink=sink))


def sink_of(weight: Tensor) -> GradientSink | None:
    """Return the sink for the operands of this weight's gradient, if any."""
    attributes: ParallelAttributes | None = getattr(weight, _ATTRIBUTES, None)
    return None if attributes is None else attributes.sink


def set_stored(weight: Tensor, stored: StoredWeight) -> None:
    """From the next forward on, products multiply by what `stored` holds."""
    _attach(weight, replace(parallel_attributes(weight), stored=stored))


def stored_of(weight: Tensor) -> StoredWeight | None:
    """Return the weight in fewer bits; None for a parameter that has its memory."""
    attributes: ParallelAttributes | None = getattr(weight, _ATTRIBUTES, None)
    return None if attributes is None else attributes.stored


def partial_kind(parameter: Tensor) -> str:
    """The group over which the gradient still has to be summed; empty where it is complete."""
    return parallel_attributes(parameter).partial


def shard_of(parameter: Tensor) -> Shard:
    """The shard of a parameter; one made elsewhere counts as replicated."""
    return parallel_attributes(parameter).shard


def full_numel(parameter: Tensor) -> int:
    """Number of elements of the unsharded parameter."""
    return math.prod(shard_of(parameter).shape)


@torch.no_grad()
def initialise(module: nn.Module, seed: int, *, prefix: str = "") -> None:
    """Fill every parameter by its Init; the values depend on the seed and on `prefix` + name.

    Raises ValueError for a parameter without Init.
    """
    for name, parameter in module.named_parameters(prefix=prefix):
        initialise_parameter(parameter, name, seed)


@torch.no_grad()
def initialise_parameter(parameter: nn.Parameter, name: str, seed: int) -> None:
    """Fill one parameter. Stages number their layers globally, so that names do not depend on the
    layout."""
    init = parallel_attributes(parameter).init
    if init is None:
        raise ValueError(f"parameter {name} carries no Init (make it with shard_parameter)")
    if init.kind in ("normal", "uniform"):
        fill_random(parameter, shard_of(parameter), noise.site_key(seed, "weights", name), init)
    else:
        parameter.fill_(1.0 if init.kind == "ones" else 0.0)


def fill_random(local: Tensor, shard: Shard, key: int, init: Init) -> None:
    """N(0, std^2), or U(-std, std), at the shard's global coordinates, in chunks of few rows, and of
    part of a row where a tensor of several dimensions has long ones (the matrices of experts)."""
    coordinates = [global_index(shard, d).to(local.device) for d in range(len(shard.shape))]
    _fill_rows(local, (), coordinates, key, init)


def _fill_rows(local: Tensor, before: tuple[Tensor, ...], coordinates: Sequence[Tensor], key: int, init: Init) -> None:
    """before: the coordinates of dimensions further out, one each; coordinates: of the tensor's."""
    first, *inner = coordinates
    width = math.prod(local.shape[1:])
    if width > _CHUNK and len(inner) > 1:
        for row, at in zip(local, first.split(1), strict=True):
            _fill_rows(row, (*before, at), inner, key, init)
        return
    last, rows = len(inner), max(1, _CHUNK // max(1, width))
    shaped = [index.view(-1, *[1] * (last - d)) for d, index in enumerate(coordinates)]
    for start in range(0, len(local), rows):
        chunk = [*before, shaped[0][start : start + rows], *shaped[1:]]
        if init.kind == "uniform":
            drawn = noise.uniform(key, chunk, dtype=torch.float64).mul_(2).sub_(1)
        else:
            drawn = noise.normal(key, chunk, dtype=torch.float64)
        if init.first is None:
            drawn.mul_(init.std)
        else:
            number, std = init.first
            scale = torch.full_like(chunk[0], init.std, dtype=torch.float64)
            drawn.mul_(scale.masked_fill_(chunk[0] < number, std))
        local[start : start + rows].copy_(drawn)


class GradientSink(Protocol):
    """Adds products and rows to the gradient of a weight."""

    def add_product(self, dy: Tensor, x: Tensor) -> None:
        """Add dY^T X [o, i], of dY [m, o] and X [m, i]."""

    def add_rows(self, rows: Tensor, vectors: Tensor) -> None:
        """Add vectors [m, i] to the rows [m]; a row may occur several times."""


class StoredWeight(Protocol):
    """A frozen weight in fewer bits than products take."""

    def whole(self) -> Tensor:
        """The weight for one product, made anew each time."""

    @property
    def tensors(self) -> Iterable[Tensor]:
        """What is kept of it."""


Deferred = Callable[[], None]


@runtime_checkable
class DefersWgrad(Protocol):
    """A layer that lets a schedule defer its weight gradients."""

    def defer_wgrad(self, deferred: DeferredWgrad) -> None:
        """Make backward defer the gradients of its weights to `deferred`."""


class _Deferral(torch.autograd.Function):
    """A backward that computes a gradient. autograd keeps what nobody else refers to, and copies a
    gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Callable[[], Tensor]) -> Tensor:
        ctx.gradient = gradient
        return weight.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient(), None


class DeferredWgrad:
    """The weight gradients that backward has deferred since the last `take`, in order."""

    def __init__(self) -> None:
        self._deferred: list[Deferred] = []

    def add(self, weight: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Defer one. gradient: computes the gradient to be added to that of the leaf `weight`."""

        def deferred() -> None:
            with torch.enable_grad():
                result = _Deferral.apply(weight, gradient)
            result.backward()

        self._deferred.append(deferred)

    def take(self) -> list[Deferred]:
        """Remove and return the gradients deferred so far, each computed by a call."""
        taken, self._deferred = self._deferred, []
        return taken
