"""Random faults over one run, whose losses must stay those of an undisturbed run:
`python -m benchmarks.soak [--faults N] [--seed S] [--kinds K,K] [--json FILE]`, or `make soak`.

A small GPT (2 layers, dropout on) trains on two ranks (tp 2, gloo), saving every SAVE_EVERY steps.
First it trains undisturbed; then again, and at random steps a random fault of soak_faults.py is
injected. The launcher restarts the ranks by itself; where the fault ended the launcher, the run is
resumed by `mpctl launch --resume`, as a person or a scheduler would.

Shown for each fault: `reported`, the time from its injection until the launcher has said what
failed (where the launcher itself was killed: until all its processes are gone); `again`, until the
first step of the next attempt is finished, the start of a new launcher included.

Exit code 1 when a loss differs in its last bit from the undisturbed run's, when a process was left
behind, or when nothing happened for PATIENCE seconds. Faults that only root can inject (full disk:
a tmpfs; cut links: a network namespace) are left out elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.soak_faults import KINDS, Fault, draw_faults
from mpctl.units import plural
from tests.launch.command import arguments
from tests.runtime.tiny import make_data

RANKS, GAP, SAVE_EVERY, PATIENCE = 2, 40, 10, 120.0
TORCHRUN = "mpctl.runtime.torchrun"
REPORTS = ("starting again from", "trying again with another port")


class Hung(Exception):
    """Nothing happened for PATIENCE seconds, or a process was left behind."""


@dataclass
class SoakRun:
    """A run that is disturbed: its directory, its launcher now, every process it ever had."""

    path: Path
    settings: list[str]
    namespace: str = ""
    process: psutil.Popen | None = None
    family: dict[int, psutil.Process] = field(default_factory=dict)

    def start(self, *more: str) -> None:
        """Start the launcher; its messages are appended to a file beside the directory."""
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        command = [*inside, sys.executable, "-m", "mpctl", *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400"}
        with self.messages.open("ab") as out:
            self.process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                        env=environment)  # fmt: skip

    def resume(self) -> None:
        self.start("launch", "--resume", "--run-dir", str(self.path))

    @property
    def messages(self) -> Path:
        return self.path.with_suffix(".messages")

    @property
    def reports(self) -> int:
        """How many failures the launcher has reported before starting again."""
        text = self.messages.read_text(errors="replace")
        return sum(text.count(words) for words in REPORTS)

    @property
    def launcher(self) -> psutil.Process:
        assert self.process is not None
        return self.process

    @property
    def torchrun(self) -> psutil.Process:
        return next(p for p in self.launcher.children() if TORCHRUN in p.cmdline())

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
            for process in (self.launcher, *self.launcher.children(recursive=True)):
                self.family[process.pid] = process

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


@dataclass(frozen=True)
class Outcome:
    """What became of a fault; times in seconds since its injection."""

    fault: Fault
    reported: float
    again: float


def inflict(run: SoakRun, fault: Fault) -> Outcome:
    """Inject a fault and see the run through to its next step."""
    kind = KINDS[fault.kind]
    run.wait(lambda: run.last()[0] >= fault.step or not run.is_running, f"step {fault.step}")
    if not run.is_running:
        raise Hung(f"the launcher ended by itself before step {fault.step}")
    run.remember()
    reports, began = run.reports, time.time()
    kind.inject(run, fault)
    injected = time.time() if "saving" in fault.kind else began
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
    run.family.pop(run.launcher.pid, None)
    if left := run.left_behind():
        raise Hung(f"left behind: {left}")
    return Outcome(fault, reported - injected, again - injected)


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


def run_settings(steps: int, faults: int) -> list[str]:
    keys = {"training.steps": steps, "checkpoint.interval": SAVE_EVERY, "checkpoint.keep_last": 3,
            "training.eval_samples": 0, "launch.max_restarts": 2 * faults + 1,
            "launch.timeout_seconds": 10, "launch.shared_memory": "false"}  # fmt: skip
    return ["--tp", str(RANKS), *(part for k, v in keys.items() for part in ("--set", f"{k}={v}"))]


def undisturbed_losses(folder: Path, settings: list[str]) -> list[float]:
    run = SoakRun(folder / "undisturbed", settings)
    run.start(*arguments(folder / "data", run.path, *settings))
    try:
        if run.launcher.wait():
            raise SystemExit(run.messages.read_text())
    finally:
        if run.is_running:  # the soak itself was stopped
            run.launcher.kill()
    return [record["loss"] for record in run.records()]


def disturb(run: SoakRun, faults: list[Fault], show: Callable[[str], None]) -> list[Outcome]:
    """Inflict every fault, then let the run end."""
    outcomes: list[Outcome] = []
    began = time.monotonic()
    for number, fault in enumerate(faults, start=1):
        outcomes.append(outcome := inflict(run, fault))
        left = (time.monotonic() - began) / number * (len(faults) - number)
        show(f"{number}/{len(faults)} step {fault.step}, {KINDS[fault.kind].text}: reported after "
             f"{outcome.reported:.2f} s, again after {outcome.again:.2f} s; {left / 60:.0f} min "
             "left")  # fmt: skip
    run.wait(lambda: not run.is_running, "the end of the run")
    return outcomes


def table(outcomes: list[Outcome]) -> list[str]:
    """Markdown: for each kind the number of faults, and both times as median / p90 / most."""
    times = "median, p90, max (s)"
    lines = [
        f"| fault | count | reported: {times} | training again: {times} |",
        "|---|--:|--:|--:|",
    ]
    kinds = [kind for kind in KINDS if any(one.fault.kind == kind for one in outcomes)]
    rows = [(KINDS[k].text, [one for one in outcomes if one.fault.kind == k]) for k in kinds]
    for text, group in (*rows, ("all", outcomes)):
        reported, again = (spread([getattr(o, n) for o in group]) for n in ("reported", "again"))
        lines.append(f"| {text} | {len(group)} | {reported} | {again} |")
    return lines


def spread(values: list[float]) -> str:
    ordered = sorted(values)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return f"{median(ordered):.2f}, {p90:.2f}, {ordered[-1]:.2f}" if ordered else ""


def soak(options: argparse.Namespace, folder: Path) -> int:
    """The whole soak; its exit code."""
    is_root = os.geteuid() == 0 and not options.no_root
    kinds = options.kinds.split(",") if options.kinds else list(KINDS)
    usable = [kind for kind in kinds if is_root or not KINDS[kind].needs]
    faults = draw_faults(options.faults, options.seed, gap=GAP, ranks=RANKS, kinds=usable)
    settings = run_settings((options.faults + 2) * GAP, options.faults)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, {time.strftime('%Y-%m-%d')}, load {os.getloadavg()[0]:.1f}")
    print(f"{plural(len(faults), 'fault')}, seed {options.seed}", flush=True)
    if missing := [kind for kind in kinds if kind not in usable]:
        print(f"left out, since only root can inject them: {', '.join(missing)}")
    make_data(folder)
    expected = undisturbed_losses(folder, settings)
    with surroundings(folder, is_root=is_root) as namespace:
        run = SoakRun(folder / "disk" / "run", settings, namespace)
        run.start(*arguments(folder / "data", run.path, *settings))
        try:
            outcomes = disturb(run, faults, lambda line: print(line, flush=True))
        except Hung as error:
            print(f"FAILED: {error}\n{run.messages.read_text(errors='replace')[-3000:]}")
            return 1
        finally:
            run.remember()
            if run.is_running:
                run.launcher.kill()
            left = run.left_behind()
        losses = [record["loss"] for record in run.records()]
    print(*table(outcomes), sep="\n")
    if options.json:
        rows = [{**vars(o.fault), "reported": o.reported, "again": o.again} for o in outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    pairs = enumerate(zip(expected, losses, strict=False), start=1)
    differs = [step for step, (one, other) in pairs if one != other]
    print(f"{len(losses)} of {len(expected)} steps; final loss {losses[-1]!r}, undisturbed "
          f"{expected[-1]!r}; steps with another loss: {differs or 'none'}")  # fmt: skip
    return int(bool(differs or left or len(losses) != len(expected)))


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended, too
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", help="comma-separated kinds of soak_faults.py; all by default")
    parser.add_argument("--no-root", action="store_true", help="leave out what only root can do")
    parser.add_argument("--json", type=Path, help="also write every fault and its times")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mpctl-soak-") as folder:
        return soak(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
