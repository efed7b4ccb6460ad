"""Commands that a login host runs for another machine.

The program `ssh` of these tests does what sshd does with a remote command: it gives the last word
to a login shell of a user whose home directory and environment are others, and whose start-up files
print to both streams. tests/multinode/test_via.py does the same over a real sshd.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import cycle
from pathlib import Path

import psutil
import pytest

from mpctl import __version__
from mpctl.core.errors import InputError
from mpctl.records.rundir.marker import write_marker
from mpctl.run.clusters.ssh.login import Login, login_command, read_login
from tests.cli.calls import Mpctl, caller, spawn
from tests.run.history.made import launched, make_run, summary
from tests.run.launch.command import wait_for

SSH = """\
#!/bin/bash
printf '%s\\n' "$@" > "{folder}/arguments"
for last; do :; done
cd "{folder}/home"
echo "Welcome to the cluster"
printf 'unterminated'
echo "all use is watched" >&2
exec env -i HOME="{folder}/home" PATH="$PATH" {shell} -c "$last"
"""
HOSTILE = (
    "two words",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "& touch pwned",
    "a\ntouch pwned",
    "* ? [a-z] {a,b} ~",
    "\\",
    "$HOME",
    "!!",
    "ü ✓",
    "--json",
    "-x",
    "--via",
)
JOB = """\
model = "mine"
cluster = { nodes = 2, gpus_per_node = 2 }
parallel = { tp = 2 }
data = { corpus = ["python-stdlib"] }
[launch]
device = "cpu"
on = "slurm"
slurm = { time = 12:30:00, partition = "two", setup = ["echo $(hostname) 'a b'"] }
"""


@pytest.fixture
def mpctl(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login host: its home directory."""
    return login_host(tmp_path, monkeypatch, "sh")


def login_host(folder: Path, monkeypatch: pytest.MonkeyPatch, shell: str) -> Path:
    (folder / "home").mkdir()
    program(folder / "bin" / "ssh", SSH.format(folder=folder, shell=shell))
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("COLUMNS", raising=False)
    return folder / "home"


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


VIA = f"--via=ssh:login:{sys.executable}"


# ---------------------------------------------------------------- the value of --via


@pytest.mark.parametrize(
    ("text", "destination", "python"),
    [
        ("ssh:login", "login", "python3"),
        ("ssh:ann@login.example.org", "ann@login.example.org", "python3"),
        ("ssh:login:/shared/venv/bin/python", "login", "/shared/venv/bin/python"),
        ("ssh:ann@10.0.0.1:~/venv/bin/python", "ann@10.0.0.1", "venv/bin/python"),
        ("ssh:ann@[fe80::1%eth0]:python3.12", "ann@fe80::1%eth0", "python3.12"),
    ],
)
def test_a_login_host_is_named(text: str, destination: str, python: str) -> None:
    login: Login = read_login(text)
    assert (login.host.destination, login.python) == (destination, python)
    *_, end, host, remote = login_command(login)
    assert (end, host, remote) == ("--", destination, f"exec {python} -P -m mpctl.cli.relayed")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("login", "via-form"),
        ("ssh:", "via-form"),
        ("http:login", "via-form"),
        ("ssh:-oProxyCommand=touch pwned", "via-host"),
        ("ssh:-oProxyCommand=x", "via-host"),
        ("ssh:ann@-oProxyCommand=x", "via-host"),
        ("ssh:-l@login", "via-host"),
        ("ssh:a;b", "via-host"),
        ("ssh:$(id)", "via-host"),
        ("ssh:login\n", "via-host"),
        ("ssh:login:python3 -c x", "via-python"),
        ("ssh:login:-c", "via-python"),
        ("ssh:login:", "via-form"),
        ("ssh:login:/bin/py\n", "via-python"),
    ],
)
def test_options_and_shell_syntax_are_no_login_host(text: str, rule: str) -> None:
    with pytest.raises(InputError) as refused:
        read_login(text)
    assert [issue.rule for issue in refused.value.issues] == [rule]
    assert all(issue.hint for issue in refused.value.issues)


def test_a_path_of_python_is_one_word_for_the_shell(login: Path, mpctl: Mpctl) -> None:
    said = mpctl("runs", "--via", "ssh:login:$(touch${IFS}pwned)")
    assert said.code == 2 and "[remote-no-python]" in said.err
    assert [*login.iterdir()] == []


# ---------------------------------------------------------------- what is said and what is printed


@pytest.mark.parametrize(("value", "shell"), [*zip(HOSTILE, cycle(("sh", "bash")), strict=False)])
@pytest.mark.quick(6)
def test_a_value_arrives_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mpctl: Mpctl, value: str, shell: str
) -> None:
    login = login_host(tmp_path, monkeypatch, shell)
    said = mpctl("status", "--json", VIA, "--", value)
    assert said.code == 2 and said.err == ""
    assert said.issues["no-run"]["message"].startswith(f"{value} does not contain")
    assert [*login.iterdir()] == []
    arguments = (tmp_path / "arguments").read_text()
    assert value not in arguments.partition("--\nlogin\n")[2]


def test_runs_are_listed_shown_and_stopped_as_there(login: Path, mpctl: Mpctl) -> None:
    run = make_run(login / "runs" / "a run", ended=summary())
    listed = mpctl("runs", VIA, "--json")
    assert [row["name"] for row in listed.document["runs"]] == ["a run"]
    assert mpctl("status", "a run", "--json", VIA).document["step"] == 20
    assert mpctl("show", "a run", "--html", "page.html", VIA).code == 0
    assert (login / "page.html").read_text().startswith("<!doctype html>")
    (run / "logs" / "rank-0.log").write_text("one\ntwo\nthree\n")
    said = mpctl("logs", VIA, "--rank", "0", "-n", "2", "a run")
    assert (said.code, said.out, said.err) == (0, "two\nthree\n", "")
    stopped = mpctl("stop", "a run", VIA)
    assert stopped.code == 0 and "was not running: finished" in stopped.out


def test_issues_and_exit_code_are_those_of_the_login_host(login: Path, mpctl: Mpctl) -> None:
    there = mpctl("logs", "nothing", "--json", VIA)
    here = mpctl("logs", "nothing", "--json")
    assert (there.code, there.err) == (here.code, here.err)
    interrupted = make_run(login / "cut", steps=3)
    assert mpctl("stop", interrupted, VIA).code == 1


def test_a_reader_that_stops_early_is_no_failure(login: Path) -> None:
    make_run(login / "run", ended=summary())
    (login / "run" / "logs" / "rank-0.log").write_text("line\n" * 200_000)
    words = [sys.executable, "-m", "mpctl", "logs", VIA, "--all", "--rank", "0", "run"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"line\n"
    process.stdout.close()
    assert process.wait(30) == 0
    assert process.stderr.read() == b""
    process.stderr.close()


def test_ctrl_c_ends_the_remote_side(login: Path) -> None:
    run = launched(make_run(login / "run", steps=3))  # its launcher is this process
    (run / "logs" / "rank-0.log").write_text("step 1: loss 3\n")
    words = [sys.executable, "-m", "mpctl", "logs", "--follow", VIA, "run"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "rank 0: step 1: loss 3\n"
    far = wait_for(lambda: psutil.Process(process.pid).children(recursive=True))
    assert any("mpctl.cli.relayed" in one.cmdline() for one in far)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")
    assert psutil.wait_procs(far, timeout=5)[1] == []


def test_a_client_that_is_killed_ends_the_remote_side(login: Path) -> None:
    launched(make_run(login / "run", steps=3))
    (login / "run" / "logs" / "rank-0.log").write_text("step 1: loss 3\n")
    words = [sys.executable, "-m", "mpctl", "logs", "--follow", VIA, "run"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    far = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    assert far and psutil.wait_procs(far, timeout=10)[1] == []


# ---------------------------------------------------------------- hosts that cannot be used


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("echo 'ssh: connect to host login port 22: Connection refused' >&2; exit 255", "ssh-refused"),
        ("echo 'ssh: Could not resolve hostname login: Name or service not known' >&2; exit 255", "ssh-unknown-name"),
        ("echo 'Host key verification failed.' >&2; exit 255", "ssh-unknown-host-key"),
        ("echo '/usr/bin/python3: No module named mpctl' >&2; exit 1", "remote-no-module"),
        ("echo 'sh: 1: exec: python3: not found' >&2; exit 127", "remote-no-python"),
        ("echo hello; exit 3", "remote-failed"),
        ("echo 'mpctl-relay/1 0.0.1'; cat > /dev/null", "host-mpctl"),
    ],
)
def test_what_is_wrong_with_the_host_is_named(tmp_path: Path, login: Path, mpctl: Mpctl, text: str, rule: str) -> None:
    program(tmp_path / "bin" / "ssh", f"#!/bin/sh\n{text}\n")
    said = mpctl("status", "run", "--json", "--via", "ssh:login")
    assert (said.code, said.err) == (2, "")
    issue = said.issues[rule]
    assert issue["where"] == "login"
    assert "hostfile" not in issue["hint"] and "launch.ssh" not in issue["hint"]
    if rule == "host-mpctl":
        assert issue["message"] == f"it has mpctl 0.0.1, and this machine {__version__}"


@pytest.mark.slow
def test_a_login_shell_that_never_ends_its_talk(tmp_path: Path, login: Path, mpctl: Mpctl) -> None:
    program(tmp_path / "bin" / "ssh", "#!/bin/sh\nexec yes\n")
    assert "via-no-answer" in mpctl("runs", "--json", "--via", "ssh:login").issues


def test_without_a_program_ssh(mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert mpctl("runs", "--json", "--via", "ssh:login").issues["no-ssh"]["where"] == "--via"


def test_a_connection_that_breaks_off(tmp_path: Path, login: Path, mpctl: Mpctl) -> None:
    text = f"echo 'mpctl-relay/1 {__version__}'; read request; echo begun\n"
    text += "echo 'Connection to login closed by remote host.' >&2; exit 255"
    program(tmp_path / "bin" / "ssh", f"#!/bin/sh\n{text}\n")
    said = mpctl("status", "run", "--via", "ssh:login")
    assert said.code == 2 and said.out == "begun\n"
    assert "[ssh-lost]" in said.err


# ---------------------------------------------------------------- jobs


@pytest.fixture
def own_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of presets of this machine, which the login host does not have."""
    folder = tmp_path / "mine"
    (folder / "models").mkdir(parents=True)
    text = "layers = 2\nhidden = 64\nheads = 4\nvocab = 300\nseq_length = 32\n"
    (folder / "models" / "mine.toml").write_text(text)
    (folder / "runtimes").mkdir()
    monkeypatch.setenv("MPCTL_PRESETS", str(folder))
    return folder


def submit(job: Path, *more: object) -> list[object]:
    return ["launch", job, "--submit", "--dry-run", "--run-dir", "/data/a 'run'", *more]


def test_a_job_with_presets_of_this_machine_is_submitted_as_from_there(
    login: Path, own_presets: Path, tmp_path: Path, mpctl: Mpctl
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    more = ["--seed", "7", "--set", "launch.slurm.account=x", "--profile=5-7"]
    there, here = mpctl(*submit(job, *more, VIA)), mpctl(*submit(job, *more))
    assert there.code == 0, there.err
    assert "#SBATCH --time=12:30:00" in there.out and "#SBATCH --account=x" in there.out
    assert there.out == here.out
    assert [*login.iterdir()] == []


def test_a_job_is_checked_here_before_any_host_is_asked(
    login: Path, own_presets: Path, tmp_path: Path, mpctl: Mpctl
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    runtime = Path("presets/runtimes/megatron-core.toml").read_text()
    (own_presets / "runtimes" / "ours.toml").write_text(runtime)
    cases: list[tuple[str, list[object]]] = [
        ("tp-divides-heads", submit(job, "--tp", 3, "--gpus-per-node", 3)),
        ("via-path", submit(job, "--set", "data.path=corpus", "--set", 'data.corpus=["x"]')),
        ("via-preset", submit(job, "--runtime", "ours")),
        ("nothing-to-submit", submit(job, "--on", "local")),
        ("usage", ["launch", job, "--run-dir", "/data/run"]),
        ("no-run-dir", ["launch", job, "--submit"]),
    ]
    for rule, words in cases:
        said = mpctl(*words, "--json", "--via", "ssh:login")
        assert said.code == 2 and rule in said.issues, said.out
    assert not (tmp_path / "arguments").exists()


def test_a_run_is_resumed_by_the_job_in_its_directory(login: Path, mpctl: Mpctl) -> None:
    run = make_run(login / "run", steps=3)
    write_marker(run)
    said = mpctl(
        "launch",
        "--resume",
        "--run-dir",
        "run",
        "--submit",
        "--dry-run",
        "--on",
        "slurm",
        "--set",
        "launch.slurm.partition=a b",
        "--json",
        VIA,
    )
    assert said.code == 2
    assert said.document["issues"][0]["where"] == "launch.slurm.partition"


def test_a_job_is_read_from_standard_input() -> None:
    text = json.dumps({"cluster": {"nodes": 2, "gpus_per_node": 2}, "parallel": {"tp": 2}})
    for job in (text, "cluster = { nodes = 2, gpus_per_node = 2 }\nparallel = { tp = 2 }\n"):
        done = subprocess.run(
            [sys.executable, "-m", "mpctl", "plan", "-", "--json"],
            input=job,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["world_size"] == 4
    assert spawn("plan", "-", "--json").issues
