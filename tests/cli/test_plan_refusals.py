"""What `mpctl plan` refuses, with a way out for everything."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.cli.calls import Mpctl, assert_refused
from tests.cli.plan_calls import document

STRADDLING = ("plan", "--nodes", 2, "--gpus-per-node", 4, "--tp", 8)


def test_tp_groups_that_leave_their_node_are_named(mpctl: Mpctl) -> None:
    said = mpctl(*STRADDLING, "--json")
    assert said.code == 2
    issue = said.issues["tp-within-nvlink-domain"]
    assert issue["where"] == "parallel.tp"
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in issue["message"]
    assert "use tp 1, 2 or 4" in issue["hint"]
    spoken = mpctl(*STRADDLING)
    assert_refused(spoken, wants_json=False)
    for part in issue.values():
        assert part in spoken.err


def test_and_may_be_allowed(mpctl: Mpctl) -> None:
    plan = document(mpctl(*STRADDLING, "--allow-tp-across-nodes", "--json"))
    (check,) = [check for check in plan["checks"] if check["rule"] == "tp-within-nvlink-domain"]
    assert check["status"] == "warning"
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in check["message"]
    assert "! tp-within-nvlink-domain: " in mpctl(*STRADDLING, "--allow-tp-across-nodes").out


def test_a_cluster_of_one_node_names_those_that_have_a_network(mpctl: Mpctl) -> None:
    """In a plan and in a search: those of the same device, as many of it in a node."""
    job = ("--cluster", "b200-node", "--nodes", 2, "--model", "gpt2", "--global-batch-size", 16)
    said = " ".join(mpctl("plan", *job).out.split())
    wanted = "--cluster dgx-b200 or gcp-a4-b200"
    assert "cluster.inter_node has no bandwidth, and dp_cp needs it → set cluster.inter_n" in said
    assert wanted in said
    refused = mpctl("search", *job, "--max-pp", 1, "--json").issues["no-step-time"]
    assert wanted in refused["hint"]
    alone = mpctl("search", "demo", "--nodes", 2, "--json").issues["no-step-time"]
    assert "--cluster" not in alone["hint"]


@pytest.mark.parametrize(
    ("arguments", "rule", "where", "near"),
    [
        (("--micro-batchsize", "2"), "usage", "--micro-batchsize", "--micro-batch-size"),
        (("--tp", "two"), "usage", "", "--tp"),
        (("--tp",), "usage", "", "--tp"),
        (("demo", "extra"), "usage", "", "extra"),
        (("--set", "parallel.tpp=2"), "unknown-key", "parallel.tpp", "parallel.tp"),
        (("--set", "parallel.tp=2.5"), "bad-value", "parallel.tp", "2.5"),
        (("--set", "training.dtype=bf17"), "bad-value", "training.dtype", "bf16"),
        (("--tp", "0"), "bad-value", "parallel.tp", "0"),
        (("--zero", "4"), "bad-value", "parallel.zero", "3"),
        (("--set", "parallel.tp"), "bad-set", "--set", "KEY=VALUE"),
        (("--model", "gtp2"), "unknown-preset", "model", "gpt2"),
        (("--cluster", "selen"), "unknown-preset", "cluster", "selene"),
        (("dem",), "no-such-job", "JOB", "demo"),
        (("nowhere.toml",), "no-such-file", "nowhere.toml", "No such file"),
        (("--nodes", "2", "--gpus-per-node", "8", "--tp", "3"), "world-size", "parallel", "16"),
        (("--order", "pp-tp-xp"), "axis-order", "parallel.order", "xp"),
    ],
)
def test_bad_input_names_the_setting(
    mpctl: Mpctl, arguments: tuple[str, ...], rule: str, where: str, near: str
) -> None:
    said = mpctl("plan", "--json", *arguments)
    assert_refused(said, wants_json=True)
    issue = said.issues[rule]
    assert where in issue["where"]
    assert near in "".join(issue.values())


GRID = ("--model", "gpt2", "--tp", 4, "--tensor-mode", "2d", "--micro-batch-size", 2)


@pytest.mark.parametrize(
    ("arguments", "rule", "where", "near"),
    [
        (("--tp", 6), "tensor-mode", "parallel.tp", "use tp 4; or tp 9 with micro batch 3"),
        (("--tp", 8, "--tensor-mode", "2.5d", "--tensor-depth", 1), "tensor-mode", "parallel.tp", "tensor_depth 2"),
        (("--tp", 4, "--tensor-mode", "3d"), "tensor-mode", "parallel.tp", "use tp 8 with micro batch 4"),
        (("--micro-batch-size", 3), "tensor-mode-samples", "training.micro_batch_size", "use micro batch 2, 4 or 6"),
        (
            ("--set", "model.heads=9", "--set", "model.hidden=720"),
            "tp-divides-heads",
            "parallel.tp",
            "cuts attention heads into 2, and 2 does not divide 9",
        ),
        (("--set", "model.kv_heads=3"), "tp-divides-kv-heads", "parallel.tp", "does not divide 3"),
        (("--set", "model.ffn=3071"), "tp-divides-ffn", "parallel.tp", "does not divide 3071"),
        (("--sequence-parallel",), "tensor-mode-sequence", "parallel.sequence_parallel", "--no-sequence-parallel"),
        (("--cp", 2), "tensor-mode-context", "parallel.cp", "use cp 1"),
        (
            ("--pp", 2, "--set", "parallel.schedule=zero-bubble"),
            "tensor-mode-schedule",
            "parallel.schedule",
            "use 1f1b or gpipe",
        ),
        (
            ("--recompute", "full", "--set", "training.partition_activations=true"),
            "tensor-mode-partition",
            "training.partition_activations",
            "false",
        ),
        (("--set", 'training.freeze=["embedding.*"]'), "tensor-mode-freeze", "training.freeze", "tensor_mode 1d"),
        (("--model", "bert-base"), "tensor-mode-family", "parallel.tensor_mode", "family gpt"),
        (("--tensor-mode", "4d"), "bad-value", "parallel.tensor_mode", "2.5d"),
        (("--tensor-mode", "2.5d", "--tensor-depth", 0), "bad-value", "parallel.tensor_depth", "0"),
    ],
)
def test_a_tensor_mode_that_cannot_run_is_refused_with_what_can(
    mpctl: Mpctl, arguments: tuple[object, ...], rule: str, where: str, near: str
) -> None:
    said = mpctl("plan", "--json", *GRID, *arguments)
    assert_refused(said, wants_json=True)
    issue = said.issues[rule]
    assert issue["where"] == where
    assert near in "".join(issue.values())


def test_the_grid_of_these_refusals_is_legal(mpctl: Mpctl) -> None:
    assert mpctl("plan", *GRID).code == 0


def test_ranks_on_cpu_cores_are_no_gpus(mpctl: Mpctl) -> None:
    assert "= 3 does not divide 1 node x 2 ranks = 2 ranks" in mpctl("plan", "demo", "--tp", 3).err


def test_so_it_is_in_a_batch_a_comparison_and_a_search(mpctl: Mpctl, tmp_path: Path) -> None:
    jobs = tmp_path / "jobs.jsonl"
    parallel = {"tp": 6, "tensor_mode": "2d"}
    jobs.write_text(json.dumps({"model": "gpt2", "parallel": parallel}))
    said = mpctl("plan", "--batch", jobs)
    assert (said.code, [issue["rule"] for issue in said.document["issues"]]) == (0, ["tensor-mode"])
    compared = mpctl("plan", "demo", "--compare", "demo", "tp=6,tensor_mode=2d")
    assert_refused(compared, wants_json=False)
    assert "[tensor-mode]" in compared.err
    searched = mpctl("search", "demo", "--tp", 6, "--tensor-mode", "2d")
    assert searched.code in (1, 2, 3)
    assert "Traceback" not in searched.err


def test_issues_of_all_kinds_come_together(mpctl: Mpctl) -> None:
    said = mpctl(
        "plan",
        "--json",
        "--model",
        "gpt2",
        "--nodes",
        2,
        "--gpus-per-node",
        8,
        "--tp",
        5,
        "--order",
        "tp-tp",
        "--set",
        "model.ffn=3073",
        "--set",
        "data.max_byte=1",
        "--set",
        "launch.timeout_seconds=soon",
    )
    assert set(said.issues) == {
        "unknown-key",
        "bad-value",
        "world-size",
        "axis-order",
        "tp-divides-heads",
        "tp-divides-kv-heads",
        "tp-divides-ffn",
    }
    assert all(issue["hint"] for rule, issue in said.issues.items() if rule != "bad-value")


@pytest.mark.parametrize("text", ["tp = ", "[parallel\n", "\x00", "a = 1\na = 2\n", "=" * 99])
def test_a_broken_job_file(mpctl: Mpctl, tmp_path: Path, text: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text)
    said = mpctl("plan", job, "--json")
    assert_refused(said, wants_json=True)
    assert set(said.issues) == {"bad-syntax"}


def test_a_job_that_is_not_text_or_not_a_file(mpctl: Mpctl, tmp_path: Path) -> None:
    binary = tmp_path / "job.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    folder = tmp_path / "folder.toml"
    folder.mkdir()
    for path in (binary, folder, tmp_path, "a" * 300, "", "-"):
        assert_refused(mpctl("plan", "--json", path), wants_json=True)


# Each is bad by itself, so any handful of them is.
BAD = [
    ("--tp", "0"),
    ("--tp", "-3"),
    ("--tp", "x"),
    ("--pp", "1.5"),
    ("--cp", ""),
    ("--dp", "nan"),
    ("--nodes", "0"),
    ("--gpus-per-node", "-8"),
    ("--vpp", "0"),
    ("--zero", "9"),
    ("--order", ""),
    ("--order", "tp--pp"),
    ("--order", "tp-tp"),
    ("--order", "[bold]"),
    ("--model", "[/red]"),
    ("--model", "../gpt2"),
    ("--cluster", "nowhere"),
    ("--recompute", "some"),
    ("--dtype", "int4"),
    ("--micro-batch-size", "0"),
    ("--global-batch-size", "-1"),
    ("--nonsense",),
    ("-q",),
    ("--groups", "xx"),
    ("--rank", "9999"),
    ("--set", "=1"),
    ("--set", ""),
    ("--set", "x"),
    ("--set", "a.b.c=1"),
    ("--set", "..=1"),
    ("--set", "parallel=3"),
    ("--set", "parallel.tp.x=3"),
    ("--set", "model={"),
    ("--set", "model=[1,2]"),
    ("--set", "training.seed=-1"),
    ("--set", "training.seed=1979-05-27"),
    ("--set", "training.learning_rate=inf"),
    ("--set", "cluster.device=[]"),
    ("--set", "data.corpus=[1]"),
    ("--set", "cluster.device.peak_flops.int3=1"),
    ("--set", "parallel.sequence_parallel=maybe"),
    ("--set", "model.layers=-1"),
    ("--set", "model.hf_config=/dev/null"),
    ("--set", "\x1b[31m=1"),
]


def test_no_bad_flag_ends_in_a_traceback(mpctl: Mpctl) -> None:
    """Each alone, as text and as JSON in turn, then handfuls of them."""
    for number, fault in enumerate(BAD):
        asked = ("--json",) if number % 2 else ()
        assert_refused(mpctl("plan", "demo", *asked, *fault), wants_json=bool(asked))
    for seed in range(12):
        draw = random.Random(seed)
        flags = [flag for fault in draw.sample(BAD, 4) for flag in fault]
        job = draw.choice([(), ("demo",), ("two-nodes-16-gpus",)])
        asked = ("--json",) if seed % 2 else ()
        assert_refused(mpctl("plan", *job, *asked, *flags), wants_json=bool(asked))
