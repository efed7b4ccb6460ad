"""The page of a plan: whole, self-contained, bounded, escaped, and alive in a real browser."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.plan.planning.traffic import rank_traffic
from mpctl.render.charts import chart_svg
from mpctl.render.parts import Section
from mpctl.render.pictures import plan_page
from mpctl.render.plan import MEMORY_PARTS
from mpctl.render.plan_svg import plan_svg
from mpctl.render.search import FrontPoint, front_chart, front_parts
from tests.cli.calls import Mpctl

EVIL = '</script><b onclick="x()">&\u202e<img src=x onerror=x()>'
VOID = {"meta", "input", "br"}
LARGE = {"cluster.nodes": 1024, "parallel.dp": 64, "training.global_batch_size": 8192}
POINTS = [
    FrontPoint("a", 1.0, 2**30, True, "tp 2"),
    FrontPoint("b", 2.0, 2**29, True, "tp 4"),
    FrontPoint("<c>", 3.0, 2**31, False, "tp 8 <i>"),
]


class Reader(HTMLParser):
    """Elements with their attributes; asserts that they nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.found if name == tag]


def page(source: str, settings: dict[str, Any] | None = None) -> str:
    plan = load_plan(source, settings or {})
    search = [Section("search", "Search"), *front_parts(POINTS)]
    return plan_page(plan, plan.require_legal(), command="mpctl plan", search=search)


# ---------------------------------------------------------------- the text


CUBE = {"cluster.gpus_per_node": 8, "parallel.tp": 8, "parallel.tensor_mode": "3d", "training.micro_batch_size": 8}


@pytest.mark.parametrize(
    ("source", "settings"),
    [("two-nodes-16-gpus", {}), ("demo", {}), ("demo-t5", {}), ("gpt3-175b-1024", {}), ("demo", CUBE)],
)
def test_a_page_is_whole_and_accessible(source: str, settings: dict[str, Any]) -> None:
    text = page(source, settings)
    seen = Reader(text)
    ids = [a["id"] for _, a in seen.found if "id" in a]
    assert len(ids) == len(set(ids))
    for _, attributes in seen.found:
        for key in ("aria-labelledby", "href"):
            target = attributes.get(key)
            assert target is None or target.lstrip("#") in ids
    for svg in seen.of("svg"):
        assert svg.get("aria-hidden") == "true" or (svg["role"], bool(svg["aria-label"])) == ("img", True)
    assert len(seen.of("table")) == len(seen.of("caption"))
    assert [a["id"] for a in seen.of("section")] == [
        "search",
        "memory",
        "layout",
        "schedule",
        "time",
        "traffic",
        "checks",
        "command",
    ]
    assert not re.search(r"https?:|\bsrc=|@import|url\((?!#)", text)


def test_a_page_needs_no_model() -> None:
    settings = {"cluster.nodes": 2, "cluster.gpus_per_node": 8, "parallel.tp": 2}
    plan = load_plan(None, settings)
    seen = Reader(plan_page(plan, plan.require_legal(), command="mpctl plan"))
    assert [a["id"] for a in seen.of("section")] == ["layout", "checks", "command"]


EXPERTS = {
    "cluster.nodes": 4,
    "cluster.gpus_per_node": 8,
    "parallel.tp": 2,
    "parallel.cp": 2,
    "parallel.pp": 2,
    "parallel.ep": 4,
}


def experts_page() -> str:
    plan = load_plan(None, EXPERTS)
    return plan_page(plan, plan.require_legal(), command="mpctl plan")


def test_a_page_shows_the_ranks_as_experts_see_them() -> None:
    text = experts_page()
    seen = Reader(text)
    kinds = [a["value"] for a in seen.of("input") if a.get("name") == "kind"]
    assert kinds == ["tp", "cp", "dp", "pp", "mp", "ep", "edp"]
    assert len(re.findall(r"<small>ep \d</small>", text)) == 32
    assert "etp 1 x ep 4 x edp 4, order etp-ep-edp-pp" in text
    dense = load_plan(None, {**EXPERTS, "parallel.ep": 1})
    plain = plan_page(dense, dense.require_legal(), command="mpctl plan")
    assert not re.search(r"\bedp\b", plain)


def test_the_picture_shows_both_views() -> None:
    """In its second half, colours are places along ep and letters are ep groups."""
    plan = load_plan(None, {**EXPERTS, "parallel.etp": 2})
    svg = plan_svg(plan, plan.require_legal())
    dense, experts = svg.split("Experts: etp 2 x ep 4 x edp 2, order etp-ep-edp-pp")
    cell = r'class="cell g(\d)"[^>]*>(?:</rect>)?<text[^>]*>(\d+) (\w+)</text>'
    assert len(re.findall(cell, dense)) == 32
    groups = plan.require_legal().kind_groups("etp_ep")
    for colour, rank, letter in re.findall(cell, experts):
        coords = plan.require_legal().whole_coords(int(rank))
        assert int(colour) == coords["ep"]
        assert int(rank) in groups["abcd".index(letter)]
    assert len(re.findall(cell, experts)) == 32


def test_a_page_of_thousands_of_gpus_is_small() -> None:
    text = page("gpt3-175b-1024", LARGE)
    assert len(text.encode()) < 600_000
    assert text.count("data-r=") == 1024


def test_words_of_a_job_stay_words(mpctl: Mpctl, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("p.html", "p.svg")]
    job = ("plan", "demo", "--set", f"model.name={json.dumps(EVIL)}")
    assert mpctl(*job, "--html", files[0], "--svg", files[1]).code == 0
    html, svg = (file.read_text("utf-8") for file in files)
    seen = Reader(html)
    assert EVIL in "".join(seen.words)
    line = "".join(seen.words).partition("This page again:")[2].partition('{"world"')[0]
    files[0].unlink()
    assert mpctl(*shlex.split(line)[1:]).code == 0
    assert files[0].read_text("utf-8") == html
    assert not seen.of("img")
    assert not [a for _, a in seen.found if "onclick" in a]
    assert len(seen.of("script")) == 2
    assert "<img" not in svg
    assert "&lt;img" in svg


def test_the_front_is_drawn_where_a_search_was_made() -> None:
    text = chart_svg(front_chart(POINTS[:2], POINTS[2:]))
    assert text.count("<title>") == 3
    assert "&lt;c&gt;: tp 8 &lt;i&gt;, 3.00 s, 2.0 GiB" in text
    Reader(chart_svg(front_chart(POINTS[:1], [])))


def test_a_page_says_how_far_it_is() -> None:
    plan, reported = load_plan("two-nodes-16-gpus", {}), list[tuple[str, int, int]]()
    plan_page(plan, plan.require_legal(), command="", on_progress=lambda *at: reported.append(at))
    assert reported == [("page", done, 6) for done in range(1, 7)]


def test_of_many_stages_a_page_shows_the_ends_and_the_fullest() -> None:
    settings = {"parallel.pp": 32, "parallel.dp": 4}
    seen = Reader(page("gpt3-175b-1024", settings))
    bars = [word for word in seen.words if re.fullmatch(r"stage \d+", word)]
    assert "stage 0" in bars and "stage 31" in bars
    assert "29 more stages in the table." in "".join(seen.words)
    assert "1-30" in seen.words  # which send the same


# ---------------------------------------------------------------- the numbers


def whole_plan(settings: dict[str, Any]) -> Plan:
    return load_plan("two-nodes-16-gpus", settings)


@pytest.mark.parametrize("settings", [{}, {"parallel.zero": 1}, {"training.recompute": "full"}])
def test_the_bars_add_up_to_the_total(settings: dict[str, Any]) -> None:
    plan = whole_plan(settings)
    assert plan.estimate is not None
    for stage in plan.estimate.memory:
        assert sum(getattr(stage, key) for key in MEMORY_PARTS) == stage.device_bytes


def test_temporary_memory_is_one_sum_on_page_and_terminal(mpctl: Mpctl, tmp_path: Path) -> None:
    """The page left out workspaces and what lasts from step to step, and called the rest so."""
    page = tmp_path / "plan.html"
    words = "--model llama-3-70b --cluster dgx-h100 --nodes 8 --tp 8 --pp 4 --runtime megatron-core"
    lines = mpctl("plan", *words.split(), "--html", page).out.splitlines()
    (head,) = (place for place, line in enumerate(lines) if line.startswith("stage  layers"))
    end = lines[head].index("temporary") + len("temporary")
    shown = [" ".join(line[:end].split()[-2:]) for line in lines[head + 1 : head + 5]]
    labels = re.findall(r'aria-label="weights [^"]*?, temporary ([^,"]+)', page.read_text("utf-8"))
    assert shown == labels and len(shown) == 4


@pytest.mark.parametrize("settings", [{}, {"parallel.vpp": 2}, {"parallel.order": "pp-dp-tp"}])
def test_ranks_send_what_their_messages_say(settings: dict[str, Any]) -> None:
    plan = whole_plan({**settings, "parallel.allow_tp_across_nodes": True})
    topology, estimate = plan.require_legal(), plan.estimate
    assert estimate is not None
    found = rank_traffic(estimate, topology)
    assert all(sender != receiver for sender, receiver in found)
    for rank in range(topology.world_size):
        stage = topology.coords(rank)["pp"]
        tp = [m for m in estimate.messages[stage] if m.axis == "tp"]
        sent = sum(parts.get("tp", 0) for (sender, _), parts in found.items() if sender == rank)
        # A ring of two: an all-reduce sends its message once, a gather or a scatter half of it.
        assert sent == sum(m.bytes * m.count / (1 + (m.kind != "all_reduce")) for m in tp)
    sends = sum(m.bytes * m.count for stage in estimate.messages for m in stage if m.kind == "send")
    pp = sum(parts.get("pp", 0) for parts in found.values())
    sums = sum(
        2 * (len(holders) - 1) * m.bytes
        for m in {m for own in estimate.messages for m in own if m.axis == "pp" != m.kind}
        if m.kind == "all_reduce"
        for holders in [[own for own in estimate.messages if m in own]]
    )
    assert pp == pytest.approx(topology.world_size / topology.sizes["pp"] * (sends + sums))


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize("option", ["--html", "--svg", "--trace"])
def test_what_cannot_be_written_is_said(mpctl: Mpctl, tmp_path: Path, option: str) -> None:
    for path in (tmp_path / "no" / "such.file", tmp_path):
        said = mpctl("plan", "two-nodes-16-gpus", option, path)
        assert (said.code, said.out) == (2, "")
        assert option in said.err
    assert list(tmp_path.iterdir()) == []


def test_a_trace_needs_times(mpctl: Mpctl, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for job in (["--nodes", 1, "--gpus-per-node", 2], ["--model", "gpt2", "--tp", 2]):
        said = mpctl("plan", *job, "--trace", path, "--json")
        assert (said.code, list(said.issues)) == (2, ["no-timeline"])
    assert not path.exists()


def test_pictures_are_of_one_plan(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("plan", "demo", "demo-t5", "--compare", "--html", tmp_path / "p.html")
    assert said.code == 2
    assert "--html" in said.err
    assert list(tmp_path.iterdir()) == []


def test_pictures_go_with_json(mpctl: Mpctl, tmp_path: Path) -> None:
    said = mpctl("plan", "two-nodes-16-gpus", "--json", "--trace", tmp_path / "t.json")
    assert said.document["schema"] == "mpctl.plan/2"
    assert json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]


def test_a_plan_without_pictures_imports_none_of_it() -> None:
    probe = (
        "import sys; from mpctl.cli.app import run; run(['plan', 'demo'])\n"
        "names = ('html', 'pictures', 'svg', 'markup', 'trace')\n"
        "print([n for n in names if f'mpctl.render.{n}' in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"


# ---------------------------------------------------------------- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
PROBE = """
const say = (type, cell) => cell.dispatchEvent(new MouseEvent(type, {bubbles: true}));
const cells = [...document.querySelectorAll("#map li")];
const marked = (name) => [...cells.keys()].filter((i) => cells[i].classList.contains(name));
const found = {};
found.screen = innerWidth;
found.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
say("mouseover", cells[5]);
found.tp = marked("in");
document.querySelector("input[value=pp]").click();
say("mouseover", cells[5]);
found.pp = marked("in");
found.said = document.getElementById("said").textContent;
found.letters = cells.map((c) => c.querySelector("em").textContent).join("");
cells[0].focus();
for (const key of ["ArrowRight", "ArrowDown", "Enter"]) {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
}
found.held = cells.findIndex((c) => c.getAttribute("aria-pressed") === "true");
found.tabs = cells.filter((c) => c.tabIndex === 0).length;
parent.postMessage(JSON.stringify(found), "*");
"""
# Chromium's own window is at least 500 wide; a frame is not.
PHONE = """<title></title><script>onmessage = (e) => { document.title = e.data; };</script>
<iframe src="page.html" style="width:360px;height:800px;border:0"></iframe>"""


def dumped(path: Path, tmp_path: Path) -> str:
    """The document as Chromium holds it after the scripts."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        path.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_the_policy_lets_the_script_run_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    text = page("gpt3-175b-1024", {"model.name": EVIL})
    path.write_text(text.replace("<main>", '<script>document.title = "run"</script><main>'), "utf-8")
    dom = dumped(path, tmp_path)
    assert re.search(r'id="map" class="tiles live"', dom)
    assert re.findall("<em>.*?</em>", dom) == re.findall("<em>.*?</em>", text)
    assert "<title>run</title>" not in dom
    assert "<img" not in dom


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_groups_by_pointer_and_keyboard_on_a_phone(tmp_path: Path) -> None:
    text, path = page("two-nodes-16-gpus"), tmp_path / "page.html"
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    path.write_text(text.replace("</body>", f"<script>{PROBE}</script></body>"), "utf-8")
    phone = tmp_path / "phone.html"
    phone.write_text(PHONE, "utf-8")
    title = re.search(r"<title>(\{.*?\})</title>", dumped(phone, tmp_path))
    assert title is not None
    found = json.loads(title[1].replace("&amp;", "&"))
    assert (found["screen"], found["wide"]) == (360, 0)
    assert (found["tp"], found["pp"]) == ([4, 5], [1, 5, 9, 13])
    assert found["said"].startswith("rank 5: node 0, local rank 5; tp 1, dp 0, pp 1; layers 6-11. tp [4, 5]")
    assert found["letters"] == "abcd" * 4
    assert (found["held"], found["tabs"]) == (5, 1)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_groups_of_experts_by_pointer(tmp_path: Path) -> None:
    text, path = experts_page(), tmp_path / "page.html"
    probe = PROBE.replace("input[value=pp]", "input[value=edp]")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    path.write_text(text.replace("</body>", f"<script>{probe}</script></body>"), "utf-8")
    phone = tmp_path / "phone.html"
    phone.write_text(PHONE, "utf-8")
    title = re.search(r"<title>(\{.*?\})</title>", dumped(phone, tmp_path))
    assert title is not None
    found = json.loads(title[1].replace("&amp;", "&"))
    assert found["wide"] == 0
    assert (found["tp"], found["pp"]) == ([4, 5], [1, 5, 9, 13])  # the second of edp
    assert "ep 1, edp 1. " in found["said"] and "ep [4, 5, 6, 7]" in found["said"]
    assert found["letters"] == "abcdabcd" * 2 + "efghefgh" * 2
