"""The sharding law: which named dimension is split over which axis, and the part that a rank keeps.

A parameter belongs to one *view* of the ranks. A view numbers them along axes; some of these cut
its parameters, along the others the same parameters are repeated. In the dense view the ranks of tp
hold the shards and dp x cp the replicas. Experts have a view with ep and edp where the dense one
has cp and dp. A parameter's view and dimensions determine local shapes, the group that reduces
gradients, the share of ZeRO, the terms of a norm and the writers of a checkpoint.

A local size is the global size over the axis size and must divide. The planner's estimate and the
layers' constructors both ask this module, so a plan and the run it describes cannot disagree.

Contraction law (Megatron, arXiv 1909.08053, section 3): a matrix product that contracts over a
dimension split over an axis leaves partial sums, which an all-reduce over that axis completes.

>>> local_range(12, parts=4, index=1)
range(3, 6)
>>> split_parts((8, 4, 4), parts=2, index=1)      # a fused q|k|v of 8, 4 and 4 rows
(range(4, 8), range(10, 12), range(14, 16))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import NamedTuple

from mpctl.core.axes import zero_groups
from mpctl.core.shard import Shard
from mpctl.core.tensor_grid import RankGrid, TensorGrid

DENSE, EXPERTS = "dense", "experts"
"""The views: of dense layers, and of the experts of mixtures of experts."""
AXIS_OF_DIM = {
    "batch": "dp",
    "seq": "cp",
    "decoder_seq": "cp",
    "heads": "tp",
    "kv_heads": "tp",
    "ffn": "tp",
    "shared_ffn": "tp",
    "vocab": "tp",
    "projected": "tp",
    "layers": "pp",
}


class View(NamedTuple):
    """Placement of the parameters of one kind on the ranks of a job.

    grid: the ranks with different shards, and the axes that cut them; shard_group: the name of
    their group. replicas: number of ranks that hold the same shard and reduce its gradients
    together; replica_group: the name of their group. zero: the ZeRO stage in effect, 0 with a
    single replica. sizes: for views other than the dense one, the ranks along each axis, the
    fastest-varying first. copies: how often ZeRO's shares of the states exist: 1 where all replicas
    share them, else the replicas are cut into so many groups, each of which shares all states
    (`parallel.zero_size`).
    """

    name: str = DENSE
    grid: RankGrid = TensorGrid()
    shard_group: str = "tp"
    replicas: int = 1
    replica_group: str = "dp_cp"
    zero: int = 0
    sizes: Mapping[str, int] = MappingProxyType({})
    copies: int = 1

    def __repr__(self) -> str:
        fields, usual = self._asdict(), self._field_defaults
        given = (f"{name}={value!r}" for name, value in fields.items() if value != usual[name])
        return f"View({', '.join(given)})"

    @property
    def zero_size(self) -> int:
        """Ranks that ZeRO divides states over."""
        return self.replicas // self.copies

    @property
    def zero_group(self) -> str:
        """The name of their group, over which ZeRO scatters and gathers."""
        return self.replica_group if self.copies == 1 else zero_groups(self.replica_group)[0]

    @property
    def copies_group(self) -> str:
        """The name of the group of the ranks with equal shares, which sum their gradients."""
        return zero_groups(self.replica_group)[1]

    def shard(
        self, shape: tuple[int, ...], dims: tuple[str, ...], rank: int, parts: Sequence[int] | None = None
    ) -> Shard:
        """The part of a parameter that rank `rank` of the shard group holds. parts: sizes of the
        fused parts along the first dimension, each of which is cut by itself. Raises ValueError
        where an axis does not divide a dimension."""
        coords, cuts = self.grid.coords(rank), dict[int, tuple[range, ...]]()
        for dim, axes in enumerate(self.grid.weight_axes(dims)):
            if self.grid.parts(axes) > 1:
                sizes = parts if parts is not None and dim == 0 else (shape[dim],)
                blocks = [self.grid.block(size, axes, coords) for size in sizes]
                starts = accumulate(sizes[:-1], initial=0)
                cuts[dim] = tuple(
                    range(block.start + start, block.stop + start) for block, start in zip(blocks, starts, strict=True)
                )
        return Shard(shape, cuts)


Views = Mapping[str, View]


def divisors(number: int) -> list[int]:
    """Every integer that divides `number`, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [k for k in range(1, int(number**0.5) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def local_size(size: int, *, parts: int) -> int:
    """size / parts, which must be an integer; raises ValueError naming the legal ways to split."""
    if size % parts:
        legal = ", ".join(map(str, divisors(size)))
        raise ValueError(f"{size} is not divisible by {parts} (use one of {legal})")
    return size // parts


def local_range(size: int, *, parts: int, index: int) -> range:
    """The contiguous block of `range(size)` that part `index` keeps."""
    step = local_size(size, parts=parts)
    return range(index * step, (index + 1) * step)


def overlapped_parts(samples: int, positions: int) -> int:
    """Return the number of parts in which a rank gathers its [samples, positions, h] for a product
    that starts with the first (parallel.tp_comm_overlap): 2 if samples or positions are even, else
    1."""
    return 1 if samples % 2 and positions % 2 else 2


def split_parts(sizes: Sequence[int], *, parts: int, index: int) -> tuple[range, ...]:
    """Blocks kept of a dimension that fuses several parts, each of which is split separately."""
    blocks, offset = [], 0
    for size in sizes:
        own = local_range(size, parts=parts, index=index)
        blocks.append(range(own.start + offset, own.stop + offset))
        offset += size
    return tuple(blocks)


def splits_kv_heads(kv_heads: int, head_dim: int, *, parts: int) -> bool:
    """Whether `parts` ranks can share the key-value heads: each has full heads, or an equal number
    of the columns of one: 6 ranks have 2 of the 6 columns of one of 2 heads.

    >>> [splits_kv_heads(2, 6, parts=t) for t in (1, 2, 3, 4, 6, 8)]
    [True, True, False, True, True, False]
    """
    in_columns = parts % kv_heads == 0 and kv_heads * head_dim % parts == 0
    return kv_heads % parts == 0 or in_columns


def validation_batches(samples: int, *, micro_batch: int, parts: int, index: int) -> list[range]:
    """Sample numbers of each validation micro batch of replica `index` of `parts`.

    Replica r takes samples r, r + parts, .. below `samples`. All replicas get the same number of
    micro batches, because ZeRO 3 gathers parameters in each of them and every replica takes part.
    Where a replica has no samples left its last range is empty: it computes a micro batch whose
    loss is not counted.

    >>> [validation_batches(5, micro_batch=2, parts=2, index=i) for i in range(2)]
    [[range(0, 4, 2), range(4, 6, 2)], [range(1, 5, 2), range(5, 5, 2)]]
    """
    own = range(index, samples, parts)
    rounds = -(-samples // (parts * micro_batch))
    return [own[j * micro_batch : (j + 1) * micro_batch] for j in range(rounds)]


def validation_sizes(
    samples: int, *, micro_batch: int, parts: int, index: int, sample_parts: int = 1
) -> dict[int, int]:
    """Count those micro batches by their number of samples, without making a list of them; one
    that is not counted is computed on a single sample.

    sample_parts: into how many parts tensor-parallel ranks cut a micro batch; a micro batch that
    they do not divide is padded with samples that do not count (`filled_up`).

    >>> [validation_sizes(5, micro_batch=2, parts=2, index=i) for i in range(2)]
    [{2: 1, 1: 1}, {2: 1, 1: 1}]
    >>> validation_sizes(5, micro_batch=2, parts=1, index=0, sample_parts=2)
    {2: 3}
    """
    full, rest = divmod(len(range(index, samples, parts)), micro_batch)
    single = -(-samples // (parts * micro_batch)) - full - (rest > 0)
    sizes = Counter({micro_batch: full})
    sizes.update({filled_up(rest, parts=sample_parts): int(rest > 0)})
    sizes.update({filled_up(1, parts=sample_parts): single})
    return {size: count for size, count in sizes.items() if count}


def filled_up(size: int, *, parts: int) -> int:
    """The least multiple of `parts` that holds `size`."""
    return -(-size // parts) * parts


def padded_vocab(vocab: int, *, tp: int, divisor: int = 128) -> int:
    """The smallest multiple of divisor x tp that holds the vocabulary (Megatron's rule).

    >>> [padded_vocab(50257, tp=t) for t in (1, 2, 8)]
    [50304, 50432, 51200]
    """
    multiple = divisor * tp
    return -(-vocab // multiple) * multiple


def reduced_axes(contracted: Iterable[str]) -> tuple[str, ...]:
    """Axes over which a product contracting over these dimensions must be all-reduced."""
    return tuple(dict.fromkeys([AXIS_OF_DIM[dim] for dim in contracted if dim in AXIS_OF_DIM]))
