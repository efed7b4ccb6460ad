"""How plain a layout is, and in words what a plainer one saves.

Layouts that a search cannot tell apart differ in what they ask of people: stages and chunks to balance,
sharded states, recomputation. What counts as plain is data of the runtime (`[plain]` of its preset): users
of FSDP leave tp and pp at 1 and take ZeRO 3, those of Megatron take ZeRO 1 and powers of two.

>>> megatron, fsdp = PlainLayout(), PlainLayout(zero=[2, 2, 1, 0], unusual=["tp", "pp"])
>>> split, whole = LayoutSettings(tp=4, pp=2, vpp=4, dp=2, zero=1), LayoutSettings(dp=16, zero=3)
>>> complexity(split, megatron), complexity(whole, megatron)
(2.5, 4.0)
>>> complexity(split, fsdp), complexity(whole, fsdp)
(8.5, 0.0)
>>> savings(split, whole, fsdp)
['no tensor parallelism', 'no pipeline', 'ZeRO 3 instead of 1']
"""

from __future__ import annotations

from math import log2

from mpctl.core.axes import DEFAULT_ORDER
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.spec.runtime import PlainLayout

RECOMPUTE = {"none": 0.0, "selective": 1.0, "full": 2.0}
PLAIN_SCHEDULES, PLAIN_BALANCE = ("1f1b", "interleaved"), "even"
PLAIN_ORDERS = (DEFAULT_ORDER, "")  # a search's sizes have no order yet
DOUBLING, UNUSUAL = 0.5, 2.0
WITHOUT = {
    "tp": "no tensor parallelism",
    "pp": "no pipeline",
    "cp": "no context parallelism",
    "ep": "no expert parallelism",
    "etp": "no tensor parallelism of experts",
    "vpp": "one chunk a stage",
}
OF_PIPELINE = ("vpp", "schedule", "balance")


def terms(layout: LayoutSettings, plain: PlainLayout) -> dict[str, float]:
    """Return the complexity of each setting: 0 for the plainest value.

    Half for each doubling of tp, pp, cp, ep and of chunks; 2 for an axis that the runtime's users leave at
    1 and for a doubling of etp; what the runtime says of ZeRO's stages; recomputation; sizes that are no
    powers of two, and what else is seldom seen.
    """
    sizes = (layout.pp, layout.cp, layout.vpp, layout.micro_batch_size)
    return {
        **{
            axis: DOUBLING * log2(size) + UNUSUAL * (size > 1 and axis in plain.unusual)
            for axis in ("tp", "pp", "cp", "ep", "vpp")
            for size in (getattr(layout, axis),)
        },
        "etp": UNUSUAL * log2(layout.etp),
        "zero": plain.zero[layout.zero],
        "recompute": RECOMPUTE[layout.recompute],
        "powers": any(size & (size - 1) for size in sizes),
        "schedule": UNUSUAL * (layout.schedule not in PLAIN_SCHEDULES),
        "balance": layout.stage_balance != PLAIN_BALANCE or layout.pipeline_layout is not None,
        "copies": layout.copies > 1,
        "overlap": layout.moe_overlap,
        "order": DOUBLING * (layout.order not in PLAIN_ORDERS),
    }


def complexity(layout: LayoutSettings, plain: PlainLayout) -> float:
    """Return how far a layout is from the plainest one; 0 for replicas alone."""
    return sum(terms(layout, plain).values())


def least_complexity(node: LayoutSettings, plain: PlainLayout) -> float:
    """Return a lower bound of the layouts below a node of the space, which has no ZeRO yet."""
    return complexity(node, plain) - plain.zero[node.zero] + min(plain.zero)


def savings(layout: LayoutSettings, plainer: LayoutSettings, plain: PlainLayout) -> list[str]:
    """Return in words each setting that is plainer in the second layout."""
    here, there = terms(layout, plain), terms(plainer, plain)
    fallen = [name for name, cost in there.items() if cost < here[name]]
    if "pp" in fallen and plainer.pp == 1:
        fallen = [name for name in fallen if name not in OF_PIPELINE]
    if layout.micro_batch_size == plainer.micro_batch_size:
        fallen = [name for name in fallen if name != "powers"]  # a number of ranks or chunks, named before
    words = {
        "zero": f"ZeRO {plainer.zero} instead of {layout.zero}",
        "recompute": f"{'no' if plainer.recompute == 'none' else plainer.recompute} recomputation",
        "powers": f"micro batch {plainer.micro_batch_size} instead of {layout.micro_batch_size}",
        "schedule": "the usual schedule",
        "balance": "stages of equal layers",
        "copies": "states divided over all replicas",
        "overlap": "experts without moe_overlap",
        "order": "ranks in the usual order",
    }
    return [words.get(name) or _size(name, layout, plainer) for name in fallen]


def _size(axis: str, layout: LayoutSettings, plainer: LayoutSettings) -> str:
    size = getattr(plainer, axis)
    return WITHOUT[axis] if size == 1 else f"{axis} {size} instead of {getattr(layout, axis)}"
