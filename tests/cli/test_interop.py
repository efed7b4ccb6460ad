"""`mpctl plan --emit` and `--from` as people use them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mpctl.interop.registry import TARGETS
from tests import readme
from tests.cli.calls import Mpctl, assert_refused

JOB = "two-nodes-16-gpus"


def test_what_is_emitted_is_planned_again_from_its_file(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("plan", JOB, "--emit", "megatron")
    assert (said.code, said.err) == (0, "")
    file = tmp_path / "train.sh"
    file.write_text(said.out)
    again = mpctl("plan", "--from", "megatron", f"@{file}", "--cluster", "dgx-2x8", "--json")
    first = mpctl("plan", JOB, "--json", "--set", "training.runtime=megatron-core")
    assert again.document["groups"] == first.document["groups"]
    assert again.document["summary"] == first.document["summary"]
    assert again.document["training"] == first.document["training"]


def test_flags_from_stdin_go_on_to_another_launcher() -> None:
    flags = "--tensor-model-parallel-size 2 --micro-batch-size 4"
    done = subprocess.run(
        [sys.executable, "-m", "mpctl", "plan", "--from", "megatron", "-", "--gpus-per-node", "4", "--emit", "torch"],
        input=flags,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert '(1, 2, 1, 2), mesh_dim_names=("pp", "dp", "cp", "tp")' in done.stdout


def test_typed_flags_win_over_those_that_are_read(mpctl: Mpctl) -> None:
    read = (
        "plan",
        "--from",
        "megatron",
        "--tensor-model-parallel-size 2 --seed 5",
        "--model",
        "gpt2",
        "--gpus-per-node",
        8,
    )
    assert mpctl(*read, "--json").document["sizes"]["tp"] == 2
    assert mpctl(*read, "--tp", 4, "--json").document["sizes"]["tp"] == 4


def test_unknown_flags_are_one_warning_of_the_plan(mpctl: Mpctl) -> None:
    flags = "--micro-batch-size 4 --log-interval 3 --save out"
    said = mpctl("plan", "--from", "megatron", flags, "--gpus-per-node", 8, "--json")
    warnings = [check for check in said.document["checks"] if check["status"] == "warning"]
    assert [(w["rule"], w["where"]) for w in warnings] == [("megatron-flags", "--from")]
    assert warnings[0]["message"].startswith("--log-interval, --save: ")


def test_a_file_s_name_without_its_sign_is_told_the_sign(mpctl: Mpctl, tmp_path: Path) -> None:
    file = tmp_path / "train.sh"
    file.write_text("--micro-batch-size 1", "utf-8")
    issue = mpctl("plan", "--from", "megatron", str(file), "--json").issues["bad-syntax"]
    assert (issue["message"], issue["hint"]) == (
        f"{str(file)!r} is a file, and flags are wanted",
        f"write @{file} for the flags in it",
    )
    lacking = mpctl("plan", "--from", "megatron", "nowhere.sh", "--json").issues["bad-syntax"]
    assert lacking["message"] == "'nowhere.sh' has no flag" and "@FILE" in lacking["hint"]


SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


def test_a_vocabulary_that_only_a_tokenizer_knows_is_asked_for(mpctl: Mpctl) -> None:
    read = ("plan", "--from", "megatron", SHAPE, "--gpus-per-node", 2, "--json")
    assert mpctl(*read).issues["megatron-flag"]["where"] == "--vocab-size"
    assert mpctl(*read, "--set", "model.vocab=1000").document["parameters"] > 0


def test_figures_of_a_job_that_is_read_are_explained(mpctl: Mpctl) -> None:
    read = ("plan", "--from", "megatron", f"{SHAPE} --vocab-size 1000", "--gpus-per-node", 2)
    figures = ("communication.stage-0", "memory.stage-0")
    said = mpctl(*read, "--explain", *figures, "--json").document["figures"]
    assert {figure["name"].rpartition(".")[0] for figure in said} >= {"memory.stage-0"}
    assert len(mpctl(*read, "--explain", "--json").document["figures"]) > len(said)
    assert "unknown-figure" in mpctl(*read, "--explain", "two-nodes-16-gpus", "--json").issues


def test_tensor_modes_of_a_job_that_is_read_are_compared(mpctl: Mpctl) -> None:
    flags = f"{SHAPE} --vocab-size 1000 --micro-batch-size 4"
    read = ("plan", "--from", "megatron", flags, "--gpus-per-node", 8, "--json")
    said = mpctl(*read, "--compare-tensor-modes", 4, 1)
    assert said.document["schema"] == "mpctl.tensor-modes/1"


def test_a_loss_that_is_read_is_left_to_other_software(mpctl: Mpctl) -> None:
    """Megatron-LM fuses none unless told to; mpctl has no unfused loss, and accelerate no key for it."""
    flags = f"{SHAPE} --vocab-size 1000 --micro-batch-size 1 --global-batch-size 8"
    read = ("--from", "megatron", flags, "--gpus", "8xh100")
    (row,) = mpctl("plan", *read, "--runtimes", "mpctl", "--json").document["runtimes"]
    assert row["not_run"] == [] and row["step_seconds"]
    assert "num_processes: 8" in mpctl("emit", "accelerate", *read).out
    assert "cross" not in mpctl("emit", "megatron", *read).out
    assert "loss_fusion = False" in mpctl("emit", "megatron-bridge", *read).out
    ways = mpctl("compare", *read, "runtime=mpctl", "runtime=amd-megatron", "--json").document
    assert ways["settings"]["training.cross_entropy"] == ["unfused", None, "unfused"]


def test_ranks_that_nobody_names_are_a_warning(mpctl: Mpctl) -> None:
    flags = "--tensor-model-parallel-size 2 --micro-batch-size 1"
    document = mpctl("plan", "--from", "megatron", flags, "--json").document
    assert document["sizes"] == {"tp": 2, "cp": 1, "dp": 1, "pp": 1}
    assert "from-world" in [check["rule"] for check in document["checks"]]


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_is_named_in_the_help_and_has_a_document(mpctl: Mpctl, target: str) -> None:
    assert target in " ".join(mpctl("plan", "--help").out.replace("│", " ").split())
    line = ("plan", "--nodes", 1, "--gpus-per-node", 4, "--model", "tinyllama-1.1b", "--dtype", "bf16")
    document = mpctl(*line, "--emit", target, "--json").document
    assert document["schema"] == "mpctl.emit/1"
    assert document["target"] == target
    assert all(note.split()[0] in document["text"] for note in document["notes"])


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((JOB, "--emit", "accelerate"), "emit-pp"),
        ((JOB, "--emit", "slurm"), "emit-target"),
        (("--from", "colossalai", "--tp 2"), "from-launcher"),
        ((JOB, "--from", "megatron", "--seed 5"), "usage"),
        (("--from", "megatron", " "), "bad-syntax"),
        (("--from", "megatron", f"@{os.devnull}"), "bad-syntax"),
        (("--from", "megatron", "@no-such-file"), "no-such-file"),
        ((JOB, "--emit", "torch", "--explain"), "usage"),
    ],
)
def test_what_cannot_be_emitted_or_read_is_refused(mpctl: Mpctl, arguments: tuple[str, ...], rule: str) -> None:
    assert_refused(mpctl("plan", *arguments), wants_json=False)
    said = mpctl("plan", *arguments, "--json")
    assert_refused(said, wants_json=True)
    assert rule in said.issues


def test_a_plan_that_does_not_fit_is_still_emitted_and_exits_3(mpctl: Mpctl) -> None:
    small = ("--set", "cluster.device.memory_bytes=1000000000")
    said = mpctl("plan", JOB, *small, "--emit", "megatron")
    assert said.code == 3
    assert "# does not fit: " in said.out


H100 = (
    "plan",
    "--cluster",
    "dgx-h100",
    "--nodes",
    1,
    "--model",
    "llama-3-8b",
    "--tp",
    2,
    "--sequence-parallel",
    "--zero",
    2,
    "--global-batch-size",
    64,
)


@pytest.mark.parametrize(("target", "runtime"), [("megatron", "megatron-core"), ("torchtitan", "torchtitan")])
def test_what_is_emitted_is_planned_for_the_launcher_s_runtime(mpctl: Mpctl, target: str, runtime: str) -> None:
    emitted = mpctl(*H100, "--emit", target).out
    assert emitted == mpctl(*H100, "--emit", target, "--runtime", runtime).out
    assert f"# planned for runtime {runtime}; a step takes " in emitted
    assert mpctl(*H100, "--runtime", runtime, "--json").document["verdict"] in emitted


def test_another_runtime_that_the_job_names_is_told(mpctl: Mpctl) -> None:
    notes = mpctl(*H100, "--emit", "megatron", "--runtime", "mpctl", "--json").document["notes"]
    assert notes[0] == (
        "memory and time are estimated for runtime mpctl, not for Megatron-LM core 0.19: --runtime megatron-core"
    )
    notes = mpctl(*H100, "--no-sequence-parallel", "--emit", "colossalai", "--json").document["notes"]
    assert notes[0].endswith("not for Colossal-AI 0.5, of which there are no figures here")


def test_flags_of_megatron_are_planned_for_the_launcher_that_they_go_on_to(mpctl: Mpctl) -> None:
    read = (
        "plan",
        "--from",
        "megatron",
        "--tensor-model-parallel-size 2 --bf16 --attention-dropout 0 --hidden-dropout 0",
        "--model",
        "llama-3-8b",
        "--cluster",
        "dgx-h100",
        "--nodes",
        1,
        "--zero",
        2,
    )
    assert "# planned for runtime torchtitan; " in mpctl(*read, "--emit", "torchtitan").out
    kept = mpctl(*read, "--emit", "torchtitan", "--runtime", "megatron-core").out
    assert "estimated for runtime megatron-core, not for torchtitan" in " ".join(kept.split())


SHOWN = [pair for page in readme.LAUNCHERS for pair in readme.SHOWN.findall(page.read_text("utf-8"))]


@pytest.mark.parametrize(("command", "block"), SHOWN, ids=[command[-30:] for command, _ in SHOWN])
def test_what_is_shown_is_what_is_printed(mpctl: Mpctl, command: str, block: str) -> None:
    """To the last figure, as on the pages of tests/cli/test_readme.py."""
    said = mpctl(*shlex.split(command)[1:])
    assert "".join(f"{line.rstrip()}\n" for line in (said.out or said.err).splitlines()) == block, "make readme"


def test_every_target_is_shown() -> None:
    assert {command.split()[-1] for command, _ in SHOWN} == {*TARGETS}
