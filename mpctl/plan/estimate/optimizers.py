"""Bytes that an optimizer keeps for the trained parameters of a rank, and moves in an update.

A 16-bit parameter has a float32 master that is updated in its place (arXiv 1710.03740), unless
training.master_weights is false or the runtime stores parameters in float32. Moments are as wide as
what is updated, unless training.optimizer_dtype says otherwise. Optimizers of 8 and 4 bits keep a
code for each element of a moment and a float32 scale for each block (arXiv 2110.02861;
bitsandbytes 0.50.2, torchao 0.18.0); a tensor of fewer than 4,096 elements, and a word table under
bitsandbytes as transformers' Trainer sets it up, has moments of 32 bits. Adafactor (arXiv
1804.04235; transformers) keeps a float32 row and column of each matrix, and a whole vector. Muon keeps one
moment of the matrices of layers and AdamW's two of the rest (model/layout/matrices.py).

A precision-aware optimizer (Megatron-Core with Transformer Engine 2.1) keeps two bytes beside a bf16 parameter, which
together are its master (`remainder_bytes` of the profile), unless it offloads its states.

By hand, bf16 with masters: adamw 4 + 2 x 4 = 12 bytes a parameter, lion 8, sgd 4. Without masters:
adamw 4, sgd 0. adamw-8bit of a [64, 64] matrix without a master: 2 (4096 + 4096 / 256 x 4) = 8320
bytes, 2.03 each; adafactor of it: 4 (64 + 64) = 512.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from mpctl.core.sharding import View
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.buckets import Bucket
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.matrices import muon_matrices
from mpctl.model.operators.matmul import ParameterSpec
from mpctl.plan.estimate.base_weights import adapter_dtype
from mpctl.spec.runtime_memory import RuntimeMemory
from mpctl.spec.training import Optimizer, TrainingSpec

SMALL = 4096  # elements below which optimizers of 8 and 4 bits keep moments of 32 bits
SCALE = 4  # bytes of the scale of a block
MOMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Of an element of a moment, by training.optimizer_dtype; one scale a tensor is nothing beside them."""


class OptimizerRule(NamedTuple):
    """What an optimizer keeps. moments: tensors like the parameter. bits: of an element of theirs; 0: it
    is not quantised. block: elements with one scale. is_paged: in memory that moves to the host when
    the device needs it. is_factored: rows and columns instead of moments. small_as_parameter: small
    tensors have moments of the parameter's dtype instead of float32. skips_tables: word tables have
    moments of 32 bits. reads: how often an update reads the gradient. others: moments of what is no matrix
    of a layer, where these have fewer; 0: as many."""

    moments: int
    bits: int = 0
    block: int = 0
    is_paged: bool = False
    is_factored: bool = False
    small_as_parameter: bool = False
    skips_tables: bool = False
    reads: int = 1
    others: int = 0


RULES: dict[Optimizer, OptimizerRule] = {
    "adamw": OptimizerRule(2),
    "adamw-8bit": OptimizerRule(2, 8, 256, skips_tables=True),
    "paged-adamw-8bit": OptimizerRule(2, 8, 256, is_paged=True, skips_tables=True),
    "adamw-4bit": OptimizerRule(2, 4, 128, small_as_parameter=True),
    "adafactor": OptimizerRule(0, is_factored=True, reads=2),
    "sgd": OptimizerRule(0),
    "lion": OptimizerRule(1),
    "lion-8bit": OptimizerRule(1, 8, 256, skips_tables=True),
    "paged-lion-8bit": OptimizerRule(1, 8, 256, is_paged=True, skips_tables=True),
    "muon": OptimizerRule(1, others=2),
}


USUAL = {"optimizer": "adamw", "optimizer_dtype": None, "master_weights": None, "momentum": 0.0}


@dataclass(frozen=True)
class OptimizerStates:
    """What is kept for a trained parameter. value: bytes of the element that an update changes;
    master: the same where it is a copy of the parameter, else 0; moment: of an element of an
    unquantised moment; copy: of the parameter's element that is written where there is a master."""

    rule: OptimizerRule
    value: int
    master: int
    moment: int
    copy: int

    @classmethod
    def of(cls, training: TrainingSpec, memory: RuntimeMemory, stored: int | None = None) -> OptimizerStates:
        """The states under a job's runtime, whose `memory` names the dtype of parameters that have no
        other copy. stored: bytes of a trained parameter's element, if not those of all parameters."""
        rule = RULES[training.optimizer]
        if training.optimizer == "sgd" and training.momentum:
            rule = rule._replace(moments=1)
        if stored is None:
            stored = DTYPE_BYTES[memory.stored_as(training)]
        has_masters = training.master_weights
        if has_masters is None:
            has_masters = memory.parameter_dtype is None
        is_apart = stored < 4 and has_masters
        value = 4 if is_apart else max(2, stored)
        moment = MOMENT_BYTES[training.optimizer_dtype] if training.optimizer_dtype else value
        master = 4 if is_apart else 0
        is_aware = training.optimizer == "adamw" and training.optimizer_dtype and not training.offload_optimizer
        if is_apart and is_aware and _keeps_bf16(training):
            master = memory.remainder_bytes or master
        return cls(rule, value, master, moment, training.value_bytes)

    @property
    def is_elementwise(self) -> bool:
        """Whether every element has as many bytes, whatever tensor it is in."""
        return not (self.rule.bits or self.rule.is_factored or self.rule.others)

    @property
    def width(self) -> int:
        """Bytes of an element of a master and of moments, if these are the same for all tensors."""
        return self.master + (self.rule.moments * self.moment if self.is_elementwise else 0)

    @property
    def moment_width(self) -> float:
        """Bytes of an element of a moment, with its share of a block's scale."""
        rule = self.rule
        return rule.bits / 8 + SCALE / rule.block if rule.bits else self.moment

    @property
    def saved(self) -> float:
        """Bytes of a parameter in a checkpoint: its value and moments, under Muon those of a matrix; the rows and
        columns of Adafactor are nothing beside them."""
        return self.value + self.rule.moments * self.moment_width

    def saved_of(self, *, is_matrix: bool) -> float:
        """The same of a parameter that is a matrix of a layer, or is none."""
        return self.saved + (0 if is_matrix else max(0, self.rule.others - self.rule.moments) * self.moment_width)

    @property
    def moved(self) -> float:
        """Bytes that an update reads and writes for a parameter besides its gradient: value and moments
        twice, the copy once."""
        return 2 * self.saved + (self.copy if self.master else 0)

    def of_tensor(self, shape: tuple[int, ...], *, is_table: bool = False, is_matrix: bool = False) -> int:
        """Bytes for a tensor of this shape, without its master. is_matrix: whether it is one of a layer."""
        rule, numel = self.rule, prod(shape)
        if rule.others and not is_matrix:
            return numel * rule.others * self.moment
        if rule.is_factored:
            return 4 * (prod(shape[:-2]) * sum(shape[-2:]) if len(shape) > 1 else numel)
        if not rule.bits:
            return numel * rule.moments * self.moment
        if rule.small_as_parameter:  # torchao
            if numel < SMALL or numel % rule.block:
                return numel * rule.moments * self.value
        elif numel < SMALL or (is_table and rule.skips_tables):  # bitsandbytes
            return numel * rule.moments * 4
        return rule.moments * (numel * rule.bits // 8 + -(-numel // rule.block) * SCALE)


def _keeps_bf16(training: TrainingSpec) -> bool:
    """Whether parameters stay in bf16 from step to step, to which a remainder adds the master: fp8 recipes other
    than delayed scaling make operands from a complete one (Megatron-Core 0.19.2, optimizer_config.py)."""
    return training.dtype == "bf16" or (training.dtype == "fp8" and training.fp8_recipe == "delayed")


def layout_states(layout: JobLayout) -> OptimizerStates:
    """Return the states of a layout; where adapters are trained those of A and B."""
    stored = None if layout.table.adapter is None else max(2, DTYPE_BYTES[adapter_dtype(layout)])
    return OptimizerStates.of(layout.job.training, layout.profile.memory, stored)


def update_factor(training: TrainingSpec, memory: RuntimeMemory) -> float:
    """Bytes that an update moves relative to AdamW with the runtime's states, which its
    `operators.optimizer_bytes` are of: 1 for that.

    By hand, bf16 with masters and float32 gradients: adamw 4 + 2 x 12 + 2 = 30, sgd 4 + 2 x 4 + 2 = 14.
    """
    if all(getattr(training, name) == value for name, value in USUAL.items()):
        return 1.0
    usual = training.model_copy(update=USUAL)
    own, of_usual = (OptimizerStates.of(one, memory) for one in (training, usual))
    if own == of_usual:
        return 1.0
    read = training.reduced_bytes
    return (own.rule.reads * read + own.moved) / (read + of_usual.moved)


def moments_of(states: OptimizerStates, layout: JobLayout, weights: Iterable[ParameterSpec], view: View) -> int:
    """Bytes of a rank's moments of trained parameters of a view. ZeRO cuts each along its first
    dimension, and the optimizer is given the pieces."""
    parts, tables, matrices = view.zero_size if view.zero else 1, _tables(layout), muon_matrices(layout)
    return sum(
        states.of_tensor(_piece(weight, view, parts), is_table=weight.name in tables, is_matrix=weight.name in matrices)
        for weight in weights
        if weight.view == view.name
    )


def slice_moments(layout: JobLayout, stage: int) -> int:
    """Bytes of the moments of mpctl's slices where matrices have fewer than the rest: those of the slice that has
    most of the rest, padding included, in the buckets of each view."""
    states, matrices = layout_states(layout), muon_matrices(layout)
    stepped, rest = 0, dict[str, Counter[int]]()
    for bucket in layout.buckets(stage):
        if bucket.is_trained:
            stepped += bucket.part
            found, others = rest.setdefault(bucket.view.name, Counter()), [n for n in bucket.names if n not in matrices]
            if bucket.view.zero == 0:
                found[0] += sum(size for name, size in zip(bucket.names, bucket.sizes, strict=True) if name in others)
                continue
            found.update(_slices_without(bucket, matrices))
    most = sum(max(found.values(), default=0) for found in rest.values())
    return states.moment * (stepped * states.rule.moments + most * (states.rule.others - states.rule.moments))


def _slices_without(bucket: Bucket, matrices: Collection[str]) -> Counter[int]:
    """Elements of each slice of a bucket that are of no matrix."""
    rest, at = Counter[int](), 0
    spans = [*zip(bucket.names, bucket.sizes, strict=True), ("", bucket.padded - bucket.numel)]
    for name, size in spans:
        if name not in matrices:
            for index in range(at // bucket.part, -(-(at + size) // bucket.part)):
                first, last = index * bucket.part, (index + 1) * bucket.part
                rest[index] += max(0, min(at + size, last) - max(at, first))
        at += size
    return rest


def _piece(weight: ParameterSpec, view: View, parts: int) -> tuple[int, ...]:
    """The shape of the largest of so many pieces of a rank's part of a parameter."""
    sides = zip(weight.shape, weight.dims, strict=True)
    first, *others = [size // view.grid.weight_parts((dim,)) for size, dim in sides]
    return -(-first // parts), *others


def _tables(layout: JobLayout) -> frozenset[str]:
    """The names of the parameters of which rows are looked up."""
    products = (product for stack in layout.table.stacks for product in stack.entry.products)
    return frozenset(weight.name for product in products if product.is_lookup for weight in product.weights)
