"""Totals of a run of many tokens: days, GPU-hours, price and energy, with and without failures.

The seconds of a step are the plan's; failures, saves and restarts follow the formula of
plan/estimate/goodput.py with the figures of `cluster.operations`. A save stops training for
`PAUSE_SECONDS` plus the time to copy a rank's data to host memory; then a thread writes it during
training (`checkpoint.asynchronous`), else training waits for that, too. Under ZeRO all ranks save, or
the first replica of each part, as the runtime's profile says (checkpoint_writers).

By hand: 1T tokens in steps of 4 Mi tokens and 5 s are 238,419 steps, 13.8 days; if 95 % of the time
is useful, 14.5 days.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import ceil

from mpctl.core.errors import InputError
from mpctl.core.sharding import divisors
from mpctl.core.units import (
    TOKENS,
    UnitError,
    bytes_text,
    count_text,
    days_text,
    energy_text,
    parse_measure,
    plural,
    seconds_text,
)
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.goodput import (
    Failures,
    SaveCost,
    best_interval,
    elastic_share,
    job_mtbf,
    mean_capacity,
    spare_nodes,
    time_shares,
)
from mpctl.plan.estimate.states import checkpoint_bytes
from mpctl.plan.estimate.step import StepTime
from mpctl.plan.planning.plan import Plan
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec

HOUR, DAY = 3600.0, 86_400.0
MOST_TOKENS = 10**18
PAUSE_SECONDS = 0.5
"""Seconds that a save stops training besides the copy: ranks that agree, host memory. A 405B model on
8,960 GPUs stops for 0.59 s in all (arXiv 2407.20143, table 8)."""
COPY_BANDWIDTH = 25e9
"""Bytes/s from a device to pinned host memory (docs/design/checkpoints.md)."""
STORAGE_PER_GPU = 83e6
"""Bytes/s of shared storage for each GPU: 2 TB/s for 24,000 (arXiv 2407.21783, section 3.3.1)."""
NODE_POWER = 1.38
"""Power of a node in training over that of its devices by their data sheet: 76 % of 10.2 kW for
eight of 700 W (arXiv 2506.14551)."""
LEAST_USEFUL, NEVER = 1e-100, 1e-4
"""Shares of the time: the least that is computed with, and below which a run is never done."""
LIKELY = 0.5
"""Failures in a run from which on a plan says how often to save."""
NEAR = 0.005
"""Fraction of the time: an interval that costs less than this over the best one is left alone."""


@dataclass(frozen=True)
class WholeRun:
    """A run of `tokens`; days, GPU-hours, price and energy with failures, and in `*_ideal` without
    failures, saves and restarts.

    useful, saves, lost, down: shares of the time (plan/estimate/goodput.py); where the run is elastic,
    useful is of the whole cluster's work. days_low, days_high: for the ends of the step's band.
    price and watt_hours: None where no price or power is known. mtbf_hours, failures: of the job.
    restart_seconds: from a failure to the first step. pause_seconds,
    write_seconds: of a save. interval_steps: that the shares are of, the job's own or the best one;
    useful_at_best: with the best one. spare_nodes: so that one is there at 99 of 100 failures;
    useful_elastic: where the run goes on without them, None where it cannot.
    """

    tokens: int
    steps: int
    gpus: int
    step_seconds: float
    useful: float
    saves: float
    lost: float
    down: float
    days_ideal: float
    days: float
    days_low: float
    days_high: float
    gpu_hours_ideal: float
    gpu_hours: float
    price_ideal: float | None
    price: float | None
    watt_hours_ideal: float | None
    watt_hours: float | None
    mtbf_hours: float
    failures: float
    restart_seconds: float
    checkpoint_bytes: int
    pause_seconds: float
    write_seconds: float
    interval_steps: int
    best_interval_steps: int
    useful_at_best: float
    job_interval_steps: int
    spare_nodes: int
    repair_hours: float
    useful_elastic: float | None
    is_elastic: bool


def read_tokens(
    text: str, option: str = "--tokens", unit: str = "tokens", examples: str = "15T, 300B or 1.4e12"
) -> int:
    """`15T`, `300B`, `1.4e12` -> a number of tokens, or of another unit. Raises InputError."""
    try:
        amount = parse_measure(text.strip(), TOKENS)
        if 1 <= amount <= MOST_TOKENS:
            return ceil(amount)
        message = f"{text[:20]!r} is not from 1 to 1e18 {unit}"
    except UnitError as error:
        message = f"{text[:20]!r}: {error}"
    raise InputError.of("bad-value", option, message, f"such as {examples}")


def gpu_hours_per_billion(ranks: int, tokens_per_second: float) -> float:
    """GPU-hours that a billion tokens take.

    >>> gpu_hours_per_billion(36, 1e6)
    10.0
    """
    return ranks * 1e9 / tokens_per_second / 3600


def plan_whole_run(plan: Plan, tokens: int) -> WholeRun:
    """The run of a plan. Raises InputError where its step has no time."""
    estimate = plan.estimate
    if estimate is None:
        message = "a layout without a model trains on no tokens"
        raise InputError.of("no-model", "--tokens", message, "name a model: --model gpt2, say")
    if isinstance(estimate.time, str):
        message = f"the step has no time: {estimate.time}"
        raise InputError.of("no-step-time", "--tokens", message, "name a cluster: --cluster selene")
    return whole_run(estimate.layout, estimate.time, tokens)


def whole_run(layout: JobLayout, time: StepTime, tokens: int, price: float | None = None) -> WholeRun:
    """The run of so many tokens under a layout. time: of a step. price: of a GPU-hour, over that of
    the cluster."""
    job, cluster = layout.job, layout.job.cluster
    facts, gpus = cluster.operations, layout.job.world_size
    size = checkpoint_bytes(layout)
    steps = -(-tokens // layout.tokens_per_step)
    save = save_cost(layout, size)
    mtbf = HOUR * job_mtbf(gpus, cluster.nodes, facts.gpu_mtbf_hours, facts.node_mtbf_hours)
    read = size / (facts.storage_read or facts.storage_write or STORAGE_PER_GPU * gpus)
    failures = Failures(mtbf, facts.detect_seconds, facts.restart_seconds + read)
    best = _best_steps(failures, save, time.total)
    own = job.checkpoint.interval or best
    shares, at_best = (time_shares(failures, save, n * time.total) for n in (own, best))
    in_repair = facts.repair_hours * HOUR / mtbf
    capacity = _elastic_capacity(job, in_repair)
    elastic = None if capacity is None else elastic_share(shares, failures, capacity)
    is_elastic = job.launch.elastic and elastic is not None
    useful, best_useful = shares.useful, at_best.useful
    if is_elastic and elastic is not None and capacity is not None:
        useful, best_useful = elastic, elastic_share(at_best, failures, capacity)
    useful = max(LEAST_USEFUL, useful)
    ideal, power = steps * time.total, power_of_gpu(cluster)
    gpu_hours_ideal = gpus * ideal / HOUR
    price = facts.price_per_gpu_hour if price is None else price

    def grown(amount: float) -> float:
        return amount / useful

    return WholeRun(
        tokens=tokens,
        steps=steps,
        gpus=gpus,
        step_seconds=time.total,
        **{**asdict(shares), "useful": useful},
        days_ideal=ideal / DAY,
        days=grown(ideal / DAY),
        days_low=grown(steps * time.low / DAY),
        days_high=grown(steps * time.high / DAY),
        gpu_hours_ideal=gpu_hours_ideal,
        gpu_hours=grown(gpu_hours_ideal),
        price_ideal=None if price is None else price * gpu_hours_ideal,
        price=None if price is None else grown(price * gpu_hours_ideal),
        watt_hours_ideal=None if power is None else power * gpu_hours_ideal,
        watt_hours=None if power is None else grown(power * gpu_hours_ideal),
        mtbf_hours=mtbf / HOUR,
        failures=grown(ideal) / mtbf,
        restart_seconds=failures.detect + failures.restart,
        checkpoint_bytes=size,
        pause_seconds=save.pause,
        write_seconds=save.write,
        interval_steps=own,
        best_interval_steps=best,
        useful_at_best=max(LEAST_USEFUL, best_useful),
        job_interval_steps=job.checkpoint.interval,
        spare_nodes=0 if is_elastic else spare_nodes(in_repair),
        repair_hours=facts.repair_hours,
        useful_elastic=elastic,
        is_elastic=is_elastic,
    )


def save_cost(layout: JobLayout, size: int) -> SaveCost:
    """Return the cost of a save of `size` bytes under a layout."""
    job, facts = layout.job, layout.job.cluster.operations
    dense = layout.dense
    shares_all = layout.profile.checkpoint_writers == "all" and job.parallel.zero >= 1
    writers = job.world_size // (dense.copies if shares_all else dense.replicas)
    copy = PAUSE_SECONDS + size / writers / COPY_BANDWIDTH
    write = size / (facts.storage_write or STORAGE_PER_GPU * job.world_size)
    return SaveCost(copy, write) if job.checkpoint.asynchronous else SaveCost(copy + write)


def _best_steps(failures: Failures, save: SaveCost, step: float) -> int:
    """The number of steps between saves, from 1, that leaves the largest useful share."""
    seconds = best_interval(save, failures.mtbf)
    fewer = max(1, int(min(seconds / step, 2**31 - 2)))
    return max((fewer, fewer + 1), key=lambda steps: time_shares(failures, save, steps * step).useful)


def _elastic_capacity(job: JobSpec, in_repair: float) -> float | None:
    """The mean work of an elastic run in its useful time, as a share of that of all nodes: it goes
    on with the largest dp that fits the nodes which are left and divides the global batch
    (run/launch/elastic.py). None where it could not shrink at all."""
    nodes, dp = job.cluster.nodes, job.sizes["dp"]
    per_node, replica = job.cluster.gpus_per_node or 1, job.world_size // dp
    per_pass = job.training.micro_batch_size
    batches = (job.training.global_batch_size or per_pass * dp) // per_pass
    least = job.launch.min_nodes or 1
    legal = [
        size
        for size in divisors(batches)
        if size <= dp and size * replica % per_node == 0 and size * replica // per_node >= least
    ]
    if nodes < 2 or len(legal) < 2:
        return None

    def share(away: int) -> float:
        most = bisect(legal, (nodes - away) * per_node // replica)
        return legal[most - 1] / dp if most else 0.0

    return mean_capacity(in_repair, share, nodes)


def saving_advice(plan: Plan) -> str | None:
    """How often the job should save, in words, if its `training.steps` take so long that a failure
    is likely and its own interval costs more than NEAR; None where there is nothing to say."""
    estimate = plan.estimate
    if estimate is None or isinstance(estimate.time, str):
        return None
    layout, job = estimate.layout, plan.job
    run = whole_run(layout, estimate.time, job.training.steps * layout.tokens_per_step)
    if run.failures < LIKELY or run.best_interval_steps >= run.steps:
        return None
    best, failures = run.best_interval_steps, f"one failure in {days_text(run.mtbf_hours / 24)}"
    if not job.checkpoint.interval:
        return f"none before the end; best every {_every(run, best)}: {failures}"
    if run.useful_at_best - run.useful <= NEAR:
        return None
    own = f"every {_every(run, run.interval_steps)}, {run.useful:.1%} of the time useful"
    return f"{own}; best every {_every(run, best)}, {run.useful_at_best:.1%}: {failures}"


def power_of_gpu(cluster: ClusterSpec) -> float | None:
    """Watts of the data centre for each GPU in training; None where no power is stated."""
    facts, device = cluster.operations, cluster.device
    if facts.watts_per_gpu is not None:
        return facts.watts_per_gpu * facts.pue
    if device is None or device.watts is None:
        return None
    return device.watts * NODE_POWER * facts.pue


def run_figures(run: WholeRun) -> Iterator[tuple[str, str]]:
    """The run in words: name and text."""
    steps = f"{plural(run.steps, 'step')} of {seconds_text(run.step_seconds)}"
    yield "tokens", f"{count_text(run.tokens)}: {steps}"
    if run.useful < NEVER:
        yield "time", f"never done: {_failures_text(run)}; {_restart_text(run)}"
        yield "checkpoints", _checkpoint_text(run)
        return
    span = f"9 of 10 runs: {days_text(run.days_low)} to {days_text(run.days_high)}"
    yield "time", f"{days_text(run.days)} ({span}); {days_text(run.days_ideal)} without failures"
    hours = f"{count_text(run.gpu_hours)} ({count_text(run.gpu_hours_ideal)} without failures)"
    yield "GPU-hours", hours
    if run.price is not None:
        yield "price", f"{count_text(run.price)} ({count_text(run.price_ideal or 0)} without)"
    if run.watt_hours is not None:
        each = f"{run.watt_hours / run.gpu_hours:,.0f} W a GPU with its host and PUE"
        yield "energy", f"{energy_text(run.watt_hours)}, {each}"
    parts = f"{run.saves:.1%} saves, {run.lost:.1%} work done again, {run.down:.1%} down"
    rest = "; of the work, with nodes away" if run.is_elastic else ""
    yield "useful", f"{run.useful:.1%} of the time: {parts}{rest}"
    yield "failures", f"{_failures_text(run)}; {_restart_text(run)}"
    yield "checkpoints", _checkpoint_text(run)
    yield "spare nodes", _spares_text(run)


def _failures_text(run: WholeRun) -> str:
    many = f", {run.failures:,.0f} in all" if 1 <= run.failures < 1e9 else ""
    return f"one in {days_text(run.mtbf_hours / 24)}{many}"


def _restart_text(run: WholeRun) -> str:
    return f"{seconds_text(run.restart_seconds)} to detect one, start and read the checkpoint"


def _checkpoint_text(run: WholeRun) -> str:
    whole = f", whole {seconds_text(run.write_seconds)} later" if run.write_seconds else ""
    cost = f"{bytes_text(run.checkpoint_bytes)}, training stops {seconds_text(run.pause_seconds)}"
    best, own = run.best_interval_steps, run.job_interval_steps
    if best >= run.steps:
        advice = "the one at the end is enough"
    elif not own:
        advice = f"best every {_every(run, best)}: checkpoint.interval = {best} (the job has none)"
    elif run.useful_at_best - run.useful <= NEAR:
        advice = f"every {_every(run, own)}, as good as the best ({_every(run, best)})"
    else:
        gain = f"{run.useful_at_best:.1%} useful instead of {run.useful:.1%}"
        advice = f"every {_every(run, own)}; best every {_every(run, best)}: {gain}"
    return f"{cost}{whole}; {advice}"


def _spares_text(run: WholeRun) -> str:
    elastic = run.useful_elastic
    if run.is_elastic:
        return "none: the run is elastic and goes on with the nodes that are left"
    text = f"{run.spare_nodes}, so that one is there at 99 of 100 failures"
    text += f" (repair takes {run.repair_hours:g} h)"
    if elastic is not None:
        text += f"; elastic without any: {elastic:.1%} of the work (dp divides the global batch)"
    return text


def _every(run: WholeRun, steps: int) -> str:
    """`17 steps (1.7 min)`."""
    seconds = steps * run.step_seconds
    text = f"{seconds / 60:.1f} min" if 60 <= seconds < 7200 else seconds_text(seconds)
    return f"{plural(steps, 'step')} ({text})"
