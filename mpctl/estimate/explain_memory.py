"""The figures of a stage's memory with the formulas that gave them.

By hand, `memory.stage-0.optimizer` of 10 bf16 parameters: 120 B = 10 parameters x (8 + 4) bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from mpctl.estimate.activation_shapes import ActivationShapes, activation_shapes, is_cuda
from mpctl.estimate.activations import ChunkBytes, stage_chunks
from mpctl.estimate.figure import Figure
from mpctl.estimate.memory import StageMemory, layout_memory
from mpctl.estimate.saved import SavedTensor, layer_activations
from mpctl.layout.job_layout import JobLayout
from mpctl.units import bytes_text, count_text

PAPER = "arXiv 2205.05198"


def explain_memory(layout: JobLayout) -> Iterator[Figure]:
    """Figures of one layer of each stack, tensor by tensor, and of every stage."""
    form = activation_shapes(layout)
    for stack in layout.table.stacks:
        prefix = f"memory.{stack.figure_name}"
        layer = layer_activations(form, stack.block_of(stack.layers - 1))
        yield from _layer(form, prefix, layer.saved)
        yield from _layer(form, f"{prefix}.again", layer.recomputed)
    for memory in layout_memory(layout):
        yield from _stage(layout, memory, stage_chunks(layout, memory.stage))


def _layer(form: ActivationShapes, prefix: str, kept: Sequence[SavedTensor]) -> Iterator[Figure]:
    """What one layer keeps of a micro batch; `again`: what is computed again for its backward."""
    found: dict[str, list[SavedTensor]] = {}
    for tensor in kept:
        found.setdefault(re.sub(r"[ ._]", "-", tensor.name), []).append(tensor)
    if kept:
        parts = " + ".join(bytes_text(form.bytes_of(own)) for own in found.values())
        yield _bytes(prefix, form.bytes_of(kept), "sum of the tensors below", parts, PAPER)
    for name, own in found.items():
        numbers = " + ".join(_product(form, tensor) for tensor in own)
        formula = " + ".join(_formula(form, tensor) for tensor in own)
        yield _bytes(f"{prefix}.{name}", form.bytes_of(own), formula, numbers, PAPER)


def _formula(form: ActivationShapes, tensor: SavedTensor) -> str:
    """`batch x seq x hidden x value`; on a grid with the parts that it cuts them into."""
    parts: dict[str, int] = {}
    if form.mode != "1d":
        parts = dict.fromkeys(("inner", "kv", "heads", "ffn"), form.feature_parts)
        parts |= {"batch": form.micro_batch // form.batch, "hidden": form.side}
    dims = (f"{dim} / {parts[dim]}" if dim in parts else dim for dim in tensor.dims)
    is_value = tensor.width == "operand" and form.operand == form.value
    return " x ".join((*dims, "value" if is_value else tensor.width))


def _product(form: ActivationShapes, tensor: SavedTensor) -> str:
    sizes = " x ".join(str(getattr(form, dim)) for dim in tensor.dims)
    width = form.bytes_of([SavedTensor("", (), tensor.width)])
    times = "" if tensor.times == 1 else f" x {tensor.times:g}"
    split = f" / {form.tp}" if form.splits and tensor.is_outer else ""
    return f"{sizes} x {width:g} B{times}{split}"


# fmt: off
def _stage(layout: JobLayout, stage: StageMemory, chunks: Sequence[ChunkBytes]) -> Iterator[Figure]:
    parallel = layout.job.parallel
    prefix, memory = f"memory.stage-{stage.stage}", layout.profile.memory
    zero = f", ZeRO {parallel.zero} over {layout.replicas}"
    for name, value in (("parameters", stage.parameter_bytes), ("gradients", stage.gradient_bytes),
                        ("optimizer", stage.optimizer_bytes)):
        each = value / stage.parameters if stage.parameters else 0.0
        yield _bytes(f"{prefix}.{name}", value, f"parameters of the rank x bytes{zero}",
                     f"{count_text(stage.parameters)} x {each:.4g} B", "arXiv 1910.02054")
    kept = " and ".join(bytes_text(chunk.saved) for chunk in chunks)
    yield _bytes(f"{prefix}.activations", stage.activation_bytes,
                 f"{parallel.schedule}: micro batches in flight x what one keeps for backward",
                 f"{stage.in_flight} x {kept}", PAPER)
    most = bytes_text(max(chunk.temporary for chunk in chunks))
    is_grid = parallel.tensor_mode != "1d"
    weights = "blocks of products under way" if is_grid else "gathered weights"
    yield _bytes(f"{prefix}.temporary", stage.working_bytes,
                 f"gradients of activations, recomputed tensors, {weights}, messages",
                 f"{most} in a backward, and messages under way")
    yield _bytes(f"{prefix}.software", stage.lasting_bytes,
                 "buffers that the training software keeps", bytes_text(stage.lasting_bytes),
                 memory.source)
    parts = (stage.state_bytes, stage.activation_bytes, stage.working_bytes, stage.lasting_bytes)
    yield _bytes(f"{prefix}.allocated", stage.allocated_bytes,
                 "states + activations + temporary + software; states: parameters, gradients, "
                 "optimizer",
                 " + ".join(map(bytes_text, parts)))
    slack = memory.slack if is_cuda(layout.job) else 1
    yield _bytes(f"{prefix}.reserved", stage.reserved_bytes, "allocated x allocator's reserve",
                 f"{bytes_text(stage.allocated_bytes)} x {slack:g}", memory.source)
    yield _bytes(f"{prefix}.device", stage.device_bytes, "reserved + context of the libraries",
                 f"{bytes_text(stage.reserved_bytes)} + {bytes_text(stage.context_bytes)}",
                 memory.source)

# fmt: on


def _bytes(name: str, value: float, formula: str, numbers: str, source: str = "") -> Figure:
    return Figure(name, value, "B", formula, numbers, source)
