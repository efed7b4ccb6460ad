"""Legal sizes of a layout: the formulas of the rules as functions that return a bool.

A search asks them of every combination of sizes before it estimates one; the rules of layout, model
and tensor mode, which check the layouts that it keeps, decide by the same functions. An axis that
has no row in LEGAL_SIZES may have any size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from mpctl.core.axes import dense_order, expert_order
from mpctl.core.sharding import splits_kv_heads
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.schedules import SCHEDULES


def head_columns(model: ModelSpec) -> int | None:
    """Columns of one head; None where neither model.head_dim nor hidden / heads gives it."""
    is_sized = model.head_dim is not None or model.hidden % model.heads == 0
    return model.head_size if is_sized else None


def splits_heads(model: ModelSpec, tp: int) -> bool:
    """Whether tp ranks in a row (1d) get equal parts of attention heads, kv heads, MLP and shared
    experts."""
    kv_split = splits_kv_heads(model.kv_heads, head_columns(model) or tp, parts=tp)
    widths = (model.heads, model.ffn, model.shared_expert_ffn)
    return kv_split and all(width % tp == 0 for width in widths)


def deals_kv_heads(kv_heads: int, ranks: int, *, repeats: bool) -> bool:
    """Whether ranks get equal numbers of kv heads. repeats: also where as many ranks share one, which has a copy
    for each.

    >>> [deals_kv_heads(4, ranks, repeats=True) for ranks in (2, 4, 6, 8)]
    [True, True, False, True]
    """
    return kv_heads % ranks == 0 or (repeats and ranks % kv_heads == 0)


def deals_heads(model: ModelSpec, tp: int, parts: int, *, repeats: bool = False) -> bool:
    """Whether the ranks of tp x `parts` of cp get equal numbers of attention heads and kv heads."""
    ranks = tp * parts
    return model.heads % ranks == 0 and deals_kv_heads(model.kv_heads, ranks, repeats=repeats)


def splits_experts(model: ModelSpec, ep: int) -> bool:
    """Whether ep ranks get equal numbers of a layer's experts."""
    return ep == 1 or (model.experts is not None and model.experts % ep == 0)


def splits_each_expert(model: ModelSpec, etp: int) -> bool:
    """Whether etp ranks get equal parts of each expert's inner width."""
    return etp == 1 or (model.experts is not None and model.expert_width % etp == 0)


def kept_experts(model: ModelSpec) -> int:
    """The number of experts in the groups that a token keeps."""
    return (model.experts or 0) // model.router_groups * model.router_groups_per_token


def views_agree(sizes: Mapping[str, int], expert_sizes: Mapping[str, int], order: str) -> bool:
    """Whether the view of the experts (`JobSpec.expert_sizes`) fills the same world as the dense
    one, and has the same pipelines: neighbours along pp are as many ranks apart in both.

    By hand, 16 ranks, tp 2, dp 4, pp 2, ep 4: in tp-cp-dp-pp they are 8 apart in both views, in
    tp-cp-pp-dp 2 apart in the dense one and 4 in the other.

    >>> sizes = {"tp": 2, "cp": 1, "dp": 4, "pp": 2}
    >>> experts = {"etp": 1, "ep": 4, "edp": 2, "pp": 2}
    >>> views_agree(sizes, experts, "tp-cp-dp-pp"), views_agree(sizes, experts, "tp-cp-pp-dp")
    (True, False)
    """
    if prod(sizes.values()) != prod(expert_sizes.values()):
        return False
    dense, experts = dense_order(order).split("-"), expert_order(order)
    return sizes["pp"] == 1 or (_ranks_between(dense, sizes) == _ranks_between(experts, expert_sizes))


def _ranks_between(order: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Ranks from one to its neighbour along pp; axes that an order leaves out are slowest."""
    before = order[: order.index("pp")] if "pp" in order else order
    return prod([sizes[axis] for axis in before])


def needs_sequence_parallel(job: JobSpec) -> bool:
    """Whether the job's ranks must split the sequence over tp: without it each of them would bring
    every token to the experts."""
    return job.model is not None and job.model.experts is not None and job.parallel.tp > 1


def context_parts(cp: int) -> int:
    """The number of blocks into which cp ranks cut a sequence: each rank has one of the first and
    one of the second half, so that all compute the same amount of causal attention."""
    return 2 * cp if cp > 1 else 1


def sequence_parts(tp: int, cp: int) -> int:
    """The number of parts into which sequence parallelism cuts a sequence that cp ranks share."""
    return tp * cp


def splits_sequences(model: ModelSpec, parts: int) -> bool:
    """Whether the sequences of encoder and decoder can be cut into this many equal parts."""
    lengths = (model.seq_length, model.decoder_seq_length)
    return all(length % parts == 0 for length in lengths if length)


def stays_in_domain(tp: int, ranks: int) -> bool:
    """Whether groups of tp neighbours stay in NVLink domains of `ranks` ranks."""
    return ranks % tp == 0


def settings_of_1d(*, sequence_parallel: bool, cp: int, schedule: str) -> list[str]:
    """The names of the given settings that run only in tensor mode 1d. A grid cuts samples, not the
    sequence, between layers, and computes gradients of inputs and weights together."""
    is_set = {"sequence_parallel": sequence_parallel, "cp": cp > 1, "schedule": SCHEDULES[schedule].splits_backward}
    return [name for name, is_on in is_set.items() if is_on]


LEGAL_SIZES: dict[str, Callable[[ModelSpec, int], bool]] = {
    "cp": lambda model, cp: splits_sequences(model, context_parts(cp)),
    "pp": lambda model, pp: pp <= model.all_layers,
    "ep": splits_experts,
    "etp": splits_each_expert,
}


def is_legal_size(job: JobSpec, axis: str, size: int) -> bool:
    """Whether the job's model can be cut into so many parts along an axis; of tp its grid decides
    (`splits_heads`, or the rules of tensor modes)."""
    legal = LEGAL_SIZES.get(axis)
    return legal is None or job.model is None or legal(job.model, size)


def are_neighbours(order: str, sizes: Mapping[str, int]) -> bool:
    """Whether no other axis of several ranks is between cp and dp, so that runs of replicas can
    share ZeRO's states.

    >>> sizes = {"tp": 2, "cp": 2, "dp": 2, "pp": 2}
    >>> are_neighbours("tp-cp-dp-pp", sizes), are_neighbours("tp-cp-pp-dp", sizes)
    (True, False)
    """
    used = [axis for axis in order.split("-") if sizes.get(axis, 1) > 1]
    both = [at for at, axis in enumerate(used) if axis in ("cp", "dp")]
    return len(both) < 2 or both[1] - both[0] == 1
