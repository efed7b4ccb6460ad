"""What the ranks of an attempt start from: one job and one checkpoint, which the launcher names.

Ranks of several hosts see the run directory through clients of a network file system, which may
show a listing or a file as it was up to a minute ago. If each took the newest checkpoint that it
sees, ranks would train on from different steps, without an error. So the launcher names the step of
the checkpoint and the SHA-256 of job.json in the environment of the ranks; a rank opens exactly
these, and waits up to SHOW_SECONDS for its file system to show them. Before a weight is read, all
ranks compare what they are about to use with rank 0.

For a worker that was started by hand nobody names them: then all use what rank 0 lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpctl.durable import wait_for_file
from mpctl.errors import RunFailed
from mpctl.rundir.checkpoints import list_checkpoints

STEP, JOB = ORIGIN = ("MPCTL_RESUME_STEP", "MPCTL_JOB_SHA256")
"""Environment variables of ranks."""
SHOW_SECONDS = 90.0


@dataclass(frozen=True)
class Origin:
    """What a launcher named. step: of the checkpoint, 0 for none; job: SHA-256 of job.json in hex;
    None where nobody named it. patience: seconds that a file system may take to show it."""

    step: int | None = None
    job: str | None = None
    patience: float = SHOW_SECONDS

    @classmethod
    def of_attempt(cls, step: int, job: str) -> Origin:
        """What an attempt starts from. step: of the checkpoint, 0 for none; job: the text of
        job.json."""
        return cls(step, hashlib.sha256(job.encode()).hexdigest())

    @property
    def variables(self) -> dict[str, str]:
        """The environment of ranks that are to start from it."""
        named = {STEP: self.step, JOB: self.job}
        return {name: str(value) for name, value in named.items() if value is not None}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Origin:
        """What the environment of a rank says."""
        step = environment.get(STEP)
        return cls(None if step is None else int(step), environment.get(JOB))

    def read_job(self, path: Path) -> bytes:
        """The content of job.json, once it is the named one. Raises RunFailed when it is not in
        time, OSError when nobody named one and it cannot be read."""
        if self.job is None:
            return path.read_bytes()

        def read() -> bytes | None:
            with suppress(OSError):
                text = path.read_bytes()
                return text if hashlib.sha256(text).hexdigest() == self.job else None
            return None

        text = wait_for_file(read, path.parent, self.patience)
        if text is None:
            waited = f"after {self.patience:g} s"
            raise RunFailed(f"{path} is not the job that the launcher wrote, {waited}")
        return text

    def find_checkpoint(self, root: Path, step: int) -> Path:
        """The folder of the checkpoint of a step, once it is shown. Raises RunFailed when it is not
        in time."""

        def find() -> Path | None:
            return dict(list_checkpoints(root)).get(step)

        folder = wait_for_file(find, root, self.patience)
        if folder is None:
            waited = f"after {self.patience:g} s"
            raise RunFailed(f"{root} does not show step-{step} to this host, {waited}")
        return folder
