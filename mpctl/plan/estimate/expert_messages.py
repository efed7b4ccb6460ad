"""Messages by which tokens reach the experts of a layer and come back, of one micro batch.

T positions of this rank, k experts a token, h hidden, w bytes an element; x = etp, e = ep, n = x e.
A dispatcher is how a training software sends them; backward mirrors each message of rows.

    dispatcher  forward, full messages
    rows        counts 8 E n gathered; x k T h w to the ranks of the experts, and as much back
    alltoall    counts as above; weights 4 k T; over ep k T h w there and back, over etp x k T h w
                gathered and summed (Megatron-Core, moe/token_dispatcher.py)
    allgather   n T h w gathered and summed, choices and weights 5 n T E gathered once
    deepep      once to every rank that has one of a token's experts, there and back:
    hybridep    x r (1 - C(E - E/r, k) / C(E, k)) T h w, with r = e ranks, of which a router with
                groups reaches a part; out of a domain once to each of d domains, as if r were d

The rows of an all-to-all are those of the token's side, k a token whatever the router chooses.
Experts' results are weighed at the token's side under `rows`. The counts of choices that the
auxiliary loss needs are summed over the ranks that share a sequence, 8 b E bytes each. Full
recomputation sends rows again, and no counts: the choice is kept.

By hand, DeepSeek-V3 (E 256, k 8) over 64 ranks of 8 nodes: 7.7 copies of a token to ranks and 5.3
to nodes, 3.6 where the router takes 4 of 8 groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import comb
from typing import NamedTuple

from mpctl.core.collectives import Kind
from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.link_levels import find_span, topology_levels
from mpctl.model.operators.grad_flow import GradFlow
from mpctl.model.operators.matmul import GradNeeds
from mpctl.plan.estimate.communication import Message, Phase
from mpctl.plan.estimate.routing import rank_tokens
from mpctl.spec.runtime import Dispatcher, RuntimeProfile

COUNT_BYTES = 8  # int64
WEIGHT_BYTES = 4  # float32
CHOICE_BYTES = 1  # a bit mask as bool
ROWS, COUNTS, LOADS = "experts' rows", "experts' counts", "experts' loads"


class Routed(NamedTuple):
    """One layer with experts inside a part of a model: the gradients that its products need."""

    up: GradNeeds
    down: GradNeeds


def routed_layers(flow: GradFlow) -> list[Routed]:
    """The layers with experts in a part of a model, usually none or one."""
    if not flow.part.has_experts:
        return []
    grouped = [flow.needs[product.name] for product in flow.part.products if product.is_grouped and not product.adapts]
    return [Routed(*pair) for pair in zip(grouped[::2], grouped[1::2], strict=True)]


def copies(experts: int, chosen: int, ranks: int) -> float:
    """How many of `ranks` ranks, which share the experts evenly, have one of the `chosen` experts
    of a token, in the mean over all choices.

    >>> round(copies(256, 8, 8), 2), copies(8, 2, 1)
    (5.29, 1.0)
    """
    others = experts - experts // ranks
    return ranks * (1 - comb(others, chosen) / comb(experts, chosen))


@dataclass(frozen=True)
class ExpertMessages:
    """Lists the messages of layers with experts under one layout and runtime profile."""

    layout: JobLayout
    profile: RuntimeProfile

    @cached_property
    def dispatcher(self) -> Dispatcher:
        """How tokens are sent: as the job says, else as the runtime does by default."""
        return self.layout.job.training.moe_dispatcher or self.profile.experts.dispatcher

    @cached_property
    def axis(self) -> str:
        """The group of the ranks that together hold each expert of a layer once."""
        return "etp_ep" if self._etp > 1 else "ep"

    @cached_property
    def ranks(self) -> int:
        """Ranks of that group."""
        return self.layout.group_sizes[self.axis]

    @property
    def _etp(self) -> int:
        return self.layout.job.parallel.etp

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a token's hidden states."""
        return self.layout.model.hidden * self.layout.job.training.value_bytes

    @cached_property
    def tokens(self) -> int:
        """Positions of a micro batch that this rank brings."""
        return int(rank_tokens(self.layout))

    def of_rows(self, flow: GradFlow, *, is_again: bool) -> Iterator[Message]:
        """Rows to the experts and back, and what has to be known before. is_again: whether the
        forward is repeated."""
        for routed in routed_layers(flow) if self.ranks > 1 else ():
            yield from self._counts()
            there, back = self._rows("forward"), self._rows("forward", returns=True)
            yield from (*there, *back)
            if is_again:
                yield from (message._replace(phase="recompute") for message in (*there, *back))
            if routed.down.y:
                yield from self._rows("backward")
            if routed.up.x:
                yield from self._rows("backward", returns=True)

    def of_loss(self, flow: GradFlow, axis: str) -> Iterator[Message]:
        """The sums of choices for the auxiliary loss over tp, whose ranks share a sequence under
        sequence parallelism, or over cp."""
        job, training = self.layout.job, self.layout.job.training
        shares = job.parallel.sequence_parallel or axis == "cp"
        counted = training.moe_load_balancing in ("sequence", "micro_batch")
        if not (shares and counted and training.moe_aux_loss_coeff):
            return
        size = COUNT_BYTES * training.micro_batch_size * (self.layout.model.experts or 0)
        for _ in routed_layers(flow) if self.layout.group_sizes[axis] > 1 else ():
            yield Message(axis, "all_reduce", LOADS, size, phase="forward")

    def _counts(self) -> Iterator[Message]:
        experts, chosen = self.layout.model.experts or 0, self.layout.model.experts_per_token
        if self.dispatcher in ("rows", "alltoall"):
            size = COUNT_BYTES * experts * self.ranks
            yield Message(self.axis, "all_gather", COUNTS, size, phase="forward")
        if self.dispatcher == "allgather":
            each = (WEIGHT_BYTES + CHOICE_BYTES) * experts * self.tokens
            yield Message(self.axis, "all_gather", COUNTS, each * self.ranks, phase="forward")
        elif self.dispatcher == "alltoall" and self._ep > 1:
            size = WEIGHT_BYTES * chosen * self.tokens
            yield Message("ep", "all_to_all", COUNTS, size, phase="forward")

    @property
    def _ep(self) -> int:
        return self.layout.job.parallel.ep

    def _rows(self, phase: Phase, *, returns: bool = False) -> list[Message]:
        """One message of rows to the experts, or from them to the tokens."""
        size, chosen = self.tokens * self.row_bytes, self.layout.model.experts_per_token
        if self.dispatcher == "rows":
            each = self._etp * chosen * size
            return [Message(self.axis, "all_to_all", ROWS, each, phase=phase)]
        if self.dispatcher == "allgather":
            kind: Kind = "reduce_scatter" if returns else "all_gather"
            return [Message(self.axis, kind, ROWS, self.ranks * size, phase=phase)]
        if self.dispatcher == "alltoall":
            return self._over_both(chosen * size, phase, returns=returns)
        each = int(self._etp * self._copies * size)
        return [Message(self.axis, "all_to_all", ROWS, each, phase=phase, outer=self._outer)]

    def _over_both(self, size: int, phase: Phase, *, returns: bool) -> list[Message]:
        """Over ep, then over etp; back in the other order."""
        messages = []
        if self._ep > 1:
            messages.append(Message("ep", "all_to_all", ROWS, size, phase=phase))
        if self._etp > 1:
            kind: Kind = "reduce_scatter" if returns else "all_gather"
            messages.append(Message("etp", kind, ROWS, self._etp * size, phase=phase))
        return messages

    def leaving(self, ranks: int) -> float:
        """The share of a message of rows that goes to ranks outside of networks of `ranks` ranks
        each; 1: of the rank itself. Even routing, each copy on its own."""
        if ranks == 1:
            return (self.ranks - 1) / self.ranks
        topology = self.layout.topology
        together = find_span(topology, topology.kinds[self.axis], ranks).together
        return (self.ranks - together) / self.ranks

    @cached_property
    def _copies(self) -> float:
        """Ranks of ep that a token is sent to."""
        return self._met(self._ep)

    def _met(self, parts: int) -> float:
        """Mean number of parts, out of `parts`, that hold a token's experts."""
        model = self.layout.model
        experts, groups, kept = model.experts or 1, model.router_groups, 1.0
        if model.router_groups_per_token < groups:
            kept = model.router_groups_per_token / groups
        within = max(1, round(parts * kept))
        return copies(max(round(experts * kept), within), model.experts_per_token, within)

    @cached_property
    def _outer(self) -> float:
        """Bytes that leave a domain, where each token leaves once for every other domain that has
        one of its experts, over those if it left once for each rank there."""
        layout = self.layout
        level = topology_levels(layout.job.cluster, layout.topology)[0]
        span = find_span(layout.topology, layout.topology.kinds[self.axis], level.ranks)
        if span.networks == 1:
            return 1.0
        domains, ranks = span.networks, self.ranks
        once = self._met(min(domains, self._ep)) * (domains - 1) / domains
        each = self._etp * self._copies * (ranks - span.together) / ranks
        return min(1.0, once / each)
