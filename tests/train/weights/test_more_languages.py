"""A run learns a new language on top of an old one: rows added, old ones kept, losses by corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.plan.planning.plan import make_plan
from mpctl.run.hosts.machine import this_machine
from mpctl.run.launch.preflight import check_here
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.data.manifest import open_prepared
from mpctl.train.data.prepare import prepare
from tests.train.data.languages import FRENCH, write_corpus
from tests.train.runtime.tiny import make_trainer, settings, tiny_job, train

STILL = {"training__dropout": 0.0, "training__attention_dropout": 0.0}
NEW = 360


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at tp 2 in the old language of 300 pieces."""
    run = tmp_path_factory.mktemp("base") / "run"
    job = tiny_job(data, 2, training__steps=60, training__eval_samples=0, **STILL)
    train(job, run)
    (run / "job.json").write_text(job.model_dump_json())
    return run


@pytest.fixture(scope="module")
def folders(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The new language with 60 new pieces, the old one by that tokenizer, and both."""
    root = tmp_path_factory.mktemp("languages")
    old, new = data.parent / "corpus", write_corpus(root / "fr", FRENCH, documents=40)
    made: dict[str, Any] = {"vocab_size": NEW, "validation_fraction": 0.2}
    prepare(sources=[new], out=root / "new", tokenizer=data, extend=True, **made)
    prepare(sources=[old], out=root / "old", tokenizer=root / "new", **made)
    prepare(sources=[old, new], out=root / "both", tokenizer=root / "new", **made)
    return {name: root / name for name in ("old", "new", "both")}


def more(folders: dict[str, Path], base: Path, tp: int = 1, **changes: Any) -> JobSpec:
    others = {name: str(folders[name]) for name in ("old", "new")}
    keys = {
        "model__vocab": NEW,
        "training__init_from": str(base),
        "data__validation": others,
        "training__steps": 1,
        "training__eval_interval": 100,
        "training__eval_samples": 64,
        "checkpoint__interval": 0,
        **STILL,
        **changes,
    }
    keys.setdefault("data__path", str(folders["both"]))
    return load_job(None, settings(tp, **keys))


def issues_of(job: JobSpec) -> list[str]:
    return [f"{i.rule} {i.where}" for i in check_here(make_plan(job), this_machine())]


@pytest.mark.slow
def test_a_trainer_starts_with_old_rows_and_means(folders: dict[str, Path], base: Path, tmp_path: Path) -> None:
    job = more(folders, base, training__dtype="bf16")
    assert issues_of(job) == []
    trainer = make_trainer(job, tmp_path)
    names = [trainer.names[p] for p in trainer.optimizer.parameters]
    table = trainer.optimizer.values[names.index("embedding.word.weight")]
    fresh = make_trainer(more(folders, base, training__init_from=None), tmp_path / "fresh")
    extension = open_prepared(folders["both"]).extension
    assert extension is not None and len(extension.pieces) == 60
    for row, piece in zip(table[300:NEW], extension.pieces, strict=True):
        assert torch.equal(row, table[list(piece)].double().mean(0).float())
    drawn = dict(fresh.model.named_parameters())["embedding.word.weight"]
    assert torch.equal(table[NEW:], drawn[NEW:].to(torch.bfloat16).float())  # padding: the seed's
    assert not torch.equal(table[:300], drawn[:300])


@pytest.mark.slow
def test_the_old_language_is_kept_and_the_new_one_learned_at_any_tp(
    folders: dict[str, Path], base: Path, tmp_path: Path
) -> None:
    found = []
    for tp in (1, 2):
        job = more(folders, base, tp, training__steps=60)
        records = train(job, tmp_path / str(tp))[0]["records"]
        first, last = records[0]["initial_validation_losses"], records[-1]["validation_losses"]
        assert last["new"] < first["new"] - 1
        assert last["old"] < first["old"] + 0.2
        found.append([*first.values(), *last.values()])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.slow
def test_a_launch_is_refused_by_name(folders: dict[str, Path], base: Path, data: Path) -> None:
    assert issues_of(more(folders, base, data__validation={"old": str(data)})) == [
        "validation-tokenizer data.validation.old"
    ]
    assert issues_of(more(folders, base, data__path=str(data), data__validation={})) == ["init-from-model model.vocab"]
