"""Routing of tokens: the choice of experts, their weights, and the rows sent there and back.

A router scores the T tokens of a rank for E experts, and each token goes to k of them:

    logits   x W^T, in float32 whatever the dtype of x (float64 for float64)
    scores   softmax over the experts, or each logit's sigmoid
    choice   the k largest scores plus a correction bias, which only chooses (arXiv 2408.15664);
             equal ones by expert number; within the best groups of experts, if groups are limited
             (arXiv 2405.04434, section 2.1.2: a group counts as its largest score; arXiv
             2412.19437, section 2.1.2: as the sum of its best two)
    weights  scores of the chosen, divided by their sum if renormalized, times a factor; a
             renormalized softmax is the softmax over the chosen logits (Mixtral, arXiv 2401.04088)

By hand: logits (ln 6, ln 3, ln 1), k = 2: experts 0 and 1 with weights .6 and .3, renormalized 2/3
and 1/3. With a bias of (0, -1, 0) on the softmax's scores (.6, .3, .1): experts 0 and 2.

Rows of tokens are sent sorted by expert, and results come back in that order. `places[c, j, t]` is
the row of token t for the j-th of its experts, which are in ascending order, in copy c. Sums over
the k rows of a token are in this order, so that they do not depend on the layout or on time.

Letters: T tokens, h hidden, E experts, k experts of a token, x copies of each row, n ranks, e
groups of ranks among which the experts are divided, R rows.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Score = Literal["softmax", "sigmoid"]
# Added to a sum of sigmoids that divides (DeepSeek-V3's code).
LEAST_SUM = 1e-20


def wide_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of scores, weights and sums for tokens of a dtype: float64 for float64, else
    float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T in float32 (float64 for float64): x [T, h], weight [E, h] -> [T, E]. Saves x as it is
    for backward, not the wider copy."""
    result: Tensor = _WideProduct.apply(x, weight)
    return result


def expert_scores(logits: Tensor, score: Score) -> Tensor:
    """The scores of all experts, [T, E] -> [T, E]."""
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


class ChosenExperts(NamedTuple):
    """experts [T, k]: numbers in ascending order. near_ties: a count, int64 of no dimensions: how
    many tokens have a next expert, or group, so close that rounding could have chosen it."""

    experts: Tensor
    near_ties: Tensor


def choose_experts(
    scores: Tensor, k: int, *, groups: int = 1, groups_per_token: int = 1, best: int = 1, rounding: float = 0.0
) -> ChosenExperts:
    """The k experts with the largest scores [T, E]; of equal ones those with the lower numbers.

    groups: equal blocks of experts, of which a token goes to `groups_per_token`, those with the
    largest sums of their `best` scores. rounding: relative to a token's largest score, the
    difference below which the choice counts as a near tie. Nothing is differentiable here.
    """
    scores = scores.detach()
    margin = scores.abs().amax(-1).mul_(rounding)
    near_groups = None
    if groups_per_token < groups:
        by_group = scores.unflatten(-1, (groups, -1))
        of_group = by_group.topk(min(best, by_group.shape[-1])).values.sum(-1)
        kept, near_groups = _largest(of_group, groups_per_token, margin)
        masked = torch.full_like(by_group, -torch.inf)
        index = kept[..., None].expand(-1, -1, by_group.shape[-1])
        scores = masked.scatter_(1, index, by_group.gather(1, index)).flatten(-2)
    largest, near = _largest(scores, k, margin)
    near = near if near_groups is None else near | near_groups
    return ChosenExperts(largest.sort(-1).values, near.sum())


def _largest(scores: Tensor, k: int, margin: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the k largest scores [T, E], [T, k], and whether the next one is within the
    margin [T]. A stable sort, since torch.topk takes any of equal ones."""
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    if k == scores.shape[-1]:
        return order, torch.zeros_like(margin, dtype=torch.bool)
    return order[:, :k], values[:, k - 1] - values[:, k] <= margin


def expert_weights(
    logits: Tensor, scores: Tensor, experts: Tensor, score: Score, *, renormalize: bool, scale: float = 1.0
) -> Tensor:
    """The weights of the chosen experts: logits and scores [T, E], experts [T, k] -> [T, k]."""
    if score == "softmax" and renormalize:
        weights = logits.gather(-1, experts).softmax(-1)
    else:
        weights = scores.gather(-1, experts)
        if renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return weights if scale == 1 else weights * scale


def expert_counts(experts: Tensor, samples: int, number: int) -> Tensor:
    """Count the tokens for each of `number` experts in each of `samples` equal blocks of tokens:
    [T, k] -> int64 [samples, number]."""
    of_sample = experts.view(samples, -1)
    counts = torch.zeros(samples, number, dtype=torch.int64, device=experts.device)
    return counts.scatter_add_(1, of_sample, torch.ones_like(of_sample))


def balance_loss(scores: Tensor, fractions: Tensor, score: Score, *, length: int) -> Tensor:
    """The sum over samples of E sum_i f_i P_i (Switch, arXiv 2101.03961, section 2.2; by sequence,
    arXiv 2412.19437, equations 17 to 20), 1 a sample if balanced.

    scores [b, s, E] of this rank's positions. P_i is the mean probability of expert i over the
    `length` positions of a sample: the result of a rank with s of them is its summand. A
    probability is a softmax's score, or a sigmoid over the sum of the token's. fractions: f, the
    part of the choices that fell on each expert, [b, E] or [E] for all samples alike, without
    gradient.
    """
    if score == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + LEAST_SUM)
    return (scores.sum(1) * fractions).sum() * (scores.shape[-1] / length)


def z_loss(logits: Tensor, *, length: int) -> Tensor:
    """The sum over samples of the mean over `length` positions of log(sum exp)^2 (ST-MoE, arXiv
    2202.08906, section 3.2): [.., E] -> a scalar."""
    return logits.logsumexp(-1).square().sum() / length


def with_loss(weights: Tensor, loss: Tensor, scale: float) -> Tensor:
    """`weights`, whose backward also adds `scale` times the gradient of `loss`, a scalar that
    nothing else reads."""
    result: Tensor = _WithLoss.apply(weights, loss, scale) if loss.requires_grad else weights
    return result


class RowOrder(NamedTuple):
    """Order in which rows are sent.

    sources [x k T]: the token of each row. places [x, k, T]: the row of each token, expert and
    copy.
    """

    sources: Tensor
    places: Tensor


def rows_by_expert(experts: Tensor, counts: Tensor, *, parts: int = 1, copies: int = 1) -> RowOrder:
    """The order of the rows of experts [T, k]: by block of experts, the experts being divided into
    `parts` equal blocks, then by copy, by expert and by token. counts [E]: rows of each expert."""
    tokens, k = experts.shape
    order = experts.flatten().argsort(stable=True)  # [T k] -> rows by expert, then token
    numbers = torch.arange(tokens * k, device=experts.device)
    first = torch.empty_like(numbers).scatter_(0, order, numbers).view(tokens, k).t()
    if copies == 1:
        return RowOrder(order // k, first.contiguous()[None])
    in_part = counts.view(parts, -1).sum(1)
    before = in_part.cumsum(0) - in_part
    part = experts.t() // (len(counts) // parts)
    first = first + before[part] * (copies - 1)
    places = torch.stack([first + in_part[part] * copy for copy in range(copies)])
    of_token = torch.arange(tokens, device=experts.device).expand(places.shape)
    sources = torch.empty_like(places).view(-1)
    return RowOrder(sources.scatter_(0, places.view(-1), of_token.reshape(-1)), places)


class RowKernels(Protocol):
    """Computes sums of rows, as a `KernelBackend` does: in the order of the places, in float32
    (float64), rounded once. The functions of this module of these names are the reference."""

    def summed_rows(self, rows: Tensor, places: Tensor) -> Tensor:
        """The sum of the rows at places [n, T]: [R, h] -> [T, h]."""

    def weighted_rows(self, rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
        """The same with weights [T, k] of the rows at places [k, T]."""

    def weighted_gradients(
        self, grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the rows and weights of `weighted_rows` for grad [T, h]. targets
        [x, k, T]: where the gradient of each row is to be, in x copies: [x k T, h]."""


def dispatched_rows(x: Tensor, order: RowOrder, kernels: RowKernels) -> Tensor:
    """The rows to send, tokens [T, h] -> [x k T, h]; backward sums the gradients of a token's rows
    in the order of its experts."""
    result: Tensor = _Dispatched.apply(x, *order, kernels)
    return result


def combined_rows(rows: Tensor, weights: Tensor, places: Tensor, kernels: RowKernels) -> Tensor:
    """The results of the experts as they came back, [x k T, h], and weights [T, k] -> the weighted
    sum of each token, [T, h]. Copies of a row, which are partial sums, are added; then the experts'
    in ascending order. Saves kT rows for the gradient of the weights."""
    result: Tensor = _Combined.apply(rows, weights, places, kernels)
    return result


def arrival_order(received: Tensor, rows: int) -> Tensor:
    """Rows arrive by rank and, of one rank, by expert; this is the permutation that sorts them by
    expert, then rank. received [n, E of this rank]: numbers of rows, `rows` in all -> [rows]."""
    ends, experts_first = received.flatten().cumsum(0), received.t().flatten().cumsum(0)
    starts = (experts_first - received.t().flatten()).view(received.t().shape).t().flatten()
    numbers = torch.arange(rows, device=received.device)
    block = torch.searchsorted(ends, numbers, right=True)  # rank and expert of a row
    moved = numbers + (starts - ends + received.flatten())[block]
    return torch.empty_like(numbers).scatter_(0, moved, numbers)


class _WideProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)  # a frozen router needs no x
        wide = wide_dtype(x)
        return x.to(wide) @ weight.to(wide).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        for_dx, for_dw = ctx.needs_input_grad
        dx = (grad @ weight.to(grad.dtype)).to(ctx.dtype) if for_dx else None
        dw = (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if for_dw else None
        return dx, dw


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale, ctx.dtype = scale, loss.dtype
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=grad.device), None


def summed_rows(rows: Tensor, places: Tensor) -> Tensor:
    """See RowKernels."""
    total = rows.index_select(0, places[0]).to(wide_dtype(rows))
    for place in places[1:]:
        total.add_(rows.index_select(0, place))
    return total.to(rows.dtype)


def weighted_rows(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """See RowKernels."""
    total: Tensor | None = None
    for place, weight in zip(places, weights.t(), strict=True):
        weighted = rows.index_select(0, place).to(weights.dtype).mul_(weight[:, None])
        total = weighted if total is None else total.add_(weighted)
    assert total is not None
    return total.to(rows.dtype)


def weighted_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """See RowKernels."""
    wide = grad.to(weights.dtype)
    d_rows = rows.new_empty(targets.numel(), rows.shape[1])
    d_weights = torch.empty_like(weights)
    for j, (place, weight) in enumerate(zip(places, weights.t(), strict=True)):
        d_weights[:, j] = rows.index_select(0, place).to(wide.dtype).mul_(wide).sum(-1)
        part = (wide * weight[:, None]).to(rows.dtype)
        for target in targets[:, j]:
            d_rows.index_copy_(0, target, part)
    return d_rows, d_weights


class _Dispatched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sources: Tensor, places: Tensor, kernels: RowKernels) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(places)
        return x.index_select(0, sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        in_order = places.transpose(0, 1).flatten(0, 1)  # by expert, then copy
        return ctx.kernels.summed_rows(grad.contiguous(), in_order), None, None, None


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, places: Tensor, kernels: RowKernels) -> Tensor:
        ctx.kernels = kernels
        if len(places) > 1:  # [x k T, h] -> [k T, h]
            rows = kernels.summed_rows(rows, places.flatten(1))
        ctx.save_for_backward(rows, weights, places)
        return kernels.weighted_rows(rows, weights, _of_sums(places))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, places = ctx.saved_tensors
        d_rows, d_weights = ctx.kernels.weighted_gradients(grad.contiguous(), rows, weights, _of_sums(places), places)
        return d_rows, d_weights, None, None


def _of_sums(places: Tensor) -> Tensor:
    """Return the places of the sums over the copies of rows, [k, T]: those of the rows if there is
    one copy, else by expert of a token, then token."""
    copies, k, tokens = places.shape
    if copies == 1:
        return places[0]
    return torch.arange(k * tokens, device=places.device).view(k, tokens)
