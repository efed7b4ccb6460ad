"""Runs that train adapters: what they save, how they resume, what is made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.estimate.states import checkpoint_bytes
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.checkpoint.tensor_header import FLOATS, read_header
from mpctl.records.rundir.directory import RunDir
from mpctl.run.inference.task import TaskOptions, task_plan
from mpctl.run.inference.trained_model import open_trained
from mpctl.run.launch.reshard import reshard_checkpoint
from mpctl.run.launch.resume import model_issues
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.families.implementation import Batch
from mpctl.train.weights.origin import open_origin, origin_issues
from mpctl.train.weights.peft_import import import_adapters
from mpctl.train.weights.writer import export_weights
from tests.train.runtime.tiny import column, make_trainer, settings, tiny_plan, train
from tests.train.weights.hub import Truth, load, tokens

Truths = Callable[[str], Truth]
Trained = tuple[Path, JobSpec, list[Any]]


def adapter_job(data: Path, folder: Path, tp: int = 1, dp: int = 1, **changes: Any) -> JobSpec:
    """The tiny job with the model of a Hugging Face directory, and adapters over its weights."""
    keys = {k: v for k, v in settings(tp, dp, data__path=str(data)).items() if not k.startswith("model.")}
    start = {"model.hf_config": str(folder), "training.init_from": str(folder), "training.steps": 6}
    start |= {"checkpoint.interval": 3, "training.eval_interval": 6}
    adapter = {"training.adapter.rank": 4, "training.adapter.dropout": 0.1}
    return load_job(None, {**keys, **start, **adapter, **{k.replace("__", "."): v for k, v in changes.items()}})


@pytest.fixture(scope="module")
def trained(truths: Truths, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run of adapters on two ranks over a llama, with a launch's files."""
    run = tmp_path_factory.mktemp("adapters") / "run"
    job = adapter_job(data, truths("llama").folder, 2)
    ranks = train(tiny_plan(job).job, run)
    (run / "job.json").write_text(job.model_dump_json())
    return run, job, ranks


def test_checkpoints_hold_what_was_trained_alone(trained: Trained) -> None:
    run, job, _ = trained
    saved = open_origin(run)
    assert isinstance(saved, SavedModel)
    assert all(".lora." in name for name in saved.names)
    headers = [header for shard in saved.shards for header in read_header(shard.path).values()]
    written = sum(torch.Size(header.shape).numel() * FLOATS[header.dtype] for header in headers)
    assert written == checkpoint_bytes(JobLayout.of(tiny_plan(job).job))


def test_a_run_resumes_in_another_layout_with_its_losses(
    trained: Trained, truths: Truths, data: Path, tmp_path: Path
) -> None:
    run, _, ranks = trained
    (tmp_path / "checkpoints").mkdir()
    shutil.copytree(run / "checkpoints" / "step-3", tmp_path / "checkpoints" / "step-3")
    again = column(train(tiny_plan(adapter_job(data, truths("llama").folder, 1)).job, tmp_path))
    assert again == pytest.approx(column(ranks)[3:], rel=1e-6)


def test_a_resharded_run_has_the_same_adapters(trained: Trained, tmp_path: Path) -> None:
    run, *_ = trained
    reshard_checkpoint(run / "checkpoints" / "step-6", tmp_path / "out", tp=1, pp=2, on_progress=lambda *done: None)
    export_weights(run, tmp_path / "one")
    export_weights(tmp_path / "out", tmp_path / "two")
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two


def test_it_is_evaluated_as_it_was_validated(trained: Trained, data: Path, tmp_path: Path) -> None:
    """By adapters that are applied, and merged into a model of transformers."""
    run, job, ranks = trained
    loss = ranks[0]["records"][-1]["validation_loss"]
    model = open_trained(run)
    assert task_plan(model.job, TaskOptions()).job.training.adapter is not None
    export_weights(run, tmp_path / "hf")
    keys = {"training.init_from": str(tmp_path / "hf"), "model.hf_config": str(tmp_path / "hf")}
    plain = {k: v for k, v in settings(data__path=str(data)).items() if not k.startswith("model.")} | keys
    applied = adapter_job(data, Path(str(job.training.init_from)), training__init_from=str(run))
    for start in (load_job(None, plain), applied):
        trainer = make_trainer(tiny_plan(start).job, tmp_path / str(start.training.adapter is None))
        assert trainer.validate()[0] == pytest.approx(loss, rel=1e-6)


def test_dora_starts_from_the_base_and_goes_on_from_its_lengths(truths: Truths, data: Path, tmp_path: Path) -> None:
    folder, run = truths("llama").folder, tmp_path / "run"
    lora = {"training__adapter__dropout": 0.0, "training__learning_rate": 0.01}
    dora = {**lora, "training__adapter__kind": "dora"}
    before = make_trainer(tiny_plan(adapter_job(data, folder, **lora)).job, tmp_path / "lora").validate()[0]
    trainer = make_trainer(tiny_plan(adapter_job(data, folder, **dora)).job, run)
    first = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if name.endswith("magnitude")}
    assert trainer.validate()[0] == pytest.approx(before, rel=1e-6)
    after = list(trainer.run())[-1]["validation_loss"]
    assert abs(after - before) > 1e-3
    for name, lengths in first.items():
        assert not torch.equal(trainer.model.get_parameter(name), lengths), name
    (run / "job.json").write_text(adapter_job(data, folder, **dora).model_dump_json())
    export_weights(run, tmp_path / "hf")
    plain = {k: v for k, v in settings(data__path=str(data)).items() if not k.startswith("model.")}
    merged = load_job(None, {**plain, **dict.fromkeys(("training.init_from", "model.hf_config"), str(tmp_path / "hf"))})
    for job in (adapter_job(data, folder, **{**dora, "training__init_from": str(run)}), merged):
        again = make_trainer(tiny_plan(job).job, tmp_path / str(job.training.adapter is None))
        assert again.validate()[0] == pytest.approx(after, rel=1e-6)


def test_a_job_without_adapters_starts_from_the_sum(
    trained: Trained, truths: Truths, data: Path, tmp_path: Path
) -> None:
    run, _, ranks = trained
    job = adapter_job(data, truths("llama").folder, training__init_from=str(run))
    job = job.model_copy(update={"training": job.training.model_copy(update={"adapter": None})})
    trainer = make_trainer(tiny_plan(job).job, tmp_path)
    assert trainer.validate()[0] == pytest.approx(ranks[0]["records"][-1]["validation_loss"], rel=1e-6)


def test_peft_has_the_logits_of_a_trained_run(trained: Trained, truths: Truths, data: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from mpctl.train.weights.peft_export import export_adapters

    run, *_ = trained
    written = export_adapters(run, tmp_path / "peft")
    assert written.files == ("adapter_config.json", "adapter_model.safetensors")
    theirs = peft.PeftModel.from_pretrained(load(truths("llama").folder), tmp_path / "peft").eval()
    trainer = make_trainer(
        tiny_plan(adapter_job(data, truths("llama").folder, training__init_from=str(run))).job, tmp_path / "run"
    )
    with torch.no_grad():
        expected = theirs(tokens()[0]).logits
        found = trainer.model(Batch(torch.arange(2), {"tokens": tokens()[0]}))
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert (expected - truths("llama").logits).abs().max() > 1e-3
    import_adapters(tmp_path / "peft", tmp_path / "ours")
    again = open_origin(tmp_path / "ours")
    assert isinstance(again, SavedModel) and again.adapter is not None
    assert again.names == open_origin(run).names  # type: ignore[union-attr]


def test_another_base_is_refused(trained: Trained, truths: Truths, tmp_path: Path) -> None:
    run, *_ = trained
    copy, base = tmp_path / "run", tmp_path / "base"
    shutil.copytree(run, copy)
    shutil.copytree(truths("llama").folder, base)
    manifest = copy / "checkpoints" / "step-6" / "manifest.json"
    document = json.loads(manifest.read_text())
    assert document["base"]["path"] == str(truths("llama").folder)
    manifest.write_text(json.dumps({**document, "base": {**document["base"], "path": str(base)}}))
    export_weights(copy, tmp_path / "fine")  # a copy has the same digest
    model = load(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    model.save_pretrained(base)
    with pytest.raises(InputError, match="another base"):
        export_weights(copy, tmp_path / "hf")
    shutil.rmtree(base)
    with pytest.raises(InputError, match="is gone"):
        export_weights(copy, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_other_adapters_are_refused(trained: Trained, data: Path) -> None:
    run, job, _ = trained
    other = adapter_job(data, Path(str(job.training.init_from)), training__adapter__rank=8)
    assert job.model is not None
    (issue,) = origin_issues(run, job.model, adapter=other.training.adapter)
    assert (issue.rule, issue.where) == ("init-from-adapter", "training.adapter.rank")
    assert "8" in issue.message and "4" in issue.message
    assert [issue.rule for issue in model_issues(other, job, RunDir(run))] == ["init-from-adapter"]
    without = job.model_copy(update={"training": job.training.model_copy(update={"adapter": None})})
    assert [issue.rule for issue in model_issues(without, job, RunDir(run))] == ["resume-adapter"]
