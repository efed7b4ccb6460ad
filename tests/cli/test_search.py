"""`mpctl search`, `plan --batch`, `--compare` and `--explain` from the outside."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run
from mpctl.cli.options import command_line
from mpctl.core.units import bytes_text
from mpctl.plan.planning.difference import WIDE_ERROR
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.load import load_job, parse_settings
from tests.cli.calls import Mpctl, assert_refused, spawn
from tests.started import started

SMALL = (
    "--cluster",
    "selene",
    "--nodes",
    1,
    "--model",
    "gpt2-medium",
    "--global-batch-size",
    32,
    "--dtype",
    "bf16",
    "--cp",
    1,
    "--zero",
    1,
)
LINE = {
    "id": "one",
    "cluster": {"preset": "selene", "nodes": 1},
    "model": "gpt2",
    "parallel": {"tp": 2},
    "training": {"dtype": "bf16", "global_batch_size": 32},
}


# ---------------------------------------------------------------- search


def test_a_search_as_json(mpctl: Mpctl) -> None:
    said = mpctl("search", *SMALL, "--top", 3, "--json")
    assert said.code == 0 and said.err == ""
    found = said.document
    assert found["schema"] == "mpctl.search/3" and found["is_complete"]
    rows, fastest, suggested = found["rows"], found["fastest"], found["suggested"]
    seconds = [entry["step_seconds"] for entry in rows]
    assert len(seconds) == 3 + (suggested not in rows[:3]) and seconds == sorted(seconds)
    assert fastest == rows[0] and suggested in rows and found["sort"] == "time"
    assert suggested["step_seconds"] <= seconds[0] * (1 + WIDE_ERROR)  # the band is wide
    assert bool(found["suggestion"]) == (suggested != fastest)
    assert [bool(row["difference"]) for row in rows] == [False, *[True] * (len(rows) - 1)] and found["front"]
    assert found["own"] is None  # nobody gave a layout: flags leave it to the search
    assert fastest["settings"]["cp"] == 1
    assert sum(fastest["breakdown"].values()) == pytest.approx(fastest["step_seconds"])


def test_its_lines_lead_to_its_layouts(mpctl: Mpctl) -> None:
    for entry in mpctl("search", *SMALL, "--top", 3, "--json").document["rows"]:
        program, verb, *typed = shlex.split(entry["command"])
        assert (program, verb) == ("mpctl", "launch")
        said = mpctl("plan", *typed, "--json", "--groups", "none")
        assert said.code == 0, said.err
        assert said.document["time"]["step_seconds"] == entry["step_seconds"]


def test_no_launch_is_offered_that_launch_refuses(mpctl: Mpctl) -> None:
    """Each line plans what this version does not launch, and a warning says why."""
    given = ("--cluster", "dgx-b200", "--nodes", 1, "--model", "gpt2", "--dtype", "mxfp8")
    document = mpctl("search", *given, "--max-pp", 2, "--json").document
    assert [w["rule"] for w in document["warnings"]] == ["job-launched"]
    assert all(entry["command"].startswith("mpctl plan ") for entry in document["rows"])


def test_a_table_says_why_and_a_page_shows_it(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "best.html"
    said = mpctl("search", *SMALL, "--top", 2, "--price", 2, "--html", page)
    assert said.code == 0
    assert "Step time against memory" in page.read_text("utf-8")
    for words in ("Layouts, fastest first", "mpctl launch --nodes 1 --cluster selene", "price/Gtok"):
        assert words in said.out


def test_by_number_of_gpus_and_cost(mpctl: Mpctl, tmp_path: Path) -> None:
    file = tmp_path / "found.csv"
    asked = ("--gpus", "1,2,8", "--objective", "cost", "--price", 2.5, "--csv", file)
    kept = ("--top", 1, "--fix", "recompute=none", "--max-pp", 1)
    said = mpctl("search", *SMALL, *asked, *kept, "--json")
    assert said.code == 0, said.err
    found = said.document
    by_gpus = found["by_gpus"]
    assert [entry["gpus"] for entry in by_gpus] == [1, 2, 8]
    assert {entry["settings"]["pp"] for entry in by_gpus} == {1}
    hours = [entry["gpu_hours_per_billion_tokens"] for entry in by_gpus]
    assert found["fastest"]["gpu_hours_per_billion_tokens"] == min(hours)
    for entry in by_gpus:
        product = 2.5 * entry["gpu_hours_per_billion_tokens"]
        assert entry["price_per_billion_tokens"] == pytest.approx(product)
    plan = load_plan(None, _overrides(by_gpus[1]["command"]))
    assert plan.job.world_size == 2
    rows = list(csv.DictReader(file.open()))
    assert [row["list"] for row in rows].count("by_gpus") == 3
    assert {row["recompute"] for row in rows} == {"none"}


def _overrides(command: str) -> dict[str, Any]:
    """Of a printed line, by the settings its flags name."""
    from mpctl.cli.options import FLAGS

    by_name = {flag.option: flag for flag in FLAGS}
    found: dict[str, Any] = {}
    words = iter(shlex.split(command)[2:])
    for word in words:
        flag = by_name.get(word)
        if flag is not None:
            found[flag.setting] = flag.type(next(words))
    return found


def test_other_numbers_of_gpus_are_told_beside_the_jobs_own(mpctl: Mpctl, tmp_path: Path) -> None:
    """The fastest is on the job's own GPUs if these are asked for too, and its row in the table of
    numbers is the same answer; each other number has a line to type."""
    asked = ("search", *SMALL, "--fix", "tp=1", "--max-pp", 1, "--top", 1)
    alone = mpctl(*asked, "--json").document["fastest"]
    found = mpctl(*asked, "--gpus", "4,8,16", "--json").document
    assert found["fastest"] == alone
    assert [entry["gpus"] for entry in found["by_gpus"]] == [4, 8, 16]
    assert found["by_gpus"][1] == alone
    page = tmp_path / "found.html"
    said = mpctl(*asked, "--gpus", "4,8,16", "--html", page).out
    assert all(html.escape(e["command"]) in page.read_text("utf-8") for e in found["by_gpus"])
    assert said.startswith("gpt2-medium on 8 GPUs ")
    lines = said.partition("\nReady to type, by number of GPUs\n")[2].strip().splitlines()
    assert [line.partition("  # ")[2] for line in lines] == ["4 GPUs", "16 GPUs"]
    for line, gpus in zip(lines, (4, 16), strict=True):
        plan = load_plan(None, _overrides(line.partition("  # ")[0]))
        assert plan.job.world_size == gpus


def test_where_the_jobs_own_gpus_are_too_few_the_largest_number_answers(mpctl: Mpctl) -> None:
    job = (
        "--cluster",
        "dgx-h100",
        "--nodes",
        1,
        "--model",
        "llama-3-70b",
        "--runtime",
        "megatron-core",
        "--global-batch-size",
        64,
        "--micro-batch-size",
        1,
    )
    kept = ("--cp", 1, "--fix", "tp=8", "--fix", "vpp=1", "--recompute", "full", "--gpus", 64)
    found = mpctl("search", *job, *kept, "--top", 1, "--json").document
    assert found["fastest"]["gpus"] == 64
    assert found["by_gpus"] == []  # nor is the job's own number of GPUs, on which nothing fits, searched


def test_the_job_as_given_is_shown_where_it_gives_a_layout(mpctl: Mpctl, tmp_path: Path) -> None:
    job = 'cluster = "this-machine"\nmodel = "demo-gpt"\n'
    (tmp_path / "open.toml").write_text(job)
    (tmp_path / "given.toml").write_text(f'{job}[training]\nrecompute = "full"\n')
    asked = ("--fix", "tp=1", "--fix", "micro_batch_size=1", "--top", 1)
    assert "as given" not in mpctl("search", tmp_path / "open.toml", *asked).out
    out = mpctl("search", tmp_path / "given.toml", *asked).out
    assert "the job as given (recompute full" in out
    assert "as given" not in mpctl("search", tmp_path / "given.toml", *asked, "--recompute", "none").out


@pytest.mark.parametrize("wants_json", [False, True])
@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["search"], "no-model"),
        (["search", "--model", "gpt2"], "no-device"),
        (["search", *SMALL, "--fix", "pq=8"], "unknown-key"),
        (["search", *SMALL, "--fix", "pp"], "bad-set"),
        (["search", *SMALL, "--fix", "pp=eight"], "bad-value"),
        (["search", *SMALL, "--fix", "pp=5"], "no-layout"),
        (["search", *SMALL, "--gpus", "3,x"], "bad-gpus"),
        (["search", *SMALL, "--gpus", "12"], "gpus-fill-nodes"),
        (["search", *SMALL, "--set", "parallel.last_stage_layers=3"], "cut-is-searched"),
        (["search", *SMALL, "--dtype", "fp8"], "no-step-time"),
        (["search", *SMALL, "--csv", "/nowhere/x.csv", "--top", "1"], "unwritable"),
        (["plan", "--batch", "/nowhere.jsonl"], "no-such-file"),
        (["plan", "demo", "--batch", "-"], "usage"),
        (["plan", "demo", "demo"], "usage"),
        (["plan", "--compare", "demo"], "usage"),
        (["plan", "--compare", "demo", "tq=2"], "unknown-key"),
        (["plan", "--compare", "demo", "tp=3"], "tp-divides-heads"),
        (["plan", "demo", "--compare-tensor-modes", "four"], "bad-tp"),
        (["plan", "demo", "--compare-tensor-modes", "6"], "tensor-mode"),
        (["plan", "demo", "--compare-tensor-modes", "--explain"], "usage"),
        (["plan", "--tp", "4", "--compare-tensor-modes"], "no-model"),
        (["plan", "demo", "--explain", "comunication.phi"], "unknown-figure"),
        (["plan", "--tp", "2", "--explain"], "nothing-to-explain"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_refused_in_words(mpctl: Mpctl, arguments: list[object], rule: str, wants_json: bool) -> None:
    said = mpctl(*arguments, *(["--json"] if wants_json else []))
    assert_refused(said, wants_json=wants_json)
    assert rule in (said.issues if wants_json else said.err)


def test_a_search_where_nothing_fits_exits_3(mpctl: Mpctl) -> None:
    said = mpctl("search", *SMALL, "--set", "cluster.device.memory_bytes=1000000000", "--json")
    assert (said.code, set(said.issues)) == (3, {"nothing-fits"})
    assert re.match(r"none of [\d,]+ legal layouts fits the memory of 8 GPUs", said.issues["nothing-fits"]["message"])


def test_where_nothing_fits_what_would_is_told(mpctl: Mpctl) -> None:
    """Less headroom that is enough, what was fixed, and the GPUs that the states alone need."""
    given = ("--model", "llama-3-8b", "--global-batch-size", 32, "--max-pp", 1, "--tp", 1)
    node = ("--cluster", "dgx-h200", "--nodes", 1, "--cp", 1, "--json")
    hint = mpctl("search", *given, *node, "--headroom", 80).issues["nothing-fits"]["hint"]
    assert (found := re.match(r"with cluster.headroom (\d+) one fits: ", hint))
    assert "change what is fixed: tp 1, cp 1, pp up to 1" in hint
    assert mpctl("search", *given, *node, "--headroom", found[1]).code == 0
    one = ("--model", "llama-3-70b", "--cluster", "dgx-h200", "--nodes", 1, "--groups", "none")
    said = mpctl("plan", *one).out
    least = re.search(r"need (\d+) GPUs or more", " ".join(said.split()))
    assert least and 8 < int(least[1]) <= 10  # 18 bytes of 70.6B over 133 GiB less context: 9 to 10


def test_a_fixed_setting_that_leaves_no_layout_is_named(mpctl: Mpctl) -> None:
    said = mpctl("search", "demo", "--fix", "tensor_mode=2d", "--fix", "pp=1", "--json")
    assert said.issues["no-layout"]["message"] == (
        "no legal layout fills 2 GPUs with what is fixed; without tensor_mode 2d there is one"
    )


@pytest.mark.parametrize("counts", ["4", pytest.param("4,8", marks=pytest.mark.slow)])
def test_a_search_where_nothing_can_be_timed_names_the_link(mpctl: Mpctl, counts: str) -> None:
    for json_flag in ([], ["--json"]):
        said = mpctl("search", "demo", "--objective", "cost", "--gpus", counts, *json_flag)
        assert said.code == 2 and "nothing-fits" not in said.err + said.out
    issue = said.issues["no-step-time"]
    assert issue["message"] == ("no layout of 4 GPUs can be timed: cluster.inter_node has no bandwidth")
    assert f"--gpus-per-node {counts[-1]}" in issue["hint"]
    ways = (("--gpus-per-node", 4), ("--set", "cluster.inter_node.bandwidth=1e9"))
    for way in ways:
        assert mpctl("search", "demo", "--gpus", 4, "--fix", "tp=1", *way).code == 0


def test_a_number_of_gpus_that_cannot_be_timed_says_so_in_its_row(mpctl: Mpctl) -> None:
    asked = ("search", "demo", "--gpus", "2,4", "--fix", "tp=1", "--top", 1)
    said, why = mpctl(*asked), "cannot be timed: cluster.inter_node has no bandwidth"
    text = " ".join(said.out.split())  # the table wraps
    assert said.code == 0 and why in text and "nothing fits" not in text
    row = mpctl(*asked, "--json").document["by_gpus"][1]
    assert row == {"gpus": 4, "settings": None, "reason": why}
    small = ("--set", "cluster.device.memory_bytes=1000000")  # then memory is the reason
    assert set(mpctl(*asked, *small, "--json").issues) == {"nothing-fits"}


@pytest.mark.parametrize(
    "command",
    [["presets"], ["plan", "demo"], ["plan", "demo", "--json"], ["plan", "--emit", "torch"], ["plan", "--help"]],
    ids=" ".join,
)
@pytest.mark.quick(2)
def test_a_reader_that_has_enough_is_no_failure(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # what is written meets a broken pipe for certain
    said = subprocess.run(
        [sys.executable, "-m", "mpctl", *command], stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False
    )
    os.close(writer)
    assert (said.returncode, said.stderr) == (0, b"")


def test_a_job_that_does_not_fit_is_not_called_faster(mpctl: Mpctl, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text('cluster = { preset = "selene", nodes = 1 }\nmodel = "gpt2-medium"\n[parallel]\ntp = 1\npp = 1\n')
    job = (
        "search",
        file,
        "--cp",
        1,
        "--global-batch-size",
        32,
        "--dtype",
        "bf16",
        "--zero",
        1,
        "--micro-batch-size",
        4,
        "--json",
    )
    bound = mpctl(*job, "--recompute", "none").document["own"]["peak_bytes"] - 1
    found = mpctl(*job, "--set", f"cluster.device.memory_bytes={bound}").document
    assert found["own"]["fits"] is False
    assert "does not fit: " in found["own_reason"]
    assert "faster" not in found["own_reason"] and "slower" not in found["own_reason"]


def test_the_header_says_what_is_trained_and_what_is_searched(mpctl: Mpctl) -> None:
    out = mpctl("search", *SMALL, "--top", 1).out
    text = " ".join(out.split())
    assert out.splitlines()[0] == "gpt2-medium on 8 GPUs of NVIDIA A100-SXM4-80GB: most tokens a second"
    assert not any(line.endswith(" ") for line in out.splitlines())
    assert re.search(r" fastest .* a step, fits: .* free \(headroom 5 %\) suggested ", text)
    for line in (
        " left out for memory (headroom 5 %)",
        "dtype bf16, sequence 1,024, global batch 32, micro batch any, recompute any, ZeRO 1, runtime mpctl",
        "searched: tp, dp, pp, vpp, schedule, stage balance, micro batch, recompute, sequence "
        "parallelism, tensor mode, tensor depth",
    ):
        assert line in text
    kept = [word for key in ("tp", "pp", "micro_batch_size") for word in ("--fix", f"{key}=1")]
    lines = mpctl("search", *SMALL, *kept, "--dtype", "auto").out.splitlines()
    assert any(
        line.startswith("dtype bf16 (auto), sequence 1,024, global batch 32, micro batch 1, recompute any")
        for line in lines
    )
    assert "searched: recompute" in lines


def test_headroom_leaves_layouts_out(mpctl: Mpctl) -> None:
    asked = (
        "search",
        *SMALL,
        "--micro-batch-size",
        4,
        "--set",
        "cluster.device.memory_bytes=8 GiB",
        "--top",
        50,
        "--json",
    )
    whole, less = (mpctl(*asked, "--headroom", share).document for share in (0, 50))
    assert max(entry["peak_bytes"] for entry in whole["rows"]) > 4 * 2**30
    assert all(entry["peak_bytes"] <= 4 * 2**30 and entry["fits"] for entry in less["rows"])
    assert less["headroom_percent"] == 50 and less["too_large"] > 0


def test_the_page_of_a_search_begins_with_its_answer(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "found.html"
    asked = ("search", *SMALL, "--top", 2, "--fix", "tp=2", "--html", page)
    said = mpctl(*asked)
    text = page.read_text("utf-8")
    first = text.index('id="search"')
    assert first < text.index("Layouts, fastest first") < text.index('id="layout"')
    for line in (line.strip() for line in said.out.splitlines() if "slower" in line):
        assert html.escape(line) in text
    again = html.unescape(text.partition("This page again:")[2]).partition("<code>")[2]
    page.unlink()
    assert mpctl(*shlex.split(again.partition("</code>")[0])[1:]).code == 0
    assert page.read_text("utf-8") == text


def test_a_command_line_is_read_as_it_was_meant() -> None:
    settings = {
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "training.dtype": "bf16",
        "data.corpus": ["a b", "c"],
        "parallel.schedule": "zero-bubble",
    }
    words = shlex.split(command_line("plan", "demo", settings))
    assert words[:5] == ["mpctl", "plan", "demo", "--tp", "2"]
    assert "--sequence-parallel" in words
    sets = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    others = ("data.corpus", "parallel.schedule")
    assert parse_settings(sets) == {key: settings[key] for key in others}


# ---------------------------------------------------------------- batch


def test_a_batch_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    file = tmp_path / "jobs.jsonl"
    file.write_text(json.dumps(LINE) + "\n{\n" + json.dumps({**LINE, "id": "two"}) + "\n")
    said = spawn("plan", "--batch", file)
    assert said.code == 0 and said.err == ""
    answers = [json.loads(line) for line in said.out.splitlines()]
    assert [answer["id"] for answer in answers] == ["one", None, "two"]
    assert answers[0]["step_seconds"] == answers[2]["step_seconds"] > 0
    assert answers[1]["issues"][0]["rule"] == "bad-syntax"
    piped = subprocess.run(
        [sys.executable, "-m", "mpctl", "plan", "--batch", "-"],
        input=file.read_bytes(),
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert piped.stdout.decode() == said.out


def test_a_batch_answers_each_line_when_it_comes_and_ends_on_ctrl_c() -> None:
    with started(
        [sys.executable, "-m", "mpctl", "plan", "--batch", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        for name in ("a", "b"):
            process.stdin.write(json.dumps({**LINE, "id": name}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == name
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert b"Traceback" not in process.stderr.read()


# ---------------------------------------------------------------- compare, explain


def test_plans_side_by_side(mpctl: Mpctl) -> None:
    said = mpctl("plan", "--compare", "demo", "tp=1,dp=2", "demo-llama,parallel.tp=1", "--json")
    assert said.code == 0, said.err
    found = said.document
    assert found["settings"]["parallel.tp"] == [2, 1, 1]
    assert found["settings"]["parallel.dp"] == [1, 2, 2]
    assert found["settings"]["model.activation"][0] != found["settings"]["model.activation"][2]
    assert "training.steps" not in found["settings"]
    plan = load_plan("demo", {"parallel.tp": 1, "parallel.dp": 2})
    assert plan.estimate is not None
    assert found["figures"][1]["step_seconds"] == plan.estimate.step_seconds
    assert found["figures"][1]["bytes.tp"] == 0 < found["figures"][0]["bytes.tp"]
    table = mpctl("plan", "--compare", "demo", "tp=1,dp=2").out
    assert "≠ 1" in table and "%" in table


def test_a_comparison_says_what_is_trained_and_what_fits(mpctl: Mpctl) -> None:
    jobs = ("plan", "--compare", "gpt3-175b-1024", "micro_batch_size=64", "vpp=6")
    found = mpctl(*jobs, "--json").document
    assert found["fits"] == [True, False, True]
    assert [own["dtype"] for own in found["training"]] == ["fp16"] * 3
    rows = {line[:20].strip(): line[20:].split() for line in mpctl(*jobs).out.splitlines()}
    assert rows["fits"] == ["yes", "no", "yes"]
    assert rows["dtype"] == ["fp16"] * 3
    assert rows["micro batch"] == ["1", "≠", "64", "1"]
    assert rows["global batch"] == ["1536"] * 3
    assert {"step time", "on device", "time: tp", "sent by a rank: tp"} <= {*rows}


def test_a_comparison_gives_what_a_rank_sends_as_that_of_tensor_modes(mpctl: Mpctl) -> None:
    job = ("plan", "demo", "--tp", "4", "--gpus-per-node", "4")
    figures = mpctl(*job, "--compare", "tensor_mode=2d", "--json").document["figures"]
    modes = mpctl(*job, "--compare-tensor-modes", "--json").document["modes"][:2]
    sent = [own["sent_bytes.tp"] for own in figures]
    assert sent == [entry["step"]["sent_bytes"] for entry in modes]
    assert sent[0] == figures[0]["bytes.tp"] * 2 * 3 / 4  # an all-reduce over 4 ranks
    words = mpctl(*job, "--compare", "tensor_mode=2d").out
    assert bytes_text(sent[1]) in words and bytes_text(figures[1]["bytes.tp"]) not in words


def test_a_comparison_counts_what_a_stage_hands_on_whole(mpctl: Mpctl) -> None:
    found = mpctl("plan", "demo", "--compare", "tp=1,pp=2", "--json").document["figures"][1]
    hidden = 2 * 4 * 2**20  # of two micro batches; 8 bytes are of the gradient norm
    assert (found["sent_bytes.pp"], found["bytes.pp"]) == (hidden + 8, 2 * (hidden + 8))


def test_a_comparison_counts_gradients_over_all_replicas(mpctl: Mpctl) -> None:
    """Of dp 2 x cp 2 a ring of 4 sends 3/4 of each message, and of the gradient norm's 8 bytes,
    which are all-reduced, twice that."""
    job = ("plan", "demo", "--tp", "1", "--cp", "2", "--gpus-per-node", "4")
    found = mpctl(*job, "--compare", "zero=1", "--json").document["figures"][1]
    assert found["sent_bytes.dp_cp"] == (found["bytes.dp_cp"] + 8) * 3 / 4 > 0
    assert "bytes.dp" not in found


def test_tensor_modes_side_by_side(mpctl: Mpctl) -> None:
    asked = ("plan", "demo", "--gpus-per-node", "8", "--compare-tensor-modes", "4", "8")
    found = mpctl(*asked, "--json").document
    able = [(entry["tp"], entry["mode"]) for entry in found["modes"] if entry["layer"]]
    assert able == [(4, "1d"), (4, "2d"), (8, "1d"), (8, "2.5d"), (8, "3d")]
    assert "one layer of 2.5d, which is 2d" in " ".join(mpctl(*asked).out.split())
    said = mpctl(*asked)
    assert said.code == 0, said.err
    words = said.out
    assert "3(q-1)(d+1)/dq" in words and "6(l-1)/l^3" in words and "2(P-1)" in words
    assert "demo on tp 4" in words and "demo on tp 8" in words and "2.5d, depth 2" in words
    assert "tp 8 in 2d: tensor_mode 2d needs" in words and "→ use tp 4" in words


def test_a_comparison_warns_as_the_plans_do(mpctl: Mpctl) -> None:
    """A layout that its runtime cannot run is marked, and the warnings are those of `plan`."""
    job = ("gpt3-175b-1024", "recompute=selective")
    alone = mpctl("plan", job[0], "--set", job[1], "--groups", "none", "--json").document["checks"]
    warned = [{k: c[k] for k in c if k != "status"} for c in alone if c["status"] == "warning"]
    assert "runtime-runs" in [warning["rule"] for warning in warned]
    document = mpctl("plan", "--compare", *job, "--json").document
    assert document["warnings"] == [[], warned] and document["runs"] == [True, False]
    said = mpctl("plan", "--compare", *job).out
    assert "! no, planned as if" in said
    assert "recompute=selective: runtime-runs: Megatron-LM of 2021 does not run" in said
    assert "its runtime runs it" not in mpctl("plan", "--compare", job[0], "vpp=6").out


def test_flags_hold_for_all_that_is_compared(mpctl: Mpctl) -> None:
    said = mpctl("plan", "--compare", "demo", "tp=1,dp=2", "--micro-batch-size", 2, "--json")
    assert said.code == 0 and "training.micro_batch_size" not in said.document["settings"]


def test_figures_with_their_formulas(mpctl: Mpctl) -> None:
    job = load_job("two-nodes-16-gpus")
    assert job.model is not None
    whole = mpctl("plan", "two-nodes-16-gpus", "--explain", "--json").document["figures"]
    names = [figure["name"] for figure in whole]
    assert len(set(names)) == len(names) and {n.split(".")[0] for n in names} >= {"communication"}
    one = mpctl("plan", "two-nodes-16-gpus", "--explain", "communication.phi", "--json").document
    (phi,) = one["figures"]
    sizes = (job.training.micro_batch_size, job.model.seq_length, job.model.hidden)
    assert phi["numbers"].startswith(" x ".join(map(str, sizes)))
    below = mpctl("plan", "two-nodes-16-gpus", "--explain", "communication.stage-1", "--json")
    own = [figure["name"] for figure in below.document["figures"]]
    assert own == [name for name in names if name.startswith("communication.stage-1.")]
    assert "communication.stage-1.tp = " in mpctl("plan", "two-nodes-16-gpus", "--explain").out
    near = mpctl("plan", "two-nodes-16-gpus", "--explain", "comunication.phi")
    assert near.code == 2 and "communication.phi" in near.err


def test_a_figure_of_a_job_of_flags_alone(mpctl: Mpctl) -> None:
    flags = ("--model", "gpt2", "--cluster", "selene", "--nodes", 1)
    assert mpctl("plan", *flags, "--explain", "time.mfu").out.strip()
    assert "unknown-figure" in mpctl("plan", *flags, "--explain", "mfu").err


def test_a_figure_s_numbers_give_its_value(mpctl: Mpctl) -> None:
    """Those that are plain arithmetic are worked out again from their text."""
    said = mpctl("plan", "two-nodes-16-gpus", "--explain", "communication", "--json")
    checked = 0
    for figure in said.document["figures"]:
        words = figure["numbers"].split()
        if all(word in "x/" or word.isdigit() for word in words):
            value, operator = float(words[0]), ""
            for word in words[1:]:
                if word.isdigit():
                    value = value * int(word) if operator == "x" else value / int(word)
                operator = word
            assert value == pytest.approx(figure["value"]), figure
            checked += 1
    assert checked > 10


def test_none_of_it_is_imported_by_a_plain_plan() -> None:
    probe = (
        "import sys\nfrom mpctl.cli.app import run\n"
        "run(['plan', 'two-nodes-16-gpus', '--json', '--groups', 'none'])\n"
        "found = [n for n in sys.modules if n.startswith(('mpctl.plan.search', 'mpctl.plan.batch', "
        "'mpctl.plan.planning.compare', 'mpctl.plan.planning.explain'))]\nprint(found, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_search_is_a_command() -> None:
    assert run(["search", "--help"]) == 0
