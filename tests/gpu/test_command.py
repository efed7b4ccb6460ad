"""`python -m benchmarks.gpu` without a device, and the page that it writes with one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from mpctl.train.data.indexed import IndexedDataset

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "benchmarks/results/gpu.md"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure for minutes")
def test_without_a_device_nothing_is_measured_and_the_page_stays() -> None:
    before = PAGE.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1 and "no CUDA device: nothing was measured" in done.stderr
    assert PAGE.read_bytes() == before


def test_the_page_has_each_part_that_is_written_once() -> None:
    text = PAGE.read_text("utf-8")
    parts = re.findall(r"<!-- measured: (\w+) -->\n(.+?)\n<!-- end -->", text, re.S)
    assert [name for name, _ in parts] == ["machine", "training", "goals"]
    assert text.count("<!-- end -->") == 3


def python(*lines: str) -> str:
    """What a program of these lines prints; benchmarks are no part of the tests' own process."""
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def listed(*budgets: int) -> list[dict[str, Any]]:
    """What `--list` prints of budgets in seconds."""
    lines = (f"print(listing({budget}), end=chr(0))" for budget in budgets)
    text = python("from benchmarks.gpu.__main__ import listing", *lines)
    return [json.loads(one) for one in text.split(chr(0))[:-1]]


RISKS = {
    "small, fp32",
    "small, bf16",
    "bf16",
    "fp8",
    "tp slice",
    "dropout",
    "recompute",
    "offload",
    "save",
    "long context",
}


def test_six_minutes_compare_with_plain_torch_and_an_hour_shows_all() -> None:
    short, more, long, two = listed(360, 600, 3600, 120)
    titles = [case["case"] for case in short["cases"]]
    for ours, theirs in (("layer by layer", "masters"), ("compiled", "masters, compiled")):
        place = titles.index(f"gpt-1.5b, mpctl, {ours}")
        # the next, or but for a case of seconds: a visit that is cut has the comparison
        assert f"gpt-1.5b, torch, bf16 with float32 {theirs}" in titles[place + 1 : place + 3]
    assert sum(case["seconds"] for case in short["cases"]) <= 360
    assert {"small, fp32", "small, bf16", "bf16", "fp8", "dropout"} < {case["kind"] for case in short["cases"]}
    assert {case["kind"] for case in more["cases"]} >= RISKS
    assert len(long["cases"]) == long["of"] and long["steps"] > short["steps"]
    order = [case["kind"] for case in long["cases"]]
    first = len(set(order))
    assert len(set(order[:first])) == first > len(RISKS)  # no second before the first of any
    assert order[:first] == list(dict.fromkeys(order))
    tight = [case["kind"] for case in two["cases"]]
    assert tight and len(tight) == len(set(tight))


def test_a_time_out_ends_what_a_process_started() -> None:
    """A grandchild too, and what was printed before is kept."""
    started = "sleep 300 & echo $!; wait"
    command = [sys.executable, "-m", "benchmarks.gpu.processes", "1", "sh", "-c", started]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 124
    stat = Path(f"/proc/{int(done.stdout)}/stat")
    until = time.monotonic() + 30  # a killed process ends when it is scheduled next
    while is_alive(stat) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_alive(stat)


def is_alive(stat: Path) -> bool:
    """Whether a process is neither gone nor dead until its parent reads that."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("reserved", "fails"), [(39.2e9, True), (38.9e9, False)])
def test_offload_has_to_free_half_of_its_plan_of_the_allocators_memory(
    reserved: float, fails: bool, tmp_path: Path
) -> None:
    """Of 40 GB, planned to become 38; that tensors take less says nothing. And GPT 1.5B's MFU by
    hand: 16,384 tokens of 9.779e9 FLOP, or 10.483e9, in 0.3 s, of 989.4e12 and of 700e12 FLOP/s."""
    figures = tmp_path / "figures.json"
    before = {"seconds": 0.3, "bytes": 39e9, "planned_bytes": 39e9, "reserved": 40e9, "planned_reserved": 40e9}
    after = {**before, "bytes": 1e9, "reserved": reserved, "planned_reserved": 38e9}
    cases = [
        {"case": f"gpt-1.5b, mpctl, {name}", "figures": found, "reason": ""}
        for name, found in (
            ("layer by layer", before),
            ("recompute full", before),
            ("recompute full, offloaded", after),
        )
    ]
    peaks = {"sheet": 989.4e12, "product": 700e12}
    figures.write_text(json.dumps({"machine": "", "peaks": peaks, "cases": cases}))
    command = [sys.executable, "-m", "benchmarks.gpu", "--figures", str(figures)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == fails
    assert ("of the allocator's memory, planned" in done.stderr) == fails
    assert "| 54.0% (57.9%) | 76.3% (81.8%) |" in done.stdout
    assert "causal half deducted | 54.0% |" in done.stdout


@pytest.mark.slow
def test_the_script_works_on_small_models(tmp_path: Path) -> None:
    """Ours and a peer, on a CPU where there is no GPU; the tables are printed. What was measured
    before is kept and not measured again."""
    file = tmp_path / "figures.json"
    before = {"case": "llama-8b-tp8, mpctl, compiled", "figures": {"seconds": 0.123}, "reason": ""}
    file.write_text(json.dumps({"machine": "", "peaks": {"sheet": None, "product": 1e12}, "cases": [before]}))
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--only", "llama-8b-tp8 ", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "llama-8b-tp8, torch, bf16 with float32 masters, compiled: " in done.stderr
    assert "llama-8b-tp8, mpctl, compiled: " not in done.stderr
    rows = re.findall(r"^\| llama-8b-tp8 \| (?:mpctl|torch): .* \d[\d,]* \|", done.stdout, re.M)
    assert len(rows) == 4 and "| 123.0 |" in done.stdout
    assert "failed" not in done.stdout
    assert len(json.loads(file.read_text())["cases"]) == 4


@pytest.mark.slow
def test_figures_are_written_after_each_case_and_a_cut_keeps_them(tmp_path: Path) -> None:
    """The second case is where the call is cut."""
    file = tmp_path / "figures.json"
    text = python(
        "import argparse, json; from pathlib import Path",
        "from benchmarks.gpu import __main__ as command; from benchmarks.gpu.cases import *",
        f"file = Path({str(file)!r})",
        "def some(bench, cases, budget):",
        "    for number, case in enumerate(cases):",
        "        yield Outcome(case, {'seconds': 1.0})",
        "        print(len(json.loads(file.read_text())['cases']))",
        "        if number: raise SystemExit",
        "command.outcomes = some",
        "given = argparse.Namespace(tiny=True, tests=False, only='small', json=file)",
        "command.measure(CASES, 60.0, given)",
    )
    assert text.split() == ["1", "2"]
    rows = [row["case"] for row in json.loads(file.read_text())["cases"]]
    assert rows == ["gpt-small, mpctl, fp32", "gpt-small, mpctl, bf16"]


def test_without_data_only_mpctls_cases_are_left_out() -> None:
    text = python(
        "from pathlib import Path; from benchmarks.gpu.cases import CASES",
        "from benchmarks.gpu.__main__ import SHAPES, Bench, Budget",
        "bench = Bench(SHAPES, 'cpu', 2)",
        "for case in CASES[:4]:",
        "    print(bench.run(case, Path(), 'no data: a reason', Budget(0.0)).reason)",
    )
    assert text.splitlines()[:3] == ["no data: a reason"] * 3
    assert text.splitlines()[3].startswith("given up")  # plain torch was started


def test_data_are_made_without_training_a_tokenizer(tmp_path: Path) -> None:
    """Words of which the first is the most frequent."""
    python(
        "from pathlib import Path; from benchmarks.gpu.data import write_data",
        f"write_data(Path({str(tmp_path)!r}), 512, texts=3)",
    )
    prepared = json.loads((tmp_path / "data/data.json").read_text())
    assert prepared["vocab_size"] <= 512 and prepared["corpus"]["texts"] == 3
    counts = Counter(IndexedDataset(tmp_path / "data/train").document(0).tolist())
    assert len(counts) > 100 and counts.most_common(1)[0][0] == 1


# ---------------------------------------------------------------- the smoke script


def test_a_check_that_hangs_is_ended_and_the_others_go_on() -> None:
    """The import of torch stands for it."""
    text = python(
        "from dataclasses import replace; from benchmarks.gpu import smoke",
        "smoke.START_SECONDS = 0.0",
        "for name, seconds in (('versions', 0.01), ('compiler', 60.0)):",
        "    smoke.CHECKS[name] = replace(smoke.CHECKS[name], seconds=seconds)",
        "print(*smoke.results(['versions', 'compiler'], 'cpu'), sep=chr(10))",
    )
    late, next_one = text.splitlines()
    assert late.startswith("FAILED") and "versions: not done after 0 s" in late
    assert "compiler: " in next_one and "not done" not in next_one


@pytest.mark.slow
def test_a_failed_check_is_the_exit_code(tmp_path: Path) -> None:
    """There is no GPU here, or else one: then the check is made there."""
    file, is_cuda = tmp_path / "smoke.json", torch.cuda.is_available()
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--only", "host copies", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    (held,) = json.loads(file.read_text())["checks"]
    assert done.returncode == (0 if is_cuda else 1)
    assert held["status"] == ("ok" if is_cuda else "FAILED") and held["words"] in done.stdout


@pytest.mark.slow
def test_all_checks_pass_on_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    command = [sys.executable, "-m", "benchmarks.gpu.smoke", "--device", "cpu", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230)
    checks = json.loads(file.read_text())["checks"]
    assert done.returncode == 0, done.stdout
    assert len(checks) == 29
    assert {one["name"] for one in checks if one["status"] == "skipped"} == {"second launches", "cuda graph"}


def test_the_wheels_are_all_that_such_a_machine_lacks() -> None:
    """What mpctl needs, with what that needs, but for what such a machine has and what charts and fits alone import."""
    text = (ROOT / "benchmarks/gpu/wheels.sh").read_text()
    named = "".join(re.findall(r"^names\+?='(.*)'$", text, re.M)).split("|")
    listed = {name.replace("[-_]", "-") for name in named}
    pins = {line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().split()}
    assert listed <= {name.replace("_", "-").lower() for name in pins}
    has = needs(
        {"torch", "triton", "numpy", "pytest", "hypothesis", "safetensors", "tokenizers", "matplotlib", "scipy"}
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = needs({*(Requirement(need).name for need in project), "pytest-timeout"})
    assert wanted - has <= listed


def needs(names: set[str]) -> set[str]:
    """These distributions and what they need, where it is installed, as in package indexes."""
    found, left = set[str](), [name.lower() for name in names]
    while left:
        name = left.pop().replace("_", "-").lower()
        if name in found or not any(metadata.Distribution.discover(name=name)):
            continue
        found.add(name)
        for need in map(Requirement, metadata.requires(name) or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                left.append(need.name)
    return found
