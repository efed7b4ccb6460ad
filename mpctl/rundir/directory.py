"""The run directory: what lies in it, when it may be used, what a resumed run finds.

RUN/ job.json plan.json metrics.jsonl summary.json logs/ checkpoints/ ranks/ failures/ doing/ data/,
where the job asks for them metrics.csv tensorboard/, and .mpctl-run, which says that all of these
are a launch's own (marker.py).
Nothing is ever written outside it. One launch at a time holds it, by a lock on the directory that
the kernel takes back however the launch ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.durable import write_whole
from mpctl.errors import InputError
from mpctl.rundir.breadcrumb import BreadcrumbState, read_breadcrumb
from mpctl.rundir.checkpoints import list_checkpoints, newest_whole, recover, set_aside
from mpctl.rundir.marker import COMMAND, is_launched, is_resumable, write_marker
from mpctl.rundir.marker import MARKER as MARKER
from mpctl.rundir.metrics import read_lines
from mpctl.rundir.scalars import Record

FILES = ("job.json", "plan.json", "metrics.jsonl", "metrics.csv", "summary.json", "stop",
         "torchrun.pid")  # fmt: skip
FOLDERS = ("logs", "checkpoints", "ranks", "failures", "doing", "data", "tensorboard")


@dataclass(frozen=True)
class RunDir:
    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def stop(self) -> Path:
        return self.path / "stop"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    @property
    def torchrun_pid(self) -> Path:
        return self.path / "torchrun.pid"

    @property
    def torchrun_log(self) -> Path:
        return self.path / "logs" / "torchrun.log"

    def torchrun_words(self) -> str:
        """What the last torchrun wrote, its command line first; the log holds all of them."""
        log = self.torchrun_log
        text = log.read_text("utf-8", errors="replace") if log.exists() else ""
        return text.rpartition(COMMAND)[2]

    @property
    def has_failures(self) -> bool:
        """Whether a rank of this attempt left a record of its end."""
        return next((self.path / "failures").glob("rank-*.json"), None) is not None

    @property
    def is_occupied(self) -> bool:
        return self.path.is_dir() and any(self.path.iterdir())

    def require_free(self) -> None:
        """Raises InputError when something is there already."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError.of("run-dir-occupied", "--run-dir", f"{self.path} is a file")
        if self.is_occupied:
            steps = self.last_step()
            held = f"a run that reached step {steps}" if steps else "files"
            ways = "use --resume to continue it, --overwrite to replace it, or another --run-dir"
            raise InputError.of(
                "run-dir-occupied", "--run-dir", f"{self.path} already holds {held}",
                ways if is_resumable(self.path) else "use another --run-dir",
            )  # fmt: skip

    def require_run(self) -> None:
        """Raises InputError when there is no run to resume."""
        if not is_resumable(self.path):
            raise InputError.of("no-run", "--run-dir", f"{self.path} does not hold a run of mpctl",
                                "leave out --resume to start one there")  # fmt: skip

    def require_replaceable(self) -> None:
        """Raises InputError when --overwrite would remove what no launch wrote."""
        if self.is_occupied and not is_launched(self.path):
            raise InputError.of("run-dir-foreign", "--run-dir",
                                f"{self.path} does not hold a run of mpctl, nothing was removed",
                                "use another --run-dir")  # fmt: skip

    @contextmanager
    def held(self) -> Iterator[None]:
        """The directory, made when missing, ours alone: a second launch in it is refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise InputError.of(
                "run-dir-busy", "--run-dir", f"a launch is running in {self.path}",
                "wait for it to end, or use another --run-dir",
            ) from None  # fmt: skip
        except OSError:
            pass  # some network file systems know no locks on directories
        try:
            yield
        finally:
            os.close(handle)

    def claim(self) -> None:
        """Make the directory and say that what a run writes here is a run's."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_marker(self.path)

    def clear(self) -> None:
        """Remove a run, and nothing that is not one's; its marker last."""
        for name in (*FILES, *FOLDERS, MARKER):
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Remove a run that never started, and its directory when nothing else is in it."""
        self.clear()
        with suppress(OSError):
            self.path.rmdir()

    def begin_attempt(self) -> list[str]:
        """Forget what an earlier attempt said after the checkpoint that this one starts from, which
        is the newest whose files have their sizes; returns what was damaged, in words."""
        self.torchrun_log.parent.mkdir(parents=True, exist_ok=True)
        for path in (self.stop, self.torchrun_pid, self.path / "summary.json"):
            path.unlink(missing_ok=True)
        root = self.path / "checkpoints"
        recover(root)
        found, damaged = newest_whole(list_checkpoints(root), hashed=False)
        said = []
        for folder, issues in damaged if found else ():
            words = f"{issues[0].where}: {issues[0].message}"
            said.append(f"{words}; kept as {set_aside(folder)}")
        for name in ("failures", "ranks", "doing"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        step = self.last_checkpoint()
        kept = [record for record in self.records() if record["step"] <= step]
        if self.metrics.exists():
            write_whole(self.metrics, "".join(json.dumps(record) + "\n" for record in kept))
        return said

    def end_attempt(self) -> None:
        """After the last rank has ended: remove what a save left unfinished."""
        recover(self.path / "checkpoints")

    def records(self) -> Iterator[Record]:
        """The records in metrics.jsonl; lines that are none are left out."""
        return (record for _, record in read_lines(self.metrics) if record is not None)

    def last_step(self) -> int:
        """The last step on record, or by the account of a rank that ended well."""
        steps = [record["step"] for record in self.records()]
        accounts = [account["steps"] for account in self.documents("ranks")]
        return int(max([0, *steps, *accounts]))

    def document(self, name: str) -> Path:
        """job.json or plan.json; the newest copy in a checkpoint where the run's own is damaged."""
        saved = reversed(list_checkpoints(self.path / "checkpoints"))
        paths = [self.path / name, *(folder / name for _, folder in saved)]
        return next((path for path in paths if _read_object(path)), paths[0])

    def doing(self, rank: int) -> str:
        """What a rank was doing when it ended or was stopped; empty for one that ended well."""
        return self.trail(rank).doing

    def trail(self, rank: int) -> BreadcrumbState:
        """What a rank wrote of itself in this attempt: what it does, its heartbeat."""
        return read_breadcrumb(self.path / "doing" / f"rank-{rank}")

    def last_checkpoint(self) -> int:
        """Steps held by the newest checkpoint, 0 without one."""
        saved = list_checkpoints(self.path / "checkpoints")
        return saved[-1][0] if saved else 0

    def documents(self, folder: str) -> list[dict[str, Any]]:
        """The JSON files of `ranks` or `failures`, by rank."""
        read = [json.loads(p.read_text("utf-8")) for p in (self.path / folder).glob("rank-*.json")]
        return sorted(read, key=lambda document: int(document["rank"]))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one when it cannot be read."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def cannot_write(path: Path, error: OSError) -> InputError:
    why = f"{path} cannot be written: {error.strerror or error}"
    hint = "use a directory that can be written"
    return InputError.of("run-dir-unusable", "--run-dir", why, hint)


def free_run_dir(name: str) -> RunDir:
    """`runs/NAME`, or the first of `runs/NAME-2`, ... that nothing occupies."""
    numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 1_000_000))
    try:
        return next(run for path in numbered if not (run := RunDir(path)).is_occupied)
    except OSError as error:
        raise cannot_write(Path("runs") / name, error) from None
