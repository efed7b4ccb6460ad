"""`mpctl eval` reports the loss that the training recorded, at any layout; what it refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.core.topology import Topology
from mpctl.run.hosts.machine import Machine
from mpctl.run.inference.evaluate import EvalSettings, Evaluation, plan_evaluation, tokenized
from mpctl.run.inference.task import TaskOptions
from mpctl.spec.load import parse
from mpctl.train.data.indexed import IndexedDataset
from mpctl.train.data.prepare import prepare
from mpctl.train.data.tokenizer import end_of_text_id, load_tokenizer
from mpctl.train.runtime.evaluation import evaluate
from mpctl.train.runtime.mesh import build_mesh
from tests.cli.calls import Said, caller, spawn
from tests.ranks import run_ranks
from tests.run.inference.test_sample import files
from tests.run.launch.command import Launched
from tests.train.runtime.tiny import make_trainer, tiny_job

MACHINE = Machine(cores=2, gpus=0, memory_bytes=8 * 2**30)
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "bert": {"model__family": "bert", "model__vocab": 310},
    "t5": {
        "model__family": "t5",
        "model__decoder_layers": 2,
        "model__decoder_seq_length": 16,
        "model__position": "relative",
        "model__vocab": 330,
    },
    "glm": {"model__family": "glm", "model__vocab": 310},
}


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    return caller(capsys)


@pytest.mark.slow
def test_the_loss_is_the_one_that_the_training_recorded(finished: Launched) -> None:
    """At the layout of the training to the last bit; the run is left as it was."""
    run, before = finished.run_dir, files(finished.run_dir)
    said = spawn("eval", run, "--tp", 2, "--samples", 6, "--json")
    assert (said.code, said.err) == (0, "")
    (row,) = said.document["corpora"]
    assert row["loss"] == row["recorded_loss"] == finished.records[-1]["validation_loss"]
    assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))
    assert (row["samples"], row["tokens"]) == (6, 6 * 32)
    assert said.document["step"] == 20
    assert files(run) == before


def answers_of(evaluation: Evaluation, prefixes: list[Path], *, rank: int = 0) -> list[dict[str, Any]]:
    """The answers of a worker of this rank, in this process."""
    return _answers(evaluation._request(prefixes), evaluation.job.model_dump(mode="json"), rank)


def _answers(request: dict[str, Any], raw: dict[str, Any], rank: int) -> list[dict[str, Any]]:
    job = parse(raw)
    topology = Topology.of(job.sizes, order=job.parallel.order)
    mesh = build_mesh(topology, rank, torch.device("cpu"), launch=job.launch)
    return [a for a in evaluate(request, job, mesh) if a["event"] == "corpus"]


def trained(data: Path, folder: Path, **changes: Any) -> float:
    """Train a tiny model for a step; its validation loss."""
    job = tiny_job(data, training__steps=1, training__global_batch_size=2, **changes)
    (record,) = make_trainer(job, folder).run()
    (folder / "job.json").write_text(job.model_dump_json())
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    loss: float = record["validation_loss"]
    return loss


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_evaluated_as_it_was_validated(family: str, data: Path, tmp_path: Path) -> None:
    loss = trained(data, tmp_path, **FAMILIES[family])
    evaluation = plan_evaluation(tmp_path, [], MACHINE, settings=EvalSettings(samples=6))
    (corpus,) = evaluation.corpora
    assert corpus.prefix is not None
    (answer,) = answers_of(evaluation, [corpus.prefix])
    assert (answer["loss"], answer["samples"]) == (loss, 6)
    row = evaluation._row(corpus, answer)
    assert row["recorded_loss"] == loss
    assert (row["perplexity"] is None) == (family == "bert")
    assert answer["tokens"] == 6 * 32 if family == "gpt" else 0 < answer["tokens"] < 6 * 32


def _rank(rank: int, size: int, asked: list[Any]) -> list[Any]:
    return [_answers(request, raw, rank) for request, raw in asked]


def test_replicas_stages_and_parts_of_the_sequence_find_the_same_loss(finished: Launched) -> None:
    """5 samples in micro batches of 2 over two replicas: one has a micro batch less to count."""
    asked, prefix = [], None
    for sizes in ({"dp": 2}, {"pp": 2}, {"cp": 2}, {}):
        evaluation = plan_evaluation(finished.run_dir, [], MACHINE, TaskOptions(sizes=sizes), EvalSettings(samples=5))
        prefix = evaluation.corpora[0].prefix
        assert prefix is not None
        asked.append((evaluation._request([prefix]), evaluation.job.model_dump(mode="json")))
    alone = _answers(*asked.pop(), 0)
    for rank in run_ranks(_rank, 2, asked):
        for answers in rank:
            (answer,) = answers
            assert answer["loss"] == pytest.approx(alone[0]["loss"], rel=1e-6)
            assert answer["tokens"] == alone[0]["tokens"] == 5 * 32


def test_text_files_are_tokenized(finished: Launched, tmp_path: Path) -> None:
    """By the model's tokenizer, a document a file, end-of-text after each; then they are
    removed."""
    texts = [f"w{n} counts {n} w3 counts 4 " * 40 for n in range(3)]
    (tmp_path / "texts").mkdir()
    for n, text in enumerate(texts):
        (tmp_path / "texts" / f"{n}.txt").write_text(text)
    asked = [f"by-name={tmp_path}/texts", str(tmp_path / "texts" / "1.txt")]
    evaluation = plan_evaluation(finished.run_dir, asked, MACHINE, settings=EvalSettings(samples=3))
    assert [corpus.name for corpus in evaluation.corpora] == ["by-name", "1.txt"]
    tokenizer = load_tokenizer(evaluation.corpora[0].tokenizer)
    expected = [[*tokenizer.encode(text).ids, end_of_text_id(tokenizer)] for text in texts]
    told: list[tuple[str, int, int]] = []
    with tokenized(evaluation.corpora, lambda *said: told.append(said)) as prefixes:
        folder, one = (IndexedDataset(prefix) for prefix in prefixes)
        held = [folder.document(n, 0, len(expected[n])).tolist() for n in range(len(folder))]
        assert held == expected
        assert one.document(0, 0, one.tokens).tolist() == expected[1]
        answers = answers_of(evaluation, prefixes)
    assert [answer["samples"] for answer in answers] == [3, 3]
    assert not prefixes[0].parent.exists()
    assert {stage for stage, *_ in told} == {"encode"}


def test_what_cannot_be_evaluated_is_reported_at_once(
    finished: Launched, tmp_path: Path, call: Callable[..., Said]
) -> None:
    run = finished.run_dir

    def rules(*arguments: object) -> dict[str, dict[str, str]]:
        said = call("eval", *arguments, "--json")
        assert said.code == 2
        return said.issues

    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for n in range(4):
        (corpus / f"{n}.txt").write_text(f"other words {n} " * 200)
    prepare(sources=[corpus], out=tmp_path / "other", vocab_size=280)
    issues = rules(run, "--data", tmp_path / "other", "--data", tmp_path / "none")
    assert "another tokenizer" in issues["eval-tokenizer"]["message"]
    assert "--tokenizer" in issues["eval-tokenizer"]["hint"]
    assert "no-such-file" in issues
    assert "same-name" in rules(run, "--data", corpus, "--data", f"corpus={corpus}")
    assert "tp-divides-heads" in rules(run, "--tp", 3)
    assert "no-weights" in rules(tmp_path)
    short = tmp_path / "short.txt"
    short.write_text("w1")
    evaluation = plan_evaluation(run, [str(short)], MACHINE)
    with (
        tokenized(evaluation.corpora, lambda *_: None) as prefixes,
        pytest.raises(InputError, match="do not fill one sample of 32"),
    ):
        answers_of(evaluation, prefixes)
