"""A checkpoint rewritten for another layout is what a run of that layout would have saved."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import read_manifest, read_shard_record
from mpctl.records.checkpoint.verify import find_damage
from mpctl.run.launch.reshard import plan_of_layout, reshard_checkpoint
from mpctl.spec.job import JobSpec
from mpctl.train.checkpoint import reshard as resharding
from mpctl.train.checkpoint.reader import OpenCheckpoint
from mpctl.train.checkpoint.reshard import reshard
from mpctl.train.runtime import build
from tests.train.checkpoint.shards import shard_record
from tests.train.runtime.test_experts import moe_job
from tests.train.runtime.test_views import NAME as EXPERTS
from tests.train.runtime.test_views import ranks_of, toy_job, toy_layout, toy_module, toy_trainer
from tests.train.runtime.tiny import column, make_trainer, tiny_job, train

# 300 words are 300 rows at every tp: padding that was not saved would become zeros.
SETTINGS: dict[str, Any] = {"training__steps": 4, "checkpoint__interval": 2, "model__vocab_divisor": 2}


def _saved(job: JobSpec, run: Path) -> Path:
    run.mkdir()
    (run / "job.json").write_text(job.model_dump_json())
    train(job, run)
    return run / "checkpoints/step-2"


def _hashes(folder: Path) -> list[str]:
    return [read_shard_record(folder, shard).sha256 for shard in read_manifest(folder).shards]


def _reshard(source: Path, out: Path, tp: int, pp: int) -> Path:
    seen: list[tuple[int, int]] = []
    reshard_checkpoint(source, out, tp=tp, pp=pp, on_progress=lambda stage, done, total: seen.append((done, total)))
    assert seen[-1][0] <= seen[-1][1]
    assert find_damage(out / "checkpoints/step-2") == []
    return out / "checkpoints/step-2"


@pytest.mark.parametrize(
    "changes",
    [
        {"training__freeze": ["layers.1.mlp.*"]},
        pytest.param(
            {
                "model__norm": "rmsnorm",
                "model__position": "rotary",
                "model__bias": False,
                "model__activation": "swiglu",
                "training__dtype": "bf16",
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_is_resumed_to_the_bit(data: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """From tp 2 to pp 2, and to one rank: the same losses as from the original, and the way back
    gives the original's bytes."""
    job = tiny_job(data, 2, **SETTINGS, **changes)
    source = _saved(job, tmp_path / "run")
    staged = _reshard(source, tmp_path / "staged", 1, 2)
    assert (len(read_manifest(staged).shards), read_manifest(staged).size("tp")) == (2, 1)
    single = _reshard(staged, tmp_path / "single", 1, 1)
    losses = []
    for number, folder in enumerate((source, staged, single)):
        run = tmp_path / f"go-on-{number}"
        shutil.copytree(folder, run / "checkpoints/step-2")
        trainer = make_trainer(tiny_job(data, **SETTINGS, **changes), run)
        losses.append(column([{"records": list(trainer.run())}]))
    assert losses[0] == losses[1] == losses[2] and len(losses[0]) == 2
    back = _reshard(single, tmp_path / "back", 2, 1)
    assert _hashes(back) == _hashes(source)


def test_one_tensor_is_in_memory_at_a_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is made when it is written, not before."""
    trainer = make_trainer(tiny_job(data, **SETTINGS), tmp_path / "run")
    trainer.step = 2
    trainer.save()
    (tmp_path / "run/job.json").write_text(tiny_job(data, **SETTINGS).model_dump_json())
    order: list[str] = []
    part = OpenCheckpoint.part

    def made(checkpoint: Any, name: str, field: str, *rest: Any) -> Any:
        order.append(f"{name}/{field}")
        return part(checkpoint, name, field, *rest)

    monkeypatch.setattr(OpenCheckpoint, "part", made)
    source, counts = tmp_path / "run/checkpoints/step-2", list[int]()
    out = tmp_path / "out"
    out.mkdir()
    layout = JobLayout.of(plan_of_layout(source, 2, 1).job)
    reshard(source, layout, out, lambda n: counts.append(n))
    assert len(order) == len(counts) > 50  # one after the other
    assert find_damage(out) == []


@pytest.fixture
def toy_view(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models have parameters of a second view, split over ep."""
    monkeypatch.setattr(build, "build_module", toy_module)
    monkeypatch.setattr(resharding, "build_module", toy_module)


@pytest.mark.usefixtures("toy_view")
def test_another_view_is_cut_over_its_own_ranks(data: Path, tmp_path: Path) -> None:
    """From one rank to ep 2: rank 1, which holds no first replica of the dense parameters, writes
    its experts alone. And back, to the original's bytes."""
    alone = toy_job(data, 1)
    trainer = toy_trainer(alone.model_dump(mode="json"), 1, tmp_path / "run", 0)
    trainer.step = 2
    trainer.save()
    source, cut, back = tmp_path / "run/checkpoints/step-2", tmp_path / "cut", tmp_path / "back"
    for folder in (cut, back):
        folder.mkdir()
    reshard(source, toy_layout(toy_job(data, 2), 2), cut, lambda _: None)
    assert find_damage(cut) == []
    dense, experts = read_manifest(cut).shards
    assert (dense.coords["ep"], experts.coords["ep"]) == (0, 1)
    held = [read_shard_record(cut, shard).parameters for shard in (dense, experts)]
    assert held[0].keys() == shard_record(source, 0).parameters.keys()
    assert [part[EXPERTS].shard.cuts for part in held] == [{0: (range(2),)}, {0: (range(2, 4),)}]
    assert held[1].keys() == {EXPERTS}
    reshard(cut, toy_layout(alone, 1), back, lambda _: None)
    assert _hashes(back) == _hashes(source)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_view")
def test_another_view_is_cut_as_its_run_saved_it(data: Path, tmp_path: Path) -> None:
    job = toy_job(data, 4)
    ranks_of(job, 2, tmp_path / "run")
    source, one, back = tmp_path / "run/checkpoints/step-2", tmp_path / "one", tmp_path / "back"
    for folder in (one, back):
        folder.mkdir()
    reshard(source, toy_layout(toy_job(data, 1), 1), one, lambda _: None)
    reshard(one, toy_layout(job, 2), back, lambda _: None)
    assert read_manifest(back).shards == read_manifest(source).shards
    assert _hashes(back) == _hashes(source)


def test_what_cannot_be_is_refused(data: Path, tmp_path: Path) -> None:
    source = tmp_path / "run/checkpoints/step-2"
    trainer = make_trainer(tiny_job(data, **SETTINGS), tmp_path / "run")
    trainer.step = 2
    trainer.save()
    with pytest.raises(InputError, match=r"no job\.json"):
        plan_of_layout(source, 2, 1)
    (tmp_path / "run/job.json").write_text(tiny_job(data, **SETTINGS).model_dump_json())
    with pytest.raises(InputError, match="heads"):
        plan_of_layout(source, 3, 1)
    path = source / "shard-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match="CRC-32"):
        reshard_checkpoint(source, tmp_path / "out", tp=2, pp=1, on_progress=lambda *_: None)
    assert not (tmp_path / "out").exists()


def test_experts_go_to_the_ranks_of_another_ep(data: Path, tmp_path: Path) -> None:
    """From ep 2 to one rank, to ep 2 with etp 2, and back to the bytes of ep 2; dp is the least
    that has as many ranks."""
    source = _saved(moe_job(data, "biased", {"dp": 2, "parallel__ep": 2}), tmp_path / "run")
    assert read_manifest(source).router_bias
    steps = [source]
    for sizes, dp in ((["ep=1"], 1), (["ep=2", "etp=2"], 4), (["ep=2", "etp=1"], 2)):
        assert plan_of_layout(steps[-1], None, None, sizes).job.parallel.dp == dp
        out = tmp_path / "-".join(sizes)
        reshard_checkpoint(steps[-1], out, tp=None, pp=None, settings=sizes, on_progress=lambda *_: None)
        steps.append(out / "checkpoints/step-2")
        assert find_damage(steps[-1]) == []
        assert read_manifest(steps[-1]).router_bias == read_manifest(source).router_bias
    assert [len(read_manifest(step).shards) for step in steps] == [2, 1, 4, 2]
    assert _hashes(steps[-1]) == _hashes(source)
