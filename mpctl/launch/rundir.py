"""The run directory: what lies in it, when it may be used, what a resumed run finds.

RUN/ job.json plan.json metrics.jsonl summary.json logs/ checkpoints/ ranks/ failures/ data/
Nothing is ever written outside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpctl.errors import InputError

FILES = ("job.json", "plan.json", "metrics.jsonl", "summary.json", "stop")
FOLDERS = ("logs", "checkpoints", "ranks", "failures", "data")


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
    def is_occupied(self) -> bool:
        return self.path.is_dir() and any(self.path.iterdir())

    def require_free(self) -> None:
        """Raises InputError when something is there already."""
        if self.path.exists() and not self.path.is_dir():
            raise InputError.of("run-dir-occupied", "--run-dir", f"{self.path} is a file")
        if self.is_occupied:
            steps = self.last_step()
            held = f"a run that reached step {steps}" if steps else "files"
            raise InputError.of(
                "run-dir-occupied", "--run-dir", f"{self.path} already holds {held}",
                "use --resume to continue it, --overwrite to replace it, or another --run-dir",
            )  # fmt: skip

    def clear(self) -> None:
        """Remove a run, and nothing that is not one's."""
        foreign = self.path.is_dir() and not (self.path / "job.json").exists()
        names = {entry.name for entry in self.path.iterdir()} if self.path.is_dir() else set()
        if foreign and names - {*FILES, *FOLDERS}:
            raise InputError.of(
                "run-dir-foreign", "--run-dir", f"{self.path} does not hold a run of mpctl",
                "use another --run-dir",
            )  # fmt: skip
        for name in FILES:
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def begin_attempt(self, *, from_step: int) -> None:
        """Forget what an earlier attempt said after the checkpoint that this one starts from."""
        self.stop.unlink(missing_ok=True)
        for name in ("failures", "ranks"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        kept = [record for record in self.records() if record["step"] <= from_step]
        if self.metrics.exists():
            self.metrics.write_text("".join(json.dumps(r) + "\n" for r in kept), "utf-8")

    def records(self) -> Iterator[dict[str, Any]]:
        """Every complete line of metrics.jsonl."""
        if not self.metrics.exists():
            return
        with self.metrics.open(encoding="utf-8") as stream:
            yield from (json.loads(line) for line in stream if line.endswith("\n"))

    def last_step(self) -> int:
        return max((record["step"] for record in self.records()), default=0)

    def last_checkpoint(self) -> int:
        """Steps held by the newest complete checkpoint, 0 without one."""
        found = (self.path / "checkpoints").glob("step-*/manifest.json")
        return max((int(p.parent.name.removeprefix("step-")) for p in found), default=0)

    def documents(self, folder: str) -> list[dict[str, Any]]:
        """The JSON files of `ranks` or `failures`, by rank."""
        read = [json.loads(p.read_text("utf-8")) for p in (self.path / folder).glob("rank-*.json")]
        return sorted(read, key=lambda document: int(document["rank"]))


def free_run_dir(name: str) -> RunDir:
    """`runs/NAME`, or the first of `runs/NAME-2`, ... that nothing occupies."""
    numbered = (Path("runs") / (name if n == 1 else f"{name}-{n}") for n in range(1, 1_000_000))
    return next(run for path in numbered if not (run := RunDir(path)).is_occupied)
