"""A layer as one list of operations in execution order, and a model's stacks of such layers.

An operation names what it reads and writes by dimensions, and holds its parameters. All figures of
a layer are folds over the list: FLOP (flops.py), messages (tensor_messages.py), gradients that are
needed (grad_flow.py), and in estimate/ the tensors saved for backward, peak memory and the seconds
of memory-bound kernels. The costs of an operation under a runtime are data: the columns of
kernel_sets.py and the passes of a runtime's profile.

A tensor has the name of the operation that made it; `input` is the layer's own input. Two
operations that read one tensor, as the two branches of a parallel residual do, save it once.

By hand, a pre-norm layer: attention_norm(input), attention.qkv(attention_norm), the core,
attention.output(context), the residual sum "attention", mlp_norm(attention), mlp.up(mlp_norm), the
activation, mlp.down(activation), the residual sum "mlp".

A layer with experts has in place of the MLP: mlp.router(mlp_norm), the dispatch, mlp.experts.up,
the activation, mlp.experts.down, the combination, and the shared experts' MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, TypeAlias, Union

from mpctl.model.operators.activation_shapes import OF_LATENTS, ActivationShapes, Saved, SavedTensor, Width, is_outer
from mpctl.model.operators.attention import AttentionOp as AttentionOp
from mpctl.model.operators.matmul import MODULES, Dims, MatMul, ParameterSpec, saved_dims
from mpctl.spec.chat import PackedAttention

INPUT = "input"
SOURCE = "source"  # the result of the stack before, which cross attention reads
LOSS_FLOATS = 4  # of each token: its loss, the softmax's maximum and sum, the target's logit
CHOICE = "choice"  # of experts, whose numbers a recomputed layer keeps


class Operator(Protocol):
    """One step of a layer's forward. A wrong count of its bytes is mended in the file of its class;
    a family may add classes of its own."""

    @property
    def part(self) -> str:
        """The branch or end that it belongs to."""

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """The tensors that its forward saves for backward. kept: names of the tensors that
        operations before it saved, to which it adds those that later ones need not save again."""

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Temporary bytes of its backward: gradients of features, of weights and of its own copies,
        in addition to what forward saved and to the gradient of the hidden states. defers: without
        what the gradients of weights need, which are computed later (zero-bubble)."""


class Norm(NamedTuple):
    """A norm over the last dimension of `reads`: `hidden`, or heads of queries and keys.

    part: the branch or end that it belongs to. kind: layernorm, rmsnorm or nonparametric. value:
    the tensor that it reads.
    """

    name: str
    part: str
    reads: Dims
    kind: str
    value: str
    weights: tuple[ParameterSpec, ...] = ()

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Its input and, for each row, a scale and (except for rmsnorm) a mean. The attention core
        saves those of norms of heads."""
        if not self.value:
            return []
        reads, statistics = saved_dims(self.reads, self.value), 1 if self.kind == "rmsnorm" else 2
        own = [] if self.value in kept else [SavedTensor(f"{self.name} input", reads, "value", 1, True)]
        kept.add(self.value)
        module = OF_LATENTS if self.reads[-1] == "latent" else ""
        return [*own, SavedTensor(f"{self.name} statistics", reads[:-1], "float", statistics, True, module=module)]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Nothing: the gradient of its input takes the place of its result, which the next product
        has read."""
        return 0.0


class Activation(NamedTuple):
    """The activation between the two products of an MLP. is_gated: whether it multiplies the
    activation of one half of its input with the other half. result: the name of what it makes, where
    a frozen product reads it, which does not save it."""

    part: str
    reads: Dims
    kind: str
    is_gated: bool
    value: str
    result: str = ""

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Its input; kernels that save only relu's result compute its gradient from that, and a
        product in fp8 saves another copy of it."""
        kernels, outer = shapes.kernels, is_outer(self.reads)
        stem = self.value.removesuffix(".up") if self.value.endswith(".up") else self.part
        module = "" if self.reads[-1] == "expert_ffn" else MODULES.get(self.reads[-1], "")

        width: Width = "operand" if _keeps_narrow(shapes) else "value"

        def tensor(name: str, times: float = 1) -> SavedTensor:
            return SavedTensor(f"{stem} {name}", self.reads, width, times, outer, module=module)

        if self._keeps_result(shapes):
            if self.result:
                kept.add(self.result)
                return [tensor("result")]
            return [tensor("result")] if shapes.operand < shapes.value else []
        gates = [tensor("gate")] if self.is_gated and kernels.keeps_gate else []
        return [tensor("up", 2 if self.is_gated else 1), *gates]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """With a gate, gradients of its result and of both parts in one kernel, less its result, which the
        product behind it has freed; else two more. Without a gate, no more than the next product needs, except
        that a result kept by both stays."""
        waits = shapes.stream_bytes(self.reads[1] if len(self.reads) > 2 else "seq") * (defers and shapes.splits)
        parts: float = (shapes.kernels.gate_gradients if shapes.is_cuda else 5) * self.is_gated
        is_wide = shapes.kernels.attention == "torch" and shapes.operand == shapes.value  # no copies in 8 bits
        if self.is_gated and shapes.is_cuda and is_wide and not (defers or self.result):  # else nothing is freed
            parts -= 1
        return waits + (parts + 2 * self._keeps_result(shapes)) * self._bytes(shapes)

    def freed(self, shapes: ActivationShapes) -> float:
        """Bytes of its result and of what it reads, which its own backward is the last to read."""
        own = self._bytes(shapes)
        if _keeps_narrow(shapes):
            return own + (2 if self.is_gated else 1) * own * shapes.operand / shapes.value
        return (3 if self.is_gated else 1 if self._keeps_result(shapes) else 2) * own

    def _keeps_result(self, shapes: ActivationShapes) -> bool:
        """Whether its gradient follows from its result, which the next product saves as well."""
        return self.kind == "relu" and not self.is_gated and shapes.kernels.relu_by_result

    def _bytes(self, shapes: ActivationShapes) -> float:
        return float(shapes.count(self.reads) * shapes.value)


def _keeps_narrow(shapes: ActivationShapes) -> bool:
    """Whether an activation keeps its input in the dtype of narrow products (AdapterCosts.narrow_activation)."""
    return shapes.adapter is not None and shapes.adapter.narrow_activation


class Residual(NamedTuple):
    """Dropout of a branch's result, and its sum with the hidden states."""

    part: str
    reads: Dims

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """The mask of its dropout."""
        return [SavedTensor(f"{self.part} mask", self.reads, "mask", 1, True)] * shapes.dropout

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """The gradient of the branch's result, if it is not that of the sum."""
        return shapes.own_bytes(self.reads[1]) * shapes.dropout


class Dropout(NamedTuple):
    """Dropout of embeddings. is_frozen: whether they have no gradient, because a model is trained by
    adapters."""

    part: str
    reads: Dims
    is_frozen: bool = False

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Its mask."""
        return [SavedTensor(f"{self.part} mask", self.reads, "mask", 1, True)] * (shapes.dropout and not self.is_frozen)

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Nothing: the gradient is multiplied in place."""
        return 0.0


class Table(NamedTuple):
    """Rows of tables that are added to the embeddings: of positions, of segments."""

    part: str
    weights: tuple[ParameterSpec, ...]

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """Nothing: numbers of rows are few."""
        return []

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Nothing: the gradients of its rows are few."""
        return 0.0


class Loss(NamedTuple):
    """Cross entropy of logits."""

    part: str
    reads: Dims

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """The logits, over which the gradient is written, unless a chunk of them is made at a time, and
        of each token some floats."""
        floats = SavedTensor("loss", self.reads[:-1], "float", LOSS_FLOATS)
        return [*[SavedTensor("logits", self.reads)] * (shapes.loss_chunks is None), floats]

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """On a CPU, a block of float32 rows for three passes; CUDA's kernels
        (train/kernels/triton/cross_entropy.py) hold a row's block in registers. By hand, bf16 logits of
        2 words a token and 4 tokens fit a CPU's block: 8 floats, 32 bytes. Of a loss in chunks it is what
        forward needs: a chunk's logits, their block and, under sequence parallelism, the input of all tokens;
        the head's backward makes the logits again."""
        block = shapes.loss_block(self.reads)
        if shapes.loss_chunks is None:
            return block
        if shapes.kernels.loss == "logits":  # more of them are there in backward
            return 0.0
        return shapes.logits(self.reads) * shapes.value + block + shapes.stream_bytes(self.reads[1]) * shapes.splits


class Dispatch(NamedTuple):
    """Sends each token's hidden states to the ranks of its experts: `reads` are the positions of
    this rank, `writes` the rows that its experts compute."""

    part: str
    reads: Dims
    writes: Dims

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """The scores of all experts in float32; the numbers, weights and row positions of each token's
        experts; the order of rows that arrive from other ranks. mpctl's layers keep the numbers even if
        the layer is recomputed, so that the second forward chooses the same experts."""
        tokens, chosen = self.reads[:-1], shapes.experts_per_token
        tensors = [
            SavedTensor("scores", (*tokens, "experts"), "float", shapes.score_tensors, True),
            SavedTensor(CHOICE, tokens, "index", chosen, True),
            SavedTensor("places", tokens, "index", chosen * shapes.etp, True),
            SavedTensor("router weights", tokens, "float", shapes.token_weights, True),
        ]
        if shapes.ep * shapes.etp > 1:
            tensors.append(SavedTensor("arrival order", ("routed",), "index"))
        return tensors

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Nothing: the rows of the first product of the experts, whose gradients these are, are gone."""
        return 0.0


class Combine(NamedTuple):
    """Sends the experts' results back, and sums those of a token by the router's weights."""

    part: str
    reads: Dims
    writes: Dims

    def saved(self, shapes: ActivationShapes, kept: set[str]) -> Saved:
        """The experts' results that come back to a token, where its weights are applied to them;
        others apply the weights to the experts' rows before these are sent back."""
        times = shapes.experts_per_token
        return [SavedTensor("combined rows", self.writes, "value", times, True)] * shapes.kernels.weighs_combined

    def needs(self, shapes: ActivationShapes, *, defers: bool = False) -> float:
        """Nothing: gradients of the results take the place of the results."""
        return 0.0


Operation: TypeAlias = Union[Operator, "OperatorGroup"]


@dataclass(frozen=True, eq=False)
class OperatorGroup:
    """The operations of a layer or of an end of a stack. A layer that belongs to an end
    (multi-token prediction) is one operation of its list. Layers of one kind are one object."""

    operations: tuple[Operation, ...] = ()

    @cached_property
    def flat(self) -> tuple[Operator, ...]:
        """The operations with those of layers inside it."""
        return tuple(self._flat())

    def _flat(self) -> Iterator[Operator]:
        for operation in self.operations:
            if isinstance(operation, OperatorGroup):
                yield from operation.flat
            else:
                yield operation

    @cached_property
    def validated(self) -> OperatorGroup:
        """Its operations in a validation, which ends with the first loss: layers of multi-token
        prediction come after it, or are a group without a loss. All of another group without one."""
        losses = [n for n, one in enumerate(self.operations) if isinstance(one, Loss)]
        if not losses and any(isinstance(one, OperatorGroup) for one in self.operations):
            return OperatorGroup()
        if not losses or losses[0] + 1 == len(self.operations):
            return self
        return OperatorGroup(self.operations[: losses[0] + 1])

    @cached_property
    def products(self) -> tuple[MatMul, ...]:
        """Its matrix products."""
        return tuple(one for one in self.flat if isinstance(one, MatMul))

    @cached_property
    def cores(self) -> tuple[AttentionOp, ...]:
        """Its attentions."""
        return tuple(one for one in self.flat if isinstance(one, AttentionOp))

    @cached_property
    def norms(self) -> tuple[Norm, ...]:
        """Its norms of hidden states."""
        return tuple(n for n in self.flat if isinstance(n, Norm) and n.reads[-1] == "hidden")

    @cached_property
    def width_norms(self) -> tuple[Norm, ...]:
        """Its norms of queries and keys over all heads together."""
        norms = (one for one in self.flat if isinstance(one, Norm) and one.reads[-1] == "heads")
        return tuple(norm for norm in norms if norm.weights and norm.weights[0].dims == ("heads",))

    @cached_property
    def has_experts(self) -> bool:
        """Whether tokens are sent to experts in it."""
        return any(isinstance(one, Dispatch) for one in self.flat)

    @cached_property
    def branches(self) -> tuple[Residual, ...]:
        """Residual branches; those of a layer are its attentions and its MLP."""
        return tuple(one for one in self.flat if isinstance(one, Residual))

    @cached_property
    def layers(self) -> tuple[OperatorGroup, ...]:
        """The layers in it: in an end those of multi-token prediction, in a layer itself."""
        inside = tuple(one for one in self.operations if isinstance(one, OperatorGroup))
        return inside or (self,) * bool(self.branches)

    @property
    def makes_logits(self) -> bool:
        """Whether a head is in it."""
        return any(one.makes_logits for one in self.products)

    @cached_property
    def stream(self) -> Dims:
        """Dimensions of the hidden states that a layer reads and writes."""
        return self.branches[-1].reads

    @cached_property
    def weights(self) -> tuple[ParameterSpec, ...]:
        """Its parameters in execution order, each once."""
        found = {w.name: w for one in self.flat for w in parameters_of(one)}
        return tuple(found.values())


def parameters_of(operation: Operation) -> tuple[ParameterSpec, ...]:
    """The parameters of one operation."""
    found: tuple[ParameterSpec, ...] = getattr(operation, "weights", ())
    return found


@dataclass(frozen=True)
class LayerStack:
    """A sequence of layers, with the ends before the first and after the last of them.

    prefix: of parameter names; those of a layer are relative to `{prefix}.N.`, where layers count
    from 0 in each stack. blocks: the layers; layers of one kind share one object, and kinds may
    differ in anything (windows, experts). seq: the dimension that the hidden states have for the
    sequence. entry, exit: embedding and head, or nothing. shared: parameters that every stage with
    a layer of the stack holds (a bias that all layers add). predictions: layers of multi-token
    prediction, which are the entry of a stack without others where they run apart from the loss: it
    reads the result of the stack before.
    """

    prefix: str
    blocks: tuple[OperatorGroup, ...]
    seq: str = "seq"
    entry: OperatorGroup = OperatorGroup()
    exit: OperatorGroup = OperatorGroup()
    shared: tuple[ParameterSpec, ...] = ()
    predictions: int = 0

    def mapped(self, change: Callable[[OperatorGroup], OperatorGroup]) -> LayerStack:
        """The stack with every layer and end changed. Layers of one kind stay one object."""
        kinds = {id(block): change(block) for block in self.kinds}
        blocks = tuple(kinds[id(block)] for block in self.blocks)
        return replace(self, blocks=blocks, entry=change(self.entry), exit=change(self.exit))

    @property
    def layers(self) -> int:
        """The number of its layers."""
        return len(self.blocks)

    def block_of(self, layer: int) -> OperatorGroup:
        """The operations of a layer, by its number in the stack."""
        return self.blocks[layer]

    @cached_property
    def kinds(self) -> tuple[OperatorGroup, ...]:
        """Its kinds of layers, in the order of their first layers."""
        return tuple({id(block): block for block in self.blocks}.values())

    @property
    def name(self) -> str:
        """`encoder` for the prefix `encoder.layers`; empty where a model has one stack."""
        return self.prefix.removesuffix("layers").rstrip(".")

    @property
    def title(self) -> str:
        """`encoder blocks`; `blocks` where a model has one stack."""
        return f"{self.name} blocks".lstrip()

    @property
    def figure_name(self) -> str:
        """The stack in the name of a figure: `encoder-blocks`."""
        return self.title.replace(" ", "-")


def with_packed_rows(stacks: Iterable[LayerStack], packed: PackedAttention) -> tuple[LayerStack, ...]:
    """The stacks of a model whose rows hold several samples, which attention keeps apart."""

    def changed(one: Operation) -> Operation:
        if isinstance(one, OperatorGroup):
            return layer(one)
        if isinstance(one, AttentionOp):
            return one._replace(has_sample_mask=packed.has_mask, segment=packed.segment)
        return one

    def layer(group: OperatorGroup) -> OperatorGroup:
        return OperatorGroup(tuple(map(changed, group.operations)))

    return tuple(stack.mapped(layer) for stack in stacks)


def predictions_apart(stacks: Sequence[LayerStack]) -> tuple[LayerStack, ...]:
    """The stacks of a model whose layers of multi-token prediction run in another stage than the loss: the
    last stack ends with its norm; behind it comes one of these layers, which ends with all heads and losses."""
    *before, last = stacks
    operations, name = last.exit.operations, f"{last.name} mtp".lstrip()
    starts = [n for n, one in enumerate(operations) if isinstance(one, MatMul) and one.is_lookup]
    if not starts:
        return tuple(stacks)

    def is_head(one: Operation) -> bool:
        return isinstance(one, Loss) or (isinstance(one, MatMul) and one.makes_logits)

    ending = OperatorGroup(tuple(one for one in operations[: starts[0]] if not is_head(one)))
    layers = OperatorGroup(tuple(one for one in operations[starts[0] :] if not is_head(one)))
    heads = OperatorGroup(tuple(filter(is_head, operations)))
    apart = LayerStack(name, (), last.seq, layers, heads, predictions=len(starts))
    return (*before, replace(last, exit=ending), apart)
