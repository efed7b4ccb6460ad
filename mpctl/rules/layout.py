"""Rules about ranks: the world, the order of axes, nodes, the pipeline, tensor modes, ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, isqrt

from mpctl.axes import AXIS_NAMES
from mpctl.balance import balanced_counts
from mpctl.families.costs import job_costs
from mpctl.rules.check import Check, listed, nearest
from mpctl.sharding import divisors
from mpctl.spec.job import JobSpec
from mpctl.spec.model import Model
from mpctl.stages import UnevenLayersError, job_stages, spans_of
from mpctl.topology import Topology
from mpctl.units import plural

LARGEST_WORLD = 2**24  # its groups are still listed in seconds
WORTH_BALANCING = 1.1  # times the time of the best cut


def find_topology(job: JobSpec) -> Topology | None:
    """The job's topology, or None when the world or the order is not legal."""
    sizes = job.sizes
    if sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"] != job.world_size:
        return None
    try:
        return Topology.of(sizes, order=job.parallel.order, gpus_per_node=job.cluster.gpus_per_node)
    except ValueError:
        return None


def world_rules(job: JobSpec) -> Iterator[Check]:
    p, world = job.parallel, job.world_size
    inner = p.tp * p.cp * p.pp
    nodes, gpus = plural(job.cluster.nodes, "node"), plural(job.cluster.gpus_per_node or 1, "GPU")
    cluster = f"{nodes} x {gpus} = {plural(world, 'rank')}"
    layout = f"tp {p.tp} x cp {p.cp} x pp {p.pp}"
    if world > LARGEST_WORLD:
        hint = f"use at most {LARGEST_WORLD:,} ranks"
        yield Check("world-size", "error", "cluster.nodes", f"{cluster} are too many", hint)
    elif world % inner:
        hint = _world_hint(job, inner)
        message = f"{layout} = {inner} does not divide {cluster}"
        yield Check("world-size", "error", "parallel", message, hint)
    elif p.dp is not None and inner * p.dp != world:
        message = f"dp {p.dp} x {layout} = {inner * p.dp} ranks, but the cluster has {cluster}"
        yield Check("world-size", "error", "parallel.dp", message, f"use dp {world // inner}")
    else:
        message = f"dp {world // inner} x {layout} fills {cluster}"
        yield Check("world-size", "ok", "parallel", message)


def _world_hint(job: JobSpec, inner: int) -> str:
    ways = []
    sizes, world = job.sizes, job.world_size
    for axis in ("tp", "pp", "cp"):
        rest = inner // sizes[axis]
        legal = [k for k in divisors(world) if world % (rest * k) == 0]
        near = nearest(legal, sizes[axis])
        if near and sizes[axis] > 1:
            ways.append(f"{axis} {listed(near)}")
    per_node = job.cluster.gpus_per_node or 1
    if not ways:  # no single axis can mend it
        ways.append(f"tp x cp x pp of {listed(divisors(world))}")
    ways.append(f"a multiple of {inner // gcd(inner, per_node)} nodes")
    return "use " + "; or ".join(ways)


def order_rules(job: JobSpec) -> Iterator[Check]:
    p = job.parallel
    try:
        Topology.of(job.sizes, order=p.order)
    except ValueError as error:
        hint = f"use each of {', '.join(AXIS_NAMES)} once, fastest first, as in tp-cp-dp-pp"
        yield Check("axis-order", "error", "parallel.order", str(error), hint)


def node_rules(job: JobSpec) -> Iterator[Check]:
    """A TP group all-reduces four times a block: it must stay on the links inside a node."""
    topology = find_topology(job)
    if topology is None or job.parallel.tp == 1:
        return
    shown, count = topology.straddling("tp")
    rule, where = "tp-within-node", "parallel.tp"
    if not count:
        yield Check(rule, "ok", where, "every tensor-parallel group stays on one node")
        return
    per_node = topology.gpus_per_node
    named = " ".join(f"[{', '.join(map(str, group))}]" for group in shown)
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    noun = (
        "tensor-parallel group leaves its" if count == 1 else "tensor-parallel groups leave their"
    )
    message = f"{count} {noun} node of {per_node} GPUs: {named}{more}"
    allowed = job.parallel.allow_tp_across_nodes
    others = job.parallel.cp * job.parallel.pp
    fits = [k for k in divisors(per_node) if job.world_size % (k * others) == 0]
    hint = f"use tp {listed(fits)} with tp first in parallel.order"
    if not allowed:
        hint += ", or --allow-tp-across-nodes to do it on purpose"
    yield Check(rule, "warning" if allowed else "error", where, message, hint)


def pipeline_rules(job: JobSpec) -> Iterator[Check]:
    p, m = job.parallel, job.num_microbatches
    if p.vpp > 1 and p.pp == 1:
        yield Check(
            "vpp-needs-pp",
            "error",
            "parallel.vpp",
            f"{p.vpp} chunks a stage need a pipeline, and pp is 1",
            "use pp 2 or more, or vpp 1",
        )
    if p.vpp > 1 and p.pp > 1 and m % p.pp:
        yield Check(
            "microbatches-fill-pipeline",
            "error",
            "training.global_batch_size",
            f"{m} micro batches do not divide over {p.pp} interleaved stages",
            f"use a global batch of a multiple of {p.pp} micro batches",
        )
    if (p.schedule == "interleaved") != (p.vpp > 1) and p.schedule != "1f1b":
        yield Check(
            "schedule-vpp",
            "error",
            "parallel.schedule",
            f"{p.schedule} does not go with {p.vpp} chunks a stage",
            "use interleaved or 1f1b with vpp 2 or more, any other schedule with vpp 1",
        )
    if job.model is None or (p.stage_balance == "cost" and not is_countable(job.model)):
        return
    layers = _stage_check(job, "model.layers", job.model.all_layers)
    yield layers
    if layers.status == "ok" and p.pp > 1 and not _is_chosen(job) and is_countable(job.model):
        yield from _balance(job)


def _stage_check(job: JobSpec, where: str, layers: int) -> Check:
    """Layers of encoder and decoder are numbered through: a stage may hold some of both."""
    try:
        stages = job_stages(job, layers)
    except UnevenLayersError as error:
        return Check("layers-per-stage", "error", where, str(error), error.hint)
    counts = sorted({sum(stop - start for start, stop in spans) for spans in stages})
    if counts[0] < 1:
        return Check(
            "layers-per-stage",
            "error",
            where,
            f"{layers} layers leave a stage empty",
            "use fewer stages or more layers",
        )
    chunks = f" in {job.parallel.vpp} chunks" if job.parallel.vpp > 1 else ""
    return Check(
        "layers-per-stage", "ok", where, f"{layers} layers: {listed(counts)} a stage{chunks}"
    )


def _is_chosen(job: JobSpec) -> bool:
    """Whether the job says how many layers its end stages hold, or that their costs do."""
    p = job.parallel
    given = p.first_stage_layers or p.last_stage_layers or p.embedding_is_layer or p.loss_is_layer
    return bool(given) or p.stage_balance == "cost"


def is_countable(model: Model) -> bool:
    """Whether other rules find the model fit to be counted."""
    decoder = model.family != "t5" or (model.decoder_layers and model.decoder_seq_length)
    return bool(decoder) and (model.head_dim is not None or model.hidden % model.heads == 0)


def _balance(job: JobSpec) -> Iterator[Check]:
    """An equal cut leaves the stage of the output head the slowest, and all others wait for it."""
    p, rule = job.parallel, "stage-balance"
    costs = job_costs(job)
    if min(costs.layers) == 0:  # less than a token a rank: cp-divides-sequence
        return
    takes = costs.of_stages(job_stages(job, len(costs.layers)))
    best = spans_of(balanced_counts(costs, pp=p.pp, vpp=p.vpp), p.pp)
    counts = [sum(stop - start for start, stop in spans) for spans in best]
    times = max(takes) / max(costs.of_stages(best))
    slowest, layers = takes.index(max(takes)), listed(sorted(set(counts)))
    message = f"stage {slowest} computes longest: {times:.2f} times as long as the longest would "
    message += f"with {layers} layers a stage"
    if times <= WORTH_BALANCING:
        yield Check(rule, "ok", "parallel", message)
        return
    hint = "use parallel.stage_balance cost"
    yield Check(rule, "warning", "parallel", f"{message}, above {WORTH_BALANCING:g}", hint)


def tensor_mode_rules(job: JobSpec) -> Iterator[Check]:
    """2D needs a square of ranks (arXiv 2104.05343), 3D a cube (2105.14450)."""
    mode, tp = job.parallel.tensor_mode, job.parallel.tp
    roots = range(1, isqrt(max(tp, 4096)) + 1)
    if mode == "2d" and isqrt(tp) ** 2 != tp:
        legal, shape = [k * k for k in roots if k * k <= 4 * tp], "a square"
    elif mode == "3d" and not any(k**3 == tp for k in roots):
        legal, shape = [k**3 for k in roots if k**3 <= 8 * tp], "a cube"
    else:
        return
    yield Check(
        "tensor-mode",
        "error",
        "parallel.tp",
        f"{tp} ranks are not {shape}, which tensor_mode {mode} needs",
        f"use tp {listed(legal)}",
    )


def zero_rules(job: JobSpec) -> Iterator[Check]:
    if job.parallel.zero and job.sizes["dp"] * job.sizes["cp"] == 1:
        yield Check(
            "zero-needs-dp",
            "warning",
            "parallel.zero",
            f"ZeRO {job.parallel.zero} shares nothing when dp and cp are 1",
            "use zero 0, or more replicas",
        )
