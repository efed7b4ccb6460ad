"""Cost of an operation of torch on a GPU: kernels, the tensors that it reads and writes, FLOP.

Below autograd an operation is one kernel, which reads its arguments and writes its results, with
three exceptions. FREE makes or describes a tensor and touches no memory. COMPOSITES are several
kernels on CUDA (read in torch 2.13's ATen/native: those that the dispatcher splits behind any mode,
and those whose CUDA code launches several). PARTLY_READ looks up rows, so that of the table only as
much is read as is returned. Multi-tensor operations (`_foreach_*`, `_fused_adamw_`) take a launch
for as many tensors as fit a kernel's argument (MultiTensorApply.cuh).

An expanded tensor is as large as what it repeats. An operation that changes a tensor in place reads
and writes it; `fill_`, `zero_` and the target of `copy_` are written only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from mpctl.plan.estimate.kernels import AttentionWork

FREE = frozenset(
    {
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "set_",
        "resize_",
        "lift_fresh",
        "resize_storage_bytes_",
        "_reshape_alias",
        "record_stream",
        "device",
        "sym_size",
        "sym_stride",
        "sym_numel",
        "sym_storage_offset",
        "is_pinned",
        "split_with_sizes",
        "_has_compatible_shallow_copy_type",
        "_assert_async",
        "_nested_tensor_size",
    }
)
COMPOSITES = {
    "masked_fill": 2,  # a clone, then masked_fill_
    "scatter": 2,
    "scatter_add": 2,
    "index_add": 2,
    "index_put": 2,
    "slice_scatter": 2,
    "select_scatter": 2,
    "index_copy": 2,
    "index_fill": 2,  # a clone, then a change in place
    "slice_backward": 2,
    "select_backward": 2,
    "diagonal_backward": 2,  # zeros, then a copy
    "constant_pad_nd": 2,  # a fill, then a copy
    "native_layer_norm_backward": 2,  # layer_norm_grad_input, then GammaBetaBackward
    "_fused_rms_norm_backward": 2,
    "simulated_rms_norm_backward": 2,  # the same two
    "_scaled_dot_product_flash_attention_backward": 3,  # dO O, the products, dQ to 16 bit
    "_scaled_dot_product_efficient_attention_backward": 2,  # dO O, the products
    "attention_backward": 2,  # ours: gradients of queries, then those of keys and values
    "embedding_dense_backward": 10,  # sorts the indices (cub), finds segments, adds them up
    "nonzero": 4,
    "masked_select": 5,  # a count, a copy to the host, prefix sums, a selection
    "sort": 4,
    "argsort": 4,
    "topk": 4,
    "unique2": 6,
    "cumsum": 2,
    "bincount": 3,
    "_foreach_norm": 2,  # a partial sum a block, then the sum of those
}
SORTED_PUTS = 8  # kernels of index_put_ with accumulate: a sort of the indices, then the sums
UNSORTED_ROWS = 3072  # so many rows of a table's gradient are summed without a sort (Embedding.cu)
PARTLY_READ = frozenset({"embedding", "index_select", "gather", "index"})
PARTLY_WRITTEN = frozenset({"scatter_add_", "scatter_", "index_add_", "index_put_"})
WRITTEN_ONLY = frozenset(
    {"fill_", "zero_", "copy_", "random_", "normal_", "uniform_", "_foreach_copy_", "_foreach_zero_", "adamw_"}
)
MOVES = frozenset({"clone", "contiguous"})
TENSORS_A_LAUNCH = (110, 64, 48, 36, 30)  # by how many lists of tensors there are
ELEMENTS_A_LAUNCH = 320 * 65536  # blocks of a launch, elements of a block
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2), "_scaled_mm": (0, 1)}


@dataclass(frozen=True)
class Product:
    """A matrix product of `batch` times m x k by k x n elements."""

    batch: int
    m: int
    k: int
    n: int
    width: int
    out: int

    @property
    def flops(self) -> float:
        """A multiplication and an addition each."""
        return 2.0 * self.batch * self.m * self.k * self.n


Touched = list[tuple[Tensor, int]]
"""Tensors, each with the bytes of it that an operation touches."""


@dataclass(frozen=True)
class OpCost:
    """Cost of one call of an operation. moved: bytes read and written; kind: `message` is a
    collective, timed by the network, `move` copies values unchanged."""

    name: str
    launches: int
    reads: Touched
    writes: Touched
    moved: int
    work: Product | AttentionWork | None = None
    kind: Literal["kernel", "move", "message"] = "kernel"


def cost_of(func: OpOverload, args: Any, kwargs: dict[str, Any], result: Any) -> OpCost | None:
    """The cost of a call that has returned `result`; None where it starts no kernel."""
    name = func._schema.name.split("::")[1]
    if func.is_view or name in FREE:
        return None
    given = _named(func, args, kwargs)
    arguments = [(a, tensors_in(given.get(a.name))) for a in func._schema.arguments]
    written = [t for a, tensors in arguments for t in tensors if _is_written(a)]
    read = [t for a, tensors in arguments for t in tensors if _is_read(a, name)]
    fresh = [] if _returns_argument(func) else tensors_in(result)
    if not any(t.numel() for t in (*read, *written, *fresh)):
        return None  # torch launches nothing for no elements
    limit = _rows_touched(name, read, fresh)
    reads = [(t, limit(t)) for t in read]
    writes = [(t, limit(t)) for t in written] + [(t, tensor_bytes(t)) for t in fresh]
    if func.namespace in ("c10d", "_c10d_functional"):
        return OpCost(name, 1, reads, writes, 0, kind="message")
    moved = _distinct(reads) + _distinct(writes)
    if name in REWRITTEN:
        moved += _distinct(writes)
    is_move = name in MOVES or (name == "_to_copy" and _keeps_values(read, fresh))
    return OpCost(
        name,
        _launches(name, given, read or written),
        reads,
        writes,
        moved,
        _product(name, read, fresh or written) or _attention(func, given),
        "move" if is_move else "kernel",
    )


def is_known(func: OpOverload) -> bool:
    """Whether the number of its kernels is known: it has CUDA code of its own, which is not seen to
    launch several, or stands in a table. torch's own operations have a kernel of their own for each
    device or are split by a rule for all; the latter must be in COMPOSITES."""
    name = func._schema.name.split("::")[1]
    if func.is_view or name in FREE or name in COMPOSITES or func.namespace not in ("aten", "prim"):
        return True
    if name.startswith("_foreach_") or name in ONE_KERNEL:
        return True
    return _has_kernel(func, "CPU") or not _has_kernel(func, "CompositeExplicitAutograd")


ONE_KERNEL = frozenset(
    {
        "_to_copy",
        "clone",
        "copy_",
        "zero_",
        "full",
        "full_like",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "scalar_tensor",
        "arange",
        "embedding",
        "repeat",
        "stack",
        "_fused_adamw_",
        "mul",
        "div",
        "add",
        "sub",
        "rsub",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "sum",
        "mean",
        "any",
        "all",
        "bernoulli",
        "normal_",
        "logical_not",
        "bitwise_and",
        "bitwise_or",
        "bitwise_xor",
        "bitwise_right_shift",
        "remainder",
        "fmod",
        "linalg_vector_norm",
        "_local_scalar_dense",
        "bitwise_right_shift_",
        "isfinite",
        "isinf",
        "mv",
        "mul_",
        "div_",
        "add_",
        "sub_",
        "bitwise_and_",
        "bitwise_xor_",
        "remainder_",
        "abs",
        "nan_to_num_",
        "floor_divide",
    }
)
"""Operations that torch splits by a rule into nothing but one kernel: an allocation and a fill or a
copy, a number made a tensor and one arithmetic kernel."""


def region(tensor: Tensor) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return a tensor's region of its storage: the offset, and (size, stride) of its dimensions from
    the largest stride, contiguous ones merged; the same for a view and its transpose."""
    dims = sorted(
        (
            (size, stride)
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if size != 1 and stride != 0
        ),
        key=lambda dim: -dim[1],
    )
    merged: list[tuple[int, int]] = []
    for size, stride in dims:
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return int(tensor.storage_offset()), tuple(merged)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements of a tensor: an expanded dimension counts once."""
    if tensor.numel() == 0:
        return 0
    return math.prod(size for size, _ in region(tensor)[1]) * tensor.element_size()


def _launches(name: str, given: dict[str, Any], tensors: list[Tensor]) -> int:
    if name in ("index_put_", "_index_put_impl_") and given.get("accumulate"):
        return SORTED_PUTS
    if name == "embedding_dense_backward" and given["indices"].numel() <= UNSORTED_ROWS:
        return 2  # zeros, then the sums
    launches = COMPOSITES.get(name, 1)
    if not name.startswith(("_foreach_", "_fused_adam")):
        return launches
    lists = max(1, sum(isinstance(v, (list, tuple)) and bool(tensors_in(v)) for v in given.values()))
    most = TENSORS_A_LAUNCH[min(lists, len(TENSORS_A_LAUNCH)) - 1]
    elements = sum(t.numel() for t in tensors)
    return launches * max(-(-len(tensors) // (lists * most)), -(-elements // (lists * ELEMENTS_A_LAUNCH)))


def _rows_touched(name: str, read: list[Tensor], fresh: list[Tensor]) -> Callable[[Tensor], int]:
    """Bytes touched of a tensor: of a table in which rows are looked up, or added to, as much as is
    returned, or added."""
    table, most = None, 0
    if name in PARTLY_READ and fresh:
        table, most = read[0], sum(map(tensor_bytes, fresh))
    elif name in PARTLY_WRITTEN:
        table, most = read[0], tensor_bytes(read[-1])

    def touched(tensor: Tensor) -> int:
        size = tensor_bytes(tensor)
        return min(size, most) if tensor is table else size

    return touched


def _distinct(touched: Touched) -> int:
    """Bytes of the tensors, one that is given twice counted once."""
    by_region = {(t.untyped_storage()._cdata, region(t)): size for t, size in touched}
    return sum(by_region.values())


REWRITTEN = frozenset(
    {
        "masked_fill",
        "scatter",
        "scatter_add",
        "index_add",
        "index_put",
        "slice_scatter",
        "select_scatter",
        "index_copy",
        "index_fill",
        "slice_backward",
        "select_backward",
        "diagonal_backward",
        "constant_pad_nd",
    }
)
"""Composites that write their result, then read or write it a second time."""


def _product(name: str, reads: list[Tensor], results: list[Tensor]) -> Product | None:
    if name not in PRODUCTS:
        return None
    a, b = (reads[i] for i in PRODUCTS[name])
    batch = a.shape[0] if a.ndim == 3 else 1
    out = results[0].element_size()
    return Product(batch, a.shape[-2], a.shape[-1], b.shape[-1], a.element_size(), out)


def _attention(func: OpOverload, given: dict[str, Any]) -> AttentionWork | None:
    """Return the work of a fused attention, torch's or one of ours with the same argument names; None
    for other operations."""
    query, key = given.get("query"), given.get("key")
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or query.ndim != 4:
        return None
    (b, a, q, d), s = query.shape, key.shape[-2]
    pairs, window, is_own = float(q * s), int(given.get("window") or 0), func.namespace == "mpctl"
    if given.get("is_causal"):
        start = given["places"][1] if is_own else 0
        pairs = seen_pairs(range(start, start + q), s, window)
    return AttentionWork(
        b * pairs, a * d, a, "backward" in func._schema.name, is_own=is_own, dropout=given.get("samples") is not None
    )


@lru_cache
def seen_pairs(rows: range, keys: int, window: int) -> float:
    """Pairs of causal rows and the keys that they see, without the half of the diagonal, as a plan
    counts them; window 0 is none. By hand, rows 2 and 3 of 4 keys: 2.5 + 3.5, with a window of 2:
    2 + 2."""
    most = min(keys, window or keys)
    return sum(min(row + 0.5, most) for row in rows)


def _keeps_values(reads: list[Tensor], fresh: list[Tensor]) -> bool:
    return bool(reads and fresh) and reads[0].dtype == fresh[0].dtype


def _named(func: OpOverload, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_read(argument: Any, name: str) -> bool:
    is_target = argument.name in ("self", "copies") and name in WRITTEN_ONLY
    return not (_is_written(argument) and (argument.kwarg_only or is_target))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _returns_argument(func: OpOverload) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None for r in returns)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors among nested arguments or results."""
    if isinstance(value, Tensor):
        return [value]
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _has_kernel(func: OpOverload, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))
