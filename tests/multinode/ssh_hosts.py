"""Hosts that ssh reaches, all on this machine: each has an sshd of its own.

    with loopback_hosts(folder) as hosts:        n1 and n2 are 127.0.0.1 at two ports
    with namespace_hosts(folder) as hosts:       n1 and n2 have addresses, host names and processes
        hosts.cut("n2")                          of their own, and a link that can be cut
        hosts.drop(0.05)                         or loses packets

The keys, the known hosts and the configuration of the ssh client are in `folder`; nothing of the
user's own ssh is read or changed. hosts.config is for `ssh -F`.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.multinode.daemons import Daemon, free_ports, wait_until
from tests.multinode.needs import program

SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
LogLevel VERBOSE
SetEnv MPCTL_TEST_HOST={name}{more}
"""
CLIENT_CONFIG = """\
Host {name}
  HostName {address}
  Port {port}
"""
CLIENT_DEFAULTS = """\
Host *
  User root
  IdentitiesOnly yes
  IdentityFile {folder}/user_key
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


@dataclass
class SshHost:
    """One host. namespace: of the network, empty on the loopback; link: the name of the end of its
    link that the launcher's side has."""

    name: str
    address: str
    port: int
    namespace: str = ""
    link: str = ""
    daemon: Daemon | None = None


@dataclass
class SshHosts:
    """Hosts by name, and the files with which ssh reaches them."""

    folder: Path
    hosts: dict[str, SshHost] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        """The configuration of the ssh client."""
        return self.folder / "ssh_config"

    def hostfile(self, *lines: str) -> Path:
        """A hostfile with these lines."""
        path = self.folder / "hosts"
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def add_alias(self, name: str, **settings: object) -> None:
        """Let ssh know a host by settings of its configuration: HostName, Port, User, ..."""
        lines = [f"Host {name}", *(f"  {key} {value}" for key, value in settings.items())]
        self.config.write_text("\n".join(lines) + "\n" + self.config.read_text())

    def start(self, name: str, *, env: Mapping[str, str] | None = None, hide: Path | None = None) -> None:
        """Start the sshd of a host. env: variables that its logins have; hide: a folder in whose
        place the host sees an empty one of its own."""
        host = self.hosts[name]
        config = self.folder / f"sshd-{name}"
        more = "".join(f' "{key}={value}"' for key, value in (env or {}).items())
        text = SSHD_CONFIG.format(address=host.address, port=host.port, folder=self.folder, name=name, more=more)
        config.write_text(text)
        sshd = [path_of("sshd"), "-D", "-e", "-f", str(config)]
        log = self.folder / f"sshd-{name}.log"
        host.daemon = Daemon([*_inside(host, hide), *sshd], log)
        wait_until(lambda: "Server listening" in log.read_text(), 10, lambda: f"{name}: {log.read_text()}")

    def stop(self, name: str) -> None:
        """Kill the sshd of a host and every login: the host is gone."""
        daemon = self.hosts[name].daemon
        if daemon is not None:
            daemon.end(signal.SIGKILL)

    def restart(self, name: str, *, env: Mapping[str, str] | None = None, hide: Path | None = None) -> None:
        """The same host, started anew with other settings."""
        self.stop(name)
        (self.folder / f"sshd-{name}.log").unlink()
        self.start(name, env=env, hide=hide)

    def cut(self, name: str) -> None:
        """Take the link of a host down; connections are neither closed nor refused."""
        _ip("link", "set", self.hosts[name].link, "down")

    def mend(self, name: str) -> None:
        """Bring the link of a host up again."""
        _ip("link", "set", self.hosts[name].link, "up")

    def drop(self, share: float) -> None:
        """Lose a share of the packets that reach each host, by chance, from now on."""
        by_chance = ["-m", "statistic", "--mode", "random", "--probability", str(share)]
        rule = ["-A", "INPUT", "!", "-i", "lo", *by_chance, "-j", "DROP"]
        for host in self.hosts.values():
            inside = [path_of("ip"), "netns", "exec", host.namespace, path_of("iptables")]
            subprocess.run([*inside, *rule], check=True, capture_output=True)


@contextmanager
def loopback_hosts(folder: Path, names: Sequence[str] = ("n1", "n2")) -> Iterator[SshHosts]:
    """Hosts that are all this machine, on the loopback address."""
    ports = free_ports(len(names))
    hosts = [SshHost(n, "127.0.0.1", port) for n, port in zip(names, ports, strict=True)]
    with _running(folder, hosts) as network:
        yield network


@contextmanager
def namespace_hosts(folder: Path, names: Sequence[str] = ("n1", "n2")) -> Iterator[SshHosts]:
    """Hosts with addresses, host names and process tables of their own. Each is a network namespace
    with a link (a veth pair) to a bridge on which this machine has an address, too."""
    number = os.getpid() % 10_000
    subnet, bridge = f"10.{128 + number % 64}.{number // 64}", f"mpb{number}"
    with ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        table = [(f"{subnet}.{index}", name) for index, name in enumerate(names, start=1)]
        hosts = [
            stack.enter_context(_namespace(name, address, bridge, f"{number}-{index}", table))
            for index, (address, name) in enumerate(table)
        ]
        yield stack.enter_context(_running(folder, hosts))


@contextmanager
def _namespace(
    name: str, address: str, bridge: str, suffix: str, table: Sequence[tuple[str, str]]
) -> Iterator[SshHost]:
    """A namespace with /etc/hosts of its own, linked to the bridge."""
    namespace, link, inner = f"mpctl-{suffix}-{name}", f"mpv{suffix}", f"mpi{suffix}"
    files = Path("/etc/netns") / namespace
    with ExitStack() as stack:
        _ip("netns", "add", namespace)
        stack.callback(_ip, "netns", "del", namespace)
        files.mkdir(parents=True)
        stack.callback(files.rmdir)
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in table)]
        (files / "hosts").write_text("\n".join(lines) + "\n")
        stack.callback((files / "hosts").unlink)
        _ip("link", "add", link, "type", "veth", "peer", "name", inner, "netns", namespace)
        stack.callback(_ip, "link", "del", link)
        _ip("link", "set", link, "master", bridge, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", inner)
        _ip("-n", namespace, "link", "set", inner, "up")
        yield SshHost(name, address, 22, namespace, link)


@contextmanager
def _running(folder: Path, hosts: Sequence[SshHost]) -> Iterator[SshHosts]:
    """The hosts with an sshd each, and the keys and configuration to reach them."""
    folder.mkdir(exist_ok=True)
    network = SshHosts(folder, {host.name: host for host in hosts})
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation wants it
    for key in ("host_key", "user_key", "other_key"):
        command = [path_of("ssh-keygen"), "-q", "-t", "ed25519", "-N", "", "-f", folder / key]
        subprocess.run(command, check=True)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    known = "".join(f"[{host.address}]:{host.port} {key}\n{host.address} {key}\n" for host in hosts)
    (folder / "known_hosts").write_text(known)
    entries = [CLIENT_CONFIG.format(name=h.name, address=h.address, port=h.port) for h in hosts]
    network.config.write_text("".join(entries) + CLIENT_DEFAULTS.format(folder=folder))
    try:
        for host in hosts:
            network.start(host.name)
        yield network
    finally:
        for host in hosts:
            with suppress(FileNotFoundError):
                network.stop(host.name)


def _inside(host: SshHost, hide: Path | None) -> list[str]:
    """What a host's sshd is started through: its namespaces, and a private empty folder."""
    script = 'exec "$@"'
    if hide is not None:
        script = f"mount -t tmpfs none {hide} && {script}"
    if not host.namespace:
        shell = ["sh", "-c", script, "sh"]
        return [] if hide is None else ["unshare", "--mount", *shell]
    script = f"hostname {host.name} && {script}"
    own = ["unshare", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [path_of("ip"), "netns", "exec", host.namespace, *own, "sh", "-c", script, "sh"]


def path_of(name: str) -> str:
    """The path of a program, which a test's need has made sure of."""
    path = program(name)
    assert path is not None, f"no {name}"
    return path


def _ip(*arguments: str) -> None:
    subprocess.run([path_of("ip"), *arguments], check=True, capture_output=True, text=True)
