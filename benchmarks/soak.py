"""Random faults over one run, whose losses must stay those of an undisturbed run:
`python -m benchmarks.soak [--hosts 2] [--faults N] [--seed S] [--kinds K,K] [--json FILE]`, or
`make soak`, which also writes the results into benchmarks/results/reliability.md (--write).

A small GPT (2 layers, dropout on) trains on two ranks (tp 2, gloo), saving every SAVE_EVERY steps.
First it trains undisturbed; then again, and at random steps a random fault of soak_faults.py is
injected. The launcher restarts the ranks; where the fault ended the launcher, the run is resumed by
`mpctl launch --resume`, as a person or a scheduler would. With --hosts 2 the ranks are on two hosts
that ssh reaches (dp 2), and the faults are those of soak_hosts.py.

Shown for each fault: `reported`, the time from its injection until the launcher has reported the
failure (where the launcher itself was killed: until all its processes are gone); `again`, until the
first step of the next attempt is finished, the start of a new launcher included. A fault that must
not end an attempt has no report; `again` is then the first step after it.

Exit code 1 when a loss differs in its last bit from the undisturbed run's, when a process was left
behind, or when nothing happened for PATIENCE seconds. Faults that only root can inject (full disk:
a tmpfs; cut links: a network namespace) are left out elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.measured import write_part
from benchmarks.soak_faults import KINDS as LOCAL_KINDS
from benchmarks.soak_faults import Fault, Kind, draw_faults
from benchmarks.soak_hosts import KINDS as HOST_KINDS
from mpctl.core.units import plural
from mpctl.run.hosts.machine import processor_name
from tests.multinode.ssh_hosts import SshHosts, namespace_hosts
from tests.multinode.ssh_launch import processes_of, ssh_arguments
from tests.run.launch.command import arguments
from tests.train.runtime.tiny import make_data

RANKS, GAP, SAVE_EVERY, PATIENCE = 2, 40, 10, 120.0
HARMLESS = 1.0
"""Seconds of training after a fault that must not end an attempt, in which a failure would show."""
PAGE = Path(__file__).parent / "results" / "reliability.md"
TORCHRUN, WAITING = "mpctl.train.runtime.torchrun", "--waiting"
REPORTS = ("starting again from", "trying again with another port")


class Hung(Exception):
    """Nothing happened for PATIENCE seconds, or a process was left behind."""


@dataclass
class SoakRun:
    """A disturbed run: its directory, the faults that may hit it, its current launcher, every
    process it has had, and those of them that waited for the next attempt."""

    path: Path
    kinds: Mapping[str, Kind]
    namespace: str = ""
    process: psutil.Popen | None = None
    family: dict[int, psutil.Process] = field(default_factory=dict)
    spares: set[int] = field(default_factory=set)

    def start(self, *more: str) -> None:
        """Start the launcher; its messages are appended to a file next to the directory."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        command = [*inside, sys.executable, "-m", "mpctl", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        with self.messages.open("ab") as out:
            self.process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)

    def resume(self) -> None:
        self.start("launch", "--resume", "--run-dir", str(self.path))

    @property
    def messages(self) -> Path:
        return self.path.with_suffix(".messages")

    @property
    def reports(self) -> int:
        """Number of failures that the launcher has reported before starting again."""
        text = self.messages.read_text(errors="replace")
        return sum(text.count(words) for words in REPORTS)

    @property
    def launcher(self) -> psutil.Process:
        assert self.process is not None
        return self.process

    @property
    def torchrun(self) -> psutil.Process:
        return next(p for p in self.launcher.children() if _is_torchrun(p.cmdline()))

    @property
    def ranks(self) -> list[psutil.Process]:
        found = {int(p.environ()["RANK"]): p for p in self.torchrun.children()}
        return [found[rank] for rank in sorted(found)]

    def rank(self, number: int) -> psutil.Process:
        return self.ranks[number]

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def remember(self) -> None:
        with suppress(psutil.Error):
            self._add((self.launcher, *self.launcher.children(recursive=True)))

    def _add(self, processes: Iterable[psutil.Process]) -> None:
        for process in processes:
            self.family[process.pid] = process
            with suppress(psutil.Error):  # it ends at this moment
                if WAITING in process.cmdline():
                    self.spares.add(process.pid)

    def forget_current(self) -> None:
        """Forget the processes that stay when the next attempt begins: the launcher, and the one
        that waited for that attempt."""
        for pid in (self.launcher.pid, *self.spares):
            self.family.pop(pid, None)
        self.spares.clear()

    def left_behind(self) -> list[psutil.Process]:
        """Processes of ended launches that still run five seconds later; they are killed."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=5)
        for process in alive:
            process.kill()
        self.family.clear()
        return alive

    def records(self) -> list[dict[str, Any]]:
        """The steps on record; a line that is being written is left out."""
        lines = (self.path / "metrics.jsonl").read_text(errors="replace").splitlines(True)
        return [record for line in lines if (record := _record(line))]

    def last(self) -> tuple[int, float]:
        """The newest step on record and the time at which it was finished; zeros without one."""
        try:
            with (self.path / "metrics.jsonl").open("rb") as stream:
                stream.seek(max(0, os.fstat(stream.fileno()).st_size - 2000))
                lines = stream.read().decode(errors="replace").splitlines(True)
        except OSError:
            return 0, 0.0
        record = next((r for line in reversed(lines) if (r := _record(line))), None)
        return (record["step"], record["time"]) if record else (0, 0.0)

    def wait(self, condition: Callable[[], bool], what: str) -> float:
        """The time at which a condition holds. Raises Hung when it does not within PATIENCE."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                raise Hung(f"{what}: not within {PATIENCE:g} s")
            time.sleep(0.01)
        return time.time()


@dataclass
class HostsRun(SoakRun):
    """A run over hosts that ssh reaches. Its processes are found by the path of its directory."""

    hosts: SshHosts = field(kw_only=True)

    def on_host(self, kind: str, number: int) -> psutil.Process:
        """The process of a kind (processes_of) on the host of this number, from 0."""
        name = list(self.hosts.hosts)[number]
        found = processes_of(self.path)[kind]
        return next(p for p in found if p.environ()["MPCTL_TEST_HOST"] == name)

    def rank(self, number: int) -> psutil.Process:
        return self.on_host("rank", number)

    def remember(self) -> None:
        for processes in processes_of(self.path).values():
            self._add(processes)

    def forget_current(self) -> None:
        """Forget the processes that stay: those of the launcher, the agents, and theirs that
        waited."""
        super().forget_current()
        for kind in ("launcher", "ssh", "agent", "other"):
            for process in processes_of(self.path).get(kind, []):
                self.family.pop(process.pid, None)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault; times in seconds since its injection. reported: None for a fault that
    must not end an attempt."""

    fault: Fault
    reported: float | None
    again: float


def inflict(run: SoakRun, fault: Fault) -> Outcome:
    """Inject a fault and wait for the run's next step."""
    kind = run.kinds[fault.kind]
    run.wait(lambda: run.last()[0] >= fault.step or not run.is_running, f"step {fault.step}")
    if not run.is_running:
        raise Hung(f"the launcher ended by itself before step {fault.step}")
    run.remember()
    reports, began = run.reports, time.time()
    kind.inject(run, fault)
    injected = time.time() if "saving" in fault.kind else began
    if kind.is_harmless:
        return ride_out(run, fault, injected)
    reported = run.wait(lambda: run.reports > reports or not run.is_running, "a report")
    kind.mend(run)
    if run.is_running:
        run.wait(lambda: run.last()[1] > reported or not run.is_running, "the next attempt")
    if not run.is_running:
        reported = resume_ended(run, kind.while_down, reported)
        run.wait(lambda: run.last()[1] > reported or not run.is_running, "the resumed run")
    step, again = run.last()
    if again <= reported:
        raise Hung(f"the launcher ended by itself after step {step}, see {run.messages}")
    run.forget_current()
    if left := run.left_behind():
        raise Hung(f"left behind: {left}")
    return Outcome(fault, reported - injected, again - injected)


def ride_out(run: SoakRun, fault: Fault, injected: float) -> Outcome:
    """Wait for a run to survive a fault that must not end an attempt. Raises Hung if it does."""
    reports, kind = run.reports, run.kinds[fault.kind]
    kind.mend(run)
    mended = time.time()
    run.wait(lambda: run.last()[1] > mended + HARMLESS or not run.is_running, "the next step")
    if run.reports > reports or not run.is_running:
        raise Hung(f"{kind.text}: ended an attempt")
    return Outcome(fault, None, run.last()[1] - injected)


def resume_ended(run: SoakRun, while_down: Callable[[SoakRun], object], reported: float) -> float:
    """Resume a run whose launcher has ended. Returns when its last process was gone."""
    while psutil.wait_procs(list(run.family.values()), timeout=0)[1]:
        if time.time() > reported + 5:
            raise Hung(f"left behind: {run.left_behind()}")
        time.sleep(0.01)
    gone = time.time()
    while_down(run)
    run.resume()
    return gone


def _is_torchrun(line: Sequence[str]) -> bool:
    """Whether a command line is that of a torchrun with ranks."""
    return TORCHRUN in line and WAITING not in line


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) and line.endswith("\n") and "step" in record else {}


# ---------------------------------------------------------------- the whole


@contextmanager
def surroundings(folder: Path, *, is_root: bool) -> Iterator[str]:
    """A small disk at FOLDER/disk and the name of a network namespace; without root a plain folder
    and an empty name."""
    disk, name = folder / "disk", f"soak-{os.getpid()}"
    disk.mkdir()
    if not is_root:
        yield ""
        return
    with ExitStack() as undo:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "soak", str(disk)], check=True)
        undo.callback(subprocess.run, ["umount", "-l", str(disk)], check=False)
        subprocess.run(["ip", "netns", "add", name], check=True)
        undo.callback(subprocess.run, ["ip", "netns", "delete", name], check=False)
        subprocess.run(["ip", "-n", name, "link", "set", "lo", "up"], check=True)
        yield name


@dataclass(frozen=True)
class World:
    """The environment of a soak. make: makes a run in a directory; command: of its launch, without
    settings; disk: the folder of the disturbed run; kinds: the faults that can be injected;
    settings: of the launch in addition to those of every soak."""

    make: Callable[[Path], SoakRun]
    command: Callable[[Path], list[str]]
    disk: Path
    kinds: tuple[str, ...]
    settings: tuple[str, ...]


@contextmanager
def one_host(folder: Path, *, is_root: bool) -> Iterator[World]:
    """Two ranks on this host, which send through the loopback interface."""
    kinds = tuple(kind for kind in LOCAL_KINDS if is_root or not LOCAL_KINDS[kind].needs)
    layout = ("--tp", str(RANKS), "--set", "launch.timeout_seconds=10")
    with surroundings(folder, is_root=is_root) as namespace:
        yield World(
            make=lambda path: SoakRun(path, LOCAL_KINDS, namespace),
            command=lambda path: arguments(folder / "data", path, *layout),
            disk=folder / "disk",
            kinds=kinds,
            settings=("--set", "launch.shared_memory=false"),
        )


@contextmanager
def two_hosts(folder: Path) -> Iterator[World]:
    """A rank on each of two hosts with separate addresses, processes and links: network namespaces
    of this machine, reached by a real ssh. Only root can make them."""
    with namespace_hosts(folder / "ssh") as hosts:
        hostfile = hosts.hostfile("n1 slots=1", "n2 slots=1")
        layout = ("--tp", "1", "--dp", str(RANKS), "--set", "cluster.gpus_per_node=1")
        yield World(
            make=lambda path: HostsRun(path, HOST_KINDS, hosts=hosts),
            command=lambda path: ssh_arguments(hosts, hostfile, folder / "data", path),
            disk=folder,
            kinds=tuple(HOST_KINDS),
            settings=(*layout, "--set", "launch.timeout_seconds=60"),
        )


def run_settings(steps: int, faults: int) -> list[str]:
    keys = {
        "training.steps": steps,
        "checkpoint.interval": SAVE_EVERY,
        "checkpoint.keep_last": 3,
        "training.eval_samples": 0,
        "launch.max_restarts": 2 * faults + 1,
    }
    return [part for k, v in keys.items() for part in ("--set", f"{k}={v}")]


def undisturbed_losses(run: SoakRun, command: list[str]) -> list[float]:
    run.start(*command)
    try:
        if run.launcher.wait():
            raise SystemExit(run.messages.read_text())
    finally:
        if run.is_running:  # the soak was stopped
            run.launcher.kill()
    return [record["loss"] for record in run.records()]


def disturb(run: SoakRun, faults: list[Fault], show: Callable[[str], None]) -> list[Outcome]:
    """Inflict every fault, then let the run end."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for number, fault in enumerate(faults, start=1):
        outcomes.append(outcome := inflict(run, fault))
        left = (time.monotonic() - began) / number * (len(faults) - number)
        reported = "nothing lost"
        if outcome.reported is not None:
            reported = f"reported after {outcome.reported:.2f} s"
        show(
            f"{number}/{len(faults)} step {fault.step}, {run.kinds[fault.kind].text}: {reported}, "
            f"again after {outcome.again:.2f} s; {left / 60:.0f} min left"
        )
    run.wait(lambda: not run.is_running, "the end of the run")
    return outcomes


def table(outcomes: list[Outcome], known: Mapping[str, Kind]) -> list[str]:
    """Markdown: for each kind the number of faults, and both times as median / p90 / most."""
    times = "median, p90, max (s)"
    lines = [f"| fault | count | reported: {times} | training again: {times} |", "|---|--:|--:|--:|"]
    kinds = [kind for kind in known if any(one.fault.kind == kind for one in outcomes)]
    rows = [(known[k].text, [one for one in outcomes if one.fault.kind == k]) for k in kinds]
    for text, group in (*rows, ("all", outcomes)):
        reported = spread([o.reported for o in group if o.reported is not None])
        again = spread([o.again for o in group])
        lines.append(f"| {text} | {len(group)} | {reported} | {again} |")
    return lines


def spread(values: list[float]) -> str:
    if not values:
        return "none"
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{median(ordered):.2f}, {p90:.2f}, {ordered[-1]:.2f}"


@dataclass(frozen=True)
class Report:
    """The results of a soak. kinds: all faults; losses: of the disturbed run, and expected: of the
    undisturbed one, by step; left: processes that were left at the end; minutes: duration of the
    disturbed run."""

    outcomes: list[Outcome]
    kinds: Mapping[str, Kind]
    losses: list[float]
    expected: list[float]
    left: list[psutil.Process]
    minutes: float

    @property
    def differs(self) -> list[int]:
        """The steps with another loss."""
        pairs = enumerate(zip(self.expected, self.losses, strict=False), start=1)
        return [step for step, (one, other) in pairs if one != other]

    @property
    def is_good(self) -> bool:
        return not (self.differs or self.left or len(self.losses) != len(self.expected))

    @property
    def text(self) -> str:
        final = f"final loss {self.losses[-1]!r}, undisturbed {self.expected[-1]!r}"
        steps = f"{len(self.losses):,} of {len(self.expected):,} steps; {final}"
        return f"{steps}; steps with another loss: {self.differs or 'none'}; left: {self.left}"

    def page(self, command: str, load: float) -> str:
        """The part of benchmarks/results/reliability.md on a successful soak."""
        memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
        machine = f"{os.cpu_count()} cores of {processor_name()}, {memory}"
        versions = f"Python {platform.python_version()}, torch {version('torch')}"
        said = (
            f"{time.strftime('%Y-%m-%d')}, {machine}, {versions}, `{command}`, load {load:.1f} at "
            f"the start, {self.minutes:.0f} minutes: {plural(len(self.outcomes), 'fault')}. All "
            f"of the {len(self.losses):,} steps had the undisturbed run's loss to the last bit "
            f"(final loss {self.losses[-1]!r} twice), and no process was left behind."
        )
        return "\n".join([*textwrap.wrap(said, 100), "", *table(self.outcomes, self.kinds)])


def soak(options: argparse.Namespace, folder: Path) -> int:
    """Run the soak; returns its exit code."""
    is_root, load = os.geteuid() == 0 and not options.no_root, os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}, load {load:.1f}", flush=True)
    if options.hosts > 1 and not is_root:
        raise SystemExit("--hosts 2 makes network namespaces, which only root can")
    make_data(folder)
    several = two_hosts(folder) if options.hosts > 1 else one_host(folder, is_root=is_root)
    with several as world:
        kinds = options.kinds.split(",") if options.kinds else list(world.kinds)
        if unknown := [kind for kind in kinds if kind not in world.kinds]:
            raise SystemExit(f"{', '.join(unknown)}: not here, where there are {world.kinds}")
        if not is_root:
            missing = LOCAL_KINDS.keys() - set(world.kinds)
            print(f"left out, since only root can inject them: {', '.join(sorted(missing))}")
        faults = draw_faults(options.faults, options.seed, gap=GAP, ranks=RANKS, kinds=kinds)
        report = run_soak(world, faults)
    if report is None:
        return 1
    print(*table(report.outcomes, report.kinds), report.text, sep="\n")
    if options.json:
        rows = [{**vars(o.fault), "reported": o.reported, "again": o.again} for o in report.outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.write and report.is_good:
        hosts = f"HOSTS={options.hosts} " if options.hosts > 1 else ""
        command = f"make soak {hosts}FAULTS={options.faults} SEED={options.seed}"
        write_part(f"soak, hosts {options.hosts}", report.page(command, load), PAGE)
    return 0 if report.is_good else 1


def run_soak(world: World, faults: list[Fault]) -> Report | None:
    """Train undisturbed, then disturbed; None, and the reason printed, when the run hung."""
    settings = [*world.settings, *run_settings((len(faults) + 2) * GAP, len(faults))]
    quiet, run = world.make(world.disk / "undisturbed"), world.make(world.disk / "run")
    expected = undisturbed_losses(quiet, [*world.command(quiet.path), *settings])
    shutil.rmtree(quiet.path)  # so that its checkpoints do not fill the disk of the other
    began = time.monotonic()
    run.start(*world.command(run.path), *settings)
    try:
        outcomes = disturb(run, faults, lambda line: print(line, flush=True))
    except Hung as error:
        print(f"FAILED: {error}\n{run.messages.read_text(errors='replace')[-3000:]}")
        return None
    finally:
        run.remember()
        if run.is_running:
            run.launcher.kill()
        left = run.left_behind()
    losses = [record["loss"] for record in run.records()]
    return Report(outcomes, run.kinds, losses, expected, left, (time.monotonic() - began) / 60)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended, too
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1)
    parser.add_argument("--kinds", help="comma-separated keys of KINDS; all by default")
    parser.add_argument("--no-root", action="store_true", help="leave out what only root can do")
    parser.add_argument("--json", type=Path, help="also write every fault and its times")
    parser.add_argument("--write", action="store_true", help=f"write the table of {PAGE.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpctl-soak-") as folder:
        return soak(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
