"""Copies of a process as ranks: each in a process of its own, since pytest's may have threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from mpctl.train.runtime import forked_agent

linux = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux")

COPIES = """
import json, os, random, signal, subprocess, sys, time
import numpy.random
from pathlib import Path
from mpctl.train.runtime.forking import fork_ranks

folder = Path(sys.argv[1])

def work(words):
    environ = Path("/proc/self/environ").read_bytes().decode().rstrip("\\0").split("\\0")
    seen = {
        "words": list(words),
        "os.environ": dict(os.environ),
        "getenv": subprocess.check_output(["env", "-0"]).decode().rstrip("\\0").split("\\0"),
        "environ": environ,
        "cmdline": Path("/proc/self/cmdline").read_bytes().decode().rstrip("\\0").split("\\0"),
        "leads": os.getsid(0) == os.getpid(),
        "stdin": os.readlink("/proc/self/fd/0"),
        "random": [random.random(), numpy.random.random()],
    }
    (folder / os.environ["RANK"]).write_text(json.dumps(seen))
    how = words[-1]
    if how == "raises":
        raise ValueError("of the rank")
    if how == "exits":
        sys.exit(7)
    if how == "segfaults":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "sleeps":
        time.sleep(600)

words = sys.argv[2:]
ranks = fork_ranks(len(words), work)
for number, (rank, how) in enumerate(zip(ranks, words)):
    rank.begin(["a rank", "with spaces", how], {"RANK": str(number), "LONG": "x\\u00e9" * 9000,
                                                "PATH": os.environ["PATH"]})
if "sleeps" in words:
    print(json.dumps([rank.pid for rank in ranks]), flush=True)
    time.sleep(600)
print(json.dumps([rank.wait(60) for rank in ranks]))
"""


def run(script: str, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        check=True,
        timeout=120,
        text=True,
        capture_output=True,
        env={**os.environ, **environment},
    )


@linux
def test_a_copy_looks_like_a_process_that_was_started_with_its_order(tmp_path: Path) -> None:
    run(COPIES, tmp_path, "ends", "ends", ONLY_OF_THE_PARENT="1")
    seen: list[dict[str, Any]] = [json.loads((tmp_path / n).read_text()) for n in "01"]
    for number, one in enumerate(seen):
        given = {"RANK": str(number), "LONG": "x\u00e9" * 9000, "PATH": os.environ["PATH"]}
        lines = sorted(f"{name}={value}" for name, value in given.items())
        assert one["os.environ"] == given
        assert sorted(one["environ"]) == sorted(one["getenv"]) == lines
        assert one["words"] == one["cmdline"] == ["a rank", "with spaces", "ends"]
        assert one["leads"] and one["stdin"] == os.devnull
    assert not set(seen[0]["random"]) & set(seen[1]["random"])


@linux
def test_it_ends_as_a_process_does(tmp_path: Path) -> None:
    done = run(COPIES, tmp_path, "ends", "raises", "exits", "segfaults")
    assert json.loads(done.stdout) == [0, 1, 7, -11]
    assert done.stderr.rstrip().endswith("ValueError: of the rank")


@linux
def test_copies_end_with_the_process_that_was_copied(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COPIES, str(tmp_path), "sleeps", "sleeps"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    copies = [psutil.Process(pid) for pid in json.loads(parent.stdout.readline())]
    parent.kill()
    parent.wait()
    assert not psutil.wait_procs(copies, timeout=30)[1]


OBSTACLE = """
import sys, threading, time
from mpctl.train.runtime import forking

if "thread" in sys.argv:
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
if "driver" in sys.argv:
    forking.DRIVERS = ("/dev/zero",)
    opened = open("/dev/zero")
if "numpy" in sys.argv:
    import numpy
    from pathlib import Path
    print(len(list(Path("/proc/self/task").iterdir())))
print(forking.obstacle())
"""


@linux
@pytest.mark.parametrize(
    ("what", "words"), [("nothing", ""), ("thread", "has 2 threads: "), ("driver", "has opened /dev/zero")]
)
def test_what_speaks_against_a_copy(what: str, words: str) -> None:
    said = run(OBSTACLE, what).stdout.strip()
    assert words in said and bool(said) == bool(words)


@linux
def test_threads_that_end_at_a_fork_are_no_obstacle() -> None:
    threads, said = run(OBSTACLE, "numpy", OPENBLAS_NUM_THREADS="4").stdout.split("\n")[:2]
    if threads == "1":
        pytest.skip("this build of numpy starts no threads when it is imported")
    assert said == ""


IMPORTS = """
import os, sys
from pathlib import Path
from mpctl.train.runtime.forking import import_rank_modules, obstacle

import_rank_modules(5)
names = ("torch", "sympy", "numpy.random", "mpctl.train.runtime.train", "mpctl.train.families.t5.module")
missing = [name for name in names if name not in sys.modules]
print(os.getpriority(os.PRIO_PROCESS, 0), missing)
print(obstacle())
"""


@linux
@pytest.mark.slow
def test_it_imports_with_a_niceness_that_it_does_not_keep() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert run(IMPORTS, OMP_NUM_THREADS="4").stdout == f"{before} []\n\n"


def test_a_torch_with_other_methods_is_not_subclassed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks are new processes then, with a line in torchrun's log."""
    assert forked_agent.unknown_torch() == ""
    known = {**forked_agent.REPLACED, (SubprocessContext, "_start"): ["self", "ranks"]}
    monkeypatch.setattr(forked_agent, "REPLACED", known)
    assert "has another SubprocessContext._start" in forked_agent.unknown_torch()
