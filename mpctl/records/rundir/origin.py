"""The job and the checkpoint from which all ranks of an attempt start, named by the launcher.

Ranks of several hosts see the run directory through clients of a network file system, which may
show a listing or a file as it was up to a minute ago. If each took the newest checkpoint that it
sees, ranks would train on from different steps, without an error. So the launcher names the step of
the checkpoint, the save that wrote it (a step that is trained again is saved again) and the SHA-256
of job.json in the environment of the ranks; a rank opens exactly these, and waits up to
SHOW_SECONDS for its file system to show them. Before a weight is read, all ranks compare what they
are about to use with rank 0.

For a worker that was started by hand they are not named: then all ranks use what rank 0 lists.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpctl.core.durable import wait_for_file
from mpctl.core.errors import RunFailed
from mpctl.records.checkpoint.folder import list_checkpoints
from mpctl.records.checkpoint.manifest import save_of

STEP, SAVE, JOB = ORIGIN = ("MPCTL_RESUME_STEP", "MPCTL_RESUME_SAVE", "MPCTL_JOB_SHA256")
"""Environment variables of ranks."""
SHOW_SECONDS = 90.0


@dataclass(frozen=True)
class Origin:
    """Start of an attempt, named by the launcher. step: of the checkpoint, 0 for none; job: SHA-256
    of job.json in hex; both None if not named. save: the save of that step (Manifest.save), empty
    for any. patience: seconds to wait for the file system to show it."""

    step: int | None = None
    job: str | None = None
    save: str = ""
    patience: float = SHOW_SECONDS

    @classmethod
    def of_attempt(cls, root: Path, job: str) -> Origin:
        """Return the origin of an attempt: the newest checkpoint in `root`, RUN/checkpoints, if any.
        job: the text of job.json."""
        sha256 = hashlib.sha256(job.encode()).hexdigest()
        saved = list_checkpoints(root)
        if not saved:
            return cls(0, sha256)
        step, folder = saved[-1]
        return cls(step, sha256, save_of(folder))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of ranks that start from it."""
        named = {STEP: self.step, SAVE: self.save or None, JOB: self.job}
        return {name: str(value) for name, value in named.items() if value is not None}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Origin:
        """The origin in the environment of a rank."""
        step = environment.get(STEP)
        number = None if step is None else int(step)
        return cls(number, environment.get(JOB), environment.get(SAVE, ""))

    def read_job(self, path: Path) -> bytes:
        """The content of job.json, once it is the named one. Raises RunFailed when it is not in
        time, OSError when none is named and it cannot be read."""
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
        """The folder of the checkpoint of a step, by the named save, once the file system shows it.
        Raises RunFailed when it does not in time."""

        def find() -> Path | None:
            folder = dict(list_checkpoints(root)).get(step)
            is_named = folder is not None and self.save in ("", save_of(folder))
            return folder if is_named else None

        folder = wait_for_file(find, root, self.patience)
        if folder is None:
            what = f"step-{step}{f' of save {self.save}' if self.save else ''}"
            waited = f"after {self.patience:g} s"
            raise RunFailed(f"{root} does not show {what} to this host, {waited}")
        return folder
