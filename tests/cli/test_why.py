"""`mpctl why`: a log or a run against its plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calls import Mpctl
from tests.interop import example_logs as logs
from tests.measure.calibrate.test_run_dirs import write_run
from tests.measure.why.planted import DENSE, noisy, plan_of

SCRIPT = """torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py --tensor-model-parallel-size 4 \\
  --pipeline-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 1 \\
  --global-batch-size 32 --bf16 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \\
  --num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 \\
  --max-position-embeddings 8192 --vocab-size 128256 --position-embedding-type rope --swiglu \\
  --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights \\
  --attention-backend flash --hidden-dropout 0 --attention-dropout 0
"""
JOB = """cluster = {preset = "dgx-h100", nodes = 2}
model = "llama-3-8b"
parallel = {tp = 4, pp = 2, sequence_parallel = true, zero = 1}
training = {global_batch_size = 32, runtime = "megatron-core"}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text(JOB)
    write(tmp_path / "run.log", 1.3)
    return tmp_path


def write(path: Path, factor: float, text: str = "") -> None:
    times = noisy(factor * plan_of(DENSE).time.total, 1, 0.01)
    path.write_text(logs.megatron(times) + text)


def test_a_slow_run_is_answered_in_forty_lines(mpctl: Mpctl, folder: Path) -> None:
    said = mpctl("why", "job.toml", "run.log")
    assert said.code == 0
    assert len(said.out.splitlines()) <= 40
    title, verdict, *rest = said.out.splitlines()
    assert title == "run.log: tp 4 dp 2 pp 2, micro batch 1, sequence parallel, zero 1"
    assert verdict.startswith("✗ 2.6") and "30 % above the planned" in said.out
    for words in ("compute", "bubble", "unexplained", "1. ", "nvidia-smi"):
        assert any(words in line for line in rest)


def test_the_document_has_what_its_schema_says(mpctl: Mpctl, folder: Path) -> None:
    said = mpctl("why", "job.toml", "run.log", "--json")
    document = json.loads(said.out)
    assert document["schema"] == "mpctl.why/1"
    assert document["verdict"]["status"] == "slower"
    parts = {part["name"]: part for part in document["parts"]}
    planned = document["band"]["planned_seconds"]
    assert sum(part["planned"] for part in parts.values()) == pytest.approx(planned)
    assert parts["unexplained"]["measured"] == pytest.approx(document["measured"]["step_seconds"] - planned)
    assert parts["tp"]["hidden"] > 0
    assert {"cause", "words", "seconds", "evidence", "check"} <= document["suspects"][0].keys()
    assert 0 <= document["standing"]["percentile"] < 30


def test_a_script_tells_what_to_change_in_its_own_flags(mpctl: Mpctl, folder: Path) -> None:
    write(folder / "asis.log", 1.12)
    said = mpctl("why", "train.sh", "asis.log", "--cluster", "dgx-h100")
    assert said.code == 0 and "as planned" in said.out
    document = json.loads(mpctl("why", "train.sh", "asis.log", "--cluster", "dgx-h100", "--json").out)
    flags = {change["words"]: change["flags"] for change in document["changes"]}
    assert flags["sequence parallel on"] == ["--sequence-parallel", "--tp-comm-overlap"]
    again = mpctl("why", "asis.log", "--from", "megatron", "@train.sh", "--cluster", "dgx-h100")
    assert again.out == said.out


def test_logged_memory_stands_beside_the_planned(mpctl: Mpctl, folder: Path) -> None:
    line = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 9.0 | max allocated: 20480.0 | reserved: 21000.0\n"
    write(folder / "memory.log", 1.0, line)
    document = json.loads(mpctl("why", "job.toml", "memory.log", "--json").out)
    assert document["verdict"]["status"] == "inside" and document["suspects"] == []
    memory = {row["kind"]: row for row in document["memory"]}
    assert memory["allocated"]["measured"] == 20 * 2**30
    assert memory["allocated"]["planned"] == plan_of(DENSE).estimate.fullest_stage.allocated_bytes


def test_a_page_has_the_same_answer(mpctl: Mpctl, folder: Path) -> None:
    assert mpctl("why", "job.toml", "run.log", "--html", "why.html").code == 0
    page = (folder / "why.html").read_text()
    for words in ("30 % above the planned", "Seconds of each step", "device-clock", "<svg", "mpctl why"):
        assert words in page


def test_a_run_of_mpctl_is_compared_with_its_own_plan(mpctl: Mpctl, folder: Path) -> None:
    write_run(folder / "run", tuple(noisy(40.0, 1, 0.01, 30)))
    document = json.loads(mpctl("why", "run", "--json").out)
    assert document["verdict"]["status"] == "slower"
    assert document["suspects"][0]["cause"] == "busy-host"


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["job.toml", "none.log"], "no-such-file"),
        (["job.toml", "train.sh"], "log-no-figures"),
        (["job.toml", "run.log", "--nodes", "1"], "log-ranks"),
        (["job.toml", "run.log", "--global-batch-size", "64"], "log-batch"),
        (["train.sh", "run.log"], "unknown-cluster"),
        (["run.log"], "log-no-layout"),
        (["job.toml", "run.log", "--launcher", "torchtitan"], "log-no-figures"),
        (["job.toml", "run.log", "--from", "megatron", "@train.sh"], "usage"),
        (["job.toml", "fast.log"], "impossible-run"),
        (["job.toml", "bar.log"], "log-no-steps"),
        (["empty"], "no-run"),
        ([], "usage"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(
    arguments: list[str], rule: str, mpctl: Mpctl, folder: Path
) -> None:
    write(folder / "fast.log", 0.01)
    (folder / "bar.log").write_text(logs.SUMMARY)
    said = mpctl("why", *arguments)
    assert said.code == 2
    assert f"[{rule}]" in said.err
