"""Rules about ranks: the world, the order of axes, nodes, the pipeline, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mpctl.core.axes import AXIS_NAMES, CHOSEN_AXES, DEFAULT_ORDER, chosen_ranks, order_hint, parse_order, sizes_text
from mpctl.core.errors import Offer, Status
from mpctl.core.sharding import divisors
from mpctl.core.topology import Group
from mpctl.core.units import plural
from mpctl.model.families import get_family
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.link_levels import LinkLevel, topology_levels
from mpctl.model.layout.topology import other_views, replicas
from mpctl.model.pipeline.balance import balanced_counts
from mpctl.model.pipeline.explicit import find_layout, layout_problems
from mpctl.model.pipeline.filled import is_filled
from mpctl.model.pipeline.placement import StagePlacement
from mpctl.model.pipeline.schedule.legality import schedule_conflicts
from mpctl.model.pipeline.stages import UnevenLayersError, spans_of
from mpctl.plan.rules.check import Check, listed, refusal
from mpctl.plan.rules.sizes import are_neighbours, stays_in_domain
from mpctl.spec.job import JobSpec
from mpctl.spec.layout_text import PipelineLayout
from mpctl.spec.model import ModelSpec

LARGEST_WORLD = 2**24  # its groups are still listed in seconds
LARGEST_NODE = 64  # GPUs that are offered for one node
NAMED_RANKS = 32  # of a group that leaves its domain
WORTH_BALANCING = 1.1  # times the time of the best cut


def world_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The axes fill the cluster: dp is open, or equals the remaining ranks."""
    job = draft.job
    p, world = job.parallel, job.world_size
    inner = chosen_ranks(job.sizes)
    device = job.cluster.device
    noun = "rank" if device is not None and device.is_cpu else "GPU"
    nodes, ranks = plural(job.cluster.nodes, "node"), plural(job.cluster.gpus_per_node or 1, noun)
    cluster = f"{nodes} x {ranks} = {plural(world, 'rank')}"
    layout = sizes_text(job.sizes, CHOSEN_AXES)
    if world > LARGEST_WORLD:
        hint = f"use at most {LARGEST_WORLD:,} ranks"
        yield Check("world-size", "error", "cluster.nodes", f"{cluster} are too many", hint)
    elif world % inner:
        message = f"{layout} = {inner} does not divide {cluster}"
        offers, more = _world_ways(job, inner)
        yield refusal("world-size", "parallel", message, *offers, more=more)
    elif p.dp is not None and inner * p.dp != world:
        message = f"dp {p.dp} x {layout} = {inner * p.dp} ranks, but the cluster has {cluster}"
        offers = [Offer("parallel.dp", (world // inner,), "dp"), *_other_node(job, inner * p.dp)]
        yield refusal("world-size", "parallel.dp", message, *offers)
    else:
        message = f"dp {world // inner} x {layout} fills {cluster}"
        yield Check("world-size", "ok", "parallel", message)


def _world_ways(job: JobSpec, inner: int) -> tuple[list[Offer], str]:
    """Sizes of a single axis that divide the world, and other ways in words."""
    offers = []
    sizes, world = job.sizes, job.world_size
    for axis in CHOSEN_AXES:
        rest = inner // sizes[axis]
        legal = tuple(k for k in divisors(world) if world % (rest * k) == 0)
        if legal and sizes[axis] > 1:
            offers.append(Offer(f"parallel.{axis}", legal, axis, near=sizes[axis]))
    per_node = job.cluster.gpus_per_node or 1
    multiple = inner // gcd(inner, per_node)
    more = f"a multiple of {plural(multiple, 'node')}"
    if not offers:  # no single axis can fix it
        more = f"{' x '.join(CHOSEN_AXES)} of {listed(divisors(world))}; or {more}"
    return [*offers, *_other_node(job, inner)], more


def _other_node(job: JobSpec, ranks: int) -> list[Offer]:
    """A single node with a GPU, or a process of a rehearsal on CPUs, for each rank."""
    if job.cluster.nodes > 1 or ranks > LARGEST_NODE:
        return []
    return [Offer("cluster.gpus_per_node", (ranks,), "--gpus-per-node")]


def order_rules(draft: LayoutDraft) -> Iterator[Check]:
    """parallel.order names each axis once, and ep at most once."""
    job = draft.job
    p = job.parallel
    try:
        parse_order(p.order, {**job.sizes, "ep": 1}, (*AXIS_NAMES, "ep"))
    except ValueError as error:
        hint = order_hint(AXIS_NAMES)
        yield Check("axis-order", "error", "parallel.order", str(error), hint)


def domain_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Tensor-parallel groups stay in one NVLink domain, by default a node: they all-reduce four
    times a layer, which only the links inside it carry fast enough."""
    job, topology = draft.job, draft.topology
    if topology is None or job.parallel.tp == 1:
        return
    domain, *_ = topology_levels(job.cluster, topology)
    shown, count = topology.straddling("tp", domain.ranks)
    rule, where = "tp-within-nvlink-domain", "parallel.tp"
    if not count:
        on = "on one node" if domain.name == "node" else "in one NVLink domain"
        yield Check(rule, "ok", where, f"every tensor-parallel group stays {on}")
        return
    named = " ".join(map(_members, shown))
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    noun = "tensor-parallel group leaves its" if count == 1 else "tensor-parallel groups leave their"
    message = f"{count} {noun} {domain_text(domain, topology.gpus_per_node)}: {named}{more}"
    allowed, offer = job.parallel.allow_tp_across_nodes, _tp_of_a_domain(job, domain.ranks)
    more = "" if allowed else "--allow-tp-across-nodes to do it on purpose"
    check = refusal(rule, where, message, offer, more=more)
    yield check._replace(status="warning") if allowed else check


def domain_text(domain: LinkLevel, per_node: int) -> str:
    """`node of 8 GPUs`, `NVLink domain of 8 GPUs` or `NVLink domain of 64 GPUs (16 nodes)`."""
    nodes = f" ({domain.ranks // per_node} nodes)" if domain.ranks > per_node else ""
    return f"{domain.name} of {plural(domain.ranks, 'GPU')}{nodes}"


def link_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The NVLink domain is a multiple of a node, and each level of the fabric a multiple of the one
    below it; the remainder is not counted."""
    job = draft.job
    cluster, below = job.cluster, job.cluster.gpus_per_node or 1
    levels = [("NVLink domain", "nvlink_domain", cluster.nvlink_domain or below, "node")]
    levels += [(f.name, "fabric", f.gpus, "network below it") for f in cluster.fabric]
    for name, key, gpus, lower in levels:
        whole = gpus // below * below
        if whole < gpus:
            size = f"{name} of {plural(gpus, 'GPU')}"
            counted = f", so it counts as {whole}" if whole else ""
            message = f"{size} is no multiple of the {plural(below, 'GPU')} of a {lower}{counted}"
            hint = f"use {' or '.join(map(str, sorted({whole, whole + below} - {0})))}"
            status: Status = "warning" if whole else "error"
            yield Check("link-levels", status, f"cluster.{key}", message, hint)
        below = whole or gpus


def _members(group: Group) -> str:
    """`[0, 4, 8, 12]`; for many ranks the first and the last."""
    few = [*group[:3], "...", group[-1]] if len(group) > NAMED_RANKS else group
    return f"[{', '.join(map(str, few))}]"


def _tp_of_a_domain(job: JobSpec, ranks: int) -> Offer:
    """Sizes of tp that stay in a domain of `ranks` ranks, with tp first in the order of axes."""
    others = chosen_ranks({**job.sizes, "tp": 1})
    sizes = (size for size in divisors(ranks) if stays_in_domain(size, ranks))
    fits = tuple(size for size in sizes if job.world_size % (size * others) == 0)
    axes = job.parallel.order.split("-")
    order = "-".join(["tp", *(axis for axis in axes if axis != "tp")])
    if axes[0] == "tp":
        return Offer("parallel.tp", fits, "tp")
    also = (("parallel.order", order),)
    return Offer("parallel.tp", fits, "tp", also=also, suffix=f" with --order {order}")


def pipeline_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The schedule exists, and the layers can be cut into stages."""
    job, p = draft.job, draft.job.parallel
    for conflict in schedule_conflicts(p.schedule, stages=p.pp, microbatches=job.num_microbatches, chunks=p.vpp):
        yield refusal(conflict.rule, conflict.setting, conflict.message, *conflict.offers, more=conflict.hint)
    if (layout := find_layout(job)) is not None:
        if StagePlacement.of(p).is_v:
            message = f"{p.schedule} goes over the stages and back, where a layout deals its parts out in rounds"
            hint = "leave pipeline_layout out, or use parallel.schedule 1f1b"
            yield Check("pipeline-layout", "error", "parallel.schedule", message, hint)
        yield from _layout_checks(job, layout)
        return
    if job.model is None or (p.stage_balance == "cost" and not is_countable(job.model)):
        return
    yield _stage_check(draft, "model.layers", job.model.all_layers)


def _layout_checks(job: JobSpec, layout: PipelineLayout) -> Iterator[Check]:
    """Every error of an explicit layout, or what it deals out."""
    rule, where = "pipeline-layout", "parallel.pipeline_layout"
    problems = list(layout_problems(job, layout))
    yield from (Check(rule, "error", where, str(problem), problem.hint) for problem in problems)
    if not problems:
        counts = sorted({part.layers for part in layout.parts})
        over = f"{plural(len(layout.parts), 'part')} over pp {job.parallel.pp}"
        yield Check(rule, "ok", where, f"{over}: {listed(counts)} layers each")


def _stage_check(draft: LayoutDraft, where: str, layers: int) -> Check:
    """The layers can be cut into stages; encoder and decoder layers are numbered together, so that
    a stage may hold some of both."""
    job = draft.job
    try:
        stages = draft.stages
    except UnevenLayersError as error:
        offers = [_without_decoder(offer, job) for offer in error.offers]
        return refusal("layers-per-stage", where, str(error), *offers, more=error.hint)
    counts = sorted({sum(stop - start for start, stop in spans) for spans in stages})
    if counts[0] < 1 and not is_filled(job):
        return Check(
            "layers-per-stage",
            "error",
            where,
            f"{plural(layers, 'layer')} cannot fill all stages",
            "use fewer stages or more layers",
        )
    chunks = f" in {job.parallel.vpp} chunks" if job.parallel.vpp > 1 else ""
    return Check("layers-per-stage", "ok", where, f"{plural(layers, 'layer')}: {listed(counts)} a stage{chunks}")


def _without_decoder(offer: Offer, job: JobSpec) -> Offer:
    """An offer of total numbers of layers, converted to model.layers, without the decoder's."""
    decoder = (job.model.decoder_layers if job.model else None) or 0
    if offer.setting != "model.layers" or not decoder:
        return offer
    left = (int(value) - decoder for value in offer.values)
    return offer._replace(values=tuple(value for value in left if value > 0))


def _is_chosen(job: JobSpec) -> bool:
    """Whether the job sets the layers of its end stages, or balances stages by cost, or its runtime
    fills stages by cost."""
    p = job.parallel
    given = p.first_stage_layers or p.last_stage_layers or p.embedding_is_layer or p.loss_is_layer
    return bool(given) or p.stage_balance == "cost" or p.pipeline_layout is not None or is_filled(job)


def is_countable(model: ModelSpec) -> bool:
    """Whether the model's FLOP can be counted: it has a head size, and decoder keys only if its
    family has a decoder. Other rules report the errors."""
    decoder = {bool(model.decoder_layers), bool(model.decoder_seq_length)}
    return decoder == {get_family(model.family).has_decoder} and (
        model.head_dim is not None or model.hidden % model.heads == 0
    )


def balance_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Stages take equally long; with equal numbers of layers the stage of the output head is
    slowest, and all others wait for it. A warning above WORTH_BALANCING."""
    job, p, rule = draft.job, draft.job.parallel, "stage-balance"
    if job.model is None or p.pp == 1 or _is_chosen(job) or not is_countable(job.model):
        return
    if _stage_check(draft, "model.layers", job.model.all_layers).status != "ok":
        return
    costs = draft.costs
    if min(costs.layers) == 0:  # less than a token per rank: cp-divides-sequence
        return
    placement = StagePlacement.of(p)
    head = placement.last.stage
    takes = costs.of_stages(draft.stages, exit_stage=head)
    counted = balanced_counts(costs, pp=p.pp, vpp=p.vpp, is_v=placement.is_v)
    best = spans_of(counted, p.pp, is_v=placement.is_v)
    counts = [sum(stop - start for start, stop in spans) for spans in best]
    times = max(takes) / max(costs.of_stages(best, exit_stage=head))
    slowest, layers = takes.index(max(takes)), listed(sorted(set(counts)))
    message = f"stage {slowest} computes longest: {times:.2f} times as long as the longest would "
    message += f"with {layers} layers a stage"
    if times <= WORTH_BALANCING:
        yield Check(rule, "ok", "parallel", message)
        return
    hint = "use parallel.stage_balance cost"
    yield Check(rule, "warning", "parallel", f"{message}, above {WORTH_BALANCING:g}", hint)


def zero_rules(draft: LayoutDraft) -> Iterator[Check]:
    """ZeRO has replicas to shard over, of dense parameters or of experts; the groups that share
    its states are runs of equal length of these."""
    job = draft.job
    p, held = job.parallel, replicas(job)
    others = any(view.replicas > 1 for view in other_views(job))
    if p.zero and held == 1 and not others and not job.training.offload_parameters:
        yield Check(
            "zero-needs-dp",
            "warning",
            "parallel.zero",
            f"ZeRO {p.zero} has no effect: dp and cp are 1",
            "use zero 0, or more replicas",
        )
    elif p.zero_size is not None:
        yield _zero_size_check(job, p.zero_size, held)


def _zero_size_check(job: JobSpec, size: int, held: int) -> Check:
    rule, where, p = "zero-size", "parallel.zero_size", job.parallel
    of = f"dp {job.sizes['dp']} x cp {job.sizes['cp']} = {plural(held, 'rank')}"
    offer = Offer(where, tuple(k for k in divisors(held) if k > 1), "zero_size", near=size)
    if held % size:
        return refusal(rule, where, f"{size} does not divide {of}", offer)
    if not p.zero:
        message = f"zero_size {size} has no effect: ZeRO 0 divides no states"
        return Check(rule, "warning", where, message, "use zero 1, 2 or 3, or no zero_size")
    if size == 1 < held:
        message = f"with zero_size 1 every rank holds all states, as without ZeRO {p.zero}"
        return Check(rule, "warning", where, message, "use zero 0, or a larger zero_size")
    if size < held and not are_neighbours(p.order, job.sizes):
        message = f"order {p.order} has other ranks between cp and dp, of which runs of {size} are "
        message += "to share states"
        return refusal(
            rule,
            where,
            message,
            Offer("parallel.order", (DEFAULT_ORDER,), "--order"),
            Offer(where, (held,), "zero_size"),
        )
    copies = plural(held // size, "group holds", "groups hold")
    message = f"states are divided over {plural(size, 'rank')} of {of}: {copies} equal shares"
    return Check(rule, "ok", where, message)
