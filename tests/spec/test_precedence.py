"""Which value of a setting counts: override, file, preset, what follows from the shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.load import job_from_raw, load_job
from mpctl.spec.model import ModelSpec
from tests.spec.jobs_on_disk import SHAPE, issues_of, write


def test_own_keys_beat_the_preset_and_overrides_beat_both(tmp_path: Path) -> None:
    path = write(
        tmp_path / "job.toml",
        '[model]\npreset = "gpt2"\nlayers = 4\nheads = 6\n[cluster]\npreset = "selene"\nnodes = 2\n',
    )
    job = load_job(path, {"model.layers": 3, "cluster.gpus_per_node": 4})
    assert job.model is not None
    assert (job.model.layers, job.model.heads, job.model.hidden) == (3, 6, 768)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 4)


def test_an_override_replaces_the_preset_of_a_job() -> None:
    job = load_job("demo", {"model": "gpt2", "training.steps": 3})
    assert job.model is not None
    assert (job.model.name, job.training.steps, job.training.dropout) == ("gpt2", 3, 0.1)


def test_overrides_leave_the_source_alone() -> None:
    raw = {"parallel": {"tp": 2}, "model": dict(SHAPE)}
    job_from_raw(raw, {"parallel.tp": 4, "model.layers": 8})
    assert raw == {"parallel": {"tp": 2}, "model": SHAPE}


def test_a_device_can_be_named_and_then_corrected() -> None:
    job = load_job(None, {"cluster.device": "cpu", "cluster.device.memory_bytes": 1024})
    assert job.cluster.device is not None
    assert (job.cluster.device.kind, job.cluster.device.memory_bytes) == ("cpu", 1024)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("cluster.inter_node.latency", 1e-6), ("cluster.intra_node.latency", 1e-6), ("cluster.device.memory_bytes", 1024)],
)
def test_a_single_key_of_a_nested_table_beats_the_preset(setting: str, value: float) -> None:
    job = load_job(None, {"cluster": "selene", setting: value})
    _, table, key = setting.split(".")
    assert getattr(getattr(job.cluster, table), key) == value


@pytest.mark.parametrize(
    ("device", "memory"), [("h200", 141), ({"preset": "h200"}, 141), ({"memory_bytes": 40 * 2**30}, 40)]
)
def test_a_device_above_a_cluster_preset(device: Any, memory: float) -> None:
    """A name replaces the device of the preset, a table without one corrects it."""
    found = load_job(None, {"cluster.preset": "selene", "cluster.device": device}).cluster
    assert found.nodes == 384
    assert found.device is not None
    assert found.device.memory_bytes == pytest.approx(memory * 2**30, rel=0.08)


@pytest.mark.parametrize("turn", [1, -1])
def test_a_name_counts_before_single_keys_in_any_order(turn: int) -> None:
    typed = [
        ("model.layers", 4),
        ("cluster.device.memory_bytes", 1024),
        ("cluster.device", "cpu"),
        ("model", "gpt2"),
        ("cluster.nodes", 2),
        ("cluster", "selene"),
    ]
    job = load_job("demo", dict(typed[::turn]))
    assert job.model is not None
    assert (job.model.name, job.model.layers) == ("gpt2", 4)
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 8)
    assert job.cluster.device is not None
    assert (job.cluster.device.kind, job.cluster.device.memory_bytes) == ("cpu", 1024)


def test_a_table_given_whole_replaces_the_one_below() -> None:
    job = load_job("demo", {"model": {**SHAPE, "activation": "relu"}, "model.layers": 3})
    assert job.model == load_job(None, {"model": {**SHAPE, "activation": "relu", "layers": 3}}).model


def test_a_preset_and_a_config_at_once_are_refused() -> None:
    found = issues_of(model="gpt2", model__hf_config="config.json", parallel__tpp=1)
    assert {where: issue.rule for where, issue in found.items()} == {
        "model.hf_config": "two-bases",
        "parallel.tpp": "unknown-key",
    }


def test_a_file_starts_from_a_job_preset(tmp_path: Path) -> None:
    path = write(
        tmp_path / "job.toml",
        'preset = "demo"\n[training]\nsteps = 3\n[model]\nlayers = 2\n[cluster.intra_node]\nlatency = 1e-6\n',
    )
    job, demo = load_job(path, {"training.seed": 1}), load_job("demo")
    assert job.model is not None and demo.model is not None
    assert job.training == demo.training.model_copy(update={"steps": 3, "seed": 1})
    assert job.model == demo.model.model_copy(update={"layers": 2})
    assert (job.data, job.parallel, job.launch) == (demo.data, demo.parallel, demo.launch)
    assert job.cluster.intra_node is not None and demo.cluster.intra_node is not None
    assert job.cluster.intra_node.bandwidth == demo.cluster.intra_node.bandwidth


def test_a_file_that_starts_from_nothing_known(tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", 'preset = "dem"\n')
    assert "demo" in issues_of(path)["preset"].hint


@pytest.mark.parametrize("source", ["preset", "job.json"])
def test_what_follows_from_the_shape_follows_the_override(source: str, tmp_path: Path) -> None:
    start: dict[str, Any] = {"model": "t5-base"}  # head_dim 64 and ffn 3072 stand in its file
    path = write(tmp_path / "job.json", load_job(None, start).model_dump_json())
    changes = {"model.hidden": 1024, "model.heads": 8, "model.seq_length": 256}
    model = (load_job(None, start | changes) if source == "preset" else load_job(path, changes)).model
    assert model is not None
    assert (model.ffn, model.head_dim, model.kv_heads, model.max_positions) == (4096, 128, 8, 256)


@pytest.mark.parametrize("source", ["preset", "job.json"])
def test_a_shorter_sequence_leaves_the_table_of_positions(source: str, tmp_path: Path) -> None:
    """It changed GPT-2's parameters, so that its weights were refused at 512 tokens."""
    path = write(tmp_path / "job.json", load_job(None, {"model": "gpt2"}).model_dump_json())
    start, changes = {"model": "gpt2"}, {"model.seq_length": 512}
    job = load_job(None, start | changes) if source == "preset" else load_job(path, changes)
    assert job.model is not None
    assert (job.model.seq_length, job.model.max_positions) == (512, 1024)


def test_a_longer_one_is_refused_unless_the_table_is_made_longer() -> None:
    with pytest.raises(InputError, match="1024 is less than the sequence length, 1500"):
        load_plan(None, {"model": "gpt2", "model.seq_length": 1500})
    longer = {"model.seq_length": 1500, "model.max_positions": 1500}
    model = load_plan(None, {"model": "gpt2", **longer}).job.model
    assert model is not None and model.max_positions == 1500


def test_what_was_chosen_stays() -> None:
    model = load_job(None, {"model": "llama-3-8b", "model.hidden": 2048}).model
    assert model is not None
    assert (model.ffn, model.kv_heads, model.head_dim) == (14336, 8, 64)
    model = load_job(None, {"model": "gpt2", "model.ffn": 3072, "model.hidden": 1536}).model
    assert model is not None
    assert (model.ffn, model.head_dim) == (3072, 128)  # typed beside hidden, not below it


@pytest.mark.parametrize("source", ["gpt2", "t5-base"])
def test_heads_that_do_not_divide_hidden_are_an_issue_not_a_floor(source: str) -> None:
    with pytest.raises(InputError) as caught:
        load_plan(None, {"model": source, "model.heads": 7})
    (issue,) = [i for i in caught.value.issues if i.where == "model.heads"]
    assert issue.rule == "heads-divide-hidden"
    assert "7" in issue.message and "768" in issue.message
    load_plan(None, {"model": "gpt2", "model.heads": 7, "model.head_dim": 64})
    with pytest.raises(AssertionError):
        ModelSpec.model_validate({**SHAPE, "heads": 3}).head_size  # noqa: B018
