"""`mpctl plan` as people use it: words, pictures, terminals, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from mpctl.cli.options import command_line
from mpctl.core.units import bytes_text, count_text, rate_text, seconds_text
from mpctl.spec.presets import preset_names
from tests.cli.calls import Mpctl, assert_refused, spawn
from tests.cli.plan_calls import GOLDEN, document
from tests.started import started
from tests.test_rank_groups import TWO_NODES


@pytest.mark.parametrize("name", preset_names("jobs"))
@pytest.mark.parametrize("flags", [(), ("--json",), ("--rank", "0"), ("--ranks", "--groups=tp")])
def test_every_job_preset_has_a_plan(mpctl: Mpctl, name: str, flags: tuple[str, ...]) -> None:
    said = mpctl("plan", name, *flags)
    assert said.code == 0, said.err
    assert said.out
    assert said.err == ""


def test_a_job_file_with_flags_and_set_on_top(mpctl: Mpctl, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text('model = "gpt2"\n[parallel]\ntp = 2\npp = 2\n[cluster]\nnodes = 4\n')
    plan = document(
        mpctl("plan", job, "--json", "--nodes", 2, "--set", "parallel.pp=3", "--set", "cluster.gpus_per_node=6")
    )
    assert plan["sizes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 3}
    assert plan["nodes"] == 2


def test_the_plan_in_words(mpctl: Mpctl) -> None:
    said = mpctl("plan", "two-nodes-16-gpus")
    assert said.code == 0
    for words in (
        "fits: 4.5 of 80.0 GiB, 75.5 GiB free (headroom 5 %)",
        "16 ranks on 2 nodes x 8 GPUs of NVIDIA A100",
        "bf16, sequence 1,024, global batch 64, micro batch 4 x 8, recompute none, ZeRO 0, runtime",
        "planned for   mpctl, as no --runtime was given; never measured on NVIDIA A100",
        "elsewhere     fsdp2 ",
        " megatron-core ",
        "gpt2-medium: tp 2 x dp 2 x pp 4",
        "node 1 · layers 12-23",
        "parts         compute ",
        "extrapolated  ",
        " passed, 1 warning below",
        "stage-balance: stage 3 computes longest",
    ):
        assert words in said.out
    named = mpctl("plan", "two-nodes-16-gpus", "--runtime", "mpctl").out
    assert "planned for" not in named and "elsewhere" not in named
    assert "elsewhere" not in mpctl("plan", "demo").out  # on CPU cores
    full = mpctl("plan", "two-nodes-16-gpus", "--full").out
    assert re.search("✓ ok +tp-within-nvlink-domain", full) and "--full" not in full
    for words in ("[0,4,8,12] [1,5,9,13]", "Φ = 8.0 MiB", "8 Φ", "Pipeline traffic", "in flight"):
        assert words in full and words not in said.out
    assert said.out.splitlines()[-1].startswith("--full: rank groups, traffic")


LARGE = "gpt3-175b-1024"


TOO_SMALL = ("--set", "cluster.device.memory_bytes=1000000000")


def test_a_plan_that_does_not_fit_says_so_first_and_exits_3(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("plan", "two-nodes-16-gpus", *TOO_SMALL)
    assert (said.code, said.err) == (3, "")
    assert said.out.splitlines()[1] == (
        "✗ does not fit: 3.6 GiB too much on stage 0 (4.5 GiB of 953.7 MiB, headroom 5 %)"
    )
    files = [tmp_path / name for name in ("p.html", "p.svg", "p.json")]
    options = zip(("--html", "--svg", "--trace"), files, strict=True)
    written = [word for pair in options for word in pair]
    said = mpctl("plan", "two-nodes-16-gpus", *TOO_SMALL, "--json", *written)
    assert (said.code, said.document["fits"]) == (3, False)
    page, drawn = (file.read_text("utf-8") for file in files[:2])
    assert page.index("✗ does not fit: 3.6 GiB too much on stage 0") < page.index("<main>")
    assert "does not fit: 3.6 GiB too much on stage 0" in drawn
    assert files[2].exists()


def test_headroom_decides_and_is_said(mpctl: Mpctl) -> None:
    tight = ("plan", "two-nodes-16-gpus", "--set", "cluster.device.memory_bytes=4.7 GiB")
    assert mpctl(*tight, "--headroom", "1").out.splitlines()[1].startswith("✓ fits: 4.5 of 4.7 GiB")
    said = mpctl(*tight, "--headroom", "20", "--json")
    assert said.code == 3
    assert said.document["verdict"].endswith("(4.5 of 4.7 GiB, headroom 20 %)")
    for near in said.document["nearest_that_fit"]:  # each was tried with the headroom
        assert near["peak_bytes"] <= 0.8 * 4.7 * 2**30
    refused = mpctl("plan", "two-nodes-16-gpus", "--headroom", "95")
    assert refused.code == 2 and "cluster.headroom" in refused.err


@pytest.mark.parametrize(
    "question", [("--compare", "demo", "tp=1,dp=2"), ("demo", "--explain"), ("demo", "--rank", "0")]
)
def test_what_asks_for_no_verdict_exits_0(mpctl: Mpctl, question: tuple[str, ...]) -> None:
    assert mpctl("plan", *question, "--set", "cluster.device.memory_bytes=1000000").code == 0


def test_a_verdict_needs_a_device_and_a_model(mpctl: Mpctl) -> None:
    for arguments, words in (
        (GOLDEN, "memory and time are not estimated"),
        (("plan", "--model", "gpt2"), "not known whether it fits: a rank needs"),
    ):
        assert document(mpctl(*arguments, "--json"))["fits"] is None
        assert words in mpctl(*arguments).out


def test_a_large_plan_is_short_and_whole_with_full(mpctl: Mpctl) -> None:
    lines = mpctl("plan", LARGE).out.splitlines()
    assert len(lines) <= 35
    assert lines[1] == "✓ fits: 31.9 of 80.0 GiB, 48.1 GiB free (headroom 5 %)"
    assert " ".join(map(str.strip, lines[2:4])) == (
        "dtype fp16, sequence 2,048, global batch 1,536, micro batch 1 x 192, recompute full, ZeRO 0, "
        "runtime megatron-2021"
    )
    assert [line.split("  ")[0] for line in lines[4:6]] == ["step time", "parts"]
    assert any(line.startswith("checks     ✓ 9 passed") for line in lines[:11])
    assert "nodes 1 to 127: as node 0, 8 ranks on each" in lines
    assert any(re.match(r"2-14 +12-89 ", line) for line in lines)
    whole = mpctl("plan", LARGE, "--full").out
    assert re.search(r"1-14 +384 .* 8-119", whole)
    assert "node 127" in whole and "[63,127,191,255," in whole and re.search("✓ ok +tp-divides-heads", whole)


def test_groups_of_a_layout_without_a_model_are_a_line_a_kind(mpctl: Mpctl) -> None:
    lines = mpctl("plan", "--nodes", 128, "--gpus-per-node", 8, "--tp", 8, "--pp", 16).out.splitlines()
    of = {kind: [line for line in lines if line.startswith(f"{kind} ")] for kind in ("dp", "pp")}
    assert [len(found) for found in of.values()] == [1, 1]
    assert of["dp"][0].rstrip().endswith("[0,8,16,...,56] ... [967,975,983,...,1023]")


@pytest.mark.parametrize("columns", ["40", "80", None])
def test_nothing_is_cut_where_a_list_is_long(
    mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    said = mpctl("plan", LARGE, "--groups", "pp").out
    assert "…" not in said
    members = "".join(said.partition("members")[2].partition("Tensor-parallel")[0].split())
    assert "[0,64,128,192,256,320,384,448,512,576,640,704,768,832,896,960]" in members


def test_text_json_and_page_tell_the_same_figures(mpctl: Mpctl, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    found = document(mpctl("plan", LARGE, "--json", "--html", page))
    text, html = mpctl("plan", LARGE, "--full").out, page.read_text("utf-8")
    s = found["summary"]
    stage = found["memory"]["stages"][s["fullest_stage"]]
    assert (s["device_bytes"], s["allocated_bytes"]) == (stage["device_bytes"], stage["allocated_bytes"])
    assert s["step_seconds"] == found["time"]["step_seconds"]
    tokens = found["training"]["global_batch_size"] * 2048
    assert s["tokens_per_second"] == pytest.approx(tokens / s["step_seconds"])
    for words in (
        seconds_text(s["step_seconds"]),
        count_text(s["tokens_per_second"]),
        f"{s['mfu']:.0%}, {rate_text(s['model_flops_per_second'])} a rank; {s['mfu_convention']}",
        f"causal {s['mfu_causal']:.0%}",
        f"{s['hfu']:.0%}, {rate_text(s['hardware_flops_per_second'])} a rank, with recomputation",
        bytes_text(s["device_bytes"]),
        bytes_text(s["allocated_bytes"]),
        found["verdict"],
        found["training"]["runtime"],
    ):
        assert words in text and words in html


def test_one_rank_in_words(mpctl: Mpctl) -> None:
    said = mpctl("plan", "two-nodes-16-gpus", "--rank", 13)
    assert "rank 13 of 16: node 1, local rank 5; tp 1, cp 0, dp 0, pp 3" in said.out
    assert "layers 18-23" in said.out
    assert "[1,5,9,13]" in said.out
    assert re.search(r"embedding +2 +\[1,13\]", said.out)


def test_svg_is_a_picture_of_layout_and_timeline(mpctl: Mpctl, tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    said = mpctl("plan", "two-nodes-16-gpus", "--svg", path)
    assert (said.code, said.err) == (0, f"wrote {path}\n")
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join("".join(root.itertext()).replace("\xa0", " ").split())
    for words in ("tp 2 x dp 2 x pp 4", "node 1 · layers 12-23", "15 h", "stage 3", "bubble"):
        assert words in text
    assert "below it its dp (d) and pp (p) place" in text  # no cell has a place along cp
    said = mpctl("plan", "demo", "--svg", path, "--json")
    assert (said.code, said.err) == (0, "")
    assert "2 micro batches on 1 stage:" in path.read_text("utf-8")


def test_an_svg_has_its_colours_where_css_variables_are_unknown(mpctl: Mpctl, tmp_path: Path) -> None:
    """Inkscape and librsvg drop `fill: var(--c0)`: what stands before it must be a colour."""
    path = tmp_path / "plan.svg"
    mpctl("plan", "demo", "--tensor-mode", "2d", "--tp", 4, "--gpus-per-node", 4, "--svg", path)
    text = path.read_text("utf-8")
    scheme = re.findall(r"(?:fill|stroke): ?var\(", text)
    plain = re.findall(r"(fill|stroke):#[0-9a-f]{6};\1: ?var\(", text)
    assert len(plain) == len(scheme) > 20


def test_an_svg_that_cannot_be_written_is_said(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl(*GOLDEN, "--svg", tmp_path / "no" / "such" / "folder.svg")
    assert_refused(said, wants_json=False)
    assert "--svg" in said.err
    assert "folder.svg" in said.err


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_narrow_terminal_breaks_nothing(mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    said = mpctl("plan", "two-nodes-16-gpus", "--ranks")
    assert said.code == 0
    assert max(map(len, said.out.splitlines())) <= columns


def test_no_color_and_no_terminal_mean_no_escapes() -> None:
    forced = {"TTY_COMPATIBLE": "1", "TERM": "xterm-256color", "FORCE_COLOR": "1"}
    coloured = spawn("plan", "demo", **forced).out
    plain = spawn("plan", "demo", **forced, NO_COLOR="1").out
    colours = re.compile(r"\x1b\[[0-9;]*(3[0-7]|4[0-7]|9[0-7]|38|48)[0-9;]*m")
    assert colours.search(coloured)
    assert not colours.search(plain)
    piped = spawn("plan", "demo", NO_COLOR="1")
    assert (piped.code, "\x1b" in piped.out) == (0, False)


def test_a_job_of_a_hostile_name_is_only_text(mpctl: Mpctl) -> None:
    """rich reads [/red] as markup unless told not to."""
    said = mpctl(
        "plan",
        "two-nodes-16-gpus",
        "--set",
        "model.name=[/red]",
        "--zero",
        1,
        "--set",
        "cluster.device.name=[/b]",
        "--dtype",
        "fp8",
    )
    assert said.code == 0, said.err
    assert "[/red]" in said.out
    assert "[/b] has no fp8 rate" in said.out


def test_a_process_keeps_stdout_for_the_result() -> None:
    good = spawn(*GOLDEN, "--json")
    assert (good.code, good.err, good.document["groups"]) == (0, "", TWO_NODES)
    bad = spawn(*GOLDEN, "--tp", 3)
    assert_refused(bad, wants_json=False)
    assert "→ use tp" in bad.err
    said = spawn(*GOLDEN, "--tp", 3, "--json")
    assert (said.err, set(said.issues)) == ("", {"world-size"})
    assert_refused(spawn("plan", "--tpp", 3), wants_json=False)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    with started(
        [sys.executable, "-m", "mpctl", "plan", "--nodes=4096", "--gpus-per-node=8", "--json", "--groups=all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1)


def test_one_layout_under_several_runtimes(mpctl: Mpctl) -> None:
    """The table and the entries are the plans that --runtime makes."""
    job = ("plan", "two-nodes-16-gpus", "--groups", "none")
    found = document(mpctl(*job, "--runtimes", "torchtitan,megatron-core", "--json"))["runtimes"]
    assert [entry["runtime"] for entry in found] == ["torchtitan", "megatron-core"]
    assert found[1]["emit"] == ["megatron", "megatron-bridge"] and not found[1]["not_run"]
    alone = document(mpctl(*job, "--runtime", "megatron-core", "--json"))
    assert found[1]["step_seconds"] == alone["summary"]["step_seconds"]
    assert "runtimes" not in alone
    table = mpctl(*job, "--runtimes", "all").out
    for words in (
        "This layout under other software",
        seconds_text(found[1]["step_seconds"]),
        "--emit torchtitan",
        "mpctl launch",
    ):
        assert words in table
    assert_refused(mpctl(*job, "--runtimes", "nobody"), wants_json=False)
    assert_refused(mpctl("plan", "demo", "--explain", "--runtimes", "all"), wants_json=False)


def test_lora_and_qlora_set_kind_and_rank(mpctl: Mpctl) -> None:
    adapter = document(mpctl("plan", "--model", "gpt2", "--qlora", 8, "--json"))["adapter"]
    assert (adapter["kind"], adapter["rank"]) == ("qlora", 8)
    line = command_line("plan", None, {"model": "gpt2", "training.adapter.kind": "lora", "training.adapter.rank": 8})
    assert line == "mpctl plan --lora 8 --model gpt2"
    said = mpctl("plan", "--model", "gpt2", "--qlora", 8, "--lora", 4, "--json")
    assert_refused(said, wants_json=True)
    assert "leave one of them out" in said.issues["given-twice"]["hint"]
