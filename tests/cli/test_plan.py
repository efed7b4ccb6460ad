"""`mpctl plan` from the outside: contract JSON, pictures, and bad input without a traceback."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from mpctl.axes import AXIS_NAMES, GROUP_KINDS
from mpctl.spec.presets import preset_names
from mpctl.units import bytes_text, count_text, rate_text, seconds_text
from tests.cli.calls import Mpctl, Said, assert_refused, caller, spawn
from tests.test_rank_groups import TWO_NODES

GOLDEN = ("plan", "--nodes", 2, "--gpus-per-node", 8, "--tp", 2, "--pp", 4)
BIG = ("plan", "--nodes", 131072, "--gpus-per-node", 8, "--tp", 8, "--pp", 16)
MIB = 2**20


@pytest.fixture
def mpctl(capsys: pytest.CaptureFixture[str]) -> Mpctl:
    return caller(capsys)


def document(said: Said) -> Any:
    assert said.code == 0, said.err
    assert said.err == ""
    return said.document


# ---------------------------------------------------------------- the contract


def test_the_document_of_the_golden_case(mpctl: Mpctl) -> None:
    """Every key of contracts.md, for the job whose groups every text prints."""
    plan = document(mpctl("plan", "two-nodes-16-gpus", "--json"))
    assert plan["schema"] == "mpctl.plan/1"
    assert plan["world_size"] == 16
    assert plan["sizes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 4}
    assert plan["order"] == "tp-cp-dp-pp"
    assert plan["groups"] == TWO_NODES
    part = {"all_reduces": 2, "volume_phi": 4, "volume_bytes": 32 * MIB}
    assert plan["communication"]["phi_bytes"] == 8 * MIB
    assert plan["communication"]["layer"] == {
        "attention": part,
        "mlp": part,
        "all_reduces": 4,
        "volume_phi": 8,
        "volume_bytes": 64 * MIB,
        "ring_bytes_per_rank": 32 * MIB,
    }
    assert len(plan["memory"]["stages"]) == 4
    assert plan["memory"]["is_lower_bound"] is False
    assert plan["time"]["step_seconds"] == pytest.approx(sum(plan["time"]["breakdown"].values()))


def test_ranks_of_the_golden_case(mpctl: Mpctl) -> None:
    ranks = document(mpctl("plan", "two-nodes-16-gpus", "--json"))["ranks"]
    assert [entry["rank"] for entry in ranks] == list(range(16))
    assert ranks[0] == {
        "rank": 0,
        "node": 0,
        "local_rank": 0,
        "coords": {"tp": 0, "cp": 0, "dp": 0, "pp": 0},
        "layers": [[0, 6]],
    }
    assert ranks[13] == {
        "rank": 13,
        "node": 1,
        "local_rank": 5,
        "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 3},
        "layers": [[18, 24]],
    }


def test_checks_say_rule_status_and_message(mpctl: Mpctl) -> None:
    checks = document(mpctl("plan", "two-nodes-16-gpus", "--json"))["checks"]
    assert all({"rule", "status", "message"} <= set(check) for check in checks)
    status = {check["rule"]: check["status"] for check in checks}
    assert status["tp-within-node"] == status["memory-fits"] == "ok"


def test_without_a_model_there_is_topology_placement_and_checks(mpctl: Mpctl) -> None:
    plan = document(mpctl(*GOLDEN, "--json"))
    assert plan["groups"] == TWO_NODES
    assert [check["status"] for check in plan["checks"]] == ["ok"] * 3
    assert not {"communication", "memory", "time"} & set(plan)
    assert "layers" not in plan["ranks"][0]


def test_tp_1_sends_nothing(mpctl: Mpctl) -> None:
    sent = document(mpctl("plan", "--model", "gpt2", "--dp", 2, "--json"))["communication"]
    nothing = {"all_reduces": 0, "volume_phi": 0, "volume_bytes": 0}
    layer = {"attention": nothing, "mlp": nothing, **nothing, "ring_bytes_per_rank": 0}
    assert sent["layer"] == layer
    assert sent["phi_bytes"] == 1024 * 768 * 4


@pytest.mark.parametrize(
    ("flags", "kinds", "with_ranks"),
    [
        ((), list(GROUP_KINDS), True),
        (("--groups", "tp,dp"), ["tp", "dp"], False),
        (("--groups", "mp,mp"), ["mp"], False),
        (("--groups", "all"), list(GROUP_KINDS), False),
        (("--groups", "none"), [], False),
        (("--groups", "none", "--ranks"), [], True),
        (("--groups", "pp", "--ranks"), ["pp"], True),
        (("--ranks",), list(GROUP_KINDS), True),
    ],
)
def test_groups_says_what_is_listed_and_leaves_ranks_out_unless_asked(
    mpctl: Mpctl, flags: tuple[str, ...], kinds: list[str], with_ranks: bool
) -> None:
    plan = document(mpctl(*GOLDEN, "--json", *flags))
    assert plan["groups"] == {kind: TWO_NODES[kind] for kind in kinds}
    assert ("ranks" in plan) == with_ranks
    assert len(plan.get("ranks", range(16))) == 16


def test_one_rank_with_every_group_it_is_in(mpctl: Mpctl) -> None:
    """Rank 5 is in stage 1, which no embedding group holds."""
    rank = document(mpctl("plan", "two-nodes-16-gpus", "--rank", 5, "--json"))
    assert rank == {
        "schema": "mpctl.rank/1",
        "world_size": 16,
        "rank": 5,
        "node": 0,
        "local_rank": 5,
        "coords": {"tp": 1, "cp": 0, "dp": 0, "pp": 1},
        "layers": [[6, 12]],
        "groups": {
            "tp": [4, 5],
            "cp": [5],
            "dp": [5, 7],
            "pp": [1, 5, 9, 13],
            "mp": [0, 1, 4, 5, 8, 9, 12, 13],
        },
    }
    last = document(mpctl(*GOLDEN, "--rank", 14, "--json"))["groups"]
    assert (last["embedding"], "position_embedding" in last) == ([2, 14], False)


@pytest.mark.parametrize("rank", [99, 16, -1])
def test_a_rank_that_does_not_exist(mpctl: Mpctl, rank: int) -> None:
    said = mpctl(*GOLDEN, f"--rank={rank}", "--json")
    assert said.code == 2
    assert said.issues["no-such-rank"]["hint"] == "use 0 to 15"
    assert str(rank) in said.issues["no-such-rank"]["message"]
    assert_refused(mpctl(*GOLDEN, f"--rank={rank}"), wants_json=False)


def test_an_unknown_group_kind(mpctl: Mpctl) -> None:
    said = mpctl(*GOLDEN, "--groups", "tp,xp", "--json")
    assert (said.code, said.issues["unknown-group"]["where"]) == (2, "--groups")
    assert "'xp'" in said.issues["unknown-group"]["message"]


def test_a_million_ranks_are_summarised(mpctl: Mpctl) -> None:
    plan = document(mpctl(*BIG, "--json"))
    assert plan["world_size"] == 1_048_576
    assert "ranks" not in plan
    assert plan["groups"]["tp"] == {
        "count": 131072,
        "size": 8,
        "first": [0, 1, 2, 3, 4, 5, 6, 7],
        "last": list(range(1_048_568, 1_048_576)),
    }
    pp = plan["groups"]["pp"]
    assert (pp["count"], pp["size"], pp["last"][-1]) == (65536, 16, 1_048_575)
    assert plan["groups"]["embedding"]["first"] == [0, 983040]
    assert plan["groups"]["position_embedding"]["last"] == [65535]
    rank = document(mpctl(*BIG, "--rank", 1_048_575, "--json"))
    assert rank["coords"] == {"tp": 7, "cp": 0, "dp": 8191, "pp": 15}


def test_many_groups_are_listed_when_asked(mpctl: Mpctl) -> None:
    large = ("plan", "--nodes", 4096, "--gpus-per-node", 8, "--tp", 8)
    groups = document(mpctl(*large, "--json", "--groups", "tp"))["groups"]
    assert (len(groups["tp"]), groups["tp"][-1]) == (4096, list(range(32760, 32768)))


@pytest.mark.parametrize(("nodes", "listed"), [(512, True), (513, False)])
def test_up_to_4096_ranks_everything_is_listed(mpctl: Mpctl, nodes: int, listed: bool) -> None:
    plan = document(mpctl("plan", "--nodes", nodes, "--gpus-per-node", 8, "--tp", 8, "--json"))
    assert ("ranks" in plan) == isinstance(plan["groups"]["tp"], list) == listed


def test_pp_may_lie_inside_dp(mpctl: Mpctl) -> None:
    """Megatron's --use-tp-pp-dp-mapping."""
    plan = document(mpctl(*GOLDEN, "--order", "tp-cp-pp-dp", "--json"))
    assert plan["order"] == "tp-cp-pp-dp"
    assert plan["groups"]["pp"] == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]
    assert plan["groups"]["dp"][:2] == [[0, 8], [1, 9]]
    assert plan["groups"]["embedding"] == [[0, 6], [1, 7], [8, 14], [9, 15]]


@pytest.mark.parametrize("order", ["-".join(order) for order in permutations(AXIS_NAMES)])
def test_any_order_fills_the_same_world(mpctl: Mpctl, order: str) -> None:
    flags = ("--cp", 2, "--dp", 1, "--order", order, "--allow-tp-across-nodes")
    plan = document(mpctl(*GOLDEN, *flags, "--json"))
    for kind, groups in plan["groups"].items():
        assert groups == sorted(groups)
        if "embedding" not in kind:
            assert sorted(rank for group in groups for rank in group) == list(range(16))
    first = next(axis for axis in order.split("-") if plan["sizes"][axis] > 1)
    assert plan["groups"][first][0] == list(range(plan["sizes"][first]))


# ---------------------------------------------------------------- jobs, pictures, terminals


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
        mpctl("plan", job, "--json", "--nodes", 2, "--set", "parallel.pp=3",
              "--set", "cluster.gpus_per_node=6")
    )  # fmt: skip
    assert plan["sizes"] == {"tp": 2, "cp": 1, "dp": 2, "pp": 3}
    assert plan["nodes"] == 2


def test_the_plan_in_words(mpctl: Mpctl) -> None:
    said = mpctl("plan", "two-nodes-16-gpus")
    assert said.code == 0
    for words in (
        "fits: stage 0 needs 3.6 GiB, the device has 80.0 GiB",
        "16 ranks on 2 nodes x 8 GPUs of NVIDIA A100",
        "bf16, global batch 64, micro batch 4 (8 a step), recompute none, ZeRO 0, runtime mpctl",
        "gpt2-medium: tp 2 x dp 2 x pp 4",
        "node 1 · layers 12-23",
        "[0,4,8,12] [1,5,9,13]",
        "Φ = 8.0 MiB",
        "8 Φ",
        "Step time ",
        "Checks passed ✓ world-size, tp-within-node",
        "stage-balance: stage 3 computes longest",
    ):
        assert words in said.out
    assert "✓  tp-within-node" in mpctl("plan", "two-nodes-16-gpus", "--full").out


LARGE = "gpt3-175b-1024"
TOO_SMALL = ("--set", "cluster.device.memory_bytes=1000000000")


def test_a_plan_that_does_not_fit_says_so_first_and_exits_3(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("plan", "two-nodes-16-gpus", *TOO_SMALL)
    assert (said.code, said.err) == (3, "")
    assert said.out.splitlines()[1] == (
        "✗ does not fit: stage 0 needs 3.6 GiB, the device has 953.7 MiB"
    )
    files = [tmp_path / name for name in ("p.html", "p.svg", "p.json")]
    options = zip(("--html", "--svg", "--trace"), files, strict=True)
    written = [word for pair in options for word in pair]
    said = mpctl("plan", "two-nodes-16-gpus", *TOO_SMALL, "--json", *written)
    assert (said.code, said.document["fits"]) == (3, False)
    page, drawn = (file.read_text("utf-8") for file in files[:2])
    assert page.index("✗ does not fit: stage 0 needs 3.6 GiB") < page.index("<main>")
    assert "does not fit: stage 0 needs 3.6 GiB" in drawn
    assert files[2].exists()


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
    assert len(lines) <= 60
    assert "step time  30.99 s" in "\n".join(lines[:12])
    assert "nodes 1 to 127: as node 0, 8 ranks on each" in lines
    assert any(re.match(r"1-14 +384 .* 8-119", line) for line in lines)
    assert any(re.match(r"2-14 +12-89 ", line) for line in lines)
    whole = mpctl("plan", LARGE, "--full").out
    assert "node 127" in whole and "[63,127,191,255," in whole and "✓  tp-divides-heads" in whole


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
    text, html = mpctl("plan", LARGE).out, page.read_text("utf-8")
    s = found["summary"]
    stage = found["memory"]["stages"][s["fullest_stage"]]
    assert (s["device_bytes"], s["allocated_bytes"]) == (
        stage["device_bytes"], stage["allocated_bytes"]
    )  # fmt: skip
    assert s["step_seconds"] == found["time"]["step_seconds"]
    tokens = found["training"]["global_batch_size"] * 2048
    assert s["tokens_per_second"] == pytest.approx(tokens / s["step_seconds"])
    for words in (
        seconds_text(s["step_seconds"]), count_text(s["tokens_per_second"]),
        f"{rate_text(s['model_flops_per_second'])} of model FLOP a rank",
        f"{rate_text(s['hardware_flops_per_second'])} of hardware FLOP a rank",
        bytes_text(s["device_bytes"]), bytes_text(s["allocated_bytes"]),
        found["verdict"], found["training"]["runtime"],
    ):  # fmt: skip
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
    assert said.code == 0
    assert "Rank groups" in said.out
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = " ".join("".join(root.itertext()).replace("\xa0", " ").split())
    for words in ("tp 2 x dp 2 x pp 4", "node 1 · layers 12-23", "15 h", "stage 3", "bubble"):
        assert words in text


def test_an_svg_that_cannot_be_written_is_said(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl(*GOLDEN, "--svg", tmp_path / "no" / "such" / "folder.svg")
    assert_refused(said, wants_json=False)
    assert "--svg" in said.err
    assert "folder.svg" in said.err


@pytest.mark.parametrize("columns", [20, 60, 200])
def test_a_narrow_terminal_breaks_nothing(
    mpctl: Mpctl, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
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
    said = mpctl("plan", "two-nodes-16-gpus", "--set", "model.name=[/red]", "--zero", 1,
                 "--set", "cluster.device.name=[/b]", "--dtype", "fp8")  # fmt: skip
    assert said.code == 0, said.err
    assert "[/red]" in said.out
    assert "[/b] has no fp8 rate" in said.out


# ---------------------------------------------------------------- refusals

STRADDLING = ("plan", "--nodes", 2, "--gpus-per-node", 4, "--tp", 8)


def test_tp_groups_that_leave_their_node_are_named(mpctl: Mpctl) -> None:
    said = mpctl(*STRADDLING, "--json")
    assert said.code == 2
    issue = said.issues["tp-within-node"]
    assert issue["where"] == "parallel.tp"
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in issue["message"]
    assert "use tp 1, 2 or 4" in issue["hint"]
    spoken = mpctl(*STRADDLING)
    assert_refused(spoken, wants_json=False)
    for part in issue.values():
        assert part in spoken.err


def test_and_may_be_allowed(mpctl: Mpctl) -> None:
    plan = document(mpctl(*STRADDLING, "--allow-tp-across-nodes", "--json"))
    (check,) = [check for check in plan["checks"] if check["rule"] == "tp-within-node"]
    assert check["status"] == "warning"
    assert "[0, 1, 2, 3, 4, 5, 6, 7]" in check["message"]
    assert "!  tp-within-node: " in mpctl(*STRADDLING, "--allow-tp-across-nodes").out


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
    assert_refused(mpctl("plan", *arguments), wants_json=False)


def test_issues_of_all_kinds_come_together(mpctl: Mpctl) -> None:
    said = mpctl("plan", "--json", "--model", "gpt2", "--nodes", 2, "--gpus-per-node", 8,
                 "--tp", 5, "--order", "tp-tp", "--set", "model.ffn=3073",
                 "--set", "data.max_byte=1", "--set", "launch.timeout_seconds=soon")  # fmt: skip
    assert set(said.issues) == {
        "unknown-key", "bad-value", "world-size", "axis-order", "tp-divides-heads",
        "tp-divides-kv-heads", "tp-divides-ffn",
    }  # fmt: skip
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
    ("--tp", "0"), ("--tp", "-3"), ("--tp", "x"), ("--pp", "1.5"), ("--cp", ""), ("--dp", "nan"),
    ("--nodes", "0"), ("--gpus-per-node", "-8"), ("--vpp", "0"), ("--zero", "9"),
    ("--order", ""), ("--order", "tp--pp"), ("--order", "tp-tp"), ("--order", "[bold]"),
    ("--model", "[/red]"), ("--model", "../gpt2"), ("--cluster", "nowhere"),
    ("--recompute", "some"), ("--dtype", "int4"), ("--micro-batch-size", "0"),
    ("--global-batch-size", "-1"), ("--nonsense",), ("-q",), ("--groups", "xx"), ("--rank", "9999"),
    ("--set", "=1"), ("--set", ""), ("--set", "x"), ("--set", "a.b.c=1"), ("--set", "..=1"),
    ("--set", "parallel=3"), ("--set", "parallel.tp.x=3"), ("--set", "model={"),
    ("--set", "model=[1,2]"), ("--set", "training.seed=-1"), ("--set", "training.seed=1979-05-27"),
    ("--set", "training.learning_rate=inf"), ("--set", "cluster.device=[]"),
    ("--set", "data.corpus=[1]"), ("--set", "cluster.device.peak_flops.int3=1"),
    ("--set", "parallel.sequence_parallel=maybe"), ("--set", "model.layers=-1"),
    ("--set", "model.hf_config=/dev/null"), ("--set", "\x1b[31m=1"),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_no_handful_of_bad_flags_ends_in_a_traceback(mpctl: Mpctl, seed: int) -> None:
    draw = random.Random(seed)
    faults = [
        *draw.sample(BAD, draw.randint(1, 4)),
        BAD[seed],  # each of them once, whatever is drawn
    ]
    job = draw.choice([(), ("demo",), ("two-nodes-16-gpus",)])
    flags = [flag for fault in faults for flag in fault]
    assert_refused(mpctl("plan", *job, *flags), wants_json=False)
    assert_refused(mpctl("plan", *job, "--json", *flags), wants_json=True)


@pytest.mark.parametrize("fault", BAD[40:], ids=lambda fault: " ".join(fault)[:30])
def test_nor_does_one_alone(mpctl: Mpctl, fault: tuple[str, ...]) -> None:
    assert_refused(mpctl("plan", "demo", *fault), wants_json=False)


# ---------------------------------------------------------------- as a process


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
    with subprocess.Popen(
        [
            sys.executable,
            "-m",
            "mpctl",
            "plan",
            "--nodes=4096",
            "--gpus-per-node=8",
            "--json",
            "--groups=all",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) in (0, 1)
