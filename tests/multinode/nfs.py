"""A directory of an NFS server, seen by two mounts that share nothing, as by two hosts.

`python -m tests.multinode.nfs FOLDER`, by `unshare --mount --net`, serves FOLDER by the kernel's
server, mounts it twice and prints what two launches of one run directory are told, a JSON object.
Exit code 77: this kernel has no NFS; the reason is on stderr.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.records.rundir.directory import RunDir
from tests.multinode.needs import program

NO_NFS = 77
HOLD = """
import sys, time
from pathlib import Path
from mpctl.records.rundir.directory import RunDir
with RunDir(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def call(name: str, *words: str) -> None:
    """Run a program of nfs-utils or mount; where it fails, the machine has no NFS."""
    done = subprocess.run([program(name) or name, *words], capture_output=True, text=True)
    if done.returncode:
        print(f"{name} {' '.join(words)}: {done.stderr.strip()}", file=sys.stderr)
        sys.exit(NO_NFS)


def serve(folder: Path, views: Sequence[Path]) -> None:
    """Export a folder in this network namespace and mount it at each of `views`."""
    call("ip", "link", "set", "lo", "up")
    call("mount", "-t", "nfsd", "nfsd", "/proc/fs/nfsd")
    for name in ("nfsv4leasetime", "nfsv4gracetime"):  # locks are granted after so many seconds
        Path("/proc/fs/nfsd", name).write_text("10")
    state = Path("/var/lib/nfs")
    state.mkdir(parents=True, exist_ok=True)
    call("mount", "-t", "tmpfs", "tmpfs", str(state))  # not of the machine's own server
    (state / "v4recovery").mkdir()
    (state / "etab").touch()
    call("exportfs", "-o", "rw,fsid=0,no_root_squash,insecure,no_subtree_check", f"*:{folder}")
    call("rpc.mountd", "--no-nfs-version", "3")
    call("rpc.nfsd", "--no-nfs-version", "3", "2")
    for view in views:
        view.mkdir()
        call("mount", "-t", "nfs4", "-o", "vers=4.2,nosharecache", "127.0.0.1:/", str(view))


def locks_of_the_directory(views: Sequence[Path]) -> int:
    """How many views are granted an exclusive lock of one directory at a time."""
    handles = [os.open(view, os.O_RDONLY) for view in views]
    granted = 0
    for handle in handles:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            granted += 1
        except OSError:
            pass
    for handle in handles:
        os.close(handle)
    return granted


def attempt(run: Path) -> dict[str, object]:
    """What a launch in a run directory is told: why it is refused, or its warnings."""
    began = time.monotonic()
    try:
        with RunDir(run).locked() as warnings:
            said: dict[str, object] = {"warnings": warnings}
    except InputError as error:
        said = {"refused": error.issues[0].rule, "message": error.issues[0].message}
    return {**said, "seconds": time.monotonic() - began}


def main(folder: Path) -> None:
    served, views = folder / "served", (folder / "a", folder / "b")
    call("mount", "--make-rprivate", "/")
    served.mkdir()
    call("mount", "-t", "tmpfs", "tmpfs", str(served))
    (served / "run").mkdir(mode=0o700)
    serve(served, views)
    first, second = (view / "run" for view in views)
    RunDir(first).claim()
    result: dict[str, object] = {"directory": locks_of_the_directory((first, second))}
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(first)], stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    result |= {"holder": holder.pid, "while it lives": attempt(second)}
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    result |= {"after it was killed": attempt(second), "once more": attempt(first)}
    result["left"] = sorted(path.name for path in (served / "run").iterdir())
    print(json.dumps(result))
    for view in views:
        subprocess.run([program("umount") or "umount", "-l", str(view)], check=False)
    subprocess.run([program("rpc.nfsd") or "rpc.nfsd", "0"], check=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
