"""`mpctl launch --program`: programs of other people on every rank, by real launches."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.run.launch.status_file import read_status
from tests.run.launch.command import Launched, start, wait_for
from tests.run.launch.programs import (
    ACCELERATE,
    EXAMPLE,
    HELD_BY_GLOO,
    MEGATRON_CORE,
    TORCHTITAN,
    TORCHTITAN_SHAPE,
    run_program,
    torchtitan_files,
    trainer,
    write,
)


def ended(run: Launched, status: str) -> Launched:
    run.ended()
    assert run.summary["status"] == status, run.stderr
    return run


def test_a_trainer_gets_its_place_its_variables_and_its_records(tmp_path: Path) -> None:
    write(
        tmp_path / "here",
        "show.py",
        """\
        import json, os, sys
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
        found = {n: v for n, v in os.environ.items() if n in names or n.startswith("MPCTL_")}
        found |= {"cuda": os.environ["CUDA_VISIBLE_DEVICES"], "argv": sys.argv, "cwd": os.getcwd()}
        found["safe"] = os.environ.get("PYTHONSAFEPATH")
        print(json.dumps(found))
        """,
    )
    hostile = ["$(touch no)", "; touch no", "a b", "*", "--run-dir", "", "a{tp}", "ä\n"]
    command = shlex.join(["python", "show.py", *hostile])
    run = ended(run_program(tmp_path / "run", command, "--tp", "2"), "finished")
    said = [json.loads(RunDir(run.run_dir).log(rank).read_text()) for rank in range(2)]
    here = (tmp_path / "here").resolve()
    assert not (here / "no").exists()
    assert [s["RANK"] for s in said] == [s["MPCTL_TP_RANK"] for s in said] == ["0", "1"]
    assert (
        said[1]
        | {
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "2",
            "cuda": "",
            "safe": None,
            "MPCTL_ATTEMPT": "0",
            "MPCTL_TP_SIZE": "2",
            "MPCTL_TP_GROUP": "0,1",
            "MPCTL_DP_SIZE": "1",
            "MPCTL_DP_GROUP": "1",
            "argv": [str(here / "show.py"), *hostile],
            "cwd": str(here),
            "MPCTL_RUN_DIR": str(run.run_dir.resolve()),
            "OMP_NUM_THREADS": "1",
            "MPCTL_PLAN": str(run.run_dir.resolve() / "plan.json"),
        }
        == said[1]
    )
    assert Path(said[0]["MPCTL_CHECKPOINT_DIR"]).is_dir()
    assert run.summary["program"] == ["python", "show.py", *hostile]
    assert "mpctl_" not in run.stdout and run.records == []


@pytest.mark.slow
def test_ddp_trains_fails_and_goes_on_by_its_own_checkpoint(tmp_path: Path) -> None:
    trainer(tmp_path / "here")
    whole = ended(run_program(tmp_path / "whole", "python train.py 7 0"), "finished")
    assert [record["step"] for record in whole.records] == list(range(1, 8))
    more = ("--set", "launch.max_restarts=1")
    torn = ended(run_program(tmp_path / "torn", "python train.py 7 5", *more), "finished")
    assert torn.summary["attempts"] == 2
    assert torn.losses == pytest.approx(whole.losses) and len(torn.losses) == 7
    assert [r["tokens"] for r in torn.records] == [32 * step for step in range(1, 8)]
    assert torn.records[-1]["mine"] == 7.0 and torn.records[-1]["tokens_per_second"] > 0
    said = (torn.run_dir / "logs" / "launcher.log").read_text()
    assert "ValueError: a sample of 3 tokens; starting the program again" in said
    assert "at step 5" in said


@pytest.mark.parametrize("how", ["", "destroys exits"])
@pytest.mark.quick(1)
def test_a_program_may_end_while_gloo_holds_a_tensor(tmp_path: Path, how: str) -> None:
    write(tmp_path / "here", "held.py", HELD_BY_GLOO)
    run = ended(run_program(tmp_path / "run", f"python held.py {how}"), "finished")
    for rank, what in itertools.product(range(2), ("at exit", "by a thread", "not closed")):
        assert (tmp_path / "here" / f"rank {rank}, {what}").read_text() == "whole"
    assert RunDir(run.run_dir).log(0).read_text() == "also "


@pytest.mark.slow
def test_a_script_that_always_fails_is_named_with_its_line(tmp_path: Path) -> None:
    write(
        tmp_path / "here",
        "bad.py",
        """\
        import sys
        def main():
            raise KeyError("no such layer")
        if __name__ == "__main__":
            main()
        """,
    )
    more = ("--set", "launch.max_restarts=5")
    run = ended(run_program(tmp_path / "run", "python bad.py", *more), "failed")
    assert run.summary["attempts"] == 2 and "twice in a row" in run.summary["failure"]["error"]
    assert "KeyError: 'no such layer'" in run.summary["failure"]["error"]
    log = RunDir(run.run_dir).log(run.summary["failure"]["rank"]).read_text()
    assert log.count("in main") == 2 and "run_python" not in log
    assert "start the program again" in run.stderr and "checkpoint.interval" not in run.stderr


@pytest.mark.slow
def test_a_rank_that_leaves_before_the_others_is_named_first(tmp_path: Path) -> None:
    write(
        tmp_path / "here",
        "leaves.py",
        """\
        import sys, torch, torch.distributed as dist, mpctl
        dist.init_process_group("gloo")
        for step in range(1, 100):
            dist.all_reduce(torch.ones(1))
            mpctl.heartbeat(step)
            if step == 15 and dist.get_rank() == 1:
                sys.exit(0)
        """,
    )
    run = ended(run_program(tmp_path / "run", "python leaves.py"), "failed")
    failure = run.summary["failure"]
    assert (failure["rank"], failure["doing"]) == (1, "step 15")
    assert failure["error"] == "ended with exit code 0, before the others"
    assert "1 rank lost its peer (rank 0)" in run.stderr


@pytest.mark.slow
def test_a_hang_is_seen_and_the_places_of_the_ranks_are_named(tmp_path: Path) -> None:
    write(
        tmp_path / "here",
        "hang.py",
        """\
        import time, torch, torch.distributed as dist, mpctl
        dist.init_process_group("gloo")
        def read_batch():
            time.sleep(600)
        mpctl.heartbeat(1)
        if dist.get_rank() == 1:
            read_batch()
        dist.all_reduce(torch.ones(1))
        """,
    )
    more = ("--set", "launch.timeout_seconds=4")
    run = ended(run_program(tmp_path / "run", "python hang.py", *more), "failed")
    error = run.summary["failure"]["error"]
    assert "no heartbeat and no processor time used for 4 s" in error
    assert "here/hang.py:4 in read_batch" in error and "rank 0 at" in error
    assert "hang.py:8 in <module>" in error


@pytest.mark.slow
def test_a_program_that_computes_and_sends_no_heartbeat_is_hung_if_it_has_to(tmp_path: Path) -> None:
    text = "import mpctl\nmpctl.heartbeat(3)\nwhile True: pass\n"
    write(tmp_path / "here", "spin.py", text)
    more = ("--set", "launch.heartbeat_seconds=4", "--set", "launch.timeout_seconds=1")
    run = ended(run_program(tmp_path / "run", "python spin.py", *more, ranks=1), "failed")
    failure = run.summary["failure"]
    assert "no heartbeat of rank 0 for 4 s (launch.heartbeat_seconds)" in failure["error"]
    assert "spin.py:3 in <module>" in failure["error"] and failure["doing"] == "step 3"


@pytest.mark.slow
def test_a_shell_script_reports_by_its_file(tmp_path: Path) -> None:
    path = write(
        tmp_path / "here",
        "train.sh",
        """\
        #!/bin/bash
        for step in 1 2 3; do
          echo "{\\"step\\": $step, \\"loss\\": 0.$step, \\"tokens\\": ${step}00}"
          echo "no report"
          sleep 0.2
        done >> "$MPCTL_HEARTBEAT"
        [ "$MPCTL_ATTEMPT" = 1 ] || exit $((3 + RANK * 0))
        """,
    )
    path.chmod(0o755)
    more = ("--set", "launch.max_restarts=1")
    run = ended(run_program(tmp_path / "run", "./train.sh", *more), "finished")
    assert run.losses == [0.1, 0.2, 0.3] and run.summary["attempts"] == 2
    assert run.summary["tokens"] == 300
    said = (run.run_dir / "logs" / "launcher.log").read_text()
    assert "exited with code 3 without a traceback" in said


STOPS = """\
import mpctl, os, signal, sys, time
from pathlib import Path
how, told = sys.argv[1], []
if how in ("SIGTERM", "SIGUSR1"):
    signal.signal(signal.Signals[how], lambda *_: told.append(1))
Path("ready-" + os.environ["RANK"]).touch()
while not (Path("ready-0").exists() and Path("ready-1").exists()):
    time.sleep(0.01)
for step in range(1, 1000):
    mpctl.heartbeat(step, loss=1.0)
    if told or (how == "file" and os.path.exists(os.environ["MPCTL_STOP"])):
        break
    if how == "library" and mpctl.stop_requested():
        break
    time.sleep(0.05)
else:
    sys.exit("nobody said to stop")
Path(os.environ["MPCTL_CHECKPOINT_DIR"], "saved-" + os.environ["RANK"]).write_text(str(step))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "signal_name"), [("SIGTERM", "SIGTERM"), ("SIGUSR1", "SIGUSR1"), ("file", "none"), ("library", "none")]
)
def test_a_stop_reaches_the_program(tmp_path: Path, how: str, signal_name: str) -> None:
    write(tmp_path / "here", "stops.py", STOPS)
    more = ("--set", f"launch.stop_signal={signal_name}")
    run = run_program(tmp_path / "run", f"python stops.py {how}", *more).at_step(3)
    run.process.send_signal(signal.SIGTERM)
    ended(run, "stopped")
    assert run.process.returncode == 128 + signal.SIGTERM
    saved = sorted(p.name for p in (run.run_dir / "program" / "checkpoints").iterdir())
    assert saved == ["saved-0", "saved-1"]
    assert run.left_behind(5.0) == []


@pytest.mark.slow
def test_a_program_that_hears_no_stop_is_ended_and_may_be_resumed(tmp_path: Path) -> None:
    write(
        tmp_path / "here",
        "deaf.py",
        """\
        import mpctl, os, sys, time
        if os.environ["MPCTL_ATTEMPT"] == "1":
            sys.exit(0)
        for step in range(1, 1000):
            mpctl.heartbeat(step, loss=1.0)
            time.sleep(0.05)
        """,
    )
    more = ("--set", "launch.stop_signal=none", "--set", "launch.stop_seconds=1")
    run = run_program(tmp_path / "run", "python deaf.py", *more).at_step(3)
    run.process.send_signal(signal.SIGINT)
    ended(run, "stopped")
    assert run.left_behind(5.0) == []
    from tests.run.launch.command import start

    again = start(["launch", "--resume", "--run-dir", str(run.run_dir)], run.run_dir)
    ended(again, "finished")
    assert again.summary["program"] == ["python", "deaf.py"] and again.records  # kept, none repeated


@pytest.mark.slow
def test_the_children_of_a_program_count_as_its_work(tmp_path: Path) -> None:
    """The script of a shell sleeps while its child computes; killed, the launch leaves neither."""
    write(tmp_path / "here", "spin.py", "while True: pass\n")
    command = f"bash -c '{shlex.quote(sys.executable)} spin.py; true'"
    more = ("--set", "launch.timeout_seconds=2", "--set", "launch.stop_signal=SIGTERM")
    run = run_program(tmp_path / "run", command, *more, ranks=1)
    status = RunDir(run.run_dir).status

    def computed() -> bool:
        report = read_status(status)
        return report is not None and any(state.processor_seconds > 4 for state in report.state.ranks.values())

    wait_for(lambda: computed() or run.process.poll() is not None)
    assert run.process.poll() is None, run.stderr
    run.remember()
    assert any("spin.py" in " ".join(p.cmdline()) for p in run.family.values())
    run.process.send_signal(signal.SIGTERM)
    ended(run, "stopped")
    assert run.left_behind(5.0) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "text", "layout"), [("accelerate", ACCELERATE, ()), ("megatron.core", MEGATRON_CORE, ("--tp", "2"))]
)
def test_trainers_of_others(tmp_path: Path, package: str, text: str, layout: tuple[str, ...]) -> None:
    """torch's DDP by accelerate; tensor parallelism by Megatron-Core, with the plan's groups."""
    pytest.importorskip(package, reason=f"{package} is not installed")
    write(tmp_path / "here", "theirs.py", text)
    run = ended(run_program(tmp_path / "run", "python theirs.py", *layout), "finished")
    assert len(run.losses) == 5 and run.losses[-1] < run.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--tp", "2"), ("--set", "parallel.zero=2")])
def test_torchtitan_s_command_with_the_plan_s_layout(tmp_path: Path, layout: tuple[str, ...]) -> None:
    """Its steps are read from its log. tests/interop/test_torchtitan.py says how to install it."""
    pytest.importorskip("torchtitan.trainer", reason="torchtitan is not installed", exc_type=ImportError)
    torchtitan_files(tmp_path / "here")
    write(tmp_path / "here", "titan.py", TORCHTITAN)
    shape = [f"{key}={json.dumps(value)}" for key, value in TORCHTITAN_SHAPE.items()]
    sets = [word for one in shape for word in ("--set", one)]
    run = run_program(tmp_path / "run", "python titan.py {torchtitan}", *layout, *sets)
    ended(run, "finished")
    assert [record["step"] for record in run.records] == [*range(1, 7)]
    assert run.losses[0] == pytest.approx(math.log(2048), rel=0.1)
    assert run.losses[-1] < 0.9 * run.losses[0]


@pytest.mark.slow
def test_the_example_of_the_documents(tmp_path: Path) -> None:
    write(tmp_path / "here", "train_ddp.py", EXAMPLE.read_text("utf-8"))
    run = run_program(tmp_path / "run", "python train_ddp.py --steps 10000").at_step(60)
    run.process.send_signal(signal.SIGTERM)
    ended(run, "stopped")
    assert run.losses[-1] < run.losses[0]
    assert (run.run_dir / "program" / "checkpoints" / "last.pt").is_file()
    more = ("--set", f'launch.program=["python", "train_ddp.py", "--steps", "{len(run.losses)}"]')
    again = start(["launch", "--resume", "--run-dir", str(run.run_dir), *more], run.run_dir)
    assert len(ended(again, "finished").losses) == len(run.losses)  # it had nothing left to do


DAEMONS = """\
import os, subprocess, sys, time
daemon = subprocess.Popen(["sleep", "7779"], start_new_session=True)
with open("daemons", "a") as stream:
    stream.write(f"{daemon.pid}\\n")
if os.environ["MPCTL_ATTEMPT"] == "0" and sys.argv[1] == "waits":
    open(f"ready-{os.environ['RANK']}", "w").close()
    time.sleep(600)
"""


def daemons(here: Path) -> list[psutil.Process]:
    """The daemons of a program that still run."""
    pids = [int(line) for line in (here / "daemons").read_text().split()]
    return [
        psutil.Process(pid)
        for pid in pids
        if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.slow
def test_daemons_of_a_program_end_with_it(tmp_path: Path) -> None:
    """And are named in one line, while those of others run on."""
    write(tmp_path / "here", "daemons.py", DAEMONS)
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        run = ended(run_program(tmp_path / "run", "python daemons.py ends"), "finished")
        assert daemons(tmp_path / "here") == [] and other.poll() is None
        assert re.search(
            r"the program left 2 processes behind, ended now: sleep \(\d+\), sleep \(\d+\)",
            RunDir(run.run_dir).launcher_log.read_text(),
        )
    finally:
        other.kill()
        other.wait()


@pytest.mark.slow
def test_the_next_launch_ends_what_a_killed_one_has_left(tmp_path: Path) -> None:
    here = tmp_path / "here"
    write(here, "daemons.py", DAEMONS)
    run = run_program(tmp_path / "run", "python daemons.py waits")
    wait_for(lambda: all((here / f"ready-{rank}").exists() for rank in range(2)))
    run.remember()
    psutil.Process(run.process.pid).kill()
    left = daemons(here)
    assert len(left) == 2
    again = start(["launch", "--resume", "--run-dir", str(run.run_dir)], run.run_dir)
    ended(again, "finished")
    assert daemons(here) == []
    assert "left 4 processes behind" in RunDir(run.run_dir).launcher_log.read_text()


@pytest.mark.slow
def test_a_killed_launcher_takes_a_script_with_it(tmp_path: Path) -> None:
    write(tmp_path / "here", "stops.py", STOPS)
    run = run_program(tmp_path / "run", "python stops.py never").at_step(2)
    psutil.Process(run.process.pid).kill()
    assert run.left_behind(10.0) == []
