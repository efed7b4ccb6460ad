"""Whether hosts can run the ranks of a plan: devices, nodes, memory, versions, a loopback address.

With `--on local` all ranks start on the host of the launcher. A plan of several nodes is therefore
refused on GPUs, and where a scheduler has allocated several hosts. Elsewhere it runs on CPU, with a
warning that its nodes are simulated. Hosts of other backends each run one node of the plan; the
facts of each are compared with the plan and with the other hosts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.core.units import bytes_text, few_text, plural
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.launched import device_not_launched
from mpctl.run.hosts.machine import ABSENT, NO_RUN_DIR, HostFacts, Machine
from mpctl.run.hosts.network import HOST, free_port
from mpctl.spec.job import JobSpec
from mpctl.spec.launch import LaunchedKind

Device = LaunchedKind
START_ANYWAY = "--set launch.check_memory=false starts it anyway"
PROCESS_BYTES: Mapping[Device, int] = {"cpu": 1 << 29, "cuda": 1 << 31}
"""Host memory of a rank beyond its tensors: Python and torch, 0.36 GiB measured on CPU; with
CUDA's libraries, its context and NCCL's buffers some 2 GiB, not measured here."""
VERSIONS = ("mpctl", "torch", "python")


def named_device(job: JobSpec) -> Device | None:
    """The device that a job names, in launch.device or by its cluster's device; None if neither.
    Raises InputError for an accelerator of a kind that mpctl only plans."""
    if reason := device_not_launched(job):
        raise InputError.of("device-not-run", reason.where, reason.message, reason.hint)
    return job.launched_kind


def host_issues(plan: Plan, machine: Machine, device: Device) -> Iterator[Issue]:
    """Yield the issues of running all ranks of a plan on this host."""
    job, world, nodes = plan.job, plan.job.world_size, plan.job.cluster.nodes
    if nodes > 1 and (device == "cuda" or machine.hosts > 1):
        where = "this one host"
        if machine.hosts > 1:
            where = f"this host alone, one of the {machine.hosts} that the scheduler has allocated"
        way_out = f"plan for one node: --nodes 1 --gpus-per-node {machine.gpus or world}"
        if machine.hosts == 1:
            way_out += f", or use --device cpu to simulate the {nodes} nodes here"
        message = f"the plan has {nodes} nodes, but all {world} ranks start on {where}"
        yield Issue("nodes-on-host", "cluster.nodes", message, way_out)
    try:
        free_port(world)
    except RunFailed as error:
        yield Issue("ranks-can-meet", HOST, str(error))
    if device == "cuda" and world > machine.gpus:
        yield Issue(
            "world-fits-machine",
            "cluster",
            f"{plural(world, 'rank')} need {plural(world, 'GPU')}, but this machine shows {machine.gpus}",
            f"use {'fewer ranks, ' if machine.gpus else ''}--device cpu to run the same ranks on "
            "its cores, or --rehearse to simulate them",
        )
    if job.launch.check_memory:
        yield from _memory_issues(plan, machine, world, device, "cluster")


def cluster_host_issues(plan: Plan, hosts: Sequence[HostFacts], device: Device) -> Iterator[Issue]:
    """Yield the issues of hosts that each run one node of a plan, with their names."""
    ranks = plan.job.world_size // len(hosts)
    for host in hosts:
        if device == "cuda" and host.machine.gpus < ranks:
            yield Issue(
                "node-fits-host",
                host.name,
                f"the plan puts {plural(ranks, 'rank')} on each node, but this host shows "
                f"{plural(host.machine.gpus, 'GPU')}",
                "plan for what the hosts have: --gpus-per-node, or leave the host out",
            )
        if plan.job.launch.check_memory:
            yield from _memory_issues(plan, host.machine, ranks, device, host.name)


def rehearsal_warnings(job: JobSpec, machine: Machine, *, hosts: int = 1) -> Iterator[str]:
    """Warnings that a run on CPU does not show the speed of the planned cluster."""
    nodes, ranks = job.cluster.nodes, job.world_size // hosts
    if machine.idle_gpus and job.launch.device == "auto":
        yield (
            f"{plural(machine.idle_gpus, 'GPU')} on the PCI bus of this host, and no driver offers "
            "one: ranks run on its CPU (`mpctl doctor` tells more)"
        )
    if nodes > hosts:
        yield f"the {nodes} nodes of the plan are simulated on the CPU of this host"
    if ranks > machine.cores:
        yield (
            f"{ranks} ranks share {plural(machine.cores, 'core')}: the speed of this run says "
            "nothing about the planned cluster"
        )


def device_memory_issues(plan: Plan) -> Iterator[Issue]:
    """An issue unless the fullest rank fits the memory of the cluster's device, by the plan."""
    if plan.fits is False:
        (check,) = [check for check in plan.checks if check.rule == "memory-fits"]
        hint = f"{check.hint}; {START_ANYWAY}"
        yield Issue("world-fits-memory", check.where, check.message, hint)


def _memory_issues(plan: Plan, machine: Machine, ranks: int, device: Device, where: str) -> Iterator[Issue]:
    """Issues of a host that lacks memory for its ranks: on CPU for the peak of a step, on a GPU on
    its devices, and always for offloaded inputs and the copies of checkpoints."""
    if device == "cuda":
        yield from device_memory_issues(plan)
    if plan.estimate is None:
        return
    stages, free = plan.estimate.memory, bytes_text(machine.memory_bytes)
    most = max(stages, key=lambda stage: stage.allocated_bytes)
    need = _step_bytes(plan, ranks) if device == "cpu" else 0
    if need > machine.memory_bytes:
        yield Issue(
            "world-fits-memory",
            where,
            f"{plural(ranks, 'rank')} take {bytes_text(need)} at the peak of a step, up to "
            f"{bytes_text(most.allocated_bytes)} a rank ({bytes_text(most.state_bytes)} of it "
            f"weights, gradients and optimizer), but {free} are free on this machine",
            f"use --recompute full, a smaller micro batch, a smaller model or fewer replicas; {START_ANYWAY}",
        )
        return
    copies = plan.estimate.host_bytes(ranks)
    if need + copies > machine.memory_bytes:
        kept, ways = list[str](), list[str]()
        if plan.estimate.snapshot_bytes:
            kept.append("checkpoints are written from copies in host memory")
            ways.append("--set checkpoint.asynchronous=false, which saves between two steps")
        if plan.estimate.host_memory.offloaded_bytes:
            kept.append("inputs of layers are offloaded to host memory")
            ways.append("--set training.offload_activations=false, which keeps them on the device")
        step = f" beside {bytes_text(need)} at the peak of a step" if need else ""
        message = f"{' and '.join(kept)}, {bytes_text(copies)} on this machine{step}, but {free} are free"
        way_out = f"use {', or '.join(ways)}"
        yield Issue("copies-fit-memory", where, message, f"{way_out}; {START_ANYWAY}")


def node_memory_bytes(plan: Plan, ranks: int, device: Device) -> int:
    """The host memory that so many ranks of one node need at most, as far as the plan knows: Python
    and torch; on CPU the peak of a step; offloaded inputs and the copies that checkpoints are
    written from. 0 without an estimate."""
    if plan.estimate is None:
        return 0
    step = _step_bytes(plan, ranks) if device == "cpu" else 0
    return ranks * PROCESS_BYTES[device] + step + plan.estimate.host_bytes(ranks)


def _step_bytes(plan: Plan, ranks: int) -> int:
    """Bytes of ranks on CPU at the peak of a step; those of a node may all be of any one stage."""
    if plan.estimate is None:
        return 0
    stages = [stage.allocated_bytes for stage in plan.estimate.memory]
    whole_world = ranks == plan.job.world_size
    return sum(stages) * (ranks // len(stages)) if whole_world else max(stages) * ranks


def unshared_issue(host: str, said: str) -> Issue | None:
    """Return the issue of a host whose agent cannot read the launcher's key; None if it can. said: what the agent wrote
    to stderr."""
    why = next((line.partition(NO_RUN_DIR)[2] for line in said.splitlines() if NO_RUN_DIR in line), None)
    if why is None:
        return None
    hint = "use a --run-dir on a file system that all hosts mount at the same path, and that this "
    return Issue("run-dir-not-shared", host, NO_RUN_DIR + why, f"{hint}user may read there")


def doubled_hosts(hosts: Sequence[HostFacts]) -> list[Issue]:
    """Hosts of different names that are one machine, so that their ranks would share its GPUs."""
    by_boot: dict[str, list[str]] = defaultdict(list)
    for host in hosts:
        by_boot[host.boot].append(host.name)
    return [
        Issue(
            "host-doubled",
            few_text(names),
            f"are names of one machine ({boot.partition(' ')[0]}), whose GPUs would be used by the "
            f"ranks of {len(names)} nodes",
            "name each machine once, with all its GPUs",
        )
        for boot, names in by_boot.items()
        if boot and len(names) > 1
    ]


def differing_hosts(hosts: Sequence[HostFacts]) -> Iterator[Issue]:
    """Versions that differ between hosts; torch that is absent."""
    for name in VERSIONS:
        by_version: dict[str, list[str]] = defaultdict(list)
        for host in hosts:
            version = getattr(host, name)
            if name == "python":  # patch releases work together
                version = ".".join(version.split(".")[:2])
            by_version[version].append(host.name)
        if ABSENT in by_version:
            yield Issue(
                f"host-{name}",
                few_text(by_version[ABSENT]),
                f"{name} is not installed for the Python that runs there ({hosts[0].executable})",
                "install it there, or name the Python that has it",
            )
        elif len(by_version) > 1:
            words = [f"{version} on {few_text(names)}" for version, names in by_version.items()]
            message = f"hosts have different versions of {name}: {', '.join(words)}"
            hint = "install the same version on every host, or use one environment that they share"
            yield Issue(f"host-{name}", few_text([host.name for host in hosts]), message, hint)


def common_machine(hosts: Sequence[HostFacts]) -> Machine:
    """The least that every one of these hosts has."""
    machines = [host.machine for host in hosts]
    return Machine(
        cores=min(machine.cores for machine in machines),
        gpus=min(machine.gpus for machine in machines),
        memory_bytes=min(machine.memory_bytes for machine in machines),
        hosts=max(machine.hosts for machine in machines),
    )
