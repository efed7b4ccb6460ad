"""`--fail-if` of a comparison: the exit code, the sentences and the JSON."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.calls import Mpctl


def test_a_failed_gate_is_exit_code_4_in_words_and_in_json(mpctl: Mpctl, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        '[cluster]\npreset = "dgx-h100"\nnodes = 1\ngpus_per_node = 2\n[model]\npreset = "gpt2"\n[parallel]\ntp = 2\n'
        "[cluster.operations]\nprice_per_gpu_hour = 2.0\n",
        "utf-8",
    )
    words = ("compare", str(job), "micro_batch_size=4")
    passed = mpctl(*words, "--fail-if", "memory>+500%", "--fail-if", "price>+1%")
    assert passed.code == 0, passed.err
    said = " ".join(passed.out.split())
    assert "memory>+500% passed" in said and "price>+1% passed" in said
    failed = mpctl(*words, "--fail-if", "memory>+2%", "--fail-if", "step>100s")
    line = next(line for line in failed.out.splitlines() if line.startswith("✗"))
    assert failed.code == 4 and "micro_batch_size=4: memory" in line and "✓" in failed.out
    told = mpctl(*words, "--fail-if", "memory>+2%", "--json")
    (gate,) = json.loads(told.out)["gates"]
    assert told.code == 4 and gate["failed"] and gate["change"] > 0.02


def test_a_gate_passes_no_job_that_does_not_fit(mpctl: Mpctl) -> None:
    said = mpctl("compare", "gpt3-175b-1024", "micro_batch_size=64,recompute=none", "--fail-if", "tokens<-90%")
    assert said.code == 3 and "tokens<-90% passed" in " ".join(said.out.split())


def test_gates_are_read_before_the_plans(mpctl: Mpctl) -> None:
    assert "is no gate" in mpctl("compare", "no-such-job", "tp=2", "--fail-if", "x").err
