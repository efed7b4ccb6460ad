"""`mpctl fit` from the outside."""

from __future__ import annotations

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpctl.cli import complete
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl, assert_refused

NODE = ("fit", "llama-3-8b", "--gpus", "4xa100-80gb", "--samples", 50_000)


def test_the_answer_is_the_first_line(mpctl: Mpctl) -> None:
    said = mpctl(*NODE, "--price", 1.8)
    assert said.code == 0 and said.err == ""
    lines = said.out.splitlines()
    assert lines[0].startswith("✓ Use LoRA rank 16 on four A100-SXM4-80GB with ")
    head = " ".join(lines[:3])
    assert "tokens/s" in head and "price" in head and "50,000 samples x 3 epochs" in head
    assert "Ways to fine-tune" in said.out and "What to type" in said.out
    assert not any(len(line) > 100 for line in lines if "mpctl " not in line)


def test_a_document_whose_lines_plan_its_rows(mpctl: Mpctl) -> None:
    found = mpctl(*NODE, "--json").document
    assert found["schema"] == "mpctl.fit/1" and found["gpus"] == 4 and not found["has_price"]
    assert found["answer"] in found["rows"] and found["ways_out"] == []
    for row in found["rows"]:
        assert row["price"] is None
        program, *typed = shlex.split(row["command"])
        said = mpctl(*typed, "--json", "--groups", "none")
        assert program == "mpctl" and said.code == (0 if row["fits"] else 3), said.err
        assert said.document["summary"]["device_bytes"] == row["peak_bytes"]
        assert said.document["time"]["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-9)
    assert found["commands"][0] == found["answer"]["command"]


def test_nothing_fits_is_exit_3_with_ways_out(mpctl: Mpctl) -> None:
    asked = ("fit", "llama-3-70b", "--gpus", "1xrtx-4090", "--method", "qlora", "--samples", 1000)
    said = mpctl(*asked)
    assert said.code == 3 and said.out.startswith("✗ Nothing fits: ")
    assert "Nearest ways out" in said.out and "To plan them" in said.out
    unsaved = mpctl(*asked, "--save", "none.toml")
    assert unsaved.code == 3 and unsaved.out == said.out and "none.toml is not written" in unsaved.err
    assert not Path("none.toml").exists()


def test_amounts_names_and_lists_as_people_write_them(mpctl: Mpctl) -> None:
    page = "https://huggingface.co/Qwen/Qwen2.5-0.5B/tree/main"
    words = ("--method", "LoRA", "--targets", "q_proj,v_proj", "--samples", "20k", "--global-batch-size", 16)
    found = mpctl("fit", page, "--gpus", "1xt4", *words, "--json").document
    assert found["targets"] == ["q_proj", "v_proj"] and found["data"]["samples"] == 20_000
    assert found["length_text"] == "16 rows as given, tokens the default"
    assert {row["method"] for row in found["rows"]} == {"lora"}


def test_any_gpus(mpctl: Mpctl) -> None:
    said = mpctl("fit", "llama-3-8b", "--price", "h100=2.5", "--price", "rtx-4090=0.4", "--tokens", "50M", "--json")
    assert said.code == 0 and said.document["gpus"] is None
    priced, answer = [row["price"] for row in said.document["rows"] if row["method"] != "full"], said.document["answer"]
    assert said.document["advice"].startswith(f"Use {answer['title']} on one ")  # what is typed comes first
    assert " cheapest" in said.document["advice"] or "about as little" in said.document["advice"]
    assert answer["price"] <= 1.02 * min(priced)
    assert "Fewest GPUs" in mpctl("fit", "qwen2.5-0.5b").out


def test_gpus_in_any_spelling_and_prices_of_others(mpctl: Mpctl) -> None:
    found = mpctl("fit", "qwen2.5-0.5b", "--gpus", "1xRTX4090", "--price", "h100=2")
    assert found.code == 0 and "one RTX 4090" in found.out
    assert "given for h100-sxm, and none for these GPUs" in found.out
    for text in ("rtx4090", "RTX 4090", "4090"):
        assert "--gpus 1xrtx-4090" in mpctl("fit", "qwen2.5-0.5b", "--gpus", text).err


def test_a_saved_answer_plans_alike(mpctl: Mpctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = mpctl(*NODE, "--save", "job.toml", "--json").document["answer"]
    job = load_job("job.toml")
    assert job.training.adapter is not None and job.training.adapter.rank == 16
    said = mpctl("plan", "job.toml", "--json", "--groups", "none")
    assert said.document["summary"]["device_bytes"] == found["peak_bytes"]
    before = Path("job.toml").read_bytes()
    assert_refused(mpctl(*NODE, "--save", "job.toml"), wants_json=False)
    assert Path("job.toml").read_bytes() == before


def test_a_page_has_the_rows(mpctl: Mpctl, tmp_path: Path) -> None:
    assert mpctl(*NODE, "--html", tmp_path / "fit.html").code == 0
    page = (tmp_path / "fit.html").read_text("utf-8")
    assert "Ways to fine-tune" in page and "Use LoRA rank 16" in page and "mpctl plan --gpus 4xa100-80gb" in page


def test_a_config_of_hugging_face(mpctl: Mpctl, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = mpctl("fit", tmp_path / "config.json", "--gpus", "1xt4", "--json")
    assert said.code == 0 and said.document["seq_length"] == 512
    assert_refused(mpctl("fit", tmp_path / "config.json", "--gpus", "1xt4", "--seq-length", 1024), wants_json=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("llama-3-9b",), "llama-3-8b"),
        (("llama-3-8b", "--gpus", "1xh101"), "h100"),
        (("llama-3-8b", "--gpus", "1xh100", "--seq-length", 9000), "8192"),
        (("llama-3-8b", "--gpus", "1xh100", "--samples", 0), "--samples 1000"),
        (("llama-3-8b", "--gpus", "1xh100", "--price", "h300=1"), "h200"),
        (("llama-3-8b", "--gpus", "1xh100", "--rank", 0), "1"),
        (("llama-3-8b", "--gpus", "1xh100", "--global-batch-size", 0), "at least 1"),
        (("llama-3-8b", "--gpus", "1xa100", "--set", "dtype=fp8"), "no fp8 rate"),
        (("llama-3-8b", "--gpus", "1xa100", "--targets", "typo_proj"), "typo_proj"),
        (("llama-3-8b", "--gpus", "1xh100", "--runtime", "trll"), "fsdp2"),
        (("llama-3-8b", "--gpus", "1xh100", "--method", "adapters"), "lora"),
        (("llama-3-8b", "--gpus", "1xh100", "--tokens", "some"), "15T"),
        (("llama-3-8b", "--gpus", "1xh100", "--samples", "some"), "20k"),
        (("llama-3-8b", "--gpus", "1xh100", "--method", "dora"), "training.adapter.kind=dora"),
        (("ours/new-9b", "--gpus", "1xh100"), "mpctl fit ours/new-9b --fetch"),
    ],
)
def test_bad_input(mpctl: Mpctl, words: tuple[object, ...], said: str) -> None:
    answer = mpctl("fit", *words)
    assert_refused(answer, wants_json=False)
    assert said in answer.err
    assert_refused(mpctl("fit", *words, "--json"), wants_json=True)


def test_gpus_are_completed() -> None:
    assert complete.gpus("4xa1") == ["4xa100", "4xa100-40gb", "4xa100-80gb", "4xa10g"]
    assert complete.gpus("") == ["any"]


@pytest.mark.parametrize(("words", "most"), [(("--gpus", "8xh100"), 2.0), (("--gpus", "any"), 5.0)])
def test_seconds_of_a_core(words: tuple[str, ...], most: float) -> None:
    """The whole process, user and system, of a dense model of 8B parameters."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "mpctl", "fit", "llama-3-8b", *words, "--json"],
        check=True,
        capture_output=True,
        env={**os.environ},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < most


def test_states_on_the_host_have_rows_where_the_software_takes_them(mpctl: Mpctl) -> None:
    """TRL shards nothing on one GPU, and so keeps nothing on its host; DeepSpeed does."""
    one = ("fit", "llama-3.1-8b", "--gpus", "1xrtx-4090")
    said = mpctl(*one, "--json").document
    assert not any(row["sharding"].endswith("offload") for row in said["rows"])
    assert "full fine-tuning does not fit by" in said["advice"]
    lora = mpctl("fit", "llama-3-8b", "--gpus", "1xt4", "--method", "lora", "--json")
    assert lora.code == 3 and lora.document["ways_out"][0]["change"] == "QLoRA instead of LoRA"
    full = (*one, "--runtime", "deepspeed", "--method", "full")
    found = mpctl(*full, "--json").document
    assert found["answer"]["sharding"] == "one GPU, offload" and found["answer"]["host_bytes"] > 100 * 2**30
    assert f"{found['answer']['host_memory']} of host memory" in found["advice"]
    small = mpctl(*full, "--set", "cluster.host_memory=64GiB", "--json")
    assert small.code == 3 and not small.document["rows"][-1]["fits"]
    assert small.document["rows"][-1]["host_memory"].endswith(" of 64.0 GiB")
    kept = mpctl(*full, "--set", "training.offload_optimizer=false", "--json")
    assert kept.code == 3 and [row["sharding"] for row in kept.document["rows"]] == ["one GPU"]
