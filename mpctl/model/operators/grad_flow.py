"""Find the gradients that backward computes when some parameters are frozen (`training.freeze`).

A frozen parameter needs no dW. A product needs dX where anything trained is upstream of its input,
that is, before it in execution order: layers add to one residual stream, so every earlier layer
reaches it. A model whose first layers are frozen needs no dX of these layers, nor its all-reduce;
backward computes nothing below the first trained parameter.

Four inputs are not the stream: a lookup's tokens have no gradient; cross attention's keys come
from the stack before, whose result is its last; a bias that all layers add joins the scores, after
the product of queries and keys and before the one that reads the heads. A second head of an end
(BERT's pooler) is treated as if it followed the first: it sends nothing, and adds at most one
token's dX. Router, experts and shared experts of a layer read the same tensor, so that the
training of one of them asks for no dX of another.

Patterns are those of fnmatch over global names: `*` crosses dots, `layers.[0-5].*` are 6 layers. A
tied head is the word table and freezes with it.

By hand, two layers, `embedding.*` and `layers.0.*` frozen: of layer 0 nothing; of layer 1 the norm
before attention is trained, so that its attention.qkv needs dX and dW; with `*norm*` frozen too, dW
alone, and no message for dX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import translate
from itertools import groupby
from typing import Any, NamedTuple

from mpctl.model.operators.layer import (
    AttentionOp,
    Dispatch,
    LayerStack,
    Operation,
    OperatorGroup,
    Residual,
    parameters_of,
)
from mpctl.model.operators.matmul import GradNeeds, MatMul, ParameterSpec

IsFrozen = Callable[[str], bool]


class GradFlow(NamedTuple):
    """Gradients that backward computes in one layer or end.

    part: its operations. needs: gradients by the product's name. trained: parameters that are not
    frozen. after: whether the gradient of its result is needed. kept: the operations that may save
    something where adapters train the model, else all: below the first adapter none has a backward.
    """

    part: OperatorGroup
    needs: Mapping[str, GradNeeds]
    trained: tuple[ParameterSpec, ...]
    after: bool
    kept: OperatorGroup

    @property
    def cores(self) -> tuple[AttentionOp, ...]:
        """Its attentions."""
        return self.part.cores


class StackGradFlow(NamedTuple):
    """Gradients that backward computes in a stack.

    entry, exit: its ends. runs: ranges of equal layers; ranges of one kind share one GradFlow object.
    shared: trained parameters that all layers share.
    """

    entry: GradFlow
    runs: tuple[tuple[range, GradFlow], ...]
    exit: GradFlow
    shared: tuple[ParameterSpec, ...]

    @property
    def ends(self) -> tuple[GradFlow, GradFlow]:
        """The gradient flow of the entry and that of the exit."""
        return self.entry, self.exit

    @property
    def last(self) -> GradFlow | None:
        """The gradient flow of the last layer; None in a stack without layers."""
        return self.runs[-1][1] if self.runs else None

    def blocks(self, layers: range) -> list[tuple[int, GradFlow]]:
        """(number of these layers, their gradient flow) for each kind of layer."""
        if len(self.runs) == 1:
            return [(len(layers), self.runs[0][1])] if layers else []
        counts: dict[int, int] = {}
        for run, flow in self.runs:
            met = min(run.stop, layers.stop) - max(run.start, layers.start)
            counts[id(flow)] = counts.get(id(flow), 0) + max(0, met)
        kinds = {id(flow): flow for _, flow in self.runs}
        return [(count, kinds[kind]) for kind, count in counts.items() if count]


def frozen_by(patterns: Sequence[str]) -> IsFrozen:
    """A test whether a parameter's global name matches any of the patterns, case-sensitively."""
    if not patterns:
        return lambda name: False
    match = re.compile("|".join(map(translate, patterns))).match
    return lambda name: match(name) is not None


def find_flows(stacks: Sequence[LayerStack], is_frozen: IsFrozen | None = None) -> tuple[StackGradFlow, ...]:
    """The gradient flow of each stack of a model, in the order of the data. is_frozen: whether the
    parameter of a name is; None where all are trained."""
    of_ends, source = is_frozen or frozen_by(()), False
    flows: list[StackGradFlow] = []
    for stack in stacks:
        shared = _trained(stack.shared, of_ends)
        follows = source and stack.predictions > 0
        entry = _walk(stack.entry, _trained(stack.entry.weights, of_ends), before=follows)
        walk = _LayerWalk(stack, source=source, joins=bool(shared))
        runs = tuple(_runs(walk, is_frozen, before=entry.after))
        before = runs[-1][1].after if runs else entry.after
        exit_ = _walk(stack.exit, _trained(stack.exit.weights, of_ends), before=before)
        flows.append(StackGradFlow(entry, runs, exit_, shared))
        source = exit_.after
    return tuple(flows)


def _trained(weights: Sequence[ParameterSpec], is_frozen: IsFrozen, prefix: str = "") -> tuple[ParameterSpec, ...]:
    return tuple(weight for weight in weights if not is_frozen(prefix + weight.name))


class _LayerWalk(NamedTuple):
    """Finds the gradient flow of a layer of a stack.

    source: whether the result of the stack before needs a gradient. joins: whether a trained bias
    of all layers joins the attention scores.
    """

    stack: LayerStack
    source: bool
    joins: bool

    def __call__(self, block: OperatorGroup, trained: tuple[ParameterSpec, ...], *, before: bool) -> GradFlow:
        foreign = {core.key_product for core in block.cores if core.keys != self.stack.seq}
        return _walk(block, trained, before=before, source=self.source, foreign=foreign, joins=self.joins)


def _runs(walk: _LayerWalk, is_frozen: IsFrozen | None, *, before: bool) -> Iterator[tuple[range, GradFlow]]:
    """Ranges of layers of one kind that train the same parameters and whose inputs need the same
    gradients.

    is_frozen None: nothing is frozen.
    """
    stack, before = walk.stack, before or is_frozen is None
    kinds: dict[tuple[Any, ...], GradFlow] = {}
    flows: list[GradFlow] = []
    for layer, block in enumerate(stack.blocks):
        trained = block.weights
        if is_frozen is not None:
            trained = _trained(trained, is_frozen, f"{stack.prefix}.{layer}.")
        kind = (id(block), trained if is_frozen else None, before)
        if kind not in kinds:
            kinds[kind] = walk(block, trained, before=before)
        flows.append(kinds[kind])
        before = flows[-1].after
    for _, run in groupby(range(stack.layers), key=lambda layer: id(flows[layer])):
        layers = list(run)
        yield range(layers[0], layers[-1] + 1), flows[layers[0]]


def _walk(
    part: OperatorGroup,
    trained: tuple[ParameterSpec, ...],
    *,
    before: bool,
    source: bool = False,
    foreign: Collection[str] = (),
    joins: bool = False,
) -> GradFlow:
    """The gradient flow of a part, found along the order of the data.

    before: whether the residual stream needs a gradient where it enters. source: whether the result
    of the stack before does. foreign: names of products that read that result. joins: whether a
    trained bias is added after the first product.
    """
    names, stream = {weight.name for weight in trained}, before
    needs: dict[str, GradNeeds] = {}
    has_branches = part.has_experts or any(core.latent for core in part.cores) or any(p.adapts for p in part.products)
    branches = _Branches() if has_branches else None
    idle, is_adapted = set[int](), any(product.is_frozen for product in part.products)
    for operation in part.flat:
        if branches is not None:
            stream = branches.entered(operation, stream)
        if isinstance(operation, MatMul):
            product, w = operation, operation.parameter in names
            x = product.input_gradient and (source if product.name in foreign else stream)
            stream = stream or x or (joins and not needs)
            needs[product.name] = GradNeeds(x, w, x or w or product.bias in names)
            if w and product.adapts:
                needs[product.adapts] = needs[product.adapts]._replace(y=True)
        stream = stream or any(weight.name in names for weight in parameters_of(operation))
        if is_adapted and not stream:
            idle.add(id(operation))
    kept = OperatorGroup(tuple(one for one in part.operations if id(one) not in idle)) if idle else part
    return GradFlow(part, needs, trained, stream, kept)


class _Branches:
    """Router, experts and shared experts read one tensor, as the latents of queries and of keys do:
    what is trained in one of them is not upstream of the others. Attention and the residual sum
    bring them together."""

    def __init__(self) -> None:
        self.read: dict[str, bool] = {}  # by tensor, whether it has a gradient
        self.value, self.beside = "", False

    def entered(self, operation: Operation, stream: bool) -> bool:
        """Whether what the operation reads has a gradient. stream: what the one before it wrote."""
        if isinstance(operation, (AttentionOp, Residual)):
            stream, self.read = stream or self.beside, {}
        elif isinstance(operation, (MatMul, Dispatch)):
            if isinstance(operation, MatMul):
                self.value = operation.value
            if self.value in self.read:
                self.beside, stream = self.beside or stream, self.read[self.value]
            self.read[self.value] = stream
        return stream
