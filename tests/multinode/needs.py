"""What the tests of tests/multinode need from the machine: root, and programs from Debian packages.

`python -m tests.multinode.needs` installs by apt-get what is missing, when it runs as root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


@dataclass(frozen=True)
class Need:
    """programs: names to be found on PATH or in a folder of SBIN; packages: Debian's, with them."""

    programs: tuple[str, ...]
    packages: tuple[str, ...]


NEEDS = {
    "slurm": Need(
        ("slurmctld", "slurmd", "munged", "sbatch", "srun", "salloc", "scontrol", "sinfo"),
        ("slurmctld", "slurmd", "slurm-client", "munge"),
    ),
    "ssh": Need(("sshd", "ssh", "ssh-keygen"), ("openssh-server", "openssh-client")),
    "netns": Need(("ip",), ("iproute2",)),
    "nfs": Need(("exportfs", "rpc.mountd", "rpc.nfsd", "mount.nfs4"), ("nfs-kernel-server", "nfs-common")),
    "loss": Need(("iptables",), ("iptables",)),
}
"""By the word that a test file gives to `pytest.mark.cluster`."""


def program(name: str) -> str | None:
    """The path of a program, also of one that lies where only root's PATH looks."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *SBIN]))


def missing_programs(need: str) -> list[str]:
    """The programs of a need that this machine does not have."""
    return [name for name in NEEDS[need].programs if program(name) is None]


def reason_to_skip(need: str) -> str | None:
    """Why a test with this need cannot run here; None when it can."""
    if not sys.platform.startswith("linux"):
        return f"{need}: needs Linux"
    if os.geteuid() != 0:
        return f"{need}: needs root"
    if missing := missing_programs(need):
        packages = " ".join(NEEDS[need].packages)
        return f"{need}: no {', '.join(missing)} (apt-get install {packages})"
    return None


def install() -> int:
    """Install the packages of every need that lacks a program; apt-get's exit code, 0 when there is
    nothing to do or this is not root."""
    packages = [p for name, need in NEEDS.items() if missing_programs(name) for p in need.packages]
    if not packages or os.geteuid() != 0 or program("apt-get") is None:
        return 0
    # A service that the package would start is not wanted: tests start their own daemons.
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (["update", "-q"], ["install", "-q", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=env, check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(install())
