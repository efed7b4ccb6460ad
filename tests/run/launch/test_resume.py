"""What a run resumes from, and the warnings about it: damage, copies, changed settings."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.plan.planning.plan import make_plan
from mpctl.records.checkpoint import manifest
from mpctl.records.checkpoint.folder import set_aside
from mpctl.records.checkpoint.verify import find_damage
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.metrics import parse_record
from mpctl.run.hosts.machine import this_machine
from mpctl.run.launch.follow import RecordReader
from mpctl.run.launch.preflight import check_here, check_launch
from mpctl.run.launch.resume import NEUTRAL, Resumption, changed_settings, find_resumption
from mpctl.spec.job import DataSpec, JobSpec
from mpctl.spec.load import load_job
from mpctl.spec.training import TrainingSpec
from tests.run.launch.command import Launched, start
from tests.train.runtime.tiny import make_trainer, settings, tiny_job, train

Capture = pytest.CaptureFixture[str]
Harm = Callable[[Path], object]


def _copy(finished: Launched, run_dir: Path, *, half: bool = False) -> Path:
    """The finished run of 20 steps; half: as if it had ended after its checkpoint of step 10."""
    shutil.copytree(finished.run_dir, run_dir)
    if half:
        shutil.rmtree(run_dir / "checkpoints/step-20")
    return run_dir


def _snapshot(run_dir: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in run_dir.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def _dry(run_dir: Path, capsys: Capture, *more: str, code: int = 0) -> str:
    """The stderr of --resume --dry-run; nothing may change."""
    before = _snapshot(run_dir)
    argv = ["launch", "--resume", "--run-dir", str(run_dir), "--dry-run", "--steps", "25", *more]
    assert mpctl(argv) == code
    assert _snapshot(run_dir) == before
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_a_finished_run_is_left_as_it_is(finished: Launched, tmp_path: Path, capsys: Capture) -> None:
    run_dir = _copy(finished, tmp_path / "run")
    before = _snapshot(run_dir)
    argv = ["launch", "--resume", "--run-dir", str(run_dir)]
    for steps in ([], ["--steps", "15"]):
        assert mpctl([*argv, *steps]) == 0
        shown = capsys.readouterr()
        assert "is already at step 20; use --steps N (more than 20) to go on" in shown.err
        assert shown.out == ""
    assert mpctl([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == finished.summary
    (run_dir / "summary.json").unlink()
    assert mpctl([*argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 20
    del before[str(run_dir / "summary.json")]
    assert _snapshot(run_dir) == before


# ---------------------------------------------------------------- a damaged newest checkpoint


def _flip(folder: Path) -> None:
    path = folder / "shard-1.safetensors"
    held = bytearray(path.read_bytes())
    held[len(held) // 2] ^= 1
    path.write_bytes(held)


def _cut(folder: Path) -> None:
    path = folder / "shard-1.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("not a folder")


NEWEST: list[tuple[Harm, str]] = [
    (_cut, "shard-1.safetensors: has"),
    (lambda folder: (folder / "shard-0.json").write_text("{}"), "shard-0.json: bytes: Field"),
    (lambda folder: (folder / "manifest.json").write_text(""), "manifest.json: Expecting value"),
    (_empty, "manifest.json: No such file"),
    (_file, "manifest.json: Not a directory"),
]


def test_another_model_cannot_resume_it(finished: Launched, tmp_path: Path, capsys: Capture) -> None:
    run_dir = _copy(finished, tmp_path / "run")
    argv = ["launch", "--resume", "--run-dir", str(run_dir), "--json"]
    assert mpctl([*argv, "--model", "gpt2"]) == 2  # also where nothing is left to train
    assert "resume-model" in capsys.readouterr().out
    shutil.rmtree(run_dir / "checkpoints/step-20")
    assert mpctl([*argv, "--set", "model.vocab=310", "--set", "model.layers=3"]) == 2
    issues = json.loads(capsys.readouterr().out)["issues"]
    assert {issue["where"] for issue in issues} == {"model.vocab", "model.layers"}


def test_a_run_without_a_checkpoint_names_its_losses(finished: Launched, tmp_path: Path) -> None:
    run_dir = _copy(finished, tmp_path / "run")
    shutil.rmtree(run_dir / "checkpoints")
    (warning,) = find_resumption(RunDir(run_dir)).warnings()
    assert "has no checkpoint: training starts at step 1" in warning
    assert "the records of 20 steps are removed" in warning


@pytest.mark.parametrize(("harm", "words"), NEWEST)
def test_the_checkpoint_before_a_damaged_one_is_used(
    finished: Launched, tmp_path: Path, harm: Harm, words: str
) -> None:
    run_dir = _copy(finished, tmp_path / "run")
    harm(run_dir / "checkpoints/step-20")
    resumption = find_resumption(RunDir(run_dir))
    (warning,) = resumption.warnings()
    assert (resumption.step, resumption.issues) == (10, [])
    assert f"{run_dir}/checkpoints/step-20 is damaged (" in warning and words in warning
    assert "resuming from step 10; the damaged checkpoint is renamed" in warning


def test_damage_is_reported_and_only_damaged_checkpoints_are_bad_input(
    finished: Launched, tmp_path: Path, capsys: Capture
) -> None:
    run_dir = _copy(finished, tmp_path / "run")
    _cut(run_dir / "checkpoints/step-20")
    assert "resuming from step 10" in " ".join(_dry(run_dir, capsys, "--json").split())
    _cut(run_dir / "checkpoints/step-10")
    said = _dry(run_dir, capsys, code=2)
    assert said.count("were written") == 2 and "--overwrite" in said


@pytest.mark.slow
def test_it_resumes_in_spite_of_all_of_it(finished: Launched, tmp_path: Path) -> None:
    """One wrong bit in the newest checkpoint, which the rank that reads it sees; an emptied
    job.json and plan.json, a torn line of metrics."""
    run_dir = _copy(finished, tmp_path / "run")
    _flip(run_dir / "checkpoints/step-20")
    for name in ("job.json", "plan.json"):
        (run_dir / name).write_text("")
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 21, "lo')
    more = ("--steps", "22", "--set", "training.lr_decay_steps=20")  # at the rates of 20 steps
    run = start(["launch", "--resume", "--run-dir", str(run_dir), *more], run_dir).ended()
    assert run.process.returncode == 0, run.stderr
    assert run.losses[:20] == finished.losses and len(run.losses) == 22
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-10", "step-20", "step-22", "damaged-step-20"}
    assert find_damage(run_dir / "checkpoints/step-20") == []
    for words in ("job.json is damaged: its copy", "line 21 is not a record"):
        assert words in run.stderr and any(words in warning for warning in run.summary["warnings"])
    said = " ".join(run.stderr.split())
    for words in (
        "step-20/shard-1.safetensors: its bytes are not those that were written (CRC-32",
        "damaged-step-20, starting from step 10",
    ):
        assert words in said
    assert run.summary["attempts"] == 1  # launch.max_restarts is for failures of training


@pytest.mark.slow
def test_the_last_checkpoint_is_not_renamed(finished: Launched, tmp_path: Path) -> None:
    """Wrong bits in every checkpoint: nothing is left to start from, and that is reported."""
    run_dir = _copy(finished, tmp_path / "run")
    for step in (10, 20):
        _flip(run_dir / f"checkpoints/step-{step}")
    argv = ["launch", "--resume", "--run-dir", str(run_dir), "--steps", "25"]
    run = start(argv, run_dir).ended()
    assert run.process.returncode == 1
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"step-10", "damaged-step-20"}
    failure = run.summary["failure"]
    assert failure["doing"] == "loading step-10" and "CRC-32" in failure["error"]
    assert "there is no checkpoint before it" in failure["error"]


def test_a_copy_replaces_a_damaged_document(finished: Launched, tmp_path: Path, capsys: Capture) -> None:
    run_dir = _copy(finished, tmp_path / "run", half=True)
    for name, text in product(("job.json", "plan.json"), ("", "{", "[]", "\0" * 100)):
        (run_dir / name).write_text(text)
        assert RunDir(run_dir).document(name) == run_dir / "checkpoints/step-10" / name
    said = " ".join(_dry(run_dir, capsys).split())
    for name in ("job.json", "plan.json"):
        assert f"{run_dir / name} is damaged: its copy" in said
        assert f"checkpoints/step-10/{name} is used" in said


@pytest.mark.slow
def test_the_launcher_reads_no_tensor(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run is gone on from or started from: a terabyte would take it minutes."""
    job = tiny_job(data, 2, training__steps=1, training__eval_samples=0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/job.json").write_text(job.model_dump_json())
    train(job, tmp_path / "run")
    monkeypatch.setattr(manifest, "sha256", None)
    single = job.model_copy(update=dict(tiny_job(data)))
    run = RunDir(tmp_path / "run")
    resumption = find_resumption(run)
    assert resumption.step == 1
    assert check_launch(make_plan(single), (), run, resumption=resumption) == []
    assert make_trainer(single, run.path).step == 1
    started = tiny_job(data, training__init_from=str(run.path))
    assert check_here(make_plan(started), this_machine()) == []
    make_trainer(started, tmp_path / "other")


# ---------------------------------------------------------------- settings that were changed

CHANGES = {
    "training.seed=7": "training.seed is 7, but was 1234: from step 11 on samples come in",
    "training.global_batch_size=4": "step 11 begins with sample 40 of the data instead of 80, so "
    "40 samples are used again",
    "training.learning_rate=0.01": "but was 0.003: the learning rate follows the new schedule",
    "training.warmup_steps=0": "the learning rate follows the new schedule from step 11 on",
    "training.weight_decay=0.0": "from step 11 on it applies to training",
    "model.norm_epsilon=0.1": "model.norm_epsilon is 0.1, but was 1e-05: from step 11 on it",
}


def test_changed_settings_are_reported(finished: Launched, data: Path, tmp_path: Path, capsys: Capture) -> None:
    run_dir = _copy(finished, tmp_path / "run", half=True)
    shutil.copytree(data, tmp_path / "data")
    changes = [*CHANGES, f"data.path={tmp_path / 'data'}"]
    sets = [part for change in changes for part in ("--set", change)]
    said = " ".join(_dry(run_dir, capsys, *sets).split())
    for change, words in CHANGES.items():
        assert words in said and change.partition("=")[0] in said, change
    assert "from step 11 on the samples come from other data" in said


def test_what_changes_nothing_is_not_reported(finished: Launched, tmp_path: Path, capsys: Capture) -> None:
    run_dir = _copy(finished, tmp_path / "run", half=True)
    argv = [
        "launch",
        "--resume",
        "--run-dir",
        str(run_dir),
        "--dry-run",
        "--micro-batch-size",
        "4",
        "--set",
        "checkpoint.interval=3",
    ]
    assert mpctl(argv) == 0
    assert "but was" not in capsys.readouterr().err


def test_every_setting_is_reported_or_known_to_be_neutral(tmp_path: Path) -> None:
    """So that a new key is never passed over in silence."""
    then = load_job(None, settings())
    for table, model in (("training", TrainingSpec), ("data", DataSpec)):
        for key in model.model_fields:
            changed = getattr(then, table).model_copy(update={key: 77})
            now = then.model_copy(update={table: changed})
            said = list(changed_settings(now, then, Resumption(RunDir(tmp_path), 10)))
            assert [words.split(" is ")[0] for words in said] == ([] if key in NEUTRAL[table] else [f"{table}.{key}"])


@pytest.mark.parametrize("schedule", [{"training.lr_schedule": "constant"}, {"training.lr_decay_steps": 50}])
def test_steps_are_reported_only_if_rates_need_them(tmp_path: Path, schedule: dict[str, object]) -> None:
    def said(**keys: object) -> list[str]:
        now, then = (load_job(None, {**settings(), **keys, "training.steps": steps}) for steps in (77, 20))
        return list(changed_settings(now, then, Resumption(RunDir(tmp_path), 10)))

    (words,) = said()
    assert "the learning rate follows the new schedule from step 11 on" in words
    assert said(**schedule) == []


def test_data_that_the_run_has_prepared_stay_its_data(tmp_path: Path) -> None:
    def job(**keys: object) -> JobSpec:
        return load_job(None, {**settings(), "data.corpus": ["a"], **keys})

    (tmp_path / "data").mkdir()
    now, then = job(**{"data.corpus": ["b"]}), job()
    (words,) = changed_settings(now, then, Resumption(RunDir(tmp_path), 10))
    assert 'data.corpus is ["b"], but was ["a"]: this has no effect' in words


def test_another_layout_is_reported_in_one_line(tmp_path: Path) -> None:
    then = load_job(None, settings(tp=1, cluster__gpus_per_node=4))
    grid = {"tp": 4, "parallel__tensor_mode": "2d", "cluster__gpus_per_node": 4}
    now = load_job(None, settings(**grid))
    (words,) = changed_settings(now, then, Resumption(RunDir(tmp_path), 10))
    assert "parallel.tp is 4, but was 1" in words
    assert 'parallel.tensor_mode is "2d", but was "1d": every rank reads its new part' in words
    assert list(changed_settings(now, now, Resumption(RunDir(tmp_path), 10))) == []


# ---------------------------------------------------------------- metrics.jsonl and attempts

LINE = b'{"step": 3, "loss": 5.1, "tokens": 9, "step_seconds": 0.1, "tokens_per_second": 90.0}\n'
FOREIGN = [
    b"\n",
    LINE[:-9],
    LINE[:-2],
    b"null\n",
    b"[1]\n",
    b'"a"\n',
    b"\xff\xfe\n",
    b'{"step": 3}\n',
    LINE.replace(b"3,", b"true,"),
    LINE.replace(b"3,", b"0,"),
    LINE.replace(b"5.1", b'"x"'),
    b"[" * 100_000 + b"\n",
]


def test_a_foreign_or_torn_line_is_no_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for line in FOREIGN:
        assert parse_record(LINE) is not None and parse_record(line) is None
        run.metrics.write_bytes(LINE + line.rstrip(b"\n") + b"\n" * line.endswith(b"\n"))
        assert [record["step"] for record in run.records()] == [3] and run.last_step() == 3


def test_an_attempt_begins_with_the_records_of_its_checkpoint(finished: Launched, tmp_path: Path) -> None:
    """A newest checkpoint of the wrong size is renamed; foreign lines and later records go."""
    run = RunDir(_copy(finished, tmp_path / "run"))
    path = run.path / "checkpoints/step-20/shard-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    (run.path / "checkpoints/step-10").rename(run.path / "checkpoints/.step-10.replaced")
    (run.path / "checkpoints/.step-30.partial").mkdir()
    run.metrics.write_bytes(b"foreign\n" + run.metrics.read_bytes())
    (words,) = run.begin_attempt()
    assert "shard-0.safetensors: has" in words and "damaged-step-20" in words
    names = {path.name for path in (run.path / "checkpoints").iterdir()}
    assert names == {"step-10", "damaged-step-20"}
    lines = run.metrics.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 11))


def test_of_damaged_checkpoints_the_last_one_stays_where_old_checkpoints_go(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    folders = [run.checkpoints / f"damaged-step-{step}" for step in ("20-2", "20", "5", "of-mine")]
    for folder in folders:
        (folder / "shards").mkdir(parents=True)
    (words,) = run.begin_attempt(keep_last=0)  # which keeps all
    assert "3 damaged checkpoints (damaged-step-N) take 0 B" in words
    assert "remove them, or set checkpoint.keep_last" in words
    for name in ("30", "5"):  # the highest step, and what is set aside last
        (run.checkpoints / f"step-{name}").mkdir()
    assert set_aside(run.checkpoints / "step-30").name == "damaged-step-30"
    time.sleep(0.05)  # more than a tick of the file system's clock
    assert set_aside(run.checkpoints / "step-5").name == "damaged-step-5-2"
    (words,) = run.begin_attempt(keep_last=3)
    assert all(f"{path.name}, " in words for path in folders[:3])
    assert "damaged-step-30 removed; of damaged checkpoints the last one stays" in words
    names = {path.name for path in run.checkpoints.iterdir()}
    assert names == {"damaged-step-5-2", "damaged-step-of-mine"}
    assert run.begin_attempt(keep_last=3) == []


def test_metrics_that_are_gone_are_no_traceback(finished: Launched, tmp_path: Path) -> None:
    run = RunDir(_copy(finished, tmp_path / "run"))
    run.metrics.unlink()
    assert run.last_step() == 20  # by the accounts of its ranks
    assert run.begin_attempt() == [] and list(run.records()) == [] and run.last_step() == 0


def test_the_reader_follows_a_file_that_is_torn_cut_or_removed(tmp_path: Path) -> None:
    path, taken = tmp_path / "metrics.jsonl", list[int]()
    reader = RecordReader(path)

    def deliver() -> list[int]:
        reader.deliver(lambda record: taken.append(record["step"]))
        found, taken[:] = list(taken), []
        return found

    assert deliver() == []
    path.write_bytes(LINE + b"foreign\n" + LINE + LINE[:5])
    assert deliver() == [3, 3] and deliver() == []
    with path.open("ab") as stream:
        stream.write(LINE[5:])
    assert deliver() == [3]
    path.write_bytes(LINE.replace(b"3,", b"4,"))
    assert deliver() == [4]
    path.unlink()
    assert deliver() == []
