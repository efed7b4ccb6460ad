"""What a plan says of adapters: parameters that are trained and frozen, their bytes, one line, figures.

By hand, Llama 3.1 8B, rank 16 on all linear layers: 32 layers of 16 x (2 x (4096 + 4096) + 2 x (4096 + 1024) +
3 x (4096 + 14336)) = 41.9M parameters, 0.52 % of 8.07B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mpctl.core.units import bytes_text, count_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.base_weights import WeightWidths, adapter_dtype, held_weights, model_weights, stored_bits
from mpctl.plan.estimate.explain import Figure
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.base import DType

TITLES = {"lora": "LoRA", "qlora": "QLoRA", "dora": "DoRA"}


class AdapterEntry(NamedTuple):
    """Adapters and base of a plan. Counts and bytes of the whole model, each parameter once, before it is
    split or shared: trained_parameters: those of A and B and of modules_to_save. base_bits: of a weight of
    the widest frozen product, scales included. dtype: of A and B."""

    kind: str
    rank: int
    alpha: float
    scale: float
    dropout: float
    targets: list[str]
    modules_to_save: list[str]
    dtype: DType
    base_precision: str
    base_bits: float
    trained_parameters: int
    frozen_parameters: int
    trained_bytes: int
    frozen_bytes: int


def adapter_entry(layout: JobLayout) -> AdapterEntry | None:
    """Return adapters and base of a layout; None without adapters."""
    adapter, training = layout.table.adapter, layout.job.training
    if adapter is None:
        return None
    held, widths = model_weights(layout), WeightWidths.of(layout)
    model = layout.model
    return AdapterEntry(
        adapter.kind,
        adapter.rank,
        2.0 * adapter.rank if adapter.alpha is None else adapter.alpha,
        adapter.scale,
        adapter.dropout,
        list(adapter.targets),
        list(adapter.modules_to_save),
        adapter_dtype(layout),
        adapter.stored_as or training.chosen_dtype,
        stored_bits(adapter, max(model.hidden, model.ffn), training.chosen_dtype),
        held.trained,
        held.frozen,
        widths.trained_bytes(held),
        round(widths.frozen_bytes(held)),
    )


def adapter_text(entry: AdapterEntry) -> str:
    """`QLoRA rank 16, alpha 32 on all-linear: 41.94M trained of 8.072B, 0.52 %, 80.0 MiB in bf16; base nf4,
    4.127 bits a weight, 5.4 GiB`."""
    total = entry.trained_parameters + entry.frozen_parameters
    saved = f", {', '.join(entry.modules_to_save)} in full" if entry.modules_to_save else ""
    bits = f"{entry.base_precision}, {entry.base_bits:.4g} bits a weight"
    return (
        f"{TITLES[entry.kind]} rank {entry.rank}, alpha {entry.alpha:g} on {', '.join(entry.targets)}{saved}: "
        f"{count_text(entry.trained_parameters)} trained of {count_text(total)}, "
        f"{entry.trained_parameters / total:.2%}, {bytes_text(entry.trained_bytes)}; "
        f"base {bits}, {bytes_text(entry.frozen_bytes)}"
    )


def explain_adapters(layout: JobLayout) -> Iterator[Figure]:
    """Yield parameters by kind, of the model and of a rank of each stage; none without adapters."""
    entry, adapter = adapter_entry(layout), layout.table.adapter
    if entry is None or adapter is None:
        return
    total = entry.trained_parameters + entry.frozen_parameters
    held, widths = model_weights(layout), WeightWidths.of(layout)
    for name, value, formula, numbers in (
        (
            "trained",
            held.trained,
            "r (in + out) of every target, and modules_to_save",
            _counted(held.adapter, held.full),
        ),
        ("frozen", held.frozen, "products of layers, and embeddings, norms and head", _counted(held.stored, held.rest)),
        ("share", held.trained / total, "trained / all", f"{count_text(held.trained)} / {count_text(total)}"),
    ):
        yield Figure(f"parameters.{name}", value, "", formula, numbers)
    for stage in range(len(layout.stages)):
        own, prefix = held_weights(layout, stage), f"memory.stage-{stage}.parameters"
        mean = own.stored_bytes / max(1, own.stored)
        for name, size, count, width, what in (
            ("adapters", own.adapter * widths.adapter, own.adapter, widths.adapter, f"A and B in {entry.dtype}"),
            ("full", own.full * widths.full, own.full, widths.full, "modules_to_save"),
            ("base", own.stored_bytes, own.stored, mean, f"frozen products in {entry.base_precision}, scales included"),
            ("rest", own.rest * widths.rest, own.rest, widths.rest, "embeddings, norms, head, frozen"),
        ):
            if size:
                formula = f"{what}: parameters of the rank x bytes, before ZeRO shares them"
                yield Figure(
                    f"{prefix}.{name}", size, "B", formula, f"{count_text(count)} x {width:.4g} B", _source(adapter)
                )


def _counted(*counts: int) -> str:
    return " + ".join(map(count_text, counts))


def _source(adapter: AdapterSpec) -> str:
    return "arXiv 2305.14314" if adapter.stored_as == "nf4" else "arXiv 2106.09685"
