"""A run directory: its paths, when it may be used, its lock, its life cycle.

mpctl/records/rundir/__init__.py lists the files. Nothing is ever written outside the directory. One launch
at a time uses it, by a lock that also holds between hosts and ends with the launch
(mpctl/core/locks.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mpctl.core.durable import remove, write_whole
from mpctl.core.errors import InputError
from mpctl.core.locks import LOCK, Holder, LockHeld, hold_lock
from mpctl.core.units import bytes_text
from mpctl.records.checkpoint.folder import list_checkpoints, list_damaged, prune_damaged, recover, set_aside
from mpctl.records.checkpoint.verify import newest_undamaged
from mpctl.records.rundir.launcher import has_ended, launcher_is_alive, read_launcher
from mpctl.records.rundir.marker import MARKER, is_launched, is_resumable, write_marker
from mpctl.records.rundir.metrics import read_lines
from mpctl.records.rundir.profile_files import PROFILE
from mpctl.records.rundir.rank_files import FailureRecord, RankReport, StepRecord

NODES = "nodes"
KEY = "key-"
"""The beginning of the name of a launch's key, in NODES."""
OLDER = {"stop", "torchrun.pid", "failures"}
"""Files and folders that only older versions wrote."""
UNLOCKED = (
    "the file system of the run directory has no locks (flock): a second launch into it is noticed "
    "only while RUN/.lock is seen to change"
)


class Place:
    """A file or folder of every run, by its path below the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """The run directory at `path`, which need not exist yet: its files, checks and changes.

    torchrun_log: of the torchruns of node 0, one after the other; launcher_log: the launchers'
    messages; nodes: what the hosts of a launch share; hosts: the host of every rank; status: the
    state of all hosts and ranks; lost_hosts: why hosts could not be used at the end of the last
    launch, a line each, absent when all could; blamed: how many failures each host is blamed for;
    excluded: the hosts that a requeued job is not to use, a line each, absent without any;
    slow: ranks and links that held it up (slow.py); program: what a program that the launch runs
    instead of mpctl's training reads and writes; program_starts: how often it was started.
    """

    path: Path
    job = Place("job.json")
    plan = Place("plan.json")
    launcher = Place("launcher.json")
    batch_script = Place("slurm.sh")
    manifest = Place("kubernetes.yaml")
    data = Place("data")
    stop_request = Place("stop-request")
    metrics = Place("metrics.jsonl")
    csv = Place("metrics.csv")
    tensorboard = Place("tensorboard")
    bench = Place("bench.json")
    answers = Place("answers.jsonl")
    slow = Place("slow.jsonl")
    checkpoints = Place("checkpoints")
    profile = Place(PROFILE)
    reports = Place("ranks")
    summary = Place("summary.json")
    torchrun_log = Place("logs/torchrun.log")
    launcher_log = Place("logs/launcher.log")
    nodes = Place(NODES)
    hosts = Place(f"{NODES}/hosts.json")
    status = Place(f"{NODES}/status.json")
    lost_hosts = Place(f"{NODES}/lost")
    blamed = Place(f"{NODES}/blamed.json")
    excluded = Place(f"{NODES}/excluded")
    program = Place("program")
    program_checkpoints = Place("program/checkpoints")
    program_starts = Place("program/starts")

    def report(self, rank: int) -> Path:
        """Return the file of a rank's measurements, written when it has finished."""
        return self.reports / f"rank-{rank}.json"

    def log(self, rank: int) -> Path:
        """The output of one rank, of all attempts."""
        return self.path / "logs" / f"rank-{rank}.log"

    def node_log(self, node: int) -> Path:
        """The output of every torchrun of a node: torchrun.log, torchrun-1.log, ..."""
        return self.torchrun_log if node == 0 else self.path / "logs" / f"torchrun-{node}.log"

    def heartbeat(self, rank: int) -> Path:
        """The file to which a rank of a program appends how far it is (heartbeat.py)."""
        return self.program / "heartbeats" / f"rank-{rank}"

    def program_stop(self, rank: int) -> Path:
        """The file that appears when a rank of a program is to stop."""
        return self.program / "stops" / f"rank-{rank}"

    def batch_log(self, job_id: str) -> Path:
        """The output of a batch job of Slurm that was submitted for this run."""
        return self.path / "logs" / f"slurm-{job_id}.out"

    @property
    def collective_trace(self) -> Path:
        """Prefix of the files to which torch's flight recorder writes the last collectives of a
        rank whose collective timed out; the rank's number follows, without a dot."""
        return self.path.resolve() / "logs" / "nccl_trace_rank_"

    # ------------------------------------------------------------ contents

    def records(self) -> Iterator[StepRecord]:
        """The records in metrics.jsonl; lines that are not records are left out."""
        return (record for _, record in read_lines(self.metrics) if record is not None)

    def rank_reports(self) -> list[RankReport]:
        files = self.reports.glob("rank-*.json")
        reports: list[RankReport] = [json.loads(path.read_text("utf-8")) for path in files]
        return sorted(reports, key=lambda report: report["rank"])

    def last_step(self) -> int:
        """The last step in metrics.jsonl or in a rank's report, 0 without any."""
        steps = [record["step"] for record in self.records()]
        reported = [report["steps"] for report in self.rank_reports()]
        return max([0, *steps, *reported])

    def last_checkpoint(self) -> int:
        """The step of the newest checkpoint, 0 without one."""
        saved = list_checkpoints(self.checkpoints)
        return saved[-1][0] if saved else 0

    def document(self, name: str) -> Path:
        """job.json or plan.json; the copy in the newest checkpoint when the run's own cannot be
        read."""
        saved = reversed(list_checkpoints(self.checkpoints))
        paths = [self.path / name, *(folder / name for _, folder in saved)]
        return next((path for path in paths if _is_json_object(path)), paths[0])

    # ------------------------------------------------------------ whether it may be used

    @property
    def is_occupied(self) -> bool:
        """Whether it is a directory with anything in it other than what the hosts of a launch use
        to find each other."""
        ignored = {NODES, LOCK}
        return self.path.is_dir() and any(path.name not in ignored for path in self.path.iterdir())

    def require_free(self) -> None:
        """Raises InputError when the directory already has content."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError.of("run-dir-occupied", "--run-dir", f"{self.path} is a file", "use another --run-dir")
        if self.is_occupied:
            steps = self.last_step()
            contents = f"a run that reached step {steps}" if steps else "files"
            message = f"{self.path} already contains {contents}"
            raise InputError.of(
                "run-dir-occupied",
                "--run-dir",
                message,
                "use --resume to continue it, --overwrite to replace it, or another --run-dir"
                if is_resumable(self.path)
                else "use another --run-dir",
            )

    def require_run(self) -> None:
        """Raises InputError when there is no run to resume."""
        if not is_resumable(self.path):
            raise InputError.of(
                "no-run",
                "--run-dir",
                f"{self.path} does not contain a run of mpctl",
                "leave out --resume to start a new run there",
            )

    def require_replaceable(self) -> None:
        """Raises InputError when --overwrite would remove files that no launch wrote."""
        if self.is_occupied and not is_launched(self.path):
            raise InputError.of(
                "run-dir-foreign",
                "--run-dir",
                f"{self.path} does not contain a run of mpctl; nothing was removed",
                "use another --run-dir",
            )

    @contextmanager
    def locked(self, option: str = "--run-dir") -> Iterator[list[str]]:
        """Make the directory when it is missing and lock it; one that is still empty at the end is
        removed. Keys that killed launches left are removed. Yields what the user should know: that
        the file system has no locks, or who was killed with the lock. Raises InputError when
        another launch has the lock, or when the directory cannot be made. option: that named it."""
        with ExitStack() as stack:
            try:
                if not self.path.exists():
                    stack.callback(self._remove_empty)
                self.make()
                held = hold_lock(self.path, also=self._launcher_elsewhere(), signs=(self.status, self.metrics))
                lock = stack.enter_context(held)
            except OSError as error:
                raise cannot_write(Path(error.filename or self.path), error) from None
            except LockHeld as error:
                by = f": {error.holder}" if error.holder else ""
                raise InputError.of(
                    "run-dir-busy",
                    option,
                    f"another launch is running in {self.path}{by}",
                    f"wait for it to end, or use another {option}",
                ) from None
            for path in self.nodes.glob(f"{KEY}*"):
                remove(path)
            left = f"the last launch in {self.path} was killed: {lock.left_by}"
            yield [UNLOCKED] * bool(lock.refusal) + [left] * bool(lock.left_by)

    def _remove_empty(self) -> None:
        with suppress(OSError):
            self.path.rmdir()

    def _launcher_elsewhere(self) -> Holder | None:
        """The launcher in launcher.json, unless it has ended as far as this host can see. It may be
        of a version that locked the directory instead of a file in it."""
        record = read_launcher(self.path)
        if record is None or record.process_started is None or record.pid == os.getpid():
            return None
        if has_ended(self.path) or launcher_is_alive(record) is False:
            return None
        return Holder(record.host, record.pid, record.started or record.process_started)

    # ------------------------------------------------------------ from launch to end

    def make(self) -> None:
        """Make the directory, which only this user may enter: whoever can read it sees the weights
        and takes part in the launch (launch/control/). An existing one is unchanged."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def claim(self) -> None:
        """Make the directory and mark it as a run's."""
        self.make()
        write_marker(self.path)

    def clear(self) -> None:
        """Remove the files and folders of a run and nothing else, the marker last. What the hosts
        of this launch use to find each other stays (nodes/)."""
        for name in (*_contents(), MARKER):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove a run that never started, and the directory when nothing else is in it."""
        shutil.rmtree(self.path / NODES, ignore_errors=True)
        self.clear()
        (self.path / LOCK).unlink(missing_ok=True)
        self._remove_empty()

    def begin_program(self) -> None:
        """Remove what an earlier attempt of a program wrote, except its records and its own
        files, and count this one."""
        self.torchrun_log.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.status, self.summary):
            path.unlink(missing_ok=True)
        for folder in (self.heartbeat(0).parent, self.program_stop(0).parent):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self.program_checkpoints.mkdir(exist_ok=True)
        write_whole(self.program_starts, f"{self.num_starts() + 1}\n")

    def num_starts(self) -> int:
        """Return the number of times that the program of this run was started."""
        with suppress(OSError, ValueError):
            return max(0, int(self.program_starts.read_text("ascii")[:9]))
        return 0

    def begin_attempt(self, keep_last: int = 0) -> list[str]:
        """Remove what an earlier attempt wrote after the checkpoint that this one starts from: the
        newest whose files have their recorded sizes. Returns a message for each newer checkpoint
        that was renamed because it is damaged, and for those of former attempts that were removed
        (prune_damaged; keep_last: of the run) or stay."""
        self.torchrun_log.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.status, self.summary, self.answers):
            path.unlink(missing_ok=True)
        messages = self._set_damaged_aside()
        if removed := prune_damaged(self.checkpoints, last=keep_last):
            names = ", ".join(path.name for path in removed)
            rule = f"of damaged checkpoints the last one stays (checkpoint.keep_last {keep_last})"
            messages.append(f"{self.checkpoints}: {names} removed; {rule}")
        if len(left := list_damaged(self.checkpoints)) > 1:
            size = sum(f.stat().st_size for path in left for f in path.glob("*") if f.is_file())
            messages.append(
                f"{self.checkpoints}: {len(left)} damaged checkpoints (damaged-step-N) take "
                f"{bytes_text(size)}: remove them, or set checkpoint.keep_last, which keeps one"
            )
        for folder in (self.path / "failures", self.reports):
            shutil.rmtree(folder, ignore_errors=True)
        step = self.last_checkpoint()
        records = [record for record in self.records() if record["step"] <= step]
        if self.metrics.exists():
            write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in records))
        return messages

    def _set_damaged_aside(self) -> list[str]:
        recover(self.checkpoints)
        newest, damaged = newest_undamaged(list_checkpoints(self.checkpoints), hashed=False)
        return [
            f"{issues[0].where}: {issues[0].message}; renamed to {set_aside(folder)}"
            for folder, issues in (damaged if newest else ())
        ]

    def set_reported_damage_aside(self, failures: Iterable[FailureRecord]) -> list[str]:
        """Rename each checkpoint in which a rank read other bytes than were written, if there is an
        older checkpoint; returns a message for each. failures: of an attempt."""
        messages = []
        for record in failures:
            damaged = Path(record.get("damaged", "")).resolve()
            saved = list_checkpoints(self.checkpoints)
            for (older, _), (_, folder) in pairwise(saved):
                if folder.resolve() == damaged:
                    renamed = f"renamed to {set_aside(folder)}, starting from step {older}"
                    messages.append(f"{record['error']}; {renamed}")
        return messages

    def end_attempt(self) -> None:
        """Remove what an unfinished save has left, after the last rank has ended."""
        recover(self.checkpoints)


def _contents() -> set[str]:
    """Names of the files and folders of a run, those that older versions wrote included; without
    what the hosts of a launch share."""
    places = {place.name for place in vars(RunDir).values() if isinstance(place, Place)}
    return {Path(name).parts[0] for name in places} - {NODES} | OLDER


def _is_json_object(path: Path) -> bool:
    """Whether a file holds a JSON object that is not empty."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and bool(document)


def cannot_write(path: Path, error: OSError) -> InputError:
    """The error for a run directory that cannot be written."""
    message = f"{path} cannot be written: {error.strerror or error}"
    return InputError.of("run-dir-unusable", "--run-dir", message, "use a directory that this user may write")


def free_run_dir(name: str) -> RunDir:
    """`runs/NAME`, or the first of `runs/NAME-2`, `runs/NAME-3`, ... that is free."""
    numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 1_000_000))
    try:
        return next(run for path in numbered if not (run := RunDir(path)).is_occupied)
    except OSError as error:
        raise cannot_write(Path("runs") / name, error) from None
