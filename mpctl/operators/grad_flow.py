"""Which gradients backward computes when some parameters are frozen (`training.freeze`).

A frozen parameter needs no dW. A product needs dX where anything trained lies upstream of its
input, that is, before it in the order of the data: layers add to one residual stream, so whatever
came before reaches it. Frozen from the first layer up, a model so loses dX of these layers, and
with dX its all-reduce; nothing at all is computed backward below the first trained parameter.

Three inputs are not the stream: a lookup's tokens have no gradient; cross attention's keys come
from the stack before, whose result is its last; a bias that all layers add joins the scores, after
the product of queries and keys and before the one that reads the heads. A second head of an end
(BERT's pooler) is taken to follow the first: it sends nothing, one token's dX is all it may add.

Patterns are those of fnmatch over global names: `*` crosses dots, `layers.[0-5].*` are 6 layers. A
tied head is the word table and freezes with it.

By hand, two layers, `embedding.*` and `layers.0.*` frozen: of layer 0 nothing; of layer 1 the norm
before attention is trained, so that its attention.qkv needs dX and dW; with `*norm*` frozen too, dW
alone, and no message for dX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import groupby

from mpctl.operators.matmul import GradNeeds, LayerStack, OperatorGroup, ParameterSpec

IsFrozen = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class GradFlow:
    """What backward computes of one part. after: whether its result needs a gradient."""

    part: OperatorGroup
    needs: Mapping[str, GradNeeds]
    trained: tuple[ParameterSpec, ...]
    after: bool


@dataclass(frozen=True, slots=True)
class StackGradFlow:
    """Of a stack: its ends, and its layers in runs that are alike, which share a Flow with other
    runs of their kind. shared: the trained ones."""

    entry: GradFlow
    runs: tuple[tuple[range, GradFlow], ...]
    exit: GradFlow
    shared: tuple[ParameterSpec, ...]

    @property
    def last(self) -> GradFlow | None:
        """The last layer's."""
        return self.runs[-1][1] if self.runs else None

    def blocks(self, layers: range) -> list[tuple[int, GradFlow]]:
        """How many of these layers are of each kind."""
        counts: dict[int, int] = {}
        for run, flow in self.runs:
            met = min(run.stop, layers.stop) - max(run.start, layers.start)
            counts[id(flow)] = counts.get(id(flow), 0) + max(0, met)
        kinds = {id(flow): flow for _, flow in self.runs}
        return [(count, kinds[kind]) for kind, count in counts.items() if count]


def frozen_by(patterns: Sequence[str]) -> IsFrozen:
    """Whether a parameter's global name matches any of the patterns, case and all."""
    if not patterns:
        return lambda name: False
    match = re.compile("|".join(map(translate, patterns))).match
    return lambda name: match(name) is not None


def find_flows(stacks: Sequence[LayerStack], freeze: Sequence[str]) -> tuple[StackGradFlow, ...]:
    """Of each stack of a model, in the order of the data."""
    is_frozen, found, source = frozen_by(freeze), [], False
    for stack in stacks:
        shared = _trained(stack.shared, is_frozen)
        entry = _walk(stack.entry, _trained(stack.entry.weights, is_frozen), before=False)
        walk = _LayerWalk(stack, source=source, joins=bool(shared))
        runs = tuple(_runs(walk, is_frozen if freeze else None, before=entry.after))
        before = runs[-1][1].after if runs else entry.after
        exit_ = _walk(stack.exit, _trained(stack.exit.weights, is_frozen), before=before)
        found.append(StackGradFlow(entry, runs, exit_, shared))
        source = exit_.after
    return tuple(found)


def _trained(
    weights: Sequence[ParameterSpec], is_frozen: IsFrozen, prefix: str = ""
) -> tuple[ParameterSpec, ...]:
    return tuple(weight for weight in weights if not is_frozen(prefix + weight.name))


@dataclass(frozen=True, slots=True)
class _LayerWalk:
    """source: whether what the stack before gave needs a gradient; joins: the shared bias."""

    stack: LayerStack
    source: bool
    joins: bool

    def __call__(self, trained: tuple[ParameterSpec, ...], *, before: bool) -> GradFlow:
        stack = self.stack
        foreign = {core.key_product for core in stack.cores if core.keys != stack.seq}
        return _walk(
            stack.block, trained, before=before, source=self.source, foreign=foreign,
            joins=self.joins,
        )  # fmt: skip


def _runs(
    walk: _LayerWalk, is_frozen: IsFrozen | None, *, before: bool
) -> Iterator[tuple[range, GradFlow]]:
    """Layers that train the same and whose inputs need the same, together; None: all of them."""
    stack, weights = walk.stack, walk.stack.block.weights
    if is_frozen is None:
        yield range(stack.layers), walk(weights, before=True)
        return
    kinds: dict[tuple[tuple[ParameterSpec, ...], bool], GradFlow] = {}
    found: list[GradFlow] = []
    for layer in range(stack.layers):
        kind = _trained(weights, is_frozen, f"{stack.prefix}.{layer}."), before
        if kind not in kinds:
            kinds[kind] = walk(kind[0], before=before)
        found.append(kinds[kind])
        before = found[-1].after
    for _, run in groupby(range(stack.layers), key=lambda layer: id(found[layer])):
        held = list(run)
        yield range(held[0], held[-1] + 1), found[held[0]]


def _walk(
    part: OperatorGroup, trained: tuple[ParameterSpec, ...], *, before: bool, source: bool = False,
    foreign: Collection[str] = (), joins: bool = False,
) -> GradFlow:  # fmt: skip
    """before: whether the stream needs a gradient where it enters; foreign: products that read the
    source instead; joins: a trained bias meets the first product's result."""
    names, stream = {weight.name for weight in trained}, before
    products = {product.parameter: product for product in part.products}
    needs: dict[str, GradNeeds] = {}
    for weight in part.weights:
        product, w = products.get(weight.name), weight.name in names
        if product is not None:
            x = product.input_gradient and (source if product.name in foreign else stream)
            stream = stream or x or (joins and not needs)
            needs[product.name] = GradNeeds(x, w, x or w or product.bias in names)
        stream = stream or w
    return GradFlow(part, needs, trained, stream)
