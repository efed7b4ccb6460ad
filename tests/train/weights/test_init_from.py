"""Training starts from other weights: of transformers, of an import, of a finished run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.plan.planning.plan import make_plan
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.rundir.directory import RunDir
from mpctl.run.hosts.machine import this_machine
from mpctl.run.launch.preflight import check_launch, check_run, launch_warnings
from mpctl.run.launch.resume import find_resumption
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from mpctl.train.data.prepare import prepare
from mpctl.train.families.implementation import Batch
from mpctl.train.weights.origin import open_origin
from mpctl.train.weights.writer import export_weights, import_weights
from tests.cli.calls import assert_refused, caller
from tests.train.runtime.tiny import column, make_trainer, settings, tiny_job, tiny_plan, train
from tests.train.weights.hub import Truth, load, tokens

Truths = Callable[[str], Truth]
ONE_STEP = {
    "training__steps": 1,
    "training__dropout": 0.0,
    "training__attention_dropout": 0.0,
    "training__eval_interval": 1,
}


def hub_job(data: Path, folder: Path, **changes: Any) -> JobSpec:
    """The tiny job with the model of a Hugging Face directory, started from its weights."""
    keys = {k: v for k, v in settings(data__path=str(data)).items() if not k.startswith("model.")}
    more = {k.replace("__", "."): v for k, v in {**ONE_STEP, **changes}.items()}
    start = {"model.hf_config": str(folder), "training.init_from": str(folder)}
    return load_job(None, {**keys, **start, **more})


def launch_issues(job: JobSpec, run: RunDir | None = None) -> list[str]:
    resumption = None if run is None else find_resumption(run)
    found = check_launch(make_plan(job), (), resumption=resumption)
    return [f"{issue.rule} {issue.where}" for issue in found]


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """A run at tp 2, with a launch's files next to its checkpoints; its last validation loss."""
    run = tmp_path_factory.mktemp("finished") / "run"
    job = tiny_job(data, 2, training__steps=8)
    losses = train(job, run)[0]["records"]
    (run / "job.json").write_text(job.model_dump_json())
    return run, float(losses[-1]["validation_loss"])


def test_a_finished_run_continues_with_its_loss(finished: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    """At tp 2; on one rank, the next two tests."""
    run, loss = finished
    job = tiny_job(data, 2, training__init_from=str(run), **ONE_STEP)
    assert launch_issues(job) == []
    before = column(train(job, tmp_path), "initial_validation_loss")[0]
    assert before == pytest.approx(loss, rel=1e-6)


def test_a_finished_run_of_tp_2_is_a_model_of_transformers(
    finished: tuple[Path, float], data: Path, tmp_path: Path
) -> None:
    """GPT-2's class, with the exact gelu; the tokenizer comes along."""
    run, loss = finished
    written = export_weights(run, tmp_path / "hf")
    assert (written.step, written.architecture) == (8, "GPT2LMHeadModel")
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()
    trainer = make_trainer(tiny_job(data, training__init_from=str(run)), tmp_path / "run")
    assert trainer.validate()[0] == pytest.approx(loss, rel=1e-6)
    with torch.no_grad():
        theirs = load(tmp_path / "hf")(tokens()[0]).logits
        assert torch.allclose(
            trainer.model(Batch(torch.arange(2), {"tokens": tokens()[0]})), theirs, rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(("imported", "dtype"), [(False, "bf16"), (True, "fp32")])
def test_a_trainer_holds_their_weights(imported: bool, dtype: str, truths: Truths, data: Path, tmp_path: Path) -> None:
    """In bf16 the masters keep all 32 bits that the file has."""
    folder = truths("llama").folder
    job = hub_job(data, folder, training__dtype=dtype)
    if imported:
        import_weights(folder, tmp_path / "ours")
        fragment = load_job(str(tmp_path / "ours" / "model.toml"))
        assert fragment.model is not None
        assert fragment.training.init_from == str(tmp_path / "ours")
        training = job.training.model_copy(update={"init_from": str(tmp_path / "ours")})
        job = job.model_copy(update={"training": training})
    trainer = make_trainer(job, tmp_path / "run")
    names = [trainer.names[p] for p in trainer.optimizer.parameters]
    value = trainer.optimizer.values[names.index("layers.1.mlp.up.weight")]
    layer = load(folder).model.layers[1].mlp
    expected = torch.cat([layer.gate_proj.weight, layer.up_proj.weight])
    assert torch.equal(value, expected)
    held = dict(trainer.model.named_parameters())["layers.1.mlp.up.weight"]
    assert torch.equal(held, expected.to(held.dtype))
    assert trainer.step == 0


def test_data_of_another_tokenizer_are_warned_of(finished: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    """Of a run and of a Hugging Face folder; the same tokenizer and one extended from it are no
    mismatch, nor is a run that goes on from its own checkpoint."""
    run, _ = finished
    known = data / "tokenizer.json"
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"other words {number} " * 200)
    texts, size = [tmp_path / "texts"], 270
    prepare(sources=texts, out=tmp_path / "other", vocab_size=size)
    prepare(sources=texts, out=tmp_path / "extended", tokenizer=known, vocab_size=305, extend=True)
    prepare(sources=texts, out=tmp_path / "same", tokenizer=known, vocab_size=300)
    bare, hub = tmp_path / "bare", export_weights(run, tmp_path / "hf").out
    export_weights(run, bare)
    (bare / "tokenizer.json").unlink()

    def said(origin: Path, **changes: Any) -> list[str]:
        job = load_job(None, settings(**{"training__init_from": str(origin), **changes}))
        found = launch_warnings(job, this_machine())
        return [warning for warning in found if "tokenizer" in warning]

    corpus = {"data__corpus": [str(tmp_path / "texts")]}
    for origin, beside in ((run, known), (hub, hub / "tokenizer.json")):
        (warning,) = said(origin, data__path=str(tmp_path / "other"))
        for part in (
            beside,
            tmp_path / "other" / "tokenizer.json",
            "--extend-tokenizer",
            f"data prepare --tokenizer {beside}",
        ):
            assert str(part) in warning
        (warning,) = said(origin, **corpus)
        assert f"data.tokenizer={beside}" in warning
        for name in ("same", "extended"):
            assert said(origin, data__path=str(tmp_path / name)) == []
        assert said(origin, **corpus, data__tokenizer=str(known)) == []
    assert said(bare, data__path=str(tmp_path / "other")) == []
    job = tiny_job(tmp_path / "other", training__init_from=str(hub))
    resumption = find_resumption(RunDir(run))
    assert launch_warnings(job, this_machine(), resumption=resumption) == launch_warnings(
        tiny_job(data), this_machine()
    )


def test_one_checkpoint_of_a_run_will_do(finished: tuple[Path, float], data: Path, tmp_path: Path) -> None:
    """The launcher names it so, because a run may save another while ranks start."""
    run, loss = finished
    origin = open_origin(run / "checkpoints" / "step-8")
    assert isinstance(origin, SavedModel)
    assert (origin.folder, origin.step, len(origin.shards)) == (run, 8, 2)
    job = tiny_job(data, training__init_from=str(origin.checkpoint))
    assert launch_issues(job) == []
    found = make_trainer(job, tmp_path).validate()[0]
    assert found == pytest.approx(loss, rel=1e-6)


def test_overwrite_may_not_remove_what_it_starts_from(data: Path, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for origin in (run.path, run.path / "checkpoints" / "step-8"):
        job = tiny_job(data, training__init_from=str(origin))
        (issue,) = check_run(job, run, overwrite=True, resume=False)
        assert issue.where == "training.init_from"
    for origin in ({"training__init_from": str(tmp_path)}, {}):
        assert check_run(tiny_job(data, **origin), run, overwrite=True, resume=False) == []


def test_a_resumed_run_needs_its_origin_no_more(data: Path, tmp_path: Path) -> None:
    job = tiny_job(data, **{**ONE_STEP, "training__init_from": str(tmp_path / "gone")})
    assert launch_issues(job) == [f"no-weights {tmp_path / 'gone'}"]
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert launch_issues(job, RunDir(tmp_path)) == [f"no-weights {tmp_path / 'gone'}"]
    train(tiny_job(data, **ONE_STEP), tmp_path)
    assert launch_issues(job, RunDir(tmp_path)) == []
    assert make_trainer(job, tmp_path).step == 1


def test_every_difference_of_the_models_is_an_issue(truths: Truths, data: Path) -> None:
    folder = truths("llama").folder
    assert launch_issues(hub_job(data, folder, model__seq_length=16)) == []
    wrong = {
        "model__heads": 8,
        "model__kv_heads": 4,
        "model__head_dim": 4,
        "model__layers": 3,
        "model__rotary_base": 1e4,
        "model__norm_epsilon": 1e-5,
    }
    assert launch_issues(hub_job(data, folder, **wrong)) == [
        f"init-from-model model.{key}"
        for key in ("layers", "heads", "kv_heads", "head_dim", "norm_epsilon", "rotary_base")
    ]


def test_a_bad_file_ends_a_launch_before_it_starts(
    data: Path, tmp_path: Path, truths: Truths, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_bytes((truths("llama").folder / "config.json").read_bytes())
    (hf / "model.safetensors").write_bytes(b"no")
    arguments = [
        "launch",
        "--set",
        f"model.hf_config={hf}",
        "--set",
        f"training.init_from={hf}",
        "--set",
        f"data.path={data}",
        "--run-dir",
        tmp_path / "run",
    ]
    for flags in ([], ["--json"], ["--dry-run", "--json"]):
        said = caller(capsys)(*arguments, *flags)
        assert_refused(said, wants_json="--json" in flags)
        assert "weights-damaged" in said.out or "model.safetensors" in said.err
    assert not (tmp_path / "run").exists()


def test_the_check_needs_no_torch(truths: Truths, finished: tuple[Path, float]) -> None:
    probe = (
        "import sys; from pathlib import Path; from mpctl.train.weights.origin import open_origin\n"
        "for path in sys.argv[1:]: open_origin(Path(path))\n"
        "print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    )
    paths = [str(truths("gpt2-sharded").folder), str(finished[0])]
    done = subprocess.run([sys.executable, "-c", probe, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_the_commands(truths: Truths, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mpctl, hf = caller(capsys), tmp_path / "hf"
    load(truths("gpt2").folder).save_pretrained(hf)
    (hf / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    said = mpctl("weights", "import", hf, tmp_path / "ours", "--json")
    assert (said.code, said.err) == (0, "")
    assert said.document["schema"] == "mpctl.weights/1"
    assert "model.toml" in said.document["files"]
    assert "tokenizer.json" in said.document["files"]
    said = mpctl("weights", "export", tmp_path / "ours", tmp_path / "back")
    assert said.code == 0  # after two seconds, on a busy machine, it says where it is
    assert "GPT2LMHeadModel" in said.out
    assert "36.1k, F32" in said.out
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert isinstance(config["eos_token_id"], int)  # the tokenizer's end of text
    assert_refused(mpctl("weights", "import", hf, tmp_path / "ours"), wants_json=False)
    assert_refused(mpctl("weights", "export", hf, tmp_path / "x", "--json"), wants_json=True)
    said = mpctl(
        "launch",
        tmp_path / "ours" / "model.toml",
        "--set",
        f"data.path={data}",
        "--dry-run",
        "--json",
        "--run-dir",
        tmp_path / "run",
    )
    assert said.code == 0
    initial = said.document["job"]["training"]["init_from"]
    assert initial == str(tmp_path / "ours" / "checkpoints" / "step-0")


def test_plans_do_not_read_the_weights() -> None:
    tiny_plan(load_job(None, {**settings(), "training.init_from": "nowhere"}))
