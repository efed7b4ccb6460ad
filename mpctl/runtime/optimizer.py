"""Gradients in one flat buffer, the norm of the whole model, AdamW, and the learning rate.

Parameters in 16 bit have a float32 master copy that the optimizer steps (mixed precision,
arXiv 1710.03740); gradients are accumulated and reduced in the reduction dtype. The norm counts
each parameter of the model once: shards are summed over tp, replicas are counted on one rank only,
and what several pipeline stages hold on the first of them.
AdamW: arXiv 1711.05101; norms and biases are not decayed. Frozen parameters (training.freeze) are
in neither: no gradient, no moments, no master, and what the model computes with is their value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from mpctl.kernels.group import Group
from mpctl.kernels.parameters import is_partial, is_sharded
from mpctl.spec.training import Training

NORM_BLOCK = 1 << 16
TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def learning_rate(training: Training, step: int) -> float:
    """Linear warm-up, then half a cosine down to the minimum; `step` counts from 0."""
    peak, low = training.learning_rate, training.min_learning_rate
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    span = max(1, training.steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / span)
    return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * progress))


class GradientBuffer:
    """Every gradient of a rank as one tensor: split parameters first, replicated ones after, and
    last those of which each tp rank computes a part (sequence parallelism).

    A micro batch adds to it; `reduce` sums it over the replicas once a step, in one message.
    copies: parameters that several pipeline stages hold, in one order on all, with the group of
    these stages. A stage may train nothing.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, *,
        copies: Mapping[nn.Parameter, Group] | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        held = list(parameters)
        self.parameters = sorted(held, key=lambda p: (not is_sharded(p), is_partial(p)))
        total = sum(p.numel() for p in held)
        self.flat = torch.zeros(total, dtype=dtype, device=device or held[0].device)
        self.copies = copies or {}
        self.split = sum(p.numel() for p in held if is_sharded(p))
        self.partial = total - sum(p.numel() for p in held if is_partial(p))
        self.views = self._make_views()

    def _make_views(self) -> list[Tensor]:
        views, start = [], 0
        for parameter in self.parameters:
            view = self.flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            views.append(view)
            if parameter.dtype == self.flat.dtype:
                parameter.grad = view  # autograd adds to it in place
            else:
                parameter.register_post_accumulate_grad_hook(_adder(view))
        return views

    def zero(self) -> None:
        self.flat.zero_()

    def reduce(self, tp: Group, replicas: Group) -> None:
        """Sum partial gradients over tp, and all of them over the replicas: losses were divided by
        the global batch, so that nothing is averaged.

        Copies are summed over their stages last. A ring adds in an order that depends on where in
        the buffer a gradient lies, and that differs between stages; the last sum gives all the same
        bits.
        """
        if self.partial < len(self.flat):
            tp.all_reduce(self.flat[self.partial :])
        if len(self.flat):
            replicas.all_reduce(self.flat)
        views = dict(zip(self.parameters, self.views, strict=True))
        for parameter, stages in self.copies.items():
            stages.all_reduce(views[parameter])

    def norm(self, tp: Group, pp: Group | None = None) -> float:
        """L2 norm of the whole model's gradient, each parameter once."""
        own, both = self._squares(0, self.split), self._squares(self.split, len(self.flat))
        total = tp.all_reduce(own) + both
        return float((pp.all_reduce(total) if pp else total).sqrt())

    def _squares(self, start: int, stop: int) -> Tensor:
        """Of what lies there, less the copies that another stage counts."""
        parts, at = [], 0
        for parameter in self.parameters:
            end = at + parameter.numel()
            copy = self.copies.get(parameter)
            if copy is not None and copy.rank > 0 and start <= at < stop:
                parts.append(self.flat[start:at])
                start = end
            at = end
        return _squares([*parts, self.flat[start:stop]])

    def clip(self, norm: float, bound: float) -> None:
        """Scale so that the norm is at most `bound`; 0 means no bound."""
        if 0 < bound < norm:
            self.flat.mul_(bound / norm)


def _squares(parts: Sequence[Tensor]) -> Tensor:
    """Sum of squares, float64: exact enough in blocks without a wide copy of the whole."""
    blocks = [block for part in parts if len(part) for block in part.split(NORM_BLOCK)]
    wide = torch.promote_types(parts[0].dtype, torch.float32)  # of 16 bit, 3 digits would be left
    norms = torch._foreach_norm(blocks, dtype=wide) if blocks else [parts[0].new_zeros(())]
    return torch.stack(norms).double().square().sum()


def _adder(view: Tensor):  # type: ignore[no-untyped-def]
    def add(parameter: Tensor) -> None:
        if parameter.grad is not None:  # else it is put off (kernels/later.py)
            view.add_(parameter.grad)
            parameter.grad = None

    return add


class Optimizer:
    """AdamW over float32 (or float64) values: the parameters themselves, or their masters."""

    def __init__(self, buffer: GradientBuffer, training: Training) -> None:
        self.training = training
        self.parameters = buffer.parameters
        self.values = [_master(parameter) for parameter in self.parameters]
        self.masters: dict[Tensor, Tensor] = dict(zip(self.parameters, self.values, strict=True))
        self.gradients = buffer.views
        decayed = [v for v in self.values if v.dim() > 1]
        plain = [v for v in self.values if v.dim() <= 1]
        self.adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": training.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=training.learning_rate,
            betas=(training.beta1, training.beta2),
            eps=training.epsilon,
            fused=True,
        )

    def step(self, step: int) -> float:
        """One update at the schedule's rate of `step`; returns that rate."""
        rate = learning_rate(self.training, step)
        for group in self.adam.param_groups:
            group["lr"] = rate
        for value, gradient in zip(self.values, self.gradients, strict=True):
            value.grad = gradient.to(value.dtype)  # the view itself where the dtypes agree
        self.adam.step()
        self.publish()
        return rate

    @torch.no_grad()
    def publish(self) -> None:
        """Masters -> the parameters that the model computes with."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            if parameter is not value:
                parameter.copy_(value)

    def value_of(self, parameter: Tensor) -> Tensor:
        """What a parameter's value is written to: its master where it has one."""
        return self.masters.get(parameter, parameter)

    def state(self, index: int) -> dict[str, Tensor]:
        """Value and moments of one parameter, for a checkpoint; moments are 0 before a step."""
        value = self.values[index]
        held = self.adam.state.get(value, {})
        moments = {name: held.get(name, torch.zeros_like(value)) for name in MOMENTS}
        return {"value": value.detach(), **moments}

    @torch.no_grad()
    def load(self, index: int, tensors: dict[str, Tensor], *, step: int) -> None:
        """The inverse of `state`, after `step` updates; without moments, which a parameter that was
        frozen has not, its updates start anew."""
        value = self.values[index]
        value.copy_(tensors["value"])
        if tensors.keys() == {"value"}:
            self.adam.state.pop(value, None)
            return
        count = torch.tensor(float(step), device=value.device)
        self.adam.state[value] = {"step": count, **{name: tensors[name] for name in MOMENTS}}


MOMENTS = ("exp_avg", "exp_avg_sq")


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return parameter
    return parameter.detach().float().requires_grad_()
