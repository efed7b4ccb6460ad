"""What a launch of a program checks, the words that it makes of the plan, and its records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.records.rundir.breadcrumb import JOINED, BreadcrumbState
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.heartbeat import parse_report
from mpctl.records.rundir.program import program_variables, recording_ranks, script_words
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.run.clusters.connect import launch_issues
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.attempt import RankState
from mpctl.run.launch.launch_plan import LaunchPlan, plan_launch
from mpctl.run.launch.preflight import check_launch, launch_warnings, runtime_issues
from mpctl.run.launch.program import program_words
from mpctl.run.launch.program_records import ProgramRecords
from mpctl.run.launch.program_watch import ProgramWatch, with_places
from mpctl.run.launch.resume import Resumption
from mpctl.run.launch.verdict import Verdict
from mpctl.spec.launch import LaunchSpec

MACHINE = Machine(cores=2, gpus=0, memory_bytes=1 << 40, hosts=1)
SIZES = {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "parallel.tp": 2, "parallel.pp": 2}
HERE = str(Path(__file__).parent)


def planned(program: list[str], **settings: Any) -> Plan:
    more = {name.replace("__", "."): value for name, value in settings.items()}
    return load_plan(
        None, {**SIZES, "launch.program": program, "launch.device": "cpu", "launch.program_dir": HERE, **more}
    )


def launched(plan: Plan, run: Path) -> LaunchPlan:
    return plan_launch(plan, RunDir(run), MACHINE)


def issues(plan: Plan) -> dict[str, str]:
    """What is wrong, by setting."""
    found: dict[str, str] = {}
    for issue in check_launch(plan, ()):
        text = f"{issue.message} ({issue.hint})"
        found[issue.where] = f"{found.get(issue.where, '')} {text}".strip()
    return found


def test_what_only_own_workers_do_is_refused_all_at_once() -> None:
    wrong = planned(
        ["python", "no.py", "x{megatron}"],
        launch__elastic=True,
        launch__profile="3-4",
        training__skip_batches="7",
        training__on_spike="skip",
        training__init_from="/there",
    )
    found = issues(wrong)
    assert found.keys() >= {
        "launch.elastic",
        "launch.profile",
        "training.skip_batches",
        "training.on_spike",
        "training.init_from",
        "launch.program",
    }
    assert all(
        "mpctl's own workers" in text for where, text in found.items() if where not in ("launch.program", "model")
    )


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (["python", "no.py"], "no.py does not exist"),
        (["train.py"], "write python train.py"),
        (["./no.sh"], "not a program that can be run here"),
        (["python", "-m", "no_such_module.train"], "no module 'no_such_module'"),
        ([""], "not a program"),
        (["python", "x{megatron}"], "write {megatron} by itself"),
        (["bash", "-c", "x", "{megatrn}"], "use {megatron}, "),
        (["bash", "-c", "x", "--config={titan}"], "{torchtitan}"),
    ],
)
def test_a_program_that_is_not_there(program: list[str], said: str) -> None:
    plan = planned(program, model="gpt2")
    assert said in issues(plan)["launch.program"]


@pytest.mark.parametrize(
    "program",
    [
        ["python", "test_program.py"],
        ["python", "-m", "json.tool"],
        ["bash", "-c", "x"],
        ["python", "-u", "-m", "tests"],
        ["python3", "-c", "pass"],
        ["bash", "-c", 'echo ${x} {"a": 1}', "step-{n}", '{"a": 1}'],
    ],
)
def test_a_program_that_is_there(program: list[str]) -> None:
    assert issues(planned(program)) == {}


def test_no_model_is_needed_and_what_is_not_read_is_said() -> None:
    plan = planned(["python", "-m", "this"], data__path="/corpus", model="gpt2")
    assert issues(plan) == {}
    first, second, *_ = launch_warnings(plan.job, MACHINE)
    assert first == "the program does not read data.path: only mpctl's own workers do"
    assert "MPCTL_TP_SIZE" in second and "{megatron}" in second
    with_flags = planned(["python", "-m", "this", "{megatron}"], model="gpt2")
    assert not any("{megatron}" in text for text in launch_warnings(with_flags.job, MACHINE))


def test_the_flags_of_the_plan_become_words(tmp_path: Path) -> None:
    plan = planned(["python", "pretrain_gpt.py", "{megatron}", "--data-path", "a b"], model="gpt2")
    words = program_words(plan, RunDir(tmp_path))
    at = words.argv.index("--tensor-model-parallel-size")
    assert words.argv[at + 1] == "2" and words.argv[:2] == ["python", "pretrain_gpt.py"]
    assert words.argv[-2:] == ["--data-path", "a b"] and "torchrun" not in words.argv
    assert not any("\n" in word or word == "\\" for word in words.argv)
    launch = launched(plan, tmp_path / "run")
    assert launch.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    job = json.loads(launch.files["job.json"])["launch"]
    assert job["program"][2] == "{megatron}" and job["program_argv"] == words.argv
    assert launch.node_start(0, 1, 8, "h", 1).module == "program"


def test_a_launcher_that_reads_a_file_gets_its_path(tmp_path: Path) -> None:
    plan = planned(
        ["python", "-m", "torchtitan.train", "--config={torchtitan}"],
        model="llama-3-8b",
        training__dtype="bf16",
        parallel__zero=3,
        parallel__pp=1,
    )
    launch = launched(plan, tmp_path / "run")
    text = launch.files["program/torchtitan_plan.py"]
    assert "tensor_parallel_degree=2" in text
    compile(text, "torchtitan.py", "exec")
    path = tmp_path / "run" / "program" / "torchtitan_plan.py"
    assert launch.job.launch.program_argv[-1] == f"--config={path}"


def test_deepspeed_gets_json_and_with_a_pipeline_python(tmp_path: Path) -> None:
    settings = {"model": "llama-3-8b", "training__dtype": "bf16", "parallel__zero": 1}
    program = ["python", "-m", "this", "--deepspeed_config", "{deepspeed}"]
    files = launched(planned(program, **settings, parallel__pp=1), tmp_path / "run").files
    read = json.loads(files["program/deepspeed_plan.json"])
    assert read["zero_optimization"]["stage"] == 1 and read["tensor_parallel"] == {"autotp_size": 2}
    files = launched(planned(program, **settings), tmp_path / "run").files
    assert "PipeModelDataParallelTopology(num_pp=2" in files["program/deepspeed_plan.py"]


def test_a_script_of_accelerate_gets_the_variables_of_its_launcher(tmp_path: Path) -> None:
    """The oracle is accelerate's own launcher, which reads the file that is emitted."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    settings = {"model": "llama-3-8b", "training__dtype": "bf16", "parallel__zero": 3, "parallel__pp": 1}
    plan = planned(["python", "-m", "this", "{accelerate}", "--lr", "1"], **settings, training__recompute="full")
    launch = launched(plan, tmp_path / "run")
    assert launch.job.launch.program_argv == ["python", "-m", "this", "--lr", "1"]
    file = tmp_path / "plan.yaml"
    file.write_text(launch.files["program/accelerate_plan.yaml"])
    arguments = launch_command_parser().parse_args(["--config_file", str(file), "--main_process_port", "0", "train.py"])
    theirs = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    ours = launch.job.launch.program_env
    assert ours == {key: theirs[key] for key in ours}
    assert ours["PARALLELISM_CONFIG_TP_SIZE"] == "2" and ours["FSDP_ACTIVATION_CHECKPOINTING"] == "true"


TITAN = {
    "__init__": "",
    "components/__init__": "",
    "components/optimizer": "LRSchedulersContainer = OptimizersContainer = ParamGroupConfig = None",
    "config": "ParallelismConfig = None",
    "distributed/__init__": "",
    "distributed/activation_checkpoint": "FullAC = SelectiveAC = None",
    "models/__init__": "",
    "models/llama3/__init__": "",
    "models/llama3/config_registry": "llama3_8b = None",
    "train": """
import importlib, sys

def main():
    options = dict(zip(sys.argv[-4::2], sys.argv[-3::2]))
    module = importlib.import_module(options["--module"])
    print(sys.argv[1:-4], getattr(module, options["--config"]).__name__, module.__file__)
""",
}
"""The names that a file for torchtitan imports; its `main` finds the config as torchtitan's ConfigManager does."""


def test_the_file_for_torchtitan_starts_it(tmp_path: Path) -> None:
    settings = {"model": "llama-3-8b", "training__dtype": "bf16", "parallel__zero": 3, "parallel__pp": 1}
    plan = planned(["python", "{torchtitan}", "--hf_assets_path", "a"], **settings, training__runtime="torchtitan")
    assert issues(plan) == {}
    launch = launched(plan, tmp_path / "run")
    script = Path(launch.job.launch.program_argv[1])
    script.parent.mkdir(parents=True)
    script.write_text(launch.files["program/torchtitan_plan.py"])
    for name, text in TITAN.items():
        file = tmp_path / "torchtitan" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    words = launch.job.launch.program_argv[1:]
    code = f"from mpctl.train.runtime.program import run_python; run_python({words})"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-c", code]  # as a rank runs it
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": paths})
    assert said.stdout == f"['--hf_assets_path', 'a'] mpctl_plan {script}\n"


@pytest.mark.parametrize(
    ("runtime", "program"),
    [
        ("megatron-core", "python pretrain_gpt.py {megatron}"),
        ("torchtitan", "python {torchtitan}"),
        ("fsdp2", "python train.py {accelerate}"),
        ("megatron-deepspeed", "python train.py --deepspeed_config {deepspeed}"),
        ("nanotron", "python run_train.py --config-file {nanotron}"),
        ("megatron-2021", "python train.py"),
    ],
)
def test_a_plan_for_other_software_starts_that_or_nothing(tmp_path: Path, runtime: str, program: str) -> None:
    layout = {"parallel__pp": 1, "parallel__tp": 1, "training__dtype": "bf16"}
    settings = {"model": "llama-3-8b", "training__runtime": runtime, **layout}
    (issue,) = launch_issues(planned([], **settings), MACHINE, None, run=RunDir(tmp_path))
    assert issue.rule == "runtime-needs-program" and runtime in issue.message
    assert issue.hint is not None and f'--program "{program}"' in issue.hint and "--runtime mpctl" in issue.hint
    with_one = planned(["python", "-m", "this"], **settings)
    assert launch_issues(with_one, MACHINE, None, run=RunDir(tmp_path)) == []
    own = planned([], **{**settings, "training__runtime": "mpctl"})
    assert "runtime-needs-program" not in {i.rule for i in launch_issues(own, MACHINE, None, run=RunDir(tmp_path))}


def test_a_run_that_own_layers_have_trained_for_another_runtime_goes_on(tmp_path: Path) -> None:
    """Runs of older versions: job.json names the runtime, and no program."""
    plan, run = planned([], model="gpt2", training__runtime="megatron-core"), RunDir(tmp_path)
    (tmp_path / "job.json").write_text(plan.job.model_dump_json())
    resumption = Resumption(run)
    assert list(runtime_issues(plan, resumption)) == [] != list(runtime_issues(plan))
    other = planned([], model="gpt2", training__runtime="torchtitan")
    assert list(runtime_issues(other, resumption))
    (tmp_path / "job.json").write_text(planned(["python", "-m", "this"], model="gpt2").job.model_dump_json())
    assert list(runtime_issues(plan, resumption))


def test_words_of_this_python() -> None:
    assert script_words(["python", "a.py", "-c"]) == ["a.py", "-c"]
    assert script_words(["/other/bin/python", "a.py"]) is None
    assert script_words(["python"]) is None and script_words(["python", "-m"]) is None
    assert script_words(["python", "-O", "a.py"]) is None


def test_coordinates_are_those_of_the_plan(tmp_path: Path) -> None:
    job = planned(["python", "-m", "this"], parallel__order="tp-cp-pp-dp").job
    found = program_variables(RunDir(tmp_path), job, 5)
    assert [found[f"MPCTL_{axis}_RANK"] for axis in ("TP", "PP", "DP")] == ["1", "0", "1"]
    assert found["MPCTL_PP_GROUP"] == "5,7" and found["MPCTL_DP_GROUP"] == "1,5"
    assert recording_ranks(job) == (0, 2)
    moe = load_plan(None, {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "parallel.ep": 4, "parallel.tp": 2}).job
    assert program_variables(RunDir(tmp_path), moe, 3)["MPCTL_EP_GROUP"] == "0,1,2,3"


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"12",
        b"[1]",
        b'{"step": 0}',
        b'{"step": 1.5}',
        b'{"step": true}',
        b'{"step": "3"}',
        b'{"step": NaN}',
        b'{"step": 1e400}',
        b"\xff\xfe",
        b'{"step": 3' + b" " * 9000 + b"}",
        b"[" * 5000,
    ],
)
def test_lines_that_are_no_reports(line: bytes) -> None:
    assert parse_report(line) is None


def test_a_report_keeps_numbers_alone() -> None:
    report = parse_report(
        b'{"step": 7, "loss": NaN, "tokens": -5, "lr": 0.1, "a b": 1, "skipped": 1, "x": "y",'
        b' "time": 12.5, "big": 1e300}'
    )
    assert report is not None and (report.step, report.time) == (7, 12.5)
    assert report.loss is None and report.tokens is None and report.figures == {"lr": 0.1}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def records_of(run: Path, clock: Clock) -> tuple[ProgramRecords, list[StepRecord]]:
    job = planned(["python", "-m", "this"]).job
    (run / "logs").mkdir(parents=True, exist_ok=True)
    RunDir(run).begin_program()
    return ProgramRecords(RunDir(run), job, clock), []


def append(path: Path, *reports: Mapping[str, Any] | str) -> None:
    with path.open("a") as stream:
        for report in reports:
            stream.write((report if isinstance(report, str) else json.dumps(report)) + "\n")


def test_reports_become_records_and_an_attempt_goes_on_at_its_own_step(tmp_path: Path) -> None:
    run, clock = RunDir(tmp_path), Clock()
    records, seen = records_of(tmp_path, clock)
    last_stage = run.heartbeat(recording_ranks(records.job)[1])
    append(run.heartbeat(0), {"step": 1, "time": 1010.0})  # rank 0 does not know the loss
    append(last_stage, {"step": 1, "loss": 3.0, "tokens": 100, "time": 1010.0}, "rubbish")
    clock.now = 1011.0
    records.deliver(seen.append)
    assert seen == []  # how long step 1 took is not known yet
    append(last_stage, {"step": 3, "loss": 2.0, "tokens": 300, "time": 1014.0})
    append(run.heartbeat(0), {"step": 2})
    clock.now = 1015.0
    records.deliver(seen.append)
    assert [(r["step"], r["loss"]) for r in seen] == [(1, 3.0), (3, 2.0)]
    assert [r["step_seconds"] for r in seen] == [2.0, 2.0]
    assert seen[1]["tokens_per_second"] == 50.0
    records, seen = records_of(tmp_path, clock)
    append(run.heartbeat(0), {"step": 2, "loss": 2.5})
    clock.now = 1020.0
    records.deliver(seen.append)
    records.finish(seen.append)
    assert [(r["step"], r["loss"]) for r in run.records()] == [(1, 3.0), (2, 2.5)]
    assert run.num_starts() == 2


MEGATRON = (
    " [2026-01-01 00:00:0{n}] iteration {n:8d}/     100 | consumed samples: 16 | elapsed time per "
    "iteration (ms): 2500.0 | learning rate: 1.0E-04 | global batch size: 8 | lm loss: {n}.5E+00 | "
    "loss scale: 1.0 | grad norm: 1.0 |"
)
TORCHTITAN = (
    "\x1b[31mstep: {n:2d}  \x1b[32mloss: {n}.50000  \x1b[33mgrad_norm: 2.0  \x1b[34mmemory:  1.0GiB"
    "(1.0%)  \x1b[36mtps: 1,000  \x1b[37mtflops: 1.0  mfu: 1.0%"
)


@pytest.mark.parametrize(("line", "rank", "seconds", "rate"), [(MEGATRON, 7, 2.5, 0.0), (TORCHTITAN, 0, 4.0, 8000.0)])
def test_steps_are_read_from_logs_that_mpctl_knows(
    tmp_path: Path, line: str, rank: int, seconds: float, rate: float
) -> None:
    run, clock = RunDir(tmp_path), Clock()
    (tmp_path / "logs").mkdir()
    append(run.log(rank), line.format(n=9))  # of an earlier attempt
    records, seen = records_of(tmp_path, clock)
    for n in (1, 2, 3):
        clock.now += 4.0
        append(run.log(rank), "building", line.format(n=n))
        records.deliver(seen.append)
    assert [(r["step"], r["loss"]) for r in seen] == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert seen[-1]["step_seconds"] == pytest.approx(seconds)
    assert seen[-1]["tokens_per_second"] == rate


def at(seconds: float, beats: int = 0) -> RankState:
    return RankState("sleeping", seconds, BreadcrumbState("step 3", JOINED, beats))


def test_idle_threads_are_no_work_and_an_ended_child_is() -> None:
    watch = ProgramWatch(LaunchSpec(timeout_seconds=100.0))
    assert all(watch.check({0: at(n * 1e-3)}, 1.0) is None for n in range(90))
    found = [watch.check({0: at(0.09)}, 1.0) for _ in range(12)]
    assert found[-1] is not None and found[-1].rank == 0
    watch = ProgramWatch(LaunchSpec(timeout_seconds=10.0))
    for used in (0.0, 50.0, 1.0):  # a child has computed, and has ended
        assert all(watch.check({0: at(used)}, 1.0) is None for _ in range(9))


def test_heartbeats_alone_keep_a_rank_that_sleeps() -> None:
    watch = ProgramWatch(LaunchSpec(timeout_seconds=2.0, heartbeat_seconds=3.0))
    assert all(watch.check({0: at(0.0, beats)}, 1.0) is None for beats in range(1, 20))
    never = ProgramWatch(LaunchSpec(timeout_seconds=50.0, heartbeat_seconds=3.0))
    assert all(never.check({0: at(float(n))}, 1.0) is None for n in range(20))


def test_the_lonely_place_comes_first() -> None:
    places = dict.fromkeys(range(4), "a.py:1 in step") | {2: "a.py:9 in read"}
    said = with_places(Verdict(None, "hung"), places).error
    assert said == "hung: rank 2 at a.py:9 in read; ranks 0-1, 3 at a.py:1 in step"
