"""AdamW over what a rank steps of each parameter.

Parameters in 16 bit have a float32 master copy that the optimizer steps (mixed precision,
arXiv 1710.03740). A rank steps whole parameters, or under ZeRO its slice of every bucket: AdamW
treats each element alone, so the update is the same. AdamW: arXiv 1711.05101; norms and biases are
not decayed. Frozen parameters (training.freeze) have no gradient, no moments, no master, and what
the model computes with is their value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpctl.runtime.lr_schedule import learning_rate
from mpctl.runtime.zero.gradients import GradientBuffer
from mpctl.runtime.zero.param_store import ParamStore, SlicedParamStore, Zero3ParamStore
from mpctl.spec.training import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
TORCH_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
}  # fmt: skip


class Optimizer:
    """AdamW over float32 (or float64) values: the parameters themselves, or their masters.

    stores: the values of every bucket of the buffer, in its order. values: the tensors stepped,
    parameters: which each belongs to, None for padding.
    """

    def __init__(
        self, buffer: GradientBuffer, stores: Sequence[ParamStore], training: TrainingSpec,
        frozen: Sequence[Zero3ParamStore] = (),
    ) -> None:  # fmt: skip
        self.training, self.stores, self.frozen = training, stores, frozen
        stepped = [piece for store in stores for piece in store.stepped]
        self.parameters = [parameter for parameter, _, _ in stepped]
        self.values = [value for _, _, value in stepped]
        self.gradients = [g for store in buffer.stores for _, _, g in store.pieces]
        self.store_of: dict[Tensor, ParamStore] = {
            p: store for store in (*stores, *frozen) for p in store.block.parameters
        }
        self.trained = {p for store in stores for p in store.block.parameters}
        self.updates, self.before = 0, dict[Tensor, int]()  # since this start; of each until then
        decays = [p is not None and p.dim() > 1 for p in self.parameters]
        pairs = list(zip(self.values, decays, strict=True))
        self.adam = torch.optim.AdamW(
            [
                {"params": [v for v, is_decayed in pairs if is_decayed],
                 "weight_decay": training.weight_decay},
                {"params": [v for v, is_decayed in pairs if not is_decayed], "weight_decay": 0.0},
            ],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )  # fmt: skip

    def step(self, step: int) -> float:
        """One update at the schedule's rate of `step`; returns that rate."""
        rate = learning_rate(self.training, step)
        for group in self.adam.param_groups:
            group["lr"] = rate
        for value, gradient in zip(self.values, self.gradients, strict=True):
            value.grad = gradient.to(value.dtype)  # the view itself where the dtypes agree
        self.adam.step()
        self.updates += 1
        self.publish()
        return rate

    def updates_of(self, parameter: Tensor) -> int:
        """How many updates the moments of a trained parameter have seen: AdamW's step."""
        return self.before.get(parameter, 0) + self.updates

    @torch.no_grad()
    def publish(self) -> None:
        """What was stepped -> the parameters that the model computes with, here and on the other
        replicas: every rank calls it."""
        for pending in [store.publish() for store in self.stores]:
            if pending is not None:
                pending.wait()

    def value_of(self, parameter: Tensor) -> Tensor:
        """A parameter's whole value, to be written to and given to `keep`: what is stepped where
        that is whole here, else a copy in host memory, for which all replicas must ask together."""
        store = self.store_of.get(parameter)
        if store is None:
            return parameter
        if isinstance(store, SlicedParamStore):
            return store.whole(parameter)
        return next(value for p, _, value in store.stepped if p is parameter)

    @torch.no_grad()
    def keep(self, parameter: Tensor, value: Tensor) -> None:
        """Take a whole value that was written to `value_of`."""
        store = self.store_of.get(parameter)
        if isinstance(store, SlicedParamStore):
            store.keep(parameter, value)

    def states(self) -> Iterator[tuple[nn.Parameter, dict[str, Tensor]]]:
        """Of each trained parameter its whole value and moments, 0 before a step, for a checkpoint.
        All replicas go through it together: of slices it is gathered, a bucket at a time. In
        forward order, which is the reverse of the buckets'."""
        for store in reversed(self.stores):
            fields: dict[str, list[Tensor]] = {"value": [v.detach() for _, _, v in store.stepped]}
            fields |= {name: [self._moment(v, name) for _, _, v in store.stepped]
                       for name in MOMENTS}  # fmt: skip
            wholes = {name: store.wholes(parts) for name, parts in fields.items()}
            for number, parameter in reversed(list(enumerate(store.block.parameters))):
                yield parameter, {name: whole[number] for name, whole in wholes.items()}

    def frozen_values(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Of those that are in slices too, as `states`."""
        for store in self.frozen:
            whole = store.wholes([value for _, _, value in store.stepped])
            yield from zip(store.block.parameters, whole, strict=True)

    def _moment(self, value: Tensor, name: str) -> Tensor:
        held: Any = self.adam.state.get(value, {})
        found: Tensor = held[name] if name in held else torch.zeros_like(value)
        return found.detach()

    @torch.no_grad()
    def load(self, parameter: nn.Parameter, tensors: dict[str, Tensor], *, updates: int) -> None:
        """The inverse of `states`, after so many updates; without moments, which a parameter that
        was frozen has not, its updates start anew."""
        self.before[parameter] = (updates if tensors.keys() > {"value"} else 0) - self.updates
        for held, start, value in self.store_of[parameter].stepped:
            if held is not parameter:
                continue
            own = {name: _cut(tensor, start, value) for name, tensor in tensors.items()}
            value.copy_(own.pop("value"))
            self.adam.state.pop(value, None)
            if own:
                count = torch.tensor(float(updates), device=value.device)
                self.adam.state[value] = {"step": count, **own}


def _cut(whole: Tensor, start: int, value: Tensor) -> Tensor:
    """The elements of a whole parameter that `value` stands for."""
    part = whole.reshape(-1)[start : start + value.numel()].view_as(value)
    is_view = part.untyped_storage().nbytes() > part.nbytes
    return part.to(value.device, copy=is_view)
