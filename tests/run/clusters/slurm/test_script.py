"""The batch script: its options, its quoting, and what its shell does on signals and at the end."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpctl.records.rundir.launcher import write_stop_request
from mpctl.run.clusters.slurm.script import (
    BatchJob,
    extra_issues,
    read_options,
    render_script,
    script_issues,
    script_options,
    step_issues,
)
from mpctl.spec.launch import SlurmSpec
from tests.started import started


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("--exclusive", "--exclusive"),
        ("--mail-type=END", "--mail-type=END"),
        ("--nodelist n[1-2]", "--nodelist 'n[1-2]'"),
        ("-w n1", "-w n1"),
        ("-wn1", "-wn1"),
        ("--comment=it's # $HOME", "--comment='it'\"'\"'s # $HOME'"),
        ("--time-min=10", "--time-min=10"),
        ("--wait-all-nodes=1", "--wait-all-nodes=1"),
    ],
)
def test_an_option_is_quoted(text: str, written: str) -> None:
    assert list(extra_issues([text])) == []
    (option,) = read_options([text])
    assert option.text == written
    assert len(shlex.split(option.text, comments=True)) == 1 + (option.separator == " ")


@pytest.mark.parametrize(
    "text",
    ["", "x", "--", "-", "exclusive", "--a\n#SBATCH --b", "--a=1\nrm -rf x", "-w n1\r", "- w", "--comment=\x1b[0m"],
)
def test_text_that_is_no_option_is_refused(text: str) -> None:
    (issue,) = extra_issues([text])
    assert "is not an option of sbatch" in issue.message
    assert read_options([text]) == []


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("--nodes=4", "cluster.nodes"),
        ("-N4", "cluster.nodes"),
        ("-N 4", "cluster.nodes"),
        ("--part=x", "launch.slurm.partition"),  # sbatch takes the beginning of an option
        ("--out=x", "--run-dir"),
        ("-c2", "launch.threads_per_rank"),
        ("--no-requeue", "launch.slurm.requeue"),
        ("--array=1-4", "launch.slurm.array"),
        ("--export=NONE", "leave it out"),
    ],
)
def test_options_of_the_plan_are_refused_with_their_setting(text: str, way_out: str) -> None:
    (issue,) = extra_issues([text])
    assert way_out in issue.hint
    assert issue.where == "launch.slurm.extra"


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("--nodes=4", "cluster.nodes"),
        ("-wn1", "cluster.nodes"),
        ("--jobid=3", "leave it out"),
        ("--export=NONE", "leave it out"),
        ("-o x", "leave it out"),
        ("--container-im=x", "launch.slurm.container_image"),
        ("x\ny", "--mpi=none"),
    ],
)
def test_options_of_srun_that_the_step_needs_are_refused(text: str, way_out: str) -> None:
    (issue,) = step_issues([text])
    assert issue.where == "launch.slurm.srun" and way_out in issue.hint
    assert list(step_issues(["--mpi=none", "--network=single_node_vni", "-A x"])) == []


def test_all_are_named_at_once() -> None:
    assert len(list(extra_issues(["x", "-N4", "--exclusive", "--array=1"]))) == 3


RUN = Path("/shared/runs/demo")
JOB = BatchJob(
    name="demo",
    run=RUN,
    nodes=2,
    gpus=8,
    cpus=None,
    command=["/venv/bin/python", "-m", "mpctl", "launch", "--resume", "--run-dir", "/shared/runs/demo"],
    signal_seconds=120,
    settings=SlurmSpec(),
)


def test_options_follow_from_plan_and_settings() -> None:
    assert " ".join(script_options(JOB)) == (
        "--job-name=demo --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --exclusive --mem=0 "
        "--requeue --signal=B:USR1@120 --open-mode=append "
        "--output=/shared/runs/demo/logs/slurm-%j.out"
    )
    settings = SlurmSpec(
        partition="batch",
        account="abc",
        time="1-00:00:00",
        qos="high",
        constraint="a100&ib",
        extra=["--mail-type=END", "-w g[1-2]"],
        requeue=False,
    )
    assert " ".join(script_options(replace(JOB, gpus=0, cpus=4, settings=settings))) == (
        "--job-name=demo --nodes=2 --ntasks-per-node=1 --cpus-per-task=4 --partition=batch "
        "--account=abc --time=1-00:00:00 --qos=high --constraint='a100&ib' --no-requeue "
        "--signal=B:USR1@120 --open-mode=append --output=/shared/runs/demo/logs/slurm-%j.out "
        "--mail-type=END -w 'g[1-2]'"
    )


def test_options_of_the_user_go_before_those_of_the_plan() -> None:
    settings = SlurmSpec(extra=["--gres=gpu:a100:8", "--exclusive", "--mem=500G"])
    options = list(script_options(replace(JOB, settings=settings)))
    assert not {"--gpus-per-node=8", "--mem=0"} & {*options}
    assert options.count("--exclusive") == 1


def test_the_script_as_a_whole() -> None:
    text = render_script(JOB)
    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=demo\n")
    assert "\n/venv/bin/python -m mpctl launch --resume --run-dir /shared/runs/demo &\n" in text
    assert "scontrol requeue" in text
    without = render_script(replace(JOB, settings=SlurmSpec(requeue=False)))
    assert "scontrol" not in without
    for script in (text, without):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


@pytest.mark.parametrize("name", ["a b", "it's", "$(touch x)", "`id`", "a;b", "# b", '"', "\\"])
def test_no_name_leaves_its_quotes(name: str, tmp_path: Path) -> None:
    run = tmp_path / name
    (run / "logs").mkdir(parents=True)
    text = render_script(replace(JOB, name=name, run=run, command=["true", str(run)]))
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) == 10
    probe = "\n".join([*text.splitlines()[:-1], 'printf %s "$RUN"', ""])
    done = bash(probe, tmp_path)
    assert done.stdout.endswith(str(run)), done.stderr
    assert [*tmp_path.iterdir()] == [run]


def test_setup_runs_before_the_launcher_and_reaches_it(tmp_path: Path) -> None:
    settings = SlurmSpec(
        setup=["module() { export LOADED=$1; }", "module cuda/12.8", "echo ${UNSET}ready"],
        dependency="afterok:41?afterany:42",
    )
    command = ["bash", "-c", "echo loaded $LOADED"]
    job = replace(JOB, run=tmp_path / "run", command=command, settings=settings)
    assert list(script_issues(job)) == []
    assert "--dependency='afterok:41?afterany:42'" in list(script_options(job))
    said = bash(render_script(job), tmp_path).stdout.splitlines()
    assert said[0] == "ready" and said[-1] == "loaded cuda/12.8"
    (issue,) = script_issues(replace(JOB, settings=SlurmSpec(setup=["a\nb"])))
    assert issue.where == "launch.slurm.setup"


def test_a_percent_sign_is_not_slurms() -> None:
    (output,) = [o for o in script_options(replace(JOB, run=Path("/a%j"))) if "output" in o]
    assert output == "--output=/a%%j/logs/slurm-%j.out"


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("afterok:1", True),
        ("afterok:1:2,after:3+5", True),
        ("afterok:1?afternotok:2_*", True),
        ("singleton", True),
        ("aftercorr:1_4", True),
        ("afterok:1;id", False),
        ("after", False),
        ("1234", False),
        ("afterok:1,afterok:2?afterok:3", False),
        ("afterok:a", False),
        ("afterok:1,", False),
    ],
)
def test_a_dependency_has_the_form_that_sbatch_takes(text: str, is_taken: bool) -> None:
    issues = list(script_issues(replace(JOB, settings=SlurmSpec(dependency=text))))
    assert [issue.where for issue in issues] == ([] if is_taken else ["launch.slurm.dependency"])


def test_line_breaks_are_refused() -> None:
    job = replace(JOB, name="a\n#SBATCH -N 9", run=Path("/x\ny"), settings=SlurmSpec(extra=["x"]))
    wheres = [issue.where for issue in script_issues(job)]
    assert wheres == ["--run-dir", "name", "launch.slurm.extra"]
    assert list(script_issues(JOB)) == []


# ---------------------------------------------------------------- what its shell does

SCONTROL = """\
#!/bin/sh
echo "scontrol $*" >> "$CALLS"
case "$*" in
  *show*) echo "JobId=7 ReqNodeList=(null) ExcNodeList=$BEFORE NodeList=n[1-2]" ;;
  requeue*) [ -z "$REFUSAL" ] || { echo "$REFUSAL" >&2; exit 1; }; kill -TERM $PPID ;;
esac
"""
"""Slurm sends SIGTERM to the script of a job that is requeued. BEFORE: the nodes that it excludes;
REFUSAL: why it requeues none; CALLS: a file for what was asked of it."""


def environment(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    command = folder / "scontrol"
    command.write_text(SCONTROL)
    command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "BEFORE": "(null)",
        "REFUSAL": "",
        "CALLS": str(folder / "calls"),
    }


def calls(folder: Path) -> list[str]:
    """What the script asked of scontrol, but for what it reads."""
    listed = folder.parent / f"{folder.name}-bin" / "calls"
    lines = listed.read_text().splitlines() if listed.exists() else []
    return [line for line in lines if "show" not in line]


def bash(text: str, folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {**environment(folder.parent / f"{folder.name}-bin"), **more}
    return subprocess.run(["bash"], input=text, env=env, capture_output=True, text=True, timeout=30, check=False)


SAVE = "mkdir -p $0/checkpoints/step-4;"
LOSE = "mkdir -p $0/nodes; echo n2 > $0/nodes/lost;"
LIMIT = "mpctl: it was stopped before its time limit;"


@pytest.mark.parametrize(
    ("launcher", "code", "said"),
    [
        (f"{SAVE} exit 138", 138, f"{LIMIT} step-4 is saved; job 7 is requeued"),
        # It saved nothing, and would not the next time either.
        ("exit 138", 138, f"{LIMIT} job 7 is not requeued, since it saved no step"),
        (f"{SAVE} exit 0", 0, ""),
        (f"{SAVE} exit 143", 143, ""),  # SIGTERM
        ("exit 1", 1, ""),
        (f"{LOSE} {SAVE} exit 1", 1, "mpctl: n2; step-4 is saved; job 7 is requeued"),
        (f"{LOSE} exit 1", 1, "mpctl: n2; job 7 is not requeued, since it saved no step"),
        (f"{SAVE} kill -9 $$", 137, "mpctl: its launcher was killed by signal 9; step-4 is saved; job 7 is requeued"),
    ],
)
def test_a_stop_before_the_limit_a_lost_node_and_a_killed_launcher_are_requeued(
    tmp_path: Path, launcher: str, code: int, said: str
) -> None:
    job = replace(JOB, run=tmp_path / "run", command=["bash", "-c", launcher, str(tmp_path / "run")])
    done = bash(render_script(job), tmp_path)
    assert done.returncode == code, done.stderr
    first, *rest = done.stdout.splitlines()
    assert (first, "".join(rest)) == ("mpctl: job 7 on n[1-2], restart 0, from the start", said)
    is_requeued = said.endswith("is requeued")
    assert calls(tmp_path) == (["scontrol requeue 7"] if is_requeued else [])


def test_a_job_that_slurm_does_not_requeue_says_what_slurm_says(tmp_path: Path) -> None:
    """`requeued` was said before it was asked for, and then that no step was saved."""
    command = ["bash", "-c", f"{SAVE} exit 138", str(tmp_path / "run")]
    script = render_script(replace(JOB, run=tmp_path / "run", command=command))
    done = bash(script, tmp_path, REFUSAL="Requested operation is presently disabled for job 7")
    assert done.returncode == 138
    assert done.stdout.splitlines()[1:] == [
        f"{LIMIT} step-4 is saved; job 7 is not requeued: Requested operation is presently disabled for job 7"
    ]


@pytest.mark.parametrize(("urgent", "saves", "code"), [(False, True, 0), (True, True, 143), (False, False, 143)])
@pytest.mark.parametrize("requeue", [True, False])
def test_a_stop_that_was_asked_for_and_saved_is_no_failure(
    tmp_path: Path, urgent: bool, saves: bool, code: int, requeue: bool
) -> None:
    """So that jobs that depend on it by afterok begin."""
    run, settings = tmp_path / "run", SlurmSpec(requeue=requeue)
    run.mkdir()
    write_stop_request(run / "stop-request", now=urgent)
    command = ["bash", "-c", f"{SAVE if saves else ''} exit 143", str(run)]
    done = bash(render_script(replace(JOB, run=run, command=command, settings=settings)), tmp_path)
    assert done.returncode == code, done.stderr
    assert ("step-4 is saved" in done.stdout) == (code == 0) and not calls(tmp_path)


@pytest.mark.parametrize(
    ("before", "list_before", "list_after"),
    [("", "(null)", "n2"), ("", "n9", "n9,n2"), ("n2", "n9,n2", None), ("n1", "n1", "n1,n2")],
)
def test_a_requeue_excludes_the_nodes_that_failed_too_often(
    tmp_path: Path, before: str, list_before: str, list_after: str | None
) -> None:
    """Also where no step was saved, if a node is new there; what is no name of a node is left
    out. before: in RUN/nodes/excluded when the job began."""
    (tmp_path / "run" / "nodes").mkdir(parents=True)
    if before:
        (tmp_path / "run" / "nodes" / "excluded").write_text(f"{before}\n")
    launcher = (
        'test "$MPCTL_REQUEUES" = 1 && cd $0/nodes && echo n2 failed too often > lost; '
        "echo n2 > excluded; echo 'n3 JobId=8' >> excluded; exit 1"
    )
    command = ["bash", "-c", launcher, str(tmp_path / "run")]
    done = bash(render_script(replace(JOB, run=tmp_path / "run", command=command)), tmp_path, BEFORE=list_before)
    assert done.returncode == 1, done.stderr
    requeued = ["scontrol requeue 7", f"scontrol update JobId=7 ExcNodeList={list_after}"]
    assert calls(tmp_path) == ([] if list_after is None else requeued)
    ends = "since it saved no step" if list_after is None else "job 7 is requeued without n2"
    assert "n2 failed too often" in done.stdout and done.stdout.endswith(f"{ends}\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 38), (signal.SIGTERM, 43)])
def test_signals_are_passed_on_and_the_launchers_code_returned(tmp_path: Path, number: int, code: int) -> None:
    launcher = "trap 'sleep .2; exit 38' USR1; trap 'sleep .2; exit 43' TERM; touch $0; while :; do sleep .05; done"
    ready = tmp_path / "ready"
    job = replace(JOB, run=tmp_path, command=["bash", "-c", launcher, str(ready)])
    script = tmp_path / "job.sh"
    script.write_text(render_script(job))
    env = environment(tmp_path / "bin")
    with started(["bash", str(script)], env=env, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 20
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(20) == code


def test_it_continues_from_the_newest_checkpoint_by_number(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        (tmp_path / "run" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "damaged-step-200").mkdir()
    job = replace(JOB, run=tmp_path / "run", command=["true"])
    assert "from step-100\n" in bash(render_script(job), tmp_path).stdout
