"""The faults of `benchmarks.soak`: their effects on a run, and a reproducible list of them.

A fault is injected once the run has reached its step. Faults that end the launcher are followed by
`mpctl launch --resume`; after the others the launcher starts the next attempt. Damage to files is
done while no process runs, or just before a rank is killed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

from mpctl.records.checkpoint.folder import list_checkpoints


class Victim(Protocol):
    """A run as faults see it. path: its directory; namespace: the network namespace in which it
    runs, empty for none."""

    path: Path
    namespace: str

    @property
    def launcher(self) -> psutil.Process: ...
    @property
    def torchrun(self) -> psutil.Process: ...
    def rank(self, number: int) -> psutil.Process: ...
    @property
    def ranks(self) -> list[psutil.Process]: ...


@dataclass(frozen=True)
class Fault:
    """One fault: its kind (a key of KINDS), the step at which it is injected, the rank it hits."""

    kind: str
    step: int
    rank: int


@dataclass(frozen=True)
class Kind:
    """inject: injects the fault into a run (Victim). text: for the table. while_down: damage done
    after the launcher has ended, before the run is resumed. mend: undoes the fault once the failure
    has been reported. needs: `root` where only root can inject it. is_harmless: it must not end an
    attempt; mend is then called immediately."""

    text: str
    inject: Callable[[Any, Fault], object]
    while_down: Callable[[Any], object] = lambda run: None
    mend: Callable[[Any], object] = lambda run: None
    needs: str = ""
    is_harmless: bool = False


def draw_faults(count: int, seed: int, *, gap: int, ranks: int, kinds: list[str]) -> list[Fault]:
    """`count` faults, one in every `gap` steps at a random step; every kind occurs about equally
    often, in random order. The same arguments give the same list."""
    draw = random.Random(seed)
    names = [kinds[number % len(kinds)] for number in range(count)]
    draw.shuffle(names)
    return [
        Fault(name, (number + 1) * gap + draw.randrange(gap // 2), draw.randrange(ranks))
        for number, name in enumerate(names)
    ]


# ---------------------------------------------------------------- processes


def _kill_rank(run: Victim, fault: Fault) -> None:
    run.rank(fault.rank).kill()


def _stop_all(run: Victim, fault: Fault) -> None:
    for process in run.ranks:
        process.suspend()


def while_saving(act: Callable[[Victim, Fault], object]) -> Callable[[Victim, Fault], object]:
    """Act once a checkpoint is being written."""

    def inject(run: Victim, fault: Fault) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not any(run.path.glob("checkpoints/.*.partial")):
            time.sleep(0.0005)
        act(run, fault)

    return inject


def _kill_launcher(run: Victim, fault: Fault) -> None:
    run.launcher.kill()


# ---------------------------------------------------------------- files


def _newest_file(run: Victim) -> Path:
    _, folder = list_checkpoints(run.path / "checkpoints")[-1]
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda path: path.stat().st_size)


def _truncate_newest(run: Victim) -> None:
    path = _newest_file(run)
    os.truncate(path, path.stat().st_size // 2)


def _flip_newest(run: Victim) -> None:
    path = _newest_file(run)
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


def _truncate_andkill_rank(run: Victim, fault: Fault) -> None:
    _truncate_newest(run)
    _kill_rank(run, fault)


def _cut_last_record(run: Victim) -> None:
    path = run.path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - 20)


def _empty_job(run: Victim) -> None:
    os.truncate(run.path / "job.json", 0)


def _fill_disk(run: Victim, fault: Fault) -> None:
    with (run.path / "filler").open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(bytes(1 << 16))


def _empty_disk(run: Victim) -> None:
    (run.path / "filler").unlink(missing_ok=True)


# ---------------------------------------------------------------- links


def _links(state: str) -> Callable[..., None]:
    def switch(run: Victim, fault: Fault | None = None) -> None:
        command = ["ip", "-n", run.namespace, "link", "set", "lo", state]
        subprocess.run(command, check=True, timeout=10)

    return switch


KINDS: dict[str, Kind] = {
    "rank-killed": Kind("a rank, kill -9", _kill_rank),
    "torchrun-killed": Kind("torchrun, kill -9", lambda run, fault: run.torchrun.kill()),
    "launcher-killed": Kind("the launcher, kill -9", _kill_launcher),
    "launcher-terminated": Kind("the launcher, SIGTERM", lambda run, fault: run.launcher.send_signal(signal.SIGTERM)),
    "rank-stopped": Kind("a rank, SIGSTOP", lambda run, fault: run.rank(fault.rank).suspend()),
    "torchrun-stopped": Kind("torchrun, SIGSTOP", lambda run, fault: run.torchrun.suspend()),
    "all-stopped": Kind("all ranks, SIGSTOP", _stop_all),
    "rank-killed-saving": Kind("a rank while saving, kill -9", while_saving(_kill_rank)),
    "launcher-killed-saving": Kind("the launcher while saving, kill -9", while_saving(_kill_launcher)),
    "checkpoint-cut-live": Kind("newest checkpoint cut, then a rank killed", _truncate_andkill_rank),
    "checkpoint-cut": Kind("launcher killed, newest checkpoint cut", _kill_launcher, while_down=_truncate_newest),
    "checkpoint-flipped": Kind(
        "launcher killed, a bit of the newest checkpoint flipped", _kill_launcher, while_down=_flip_newest
    ),
    "record-cut": Kind("launcher killed, last record cut", _kill_launcher, while_down=_cut_last_record),
    "job-emptied": Kind("launcher killed, job.json emptied", _kill_launcher, while_down=_empty_job),
    "disk-full": Kind("disk full", _fill_disk, mend=_empty_disk, needs="root"),
    "link-cut": Kind("links cut", _links("down"), mend=_links("up"), needs="root"),
}
