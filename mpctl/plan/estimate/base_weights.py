"""Bytes of the parameters of a model that adapters train: A and B, what is trained in full, the frozen base.

A frozen product of a layer is stored as `training.adapter` says: 4 or 8 bits a weight and the scales of
its blocks, or a data type. Embeddings, norms, routers and the head are not quantised: they have the
training dtype or the one to which the software casts them (`adapters.unquantized_dtype`).

Bits a weight: nf4 has blocks of 64 with a float32 scale, 4 + 32/64 = 4.5; double quantisation stores
scales in 8 bits, with a float32 for 256 of them, 4 + (8 + 32/256)/64 = 4.127 (arXiv 2305.14314,
section 3), and a matrix's mean scale. int8 has a float32 scale a row, 8 + 32/in; int4-gptq a float16
scale and a 4-bit zero for 128 weights, 4 + 20/128 = 4.156; fp8 a scale a tensor.

By hand, a product [8, 64] in nf4 without double quantisation: 512 x 4.5 / 8 = 288 bytes, 1,024 in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.operators.activation_shapes import AdapterShapes
from mpctl.model.operators.adapters import is_of_adapter
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.model.operators.table import OperatorTable, StageSlice
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.base import DType

NF4, DOUBLE = 4 + 32 / 64, 4 + (8 + 32 / 256) / 64
GPTQ = 4 + (16 + 4) / 128


def stored_bits(adapter: AdapterSpec, columns: int, dtype: DType) -> float:
    """Return the bits of a weight of a frozen product with so many columns; dtype: of training.

    >>> round(stored_bits(AdapterSpec(kind="qlora"), 4096, "bf16"), 3)
    4.127
    >>> stored_bits(AdapterSpec(base_precision="int8"), 4096, "bf16"), stored_bits(AdapterSpec(), 4096, "bf16")
    (8.0078125, 16)
    """
    stored = adapter.stored_as
    if stored == "nf4":
        return DOUBLE if adapter.double_quantization else NF4
    if stored == "int4-gptq":
        return GPTQ
    if stored == "int8":
        return 8 + 32 / columns
    return 8 * (DTYPE_BYTES[stored] if stored else max(2, DTYPE_BYTES[dtype]))


class WeightKinds(NamedTuple):
    """Parameters of a rank: elements of adapters, of what is trained in full, of frozen products that are
    stored apart (`stored`) and of everything else that is frozen; stored_bytes: of the third."""

    adapter: int = 0
    full: int = 0
    stored: int = 0
    rest: int = 0
    stored_bytes: float = 0.0

    def plus(self, other: WeightKinds, times: int = 1) -> WeightKinds:
        """These and `times` equal others."""
        return WeightKinds(
            self.adapter + times * other.adapter,
            self.full + times * other.full,
            self.stored + times * other.stored,
            self.rest + times * other.rest,
            self.stored_bytes + times * other.stored_bytes,
        )

    @property
    def trained(self) -> int:
        """Elements that have a gradient."""
        return self.adapter + self.full

    @property
    def frozen(self) -> int:
        """Elements that have none."""
        return self.stored + self.rest


class WeightWidths(NamedTuple):
    """Bytes of an element of the parameters of each kind (WeightKinds)."""

    adapter: int
    full: int
    rest: int

    @classmethod
    def of(cls, layout: JobLayout) -> WeightWidths:
        """Return those of a layout whose model adapters train."""
        training, profile = layout.job.training, layout.profile
        adapter, costs = _adapter(layout), profile.adapters
        full = profile.memory.stored_as(training)
        rest = training.value_bytes
        if adapter.is_quantized and costs.unquantized_dtype:
            rest = DTYPE_BYTES[costs.unquantized_dtype]
        elif adapter.stored_as and not adapter.is_quantized:
            rest = max(rest, DTYPE_BYTES[adapter.stored_as])
        return cls(max(2, DTYPE_BYTES[adapter_dtype(layout)]), max(2, DTYPE_BYTES[full]), rest)

    def trained_bytes(self, held: WeightKinds) -> int:
        """Bytes of the parameters that have gradients."""
        return held.adapter * self.adapter + held.full * self.full

    def frozen_bytes(self, held: WeightKinds) -> float:
        """Bytes of those that have none."""
        return held.stored_bytes + held.rest * self.rest


def adapter_dtype(layout: JobLayout) -> DType:
    """Return the data type of A and B: the job's, the runtime's, or that of its trained parameters."""
    profile, training = layout.profile, layout.job.training
    return _adapter(layout).dtype or profile.adapters.dtype or profile.memory.stored_as(training)


def _adapter(layout: JobLayout) -> AdapterSpec:
    adapter = layout.table.adapter
    assert adapter is not None, "asked where there is one"
    return adapter


def stored_names(table: OperatorTable) -> frozenset[str]:
    """Return the names within a layer of the matrices that may be stored in another data type."""
    blocks = (block for stack in table.stacks for block in stack.kinds)
    return table.once("stored", lambda: frozenset(p.matrix.name for b in blocks for p in b.products if p.is_stored))


def held_weights(layout: JobLayout, stage: int, view: str = "") -> WeightKinds:
    """Return the parameters of one rank of a stage before ZeRO shares them; view: only those of this view."""
    grids = tuple((name, held.grid) for name, held in layout.views.items())
    key = ("held", layout.stage_classes[stage], grids, view, layout.job.training.dtype)

    return layout.table.once(key, lambda: _count_slices(layout, layout.stage_slices(stage), view))


def model_weights(layout: JobLayout) -> WeightKinds:
    """Return the parameters of the model by kind, each once."""
    table = layout.table
    return table.once("kinds", lambda: _count_slices(layout, table.stage_slices([(0, table.layers)]), is_whole=True))


def _count_slices(
    layout: JobLayout, slices: Sequence[StageSlice], view: str = "", *, is_whole: bool = False
) -> WeightKinds:
    ends = {w.name: w for part in slices for w in part.end_weights()}.values()
    total = count_weights(layout, ends, view, is_whole=is_whole)
    for part in slices:
        for layers, flow in part.blocks:
            trained = {w.name for w in flow.trained}
            own = count_weights(layout, flow.part.weights, view, trained, is_whole=is_whole)
            total = total.plus(own, layers)
    return total


def count_weights(
    layout: JobLayout,
    weights: Iterable[ParameterSpec],
    view: str = "",
    trained: set[str] | None = None,
    *,
    is_whole: bool = False,
) -> WeightKinds:
    """Return the elements of these parameters by kind. trained: names of those that have gradients; None:
    their names are full ones, of an end. is_whole: of the model, not of a rank."""
    table, adapter, dtype = layout.table, _adapter(layout), layout.job.training.chosen_dtype
    stored_apart = stored_names(table) if trained is not None else ()
    of_adapter = full = stored = rest = 0
    stored_bytes = 0.0
    for weight in weights:
        if view not in ("", weight.view):
            continue
        numel = weight.numel if is_whole else weight.local_numel(layout.views)
        if weight.name in trained if trained is not None else not table.is_frozen(weight.name):
            of_adapter, full = (of_adapter + numel, full) if is_of_adapter(weight.name) else (of_adapter, full + numel)
        elif weight.name in stored_apart:
            stored += numel
            if adapter.stored_as == "nf4":
                stored_bytes += _nf4_bytes(weight, numel, double=adapter.double_quantization)
            else:
                stored_bytes += numel * stored_bits(adapter, weight.shape[-1], dtype) / 8
        else:
            rest += numel
    return WeightKinds(of_adapter, full, stored, rest, stored_bytes)


def _nf4_bytes(weight: ParameterSpec, numel: int, *, double: bool) -> int:
    """Bytes of so many elements of a matrix, or of each expert's: bits, scales of blocks, also of a last
    one that is not full, and of doubly quantised ones their mean."""
    matrices = max(1, numel * weight.shape[0] // weight.numel) if len(weight.shape) > 2 else 1
    each = numel // matrices
    blocks = -(-each // 64)
    scales = blocks + 4 * -(-blocks // 256) + 4 if double else 4 * blocks
    return matrices * (-(-each // 2) + scales)


def gathered_bytes(layout: JobLayout, held: WeightKinds) -> float:
    """Return the bytes of these parameters as ZeRO 3 gathers them for a pass."""
    adapter, costs, value = _adapter(layout), layout.profile.adapters, layout.job.training.value_bytes
    if not (adapter.is_quantized and costs.gathers_quantized):
        return float((held.trained + held.frozen) * value)
    return (held.trained + held.rest) * value + held.stored_bytes


def gathered_numel(
    layout: JobLayout, weights: Iterable[ParameterSpec], view: str, trained: Iterable[ParameterSpec] | None = None
) -> int:
    """Return how many elements of the training dtype the messages of ZeRO 3 have that gather these
    parameters of a rank: fewer where the stored bits of a base travel, none of a base that every rank has.
    trained: those that have gradients; None: names are full ones, of an end."""
    adapter, costs = layout.table.adapter, layout.profile.adapters
    if adapter is None or not adapter.is_quantized:
        return sum(weight.local_numel(layout.views) for weight in weights if weight.view == view)
    names = None if trained is None else {weight.name for weight in trained}
    held = count_weights(layout, weights, view, names)
    if not costs.shards_quantized:
        held = held._replace(stored=0, stored_bytes=0.0)
    return round(gathered_bytes(layout, held) / layout.job.training.value_bytes)


def adapter_shapes(layout: JobLayout) -> AdapterShapes | None:
    """Return what adapters and base keep of a micro batch; None of a model without adapters."""
    adapter, costs, value = layout.table.adapter, layout.profile.adapters, layout.job.training.value_bytes
    if adapter is None:
        return None
    own = max(2, DTYPE_BYTES[adapter_dtype(layout)])
    copies = {"none": 0, "training": value, "adapter": own}[costs.input_copy]
    stored = adapter.stored_as
    return AdapterShapes(
        own if costs.input_copy == "adapter" else value,
        copies if own != value else 0,
        costs.mask_bytes,
        dropout=adapter.dropout > 0,
        remakes=costs.remakes_activation,
        results=costs.dora_results if adapter.kind == "dora" else 0.0,
        formed=2 * (adapter.kind == "dora" and costs.dora_base),  # BA and W + BA
        dequantizes=adapter.is_quantized and not multiplies_narrow(layout),
        copies=bool(stored and not adapter.is_quantized and DTYPE_BYTES[stored] > value),
        base_inputs=costs.base_inputs,
        narrow_activation=costs.narrow_activation,
        adds=costs.adds_in_place,
    )


def multiplies_narrow(layout: JobLayout) -> bool:
    """Return whether an fp8 base is multiplied in fp8: the software does it, on a device that has it."""
    adapter, device = layout.table.adapter, layout.job.cluster.device
    is_fp8 = adapter is not None and adapter.stored_as == "fp8"
    return is_fp8 and layout.profile.adapters.narrow_products and device is not None and "fp8" in device.peak_flops
