"""The optimizer over a rank's parameters or slices of them, and the learning rate of every step.

Parameters in 16 bit have a float32 master copy that the optimizer steps (mixed precision,
arXiv 1710.03740), unless training.master_weights is false: then they are stepped themselves. A rank
updates full parameters, or under ZeRO its slice of every bucket: AdamW, Lion and SGD are elementwise, so
the update is the same. Norms and biases are not decayed (ParameterSpec.decays). Frozen parameters
(training.freeze) have no gradient, no moments and no master.

Muon updates the matrices of layers, of which it needs all elements (muon.py), and AdamW the rest.

The device's kernels make AdamW's update (train/kernels/adamw.py). Those of a GPU write the parameters of
16 bits in the same pass; elsewhere `publish` copies them. The others, and AdamW with narrower states, are
in train/kernels/update.py.

The learning rate has a warm-up, then one of four schedules. Step s counts from 0. With w =
warmup_steps, D = lr_decay_steps (steps when absent), peak = learning_rate and low =
min_learning_rate (absent: 3e-5, at most the peak):

    warm-up   s < w                peak (s + 1) / w
    constant                       peak
    linear    x = (s - w) / (D - w), at most 1    peak - (peak - low) x
    cosine                         low + (peak - low) (1 + cos(pi x)) / 2       arXiv 1608.03983
    wsd       until D - a          peak, with a = lr_wsd_decay_steps             arXiv 2404.06395
              then, y = (s - D + a) / a, at most 1      low + (peak - low) f(y)

f by lr_wsd_decay_style, 1 at y = 0 and 0 at y = 1 (Megatron-LM's names and formulas): linear 1 - y,
cosine (1 + cos(pi y)) / 2, exponential 2 (1/2)^y - 1, minus_sqrt 1 - sqrt(y). From step D on the
rate is low, under constant the peak. A run that is resumed with more steps keeps its rates where
lr_decay_steps is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mpctl.model.layout.matrices import Matrix
from mpctl.spec.training import Optimizer as OptimizerName
from mpctl.spec.training import TrainingSpec
from mpctl.train.checkpoint.snapshot import MOMENTS
from mpctl.train.kernels.adamw import AdamWStep
from mpctl.train.kernels.backend import TORCH_BACKEND, KernelBackend
from mpctl.train.kernels.update import RULES, UpdateSettings, update_tensors
from mpctl.train.runtime.muon import MOMENT, Muon, StepScalars
from mpctl.train.runtime.zero.gradients import GradientBuffer
from mpctl.train.runtime.zero.param_store import ParamStore, SlicedParamStore, Zero3ParamStore
from mpctl.train.transport.group import Group


@dataclass(frozen=True)
class ParameterGroup:
    """Tensors that are stepped with the same weight decay."""

    values: Sequence[Tensor]
    weight_decay: float


@dataclass
class UpdateRule:
    """Steps the values of its groups by their `.grad`. optimizer: one of those in MOMENTS; beta1, beta2,
    epsilon, momentum: as in its paper.

    dtype: of the moments, that of the values when absent. kernels: make AdamW's update. copies: of
    values, by value, in the dtype of the model. state: for each value, its moments (shaped like the value)
    and `step`, a tensor with the number of updates that they have seen; absent before the first step.
    """

    groups: Sequence[ParameterGroup]
    beta1: float
    beta2: float
    epsilon: float
    kernels: KernelBackend = TORCH_BACKEND
    copies: Mapping[Tensor, Tensor] = field(default_factory=dict)
    state: dict[Tensor, dict[str, Tensor]] = field(default_factory=dict)
    optimizer: OptimizerName = "adamw"
    momentum: float = 0.0
    dtype: torch.dtype | None = None

    @property
    def moments(self) -> tuple[str, ...]:
        """The names of the moments of a value."""
        return () if self.optimizer == "sgd" and not self.momentum else MOMENTS[self.optimizer]

    @torch.no_grad()
    def step(self, rate: float, *, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> bool:
        """Update every value that has a gradient; rate: the learning rate. Returns whether all
        copies were written too.

        grad_scale, found_inf: float32 scalars on the device of the values. Gradients are divided by
        grad_scale, possibly in place; if found_inf is 1, values, moments and counts do not change.
        """
        written = [self._update(group, rate, grad_scale, found_inf) for group in self.groups]
        return all(written)

    def _update(self, group: ParameterGroup, rate: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> bool:
        values = [value for value in group.values if value.grad is not None]
        gradients = [value.grad for value in values if value.grad is not None]
        states = [self.state_of(value) for value in values]
        counts = [state["step"] for state in states]
        if self.optimizer != "adamw" or any(self.dtype not in (None, value.dtype) for value in values):
            settings = (rate, group.weight_decay, self.beta1, self.beta2, self.epsilon, self.momentum)
            moments = [[state[name] for name in self.moments] for state in states]
            rule = RULES[self.optimizer]
            update_tensors(rule, UpdateSettings(*settings), values, gradients, moments, counts, grad_scale, found_inf)
            return not self.copies
        return self.kernels.adamw(
            AdamWStep(
                values,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                counts,
                [self.copies[value] for value in values if value in self.copies],
                rate,
                group.weight_decay,
                self.beta1,
                self.beta2,
                self.epsilon,
                grad_scale,
                found_inf,
            )
        )

    def state_of(self, value: Tensor) -> dict[str, Tensor]:
        """The state of a value, created with moments of 0 at its first step."""
        if value not in self.state:
            self.state[value] = {
                "step": torch.zeros((), dtype=torch.float32, device=value.device),
                **{name: torch.zeros_like(value, dtype=self.dtype) for name in self.moments},
            }
        return self.state[value]


WSD_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda y: 1 - y,
    "cosine": lambda y: 0.5 * (1 + math.cos(math.pi * y)),
    "exponential": lambda y: 2 * 0.5**y - 1,
    "minus_sqrt": lambda y: 1 - math.sqrt(y),
}


def learning_rate(training: TrainingSpec, step: int) -> float:
    """The rate of step `step`, from 0; defined for every step, beyond the last one too."""
    peak, low, warmup = training.learning_rate, training.lowest_rate, training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    end = training.lr_decay_steps or training.steps
    if training.lr_schedule == "constant":
        return peak
    if training.lr_schedule == "wsd":
        decay = training.lr_wsd_decay_steps or 0
        y = _progress(step, end - decay, decay)
        return peak if y == 0 else low + (peak - low) * WSD_SHAPES[training.lr_wsd_decay_style](y)
    x = _progress(step, warmup, end - warmup)
    if training.lr_schedule == "linear":
        return low + (peak - low) * (1 - x)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * x))


def _progress(step: int, start: int, span: int) -> float:
    """Return the progress of a decay of `span` steps from `start`: 0 to 1."""
    return min(1.0, max(0, step - start) / max(1, span))


TORCH_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,  # of parameters and activations; only products are in 8 bits
}


class Optimizer:
    """An update rule over values: the parameters themselves, or their float32 masters.

    stores: those of the buffer's buckets, in its order; frozen: those of frozen parameters that are
    sharded. publishes_ahead: whether the gather of updated parameters may still be running until a
    forward waits for it (zero/gather.py). before_step: called before a step changes the tensors; it
    waits for who may still read them, such as a checkpoint's copies. kernels: make the update.
    is_saved: whether checkpoints hold a parameter, by name.
    matrices: those that Muon updates, by name; groups: by name, whose ranks complete them.
    values: the tensors that are updated; parameters: which parameter each belongs to, None for
    padding.
    """

    def __init__(
        self,
        buffer: GradientBuffer,
        stores: Sequence[ParamStore],
        training: TrainingSpec,
        frozen: Sequence[Zero3ParamStore] = (),
        *,
        publishes_ahead: bool = False,
        before_step: Callable[[], None] = lambda: None,
        kernels: KernelBackend = TORCH_BACKEND,
        matrices: Mapping[str, Matrix] | None = None,
        groups: Mapping[str, Group] | None = None,
        is_saved: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.training, self.stores, self.frozen = training, stores, frozen
        self.publishes_ahead, self.before_step, self.is_saved = publishes_ahead, before_step, is_saved
        stepped = [part for store in stores for part in store.stepped]
        self.parameters = [part.parameter for part in stepped]
        self.values = [part.values for part in stepped]
        self.gradients = [part.values for store in buffer.stores for part in store.slices]
        self.store_of: dict[Tensor, ParamStore] = {
            p: store for store in (*stores, *frozen) for p in store.shard.parameters
        }
        self.trained = {p for store in stores for p in store.shard.parameters}
        self.updates = 0  # since this start
        self.earlier_updates: dict[Tensor, int] = {}  # of each parameter, before this start
        decayed = {parameter for store in stores for parameter in store.shard.decayed}
        self.muon = self._make_muon(matrices or {}, groups or {})
        of_muon = self.muon.of_parameter if self.muon else {}
        pairs = [(v, p in decayed) for v, p in zip(self.values, self.parameters, strict=True) if p not in of_muon]
        self.rule = UpdateRule(
            [
                ParameterGroup([v for v, decays in pairs if decays], training.weight_decay),
                ParameterGroup([v for v, decays in pairs if not decays], 0.0),
            ],
            training.beta1,
            training.beta2,
            training.epsilon,
            kernels,
            {value: copy for store in stores for copy, value in store.copies},
            state=self.muon.state if self.muon else {},
            optimizer="adamw" if self.muon else training.optimizer,
            momentum=training.momentum,
            dtype=self._moment_dtype,
        )

    @property
    def _moment_dtype(self) -> torch.dtype | None:
        return TORCH_DTYPES[self.training.optimizer_dtype] if self.training.optimizer_dtype else None

    def _make_muon(self, matrices: Mapping[str, Matrix], groups: Mapping[str, Group]) -> Muon | None:
        """Make Muon's part of the update; None if the optimizer is another. Products are in bfloat16 where those of
        training are in 16 bits or fewer."""
        t = self.training
        if t.optimizer != "muon":
            return None
        products = torch.bfloat16 if TORCH_DTYPES[t.dtype].itemsize == 2 else None
        return Muon(self.stores, matrices, groups, t.muon, t.weight_decay, products, self._moment_dtype)

    def step(self, step: int, *, factor: Tensor | None = None, is_bad: Tensor | None = None) -> None:
        """Update every parameter at the schedule's rate of `step`, from 0.

        factor: multiplies the gradients; is_bad: 1 if nothing is to change. Both are scalars on the
        device. An update that changed nothing counts in `updates` until the caller subtracts it.
        """
        self.wait_for_parameters()
        self.before_step()
        for value, gradient in zip(self.values, self.gradients, strict=True):
            value.grad = gradient.to(value.dtype)  # the view itself where the dtypes agree
        scale = None
        if factor is not None:
            scale = None if self._multiplied(factor) else (1 / factor).float()
        found = None if is_bad is None else is_bad.float()
        rate = learning_rate(self.training, step)
        has_copied = self.rule.step(rate, grad_scale=scale, found_inf=found) and self.muon is None
        if self.muon is not None:
            self.muon.step(StepScalars(rate, scale, found))
        for value, gradient in zip(self.values, self.gradients, strict=True):
            if gradient.dtype != value.dtype:
                value.grad = None  # a parameter without a master would have it added to the next one
        self.updates += 1
        self.publish(has_copied=has_copied)

    @torch.no_grad()
    def _multiplied(self, factor: Tensor) -> bool:
        """Multiply gradients if they are float64, for which AdamW's float32 scale is too coarse;
        returns whether they are."""
        is_wide = any(value.dtype == torch.float64 for value in self.values)
        if is_wide:
            torch._foreach_mul_([v.grad for v in self.values if v.grad is not None], factor)
        return is_wide

    def updates_of(self, parameter: Tensor) -> int:
        """Return the number of updates in the moments of a trained parameter: AdamW's step."""
        return self.earlier_updates.get(parameter, 0) + self.updates

    def saved_dtypes(self, parameter: Tensor) -> dict[str, torch.dtype]:
        """The data types of what `states` yields of a trained parameter, by name."""
        value = self.store_of[parameter].stepped_dtype
        return {"value": value, **dict.fromkeys(self.moments_of(parameter), self.rule.dtype or value)}

    @torch.no_grad()
    def make_states(self) -> None:
        """Make the state of every value now, as after an update."""
        for value, parameter in zip(self.values, self.parameters, strict=True):
            is_muons = self.muon is not None and parameter in self.muon.of_parameter
            state_of = self.muon.state_of if self.muon is not None and is_muons else self.rule.state_of
            state_of(value)["step"].fill_(1)

    def moments_of(self, parameter: Tensor | None) -> tuple[str, ...]:
        """The names of the moments of a trained parameter, or of padding."""
        return (MOMENT,) if self.muon is not None and parameter in self.muon.of_parameter else self.rule.moments

    @property
    def gathers_states(self) -> bool:
        """Whether `states` and `frozen_values` yield gathered copies, freed after use; otherwise
        they yield the tensors that are updated."""
        return any(isinstance(store, SlicedParamStore) for store in (*self.stores, *self.frozen))

    @torch.no_grad()
    def publish(self, *, has_copied: bool = False) -> None:
        """Copy the updated values to the parameters that the model computes with, here and on the
        other replicas; every rank calls it. has_copied: those of this rank have been."""
        if not has_copied and (copies := [pair for store in self.stores for pair in store.copies]):
            self.wait_for_parameters()
            parameters, masters = zip(*copies, strict=True)
            torch._foreach_copy_(parameters, masters)  # some tens of them in a kernel on a GPU
        for store in reversed(self.stores):  # in the order in which forward needs them
            store.publish()
        if not self.publishes_ahead:
            self.wait_for_parameters()

    def wait_for_parameters(self) -> None:
        """Wait until all published parameters have arrived."""
        for store in self.stores:
            store.arrive()

    def full_value(self, parameter: Tensor) -> Tensor:
        """See ParamStore.full_value; a parameter that is in no store is returned itself."""
        store = self.store_of.get(parameter)
        return parameter if store is None else store.full_value(parameter)

    @torch.no_grad()
    def set_value(self, parameter: Tensor, value: Tensor) -> None:
        """Take over the full value written to the tensor that `full_value` returned."""
        if (store := self.store_of.get(parameter)) is not None:
            store.set_value(parameter, value)

    def states(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Each trained parameter with its full `value` and moments (0 before a step), for a
        checkpoint.

        All replicas iterate together: slices are gathered one bucket at a time, in forward order,
        which is the reverse of the order of buckets.
        """
        for store in reversed(self.stores):
            values = [part.values.detach() for part in store.stepped]
            names = [self.moments_of(part.parameter) for part in store.stepped]
            most = max(len(self.moments_of(parameter)) for parameter in store.shard.parameters)
            moments = [
                [self._moment(part.values, *own[n : n + 1]) for part, own in zip(store.stepped, names, strict=True)]
                for n in range(most)
            ]
            value, *full = (store.gather_full(parts) for parts in (values, *moments))
            for number, parameter in reversed(list(enumerate(store.shard.parameters))):
                own = zip(self.moments_of(parameter), full, strict=False)
                yield parameter, {"value": value[number], **{name: tensors[number] for name, tensors in own}}
            del value, full, own  # before the next bucket

    def frozen_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The full values of frozen parameters that are sharded, of buckets that checkpoints hold;
        replicas iterate together, as for `states`."""
        for store in self.frozen:
            if any(map(self.is_saved, store.shard.bucket.names)):
                full = store.gather_full([part.values for part in store.stepped])
                yield from zip(store.shard.parameters, full, strict=True)
                del full  # before the next bucket

    def _moment(self, value: Tensor, name: str = "") -> Tensor:
        """A moment of a value; zeros before its first step, and of one that has fewer moments than others."""
        state = self.rule.state.get(value, {})
        moment = state[name] if name in state else torch.zeros_like(value, dtype=self.rule.dtype)
        return moment.detach()

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, tensors: dict[str, Tensor], *, updates: int) -> None:
        """The inverse of `states`, after so many updates. If moments are absent, since the parameter was
        frozen or another optimizer's, its count of updates starts at 0."""
        has_moments = tensors.keys() == {"value", *self.moments_of(parameter)}
        self.earlier_updates[parameter] = (updates if has_moments else 0) - self.updates
        for owner, start, value in self.store_of[parameter].stepped:
            if owner is not parameter:
                continue
            local = {name: _elements(tensor, start, value) for name, tensor in tensors.items()}
            value.copy_(local.pop("value"))
            self.rule.state.pop(value, None)
            if local:
                count = torch.tensor(float(updates), device=value.device)
                self.rule.state[value] = {"step": count, **local}


def _elements(full: Tensor, start: int, like: Tensor) -> Tensor:
    """The elements of a full parameter from index `start` on, in the number and shape of `like`."""
    part = full.reshape(-1)[start : start + like.numel()].view_as(like)
    is_view = part.untyped_storage().nbytes() > part.nbytes
    return part.to(like.device, copy=is_view)
