"""Where a job comes from on a command line: --from, --gpus, --seq-length, --price; and --emit toml."""

from __future__ import annotations

import io
import shlex
import tomllib
from pathlib import Path

import pytest

from mpctl.spec.gpus import CLUSTERS, read_gpus
from mpctl.spec.load import parse_settings
from mpctl.spec.presets import find_preset
from tests.cli.calls import Mpctl

SCRIPT = """#!/bin/bash
TP=4
ARGS=(
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
  --micro-batch-size 1 --global-batch-size 64 --bf16 --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1 --vocab-size 50257
)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --tensor-model-parallel-size $TP
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "train.sh").write_text(SCRIPT)
    return f"@{tmp_path}/train.sh"


def summary(mpctl: Mpctl, *words: object) -> object:
    document = mpctl("plan", *words, "--json").document
    return document["summary"], document["sizes"], document["training"]


@pytest.mark.parametrize("name", CLUSTERS)
def test_each_device_has_a_cluster_of_its_own_device(name: str) -> None:
    cluster = find_preset("clusters", CLUSTERS[name])
    assert cluster is not None
    assert str(cluster["device"]).startswith(name.removesuffix("-sxm")) or name == "a100"
    assert read_gpus(f"1x{name}").settings["cluster.gpus_per_node"] == 1


def test_gpus_are_a_cluster_and_what_is_assumed_is_said(mpctl: Mpctl) -> None:
    named = summary(mpctl, "--model", "gpt2", "--cluster", "dgx-h100", "--nodes", 2)
    assert summary(mpctl, "--model", "gpt2", "--gpus", "16xH100") == named
    assert summary(mpctl, "--model", "gpt2", "--gpus", "16", "--cluster", "dgx-h100") == named
    said = mpctl("plan", "--model", "gpt2", "--gpus", "2x4090", "--json").document
    (note,) = [check["message"] for check in said["checks"] if check["rule"] == "gpus-assumed"]
    assert note.startswith("2 x NVIDIA GeForce RTX 4090 on one node; assumed, from preset rtx-4090-node: PCIe 4")


@pytest.mark.parametrize(
    ("words", "rule", "hint"),
    [
        (("--gpus", "12xh100"), "gpus-fill-nodes", "use 8 or 16"),
        (("--gpus", "8xh1000"), "bad-gpus", "h100"),
        (("--gpus", "x8"), "bad-gpus", "--gpus 64xh100"),
        (("--gpus", "8,16xh100"), "bad-gpus", "mpctl search --gpus 8,16xh100"),
        (("--gpus", "8"), "bad-gpus", "--gpus 8xh100"),
        (("--gpus", "8xh100", "--nodes", 2), "given-twice", "leave one of them out"),
        (("--gpus", "8xt4", "--dtype", "bf16"), "dtype-on-device", "use --dtype fp16"),
        (("--price", "-1"), "bad-value", "0"),
    ],
)
def test_gpus_that_cannot_be_are_refused(mpctl: Mpctl, words: tuple[object, ...], rule: str, hint: str) -> None:
    said = mpctl("plan", "--model", "gpt2", *words, "--json")
    assert said.code == 2 and hint in said.issues[rule]["hint"]


def test_sequence_length_and_price_are_flags(mpctl: Mpctl) -> None:
    words = ("plan", "--model", "llama-3-8b", "--gpus", "8xh100", "--zero", 3, "--runtime", "fsdp2")
    words = (*words, "--seq-length", 2048, "--price", 2.5, "--tokens", "1B")
    assert "sequence 2048" in mpctl(*words).out
    run = mpctl(*words, "--json").document["run"]
    assert run["price"] == pytest.approx(2.5 * run["gpu_hours"])


@pytest.mark.parametrize("words", [("--from", "megatron"), ("--model", "gpt2", "--gpus", "8xh100", "--tp", 2)])
def test_a_job_file_plans_as_the_command_line_that_wrote_it(
    mpctl: Mpctl, words: tuple[object, ...], script: str, tmp_path: Path
) -> None:
    words = (*words, script, "--gpus", "8xh100") if words[0] == "--from" else words
    text = mpctl("plan", *words, "--emit", "toml").out
    assert tomllib.loads(text)["cluster"]["preset"] == "dgx-h100"
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert summary(mpctl, file) == summary(mpctl, *words)


def test_a_preset_with_changes_becomes_a_job_file(mpctl: Mpctl, tmp_path: Path) -> None:
    words = ("two-nodes-16-gpus", "--tp", 4, "--set", "training.dropout=0.2")
    file = tmp_path / "job.toml"
    file.write_text(mpctl("plan", *words, "--emit", "toml").out)
    assert summary(mpctl, file) == summary(mpctl, *words)
    assert mpctl("plan", *words, "--emit", "toml", "--json").document["language"] == "toml"


def test_a_search_says_what_to_change_in_the_launchers_own_flags(mpctl: Mpctl, script: str) -> None:
    words = ("search", "--from", "megatron", script, "--gpus", "8xh100", "--max-pp", 1, "--max-cp", 1, "--top", 1)
    document = mpctl(*words, "--json").document
    changes = document["changes"]
    keys = {change["key"]: (change["old"], change["new"]) for change in changes["changes"]}
    assert changes["new_seconds"] < changes["old_seconds"]
    assert keys["--tensor-model-parallel-size"] == ("4", "1")
    assert keys["--recompute-granularity"] == ("full", None)
    command = document["fastest"]["command"]
    assert (
        command.startswith(f"mpctl plan --from megatron {script} --cluster dgx-h100") and "--set model" not in command
    )
    said = mpctl(*words).out
    assert "--tensor-model-parallel-size 4 -> 1" in said and "leave out --recompute-granularity" in said


def test_a_job_that_is_read_is_compared_with_variants(mpctl: Mpctl, script: str) -> None:
    words = ("plan", "--from", "megatron", script, "--gpus", "8xh100", "--compare")
    document = mpctl(*words, "tp=2", "recompute=none,tp=1", "--json").document
    assert document["jobs"] == ["--from megatron", "tp=2", "recompute=none,tp=1"]
    assert document["settings"]["parallel.tp"] == [4, 2, 1]


def test_counts_of_a_search_may_have_a_device(mpctl: Mpctl) -> None:
    words = ("search", "--model", "gpt2", "--top", 1, "--max-pp", 1, "--max-tp", 1)
    document = mpctl(*words, "--gpus", "2,4xh100", "--price", 2, "--json").document
    assert (document["gpus"], [entry["gpus"] for entry in document["by_gpus"]]) == (4, [2, 4])
    assert document["fastest"]["price_per_billion_tokens"] > 0
    listed = mpctl(*words, "--cluster", "dgx-h100", "--nodes", 1, "--gpus", "2,4", "--json").document
    assert [entry["gpus"] for entry in listed["by_gpus"]] == [2, 4]
    assert listed["fastest"] == listed["by_gpus"][1]


def test_a_job_of_flags_is_compared_with_variants_without_a_name(mpctl: Mpctl) -> None:
    model = ("--model", "gpt2", "--gpus", "8xh100")
    document = mpctl("compare", "tp=4", "tp=2,micro_batch_size=2", *model, "--json").document
    assert document["jobs"] == ["tp=4", "tp=2,micro_batch_size=2"]
    assert document["settings"]["parallel.tp"] == [4, 2]
    assert mpctl("compare", "tp=4", *model, "--json").document["jobs"] == ["gpt2", "tp=4"]
    table = ("--set", "model.preset=gpt2", "--gpus", "8xh100")  # as an agent's table of a job says it
    assert mpctl("compare", "tp=4", *table, "--json").document["jobs"] == ["gpt2", "tp=4"]
    assert mpctl("explain", "time.mfu", *table, "--json").code == 0
    assert "nothing to compare" in mpctl("compare", *model).err


@pytest.mark.parametrize(
    "words",
    [("plan", "-", "--gpus", "16"), ("emit", "-", "megatron"), ("compare", "-", "tp=4"), ("tensor-modes", "-", "4")],
    ids=" ".join,
)
def test_a_job_on_standard_input_may_be_loaded_twice(
    words: tuple[str, ...], mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = '[cluster]\npreset = "dgx-h100"\nnodes = 1\n[model]\npreset = "llama-3-8b"\n[parallel]\ntp = 8\n'
    monkeypatch.setattr("sys.stdin", io.StringIO(job + '[training]\nruntime = "megatron-core"\n'))
    said = mpctl(*words)
    assert said.code == 0, said.err


def test_a_line_removes_what_the_file_sets(mpctl: Mpctl, tmp_path: Path) -> None:
    """Every row of a search plans as its line, from a job that sets what the row leaves out."""
    job = tmp_path / "job.toml"
    job.write_text(
        '[cluster]\npreset = "dgx-h100"\nnodes = 2\n[model]\npreset = "llama-3-8b"\n[parallel]\ntp = 2\nzero = 1\n'
        'zero_size = 2\n[training]\nruntime = "megatron-core"\nglobal_batch_size = 64\n',
        "utf-8",
    )
    words = ("search", job, "--fix", "micro_batch_size=1", "--max-pp", 1, "--max-cp", 1, "--json")
    rows = mpctl(*words).document["rows"]
    assert any("zero_size=null" in row["command"] for row in rows)
    for row in rows:
        settings = parse_settings(w for w in shlex.split(row["command"]) if w.startswith("parallel.zero_size="))
        assert settings.get("parallel.zero_size", 2) == row["settings"]["zero_size"]
        plan = mpctl(*shlex.split(row["command"])[1:], "--json").document
        assert max(stage["device_bytes"] for stage in plan["memory"]["stages"]) == row["peak_bytes"]


def test_a_job_file_leaves_out_what_is_removed(mpctl: Mpctl, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('preset = "demo"\n[parallel]\nzero = 1\nzero_size = 1\n', "utf-8")
    text = mpctl("emit", job, "toml", "--set", "zero_size=null").out
    found = tomllib.loads(text)
    assert found["preset"] == "demo" and found["parallel"] == {"zero": 1}
