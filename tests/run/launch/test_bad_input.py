"""Bad input ends with exit 2 and words before a process is started or a file is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.cli.launch import _name_of
from mpctl.core.errors import InputError
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.marker import write_marker
from mpctl.run.launch.node.torchrun import NodeTorchrun
from tests.run.launch.command import arguments, start
from tests.train.runtime.tiny import settings

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(NodeTorchrun, "__init__", refuse)


def refused(argv: list[str], capsys: Capture) -> str:
    """The words of exit 2."""
    capsys.readouterr()
    assert mpctl(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "Traceback" not in shown.err
    return shown.err


def test_the_issues_are_words_or_json(data: Path, tmp_path: Path, capsys: Capture) -> None:
    argv = arguments(data, tmp_path / "run", "--tp", "3", "--set", "data.path=/nowhere")
    said = refused(argv, capsys)
    assert mpctl([*argv, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mpctl.error/1"
    assert all(issue["message"] in said for issue in document["issues"])


XPU = ["--device", "auto", "--set", "cluster.device=a100-80gb", "--set", "cluster.device.kind=xpu"]
SETTINGS_REFUSED = [
    (
        ["--tp", "6", "--tensor-mode", "2d", "--set", "cluster.gpus_per_node=6"],
        "parallel.tp: tensor_mode 2d needs q x q ranks with q at least 2, not 6",
    ),
    (["--set", "model.position=relative"], "model.position"),
    (["--set", "training.dtype=mxfp8"], "training.dtype: mxfp8"),
    (["--set", "training.gradient_dtype=fp8"], "training.gradient_dtype: fp8"),
    (["--set", "data.path=/nowhere/at/all"], "/nowhere/at/all"),
    (["--set", "model.vocab=260"], "tokenizer"),
    (["--set", "model.seq_length=100000", "--set", "launch.check_memory=false"], "tokens"),
    (["--set", "training.stepz=3"], "training.stepz"),
    (["--tp", "3"], "parallel.tp"),
    ([*XPU, "--set", "cluster.device.kind=tpu"], "ranks run on cpu, cuda or rocm"),
    ([*XPU, "--dry-run"], "is of kind xpu"),
    (["--resume", "--overwrite"], "exclude each other"),
    (["--profile", "7-5"], "launch.profile: '7-5' is not allowed: input should be steps in rising order"),
    (["--profile", "3-90000"], "launch.profile: step 90000 is to be recorded, but the run has"),
]


@pytest.mark.parametrize(("more", "words"), SETTINGS_REFUSED, ids=lambda value: str(value)[:40])
def test_settings(data: Path, tmp_path: Path, capsys: Capture, more: list[str], words: str) -> None:
    assert words in refused(arguments(data, tmp_path / "run", *more), capsys)
    assert not (tmp_path / "run").exists()


def test_gpus_that_are_not_there(data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    argv = arguments(data, tmp_path / "run", "--set", "launch.device=cuda")
    assert "this machine shows 0" in refused(argv, capsys)


def test_no_model_and_no_data(tmp_path: Path, capsys: Capture) -> None:
    argv = ["launch", "--tp", "2", "--run-dir", str(tmp_path / "run")]
    assert "a launch needs a model" in refused(argv, capsys)
    assert "data.corpus" in refused([*argv, "--model", "gpt2"], capsys)


def _truncate(data: Path) -> None:
    held = (data / "train.bin").read_bytes()
    (data / "train.bin").write_bytes(held[: len(held) // 2])


def _foreign_index(data: Path) -> None:
    shutil.copy(data / "validation.idx", data / "train.idx")


def _garbage_index(data: Path) -> None:
    size = (data / "train.idx").stat().st_size
    (data / "train.idx").write_bytes(os.urandom(size))


HARMS = [
    (_truncate, "train.bin"),
    (_foreign_index, "train.idx"),
    (_garbage_index, "train"),
    (lambda data: (data / "tokenizer.json").unlink(), "tokenizer.json"),
    (lambda data: (data / "data.json").write_text("{"), "data.json"),
]


@pytest.mark.parametrize(("harm", "words"), HARMS)
def test_damaged_data(data: Path, tmp_path: Path, capsys: Capture, harm: Callable[[Path], None], words: str) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    harm(copy)
    assert words in refused(arguments(copy, tmp_path / "run"), capsys)


def _with_corpus(tmp_path: Path, corpus: Path) -> list[str]:
    job = {key: value for key, value in settings().items() if key != "data.path"}
    sets = [f"{key}={json.dumps(value)}" for key, value in job.items()]
    sets.append(f"data.corpus={json.dumps([str(corpus)])}")
    return ["launch", *(part for one in sets for part in ("--set", one)), "--run-dir", str(tmp_path / "run")]


def test_a_corpus_that_is_missing_empty_or_too_small(tmp_path: Path, capsys: Capture) -> None:
    corpus = tmp_path / "corpus"
    argv = _with_corpus(tmp_path, corpus)
    assert "no such file or folder" in refused(argv, capsys)
    corpus.mkdir()
    assert "no text found" in refused(argv, capsys)
    (corpus / "only.txt").write_text("one document")
    assert "need 2" in refused(argv, capsys)
    assert not (tmp_path / "run").exists()  # found while preparing, and cleared away


class TestRunDir:
    def test_occupied(self, data: Path, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run/thesis.txt").write_text("years")
        argv = arguments(data, tmp_path / "run")
        for typed in (argv, [*argv, "--dry-run"]):
            said = refused(typed, capsys)
            assert "use another --run-dir" in said and "--overwrite" not in said
        write_marker(tmp_path / "run")
        assert "--overwrite" in refused(argv, capsys)

    def test_a_file(self, data: Path, tmp_path: Path, capsys: Capture) -> None:
        (tmp_path / "run").write_text("")
        assert "is a file" in refused(arguments(data, tmp_path / "run"), capsys)
        below = arguments(data, tmp_path / "run" / "below")
        assert "cannot be written: Not a directory" in refused(below, capsys)

    def test_not_writable(self, data: Path, capsys: Capture) -> None:
        assert "cannot be written" in refused(arguments(data, Path("/proc/run")), capsys)

    @pytest.mark.parametrize("names", [["data", "logs"], ["job.json", "data"], ["thesis.txt"]])
    def test_overwrite_removes_nothing_foreign(
        self, data: Path, tmp_path: Path, capsys: Capture, names: list[str]
    ) -> None:
        run = tmp_path / "run"
        for name in names:
            path = run / name if "." in name else run / name / "precious"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        before = sorted(run.rglob("*"))
        words = refused(arguments(data, run, "--overwrite"), capsys)
        assert "nothing was removed" in words
        assert sorted(run.rglob("*")) == before

    def test_a_plan_and_a_job_are_no_run(
        self, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """`mpctl plan --json > plan.json` in a folder of ours, then --run-dir . --overwrite."""
        monkeypatch.chdir(tmp_path)
        assert mpctl(["plan", "demo", "--json"]) == 0
        Path("plan.json").write_text(capsys.readouterr().out)
        for name in ("job.json", "data/thesis.txt", "logs/diary.txt", "checkpoints/mine"):
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text("{}")
        before = sorted(tmp_path.rglob("*"))
        argv = ["launch", "demo", "--run-dir", "."]
        assert "nothing was removed" in refused([*argv, "--overwrite"], capsys)
        assert "does not contain a run" in refused([*argv, "--resume"], capsys)
        assert sorted(tmp_path.rglob("*")) == before

    def test_runs_from_before_the_marker(self, tmp_path: Path) -> None:
        """Replaced if the log of a launch exists, continued if there are checkpoints."""
        run = RunDir(tmp_path)
        (tmp_path / "job.json").write_text("{}")
        (tmp_path / "plan.json").write_text('{"schema": "mpctl.plan/2"}')
        (tmp_path / "checkpoints/step-3").mkdir(parents=True)
        run.require_run()
        with pytest.raises(InputError, match="nothing was removed"):
            run.require_replaceable()
        run.torchrun_log.parent.mkdir()
        run.torchrun_log.write_text("\n$ python -m torch.distributed.run train.py x\n")
        with pytest.raises(InputError, match="nothing was removed"):
            run.require_replaceable()
        run.torchrun_log.write_text(
            "\n$ python -m torch.distributed.run --nnodes=1 -m mpctl.train.runtime.worker /a/run\nwords\n"
        )
        run.require_replaceable()
        run.clear()
        assert list(tmp_path.iterdir()) == []

    def test_a_claimed_directory_is_a_run_until_it_is_cleared(self, tmp_path: Path) -> None:
        run = RunDir(tmp_path / "run")
        run.claim()
        run.require_run()
        run.require_replaceable()
        (run.path / ".mpctl-run").write_text('{"schema": "another/1"}')
        with pytest.raises(InputError, match="does not contain a run"):
            run.require_run()
        run.claim()
        run.abandon()
        assert not run.path.exists()

    def test_resume_without_a_run(self, data: Path, tmp_path: Path, capsys: Capture) -> None:
        assert "no run is named" in refused(["launch", "--resume"], capsys)
        for argv in (["launch", "--run-dir", str(tmp_path)], arguments(data, tmp_path)):
            assert "does not contain a run" in refused([*argv, "--resume"], capsys)

    def test_links_are_unlinked_never_followed(self, tmp_path: Path) -> None:
        elsewhere, run = tmp_path / "big-disk", tmp_path / "run"
        (elsewhere / "step-1").mkdir(parents=True)
        run.mkdir()
        (run / "checkpoints").symlink_to(elsewhere)
        RunDir(run).clear()
        assert list(run.iterdir()) == [] and (elsewhere / "step-1").exists()


def test_by_a_real_process(data: Path, tmp_path: Path) -> None:
    argv = arguments(data, tmp_path / "run", "--tp", "3", "--set", "model.vocab=10")
    ended = start(argv, tmp_path / "run").ended()
    assert ended.process.returncode == 2 and ended.stdout == ""
    assert "parallel.tp" in ended.stderr and "Traceback" not in ended.stderr


def test_a_job_by_path_with_its_own_name(
    data: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --run-dir a run goes to runs/NAME, then runs/NAME-2."""
    monkeypatch.chdir(tmp_path)
    model = "layers = 1\nhidden = 32\nheads = 4\nvocab = 300\nseq_length = 32"
    text = f'name = "mine"\n[model]\n{model}\n[data]\npath = "{data}"\n[launch]\ndevice = "cpu"\n'
    Path("my job.toml").write_text(text)
    for expected in ("runs/mine", "runs/mine-2"):
        assert mpctl(["launch", "my job.toml", "--dry-run", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["run_dir"] == expected
        Path(expected).mkdir(parents=True)
        Path(expected, "job.json").write_text("")


def test_a_run_is_named_after_its_preset_or_file() -> None:
    assert [_name_of(source) for source in ("demo-t5", "jobs/mine.toml", None)] == ["demo-t5", "mine", "run"]
