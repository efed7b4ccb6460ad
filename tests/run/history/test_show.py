"""`mpctl show`: a run in words, its curves in the terminal and as pictures, its exports."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.text import Text

from mpctl.records.rundir.directory import RunDir
from mpctl.render.curves import axis_of, mean, plot_text, round_ticks
from mpctl.run.history.saved import SavedSummary
from mpctl.run.history.show import Series, find_series, open_runs
from mpctl.run.launch.follow import follow
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl
from tests.run.history.made import FAILURE, make_run, rank, record, records, summary


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """runs/demo below the working directory."""
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs/demo", ended=summary(), checkpoints=(10, 20))


def squeezed(text: str) -> str:
    """Lines of a table as one, however they were wrapped."""
    return " ".join(text.split())


# ---------------------------------------------------------------- in words


def test_a_finished_run_in_words(demo: Path, call: Mpctl) -> None:
    text = squeezed(call("show", "runs/demo").out)
    assert text.startswith("✓ demo finished after 20 of 20 steps")
    for words in (
        "gpt, 2 layers, hidden 32, 4 heads, vocabulary 300, sequence of 32",
        "tp 2, micro batch 2; 2 ranks, device cpu",
        "8 samples, fp32",
        "python-stdlib; seed 1234",
        "learning rate 0.0003 to 3e-05, cosine",
        "10.00 s in training steps",
        "6.2500 → 2.5783",
        "of old 6.5000 → 5.0000",
        "500.0 ms (median), predicted 200.0 ms",
        "5.12k",
        "of 2 ranks are as planned",
        "256.0 MiB on the fullest rank",
        "step 10 (1.0 KiB), step 20 (1.0 KiB)",
        "runs/demo",
    ):
        assert words in text, words


def test_a_name_in_runs_is_enough(demo: Path, call: Mpctl) -> None:
    assert call("show", "demo").out == call("show", "runs/demo").out


def test_endings_in_words(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/dead"), steps=5, ended=summary("failed", failure=FAILURE))
    text = squeezed(call("show", "dead").out)
    assert "rank 1 (tp 1, dp 0) failed at step 5, forward: RuntimeError: out of memory" in text
    assert "not compared" in text and "checkpoints none" in text
    assert "--resume" not in text  # from what?
    constant = {"training.lr_schedule": "constant"}
    make_run(Path("runs/my run"), steps=12, checkpoints=(10,), **constant)
    text = squeezed(call("show", "my run").out)
    assert "mpctl launch --resume --run-dir 'runs/my run'" in text
    assert "learning rate 0.0003, constant data" in text
    assert "--resume" not in call("show", "demo").out


def test_without_a_summary_the_ranks_records_tell(demo: Path, call: Mpctl) -> None:
    """A real error before one that the loss of a peer caused."""
    run = make_run(Path("runs/dead"), steps=5)
    (run / "failures").mkdir()
    secondary = {**FAILURE, "rank": 0, "is_echo": True, "error": "Connection closed by peer"}
    (run / "failures/rank-0.json").write_text(json.dumps(secondary))
    (run / "failures/rank-1.json").write_text(json.dumps({**FAILURE, "is_echo": False}))
    (run / "failures/rank-2.json").write_text("{")
    text = squeezed(call("show", "dead").out)
    assert text.startswith("✗ dead failed after 5 of 20 steps")
    assert "out of memory" in text and "Connection" not in text


def test_differences_from_the_plan_and_damage_are_reported(demo: Path, call: Mpctl) -> None:
    ended = summary()
    ended["plan_beside_run"][1]["agrees"] = False
    (demo / "summary.json").write_text(json.dumps(ended))
    (demo / "checkpoints/step-20/manifest.json").write_text("{")
    text = squeezed(call("show", "demo").out)
    assert "rank 1 differs from the plan" in text and "damaged" in text


def test_json_holds_the_job_and_what_was_reached(demo: Path, call: Mpctl) -> None:
    document = call("show", "demo", "--json").document
    (run,) = document["runs"]
    assert document["schema"] == "mpctl.show/1"
    assert run["job"]["training"]["global_batch_size"] == 8
    assert (run["steps"], run["steps_asked"], run["tokens"]) == (20, 20, 5120)
    assert run["final_loss"] == record(20)["loss"] and run["training_seconds"] == 10.0
    assert [saved["step"] for saved in run["checkpoints"]] == [10, 20]
    assert [rank["agrees"] for rank in run["plan_beside_run"]] == [True, True]


def test_every_name_that_is_no_run_is_refused(demo: Path, call: Mpctl) -> None:
    said = call("show", "demo", "nope", "neither")
    assert said.code == 2 and said.out == ""
    assert "nope does not contain a run" in said.err and "neither does not" in said.err


# ---------------------------------------------------------------- curves


def curves(call: Mpctl, *more: str) -> list[dict[str, Any]]:
    document = call("show", "demo", *more, "--json").document
    assert document["schema"] == "mpctl.series/1"
    return document["series"]


def test_curves_are_what_the_records_say(demo: Path, call: Mpctl) -> None:
    written = records(20)
    (loss,) = curves(call, "--plot", "loss")
    assert loss["x"] == list(range(1, 21)) and loss["y"] == [r["loss"] for r in written]
    (tokens,) = curves(call, "--plot", "loss", "--x", "tokens")
    assert tokens["x"] == [256 * step for step in range(1, 21)]
    (time,) = curves(call, "--plot", "loss", "--x", "time")
    assert time["x"] == [0.5 * step for step in range(1, 21)]
    (memory,) = curves(call, "--plot", "memory_bytes")
    assert memory["y"] == [3 * 2**20] * 20


def test_validation_begins_before_the_first_step(demo: Path, call: Mpctl) -> None:
    val, old = curves(call, "--plot", "val", "--plot", "validation_loss/old", "--x", "tokens")
    assert (val["x"], val["metric"]) == ([0, 2560, 5120], "validation_loss")
    assert val["y"][0] == 6.25 and old["y"] == [6.5, 5.0, 5.0]


def test_an_unknown_metric_lists_what_there_is(demo: Path, call: Mpctl) -> None:
    said = call("show", "demo", "--plot", "los", "--json")
    assert said.code == 2
    hint = said.issues["unknown-metric"]["hint"]
    assert "did you mean loss?" in hint
    for name in ("grad_norm", "validation_loss/old", "lr for learning_rate"):
        assert name in hint


def test_runs_without_the_metric_are_left_out(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/new"), steps=0)
    document = call("show", "demo", "new", "--plot", "loss", "--json").document
    assert [one["run"] for one in document["series"]] == ["demo"]
    assert call("show", "new", "--plot", "loss").code == 2


def grid(text: Text) -> list[str]:
    """The rows of the canvas, between the frame's lines."""
    return [line.split("┤")[-1].split("│")[-2] for line in text.plain.splitlines() if line.rstrip().endswith("│")]


def drawn(demo: Path, *names: str, **how: Any) -> Text:
    runs = open_runs([Path("runs") / name for name in names])
    look = {"width": 60, "height": 16, "coloured": False, "ascii_only": False, **how}
    return plot_text(find_series(runs, ["loss"], "step"), "step", **look)


def test_the_terminal_shows_the_curve_falling(demo: Path) -> None:
    text = drawn(demo, "demo")
    rows = grid(text)
    firsts = [next(i for i, row in enumerate(rows) if row[c] != " ") for c in range(len(rows[0]))]
    assert firsts == sorted(firsts) and firsts[0] <= 1 and firsts[-1] >= len(rows) - 2
    assert text.plain.splitlines()[0] == "loss of demo"
    assert max(map(len, text.plain.splitlines())) <= 60


def test_runs_without_colour_are_told_apart_by_signs(demo: Path) -> None:
    make_run(Path("runs/two"), steps=12)
    text = drawn(demo, "demo", "two").plain
    assert "** demo" in text and "oo two" in text
    assert {"*", "o"} <= set("".join(grid(drawn(demo, "demo", "two"))))


def test_curves_that_lie_on_each_other_say_so() -> None:
    losses = (8.0, 6.0, 5.0)
    runs = [Series(name, "loss", (1.0, 2.0, 3.0), losses) for name in ("a", "b")]
    close = Series("c", "loss", (1.0, 2.0), (8.0, 6.0 + 1e-7))
    look = {"width": 60, "height": 16, "coloured": False, "ascii_only": True}
    text = plot_text([*runs, close], "step", **look).plain
    assert text.splitlines()[-1] == "3 curves, largest difference 1e-07"
    apart = Series("c", "loss", (1.0, 2.0), (8.0, 6.5))
    for series in ([*runs, apart], runs[:1], [runs[0], runs[1]._replace(metric="mfu")]):
        assert "largest difference" not in plot_text(series, "step", **look).plain


def test_ascii_means_ascii(demo: Path) -> None:
    assert drawn(demo, "demo", ascii_only=True).plain.isascii()
    assert not drawn(demo, "demo").plain.isascii()


def test_a_flat_curve_and_a_single_point_are_drawn(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/one"), steps=1)
    for name in ("step_seconds", "loss"):
        assert call("show", "one", "--plot", name).code == 0
    assert call("show", "one", "--out", "one.png").code == 0
    assert Path("one.png").read_bytes().startswith(b"\x89PNG")


def test_units_follow_from_the_numbers() -> None:
    for metric, value, label in (
        ("step_seconds", 0.004, "step time (ms)"),
        ("time", 9000.0, "time of training (h)"),
        ("memory_bytes", 3 * 2**30, "peak memory of the fullest rank (GiB)"),
        ("grad_norm", 2e5, "gradient norm"),
    ):
        assert axis_of(metric, [value]).label == label
    assert axis_of("tokens", [5e9]).scaled([5e9]) == [5.0]


def test_ticks_and_running_means_by_hand() -> None:
    assert round_ticks(4.0, 4.0, 5) == [4.0]
    assert round_ticks(1e-4, 9e-4, 5) == pytest.approx([2e-4, 4e-4, 6e-4, 8e-4])
    assert mean([4.0, 8.0, 6.0], 1) == [4.0, 8.0, 6.0]
    assert mean([4.0, 8.0, 6.0, 2.0], 3) == pytest.approx([6.0, 6.0, 16 / 3, 4.0])


# ---------------------------------------------------------------- pictures and exports


def test_an_svg_has_axes_legend_and_a_line_a_run(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/two"), steps=12)
    said = call("show", "demo", "two", "--plot", "loss", "--x", "tokens", "--out", "a.svg")
    assert (said.code, said.out) == (0, "wrote a.svg\n")
    text = Path("a.svg").read_text()
    words = {node.text for node in ElementTree.fromstring(text).iter() if node.text}
    assert {"loss of 2 runs", "tokens", "loss", "demo", "two"} <= words
    assert text.count("<title>") == 32  # the steps of both runs
    call("show", "demo", "two", "--plot", "loss", "--x", "tokens", "--out", "b.svg")
    assert Path("b.svg").read_text() == text  # the same runs, the same file


def test_bad_places_for_a_picture_are_refused(demo: Path, call: Mpctl) -> None:
    assert "bad-suffix" in call("show", "demo", "--out", "a.bmp", "--json").issues
    assert "unwritable" in call("show", "demo", "--out", "no/such/a.png", "--json").issues


def test_exports_say_what_a_launch_would_have_written(demo: Path, call: Mpctl) -> None:
    job = load_job(None, {"launch.csv": True, "launch.tensorboard": True})
    follower = follow(RunDir(demo), job, print, lambda _: None)
    for one in RunDir(demo).records():
        follower.record(one)
    said = call("show", "demo", "--csv", "m.csv", "--tensorboard", "board")
    assert said.out == "wrote m.csv\nwrote board\n"
    assert Path("m.csv").read_text() == (demo / "metrics.csv").read_text()
    assert len(list(csv.DictReader(Path("m.csv").read_text().splitlines()))) == 21
    sizes = [next(folder.iterdir()).stat().st_size for folder in (Path("board"), demo / "tensorboard")]
    assert sizes[0] == sizes[1] > 1000
    assert "occupied" in call("show", "demo", "--tensorboard", "board", "--json").issues
    assert "usage" in call("show", "demo", "demo", "--csv", "m.csv", "--json").issues
    assert "unwritable" in call("show", "demo", "--csv", "no/m.csv", "--json").issues


def test_drawing_libraries_load_only_to_draw(demo: Path) -> None:
    probe = (
        "import sys; from mpctl.cli.app import run\n"
        "for words in (['runs'], ['show', 'demo'], ['show', 'demo', '--plot', 'loss']):\n"
        "    code = run(words)\n"
        "    drawing = ('torch', 'numpy', 'matplotlib', 'plotext', 'tensorboard')\n"
        "    print(code, [m for m in drawing if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == ["0 []", "0 []", "0 ['plotext']"]


def test_traffic_of_an_older_run_has_the_names_of_today() -> None:
    sent = {"dp all_reduce": {"count": 1, "bytes": 8}, "tp all_reduce": {"count": 2, "bytes": 8}}
    old = rank(0) | {"step_traffic": {"planned": sent, "measured": sent}}
    reported = summary() | {"plan_beside_run": [old]}
    read = SavedSummary.model_validate(reported).plan_beside_run[0]["step_traffic"]
    assert read["planned"] == read["measured"]
    assert list(read["measured"]) == ["dp_cp all_reduce", "tp all_reduce"]


# ---------------------------------------------------------------- the page


def test_the_page_of_a_run(demo: Path, call: Mpctl) -> None:
    assert call("show", "demo", "--html", "demo.html").out == "wrote demo.html\n"
    page = Path("demo.html").read_text("utf-8")
    assert "✓ demo  finished after 20 of 20 steps" in page
    for heading in ("Loss", "Speed", "Where the time went", "Facts", "Command"):
        assert f">{heading}</h2>" in page, heading
    assert "mpctl show runs/demo --html demo.html --x step" in page
    assert page.count('class="chart"') == 3  # losses, speed, memory; no collectives were recorded
    assert "<script" not in page


def test_the_page_of_a_run_that_failed_escapes_its_words(demo: Path, call: Mpctl) -> None:
    failure = {**FAILURE, "error": "<b>bold</b> & out of memory"}
    make_run(Path("runs/dead"), steps=5, ended=summary("failed", failure=failure))
    call("show", "dead", "--html", "dead.html", "--x", "tokens")
    page = Path("dead.html").read_text("utf-8")
    assert "✗ dead  failed after 5 of 20 steps" in page
    assert "&lt;b&gt;bold&lt;/b&gt; &amp; out of memory" in page
    assert "<b>bold" not in page


def test_a_page_is_of_one_run_and_needs_a_folder(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/other"))
    several = call("show", "demo", "other", "--html", "x.html")
    assert several.code == 2
    assert "2 runs were named" in several.err
    nowhere = call("show", "demo", "--html", "no/such/folder/x.html")
    assert nowhere.code == 2
    assert "unwritable" in nowhere.err


def test_a_run_without_a_step_has_a_page(demo: Path, call: Mpctl) -> None:
    make_run(Path("runs/new"), steps=0)
    assert call("show", "new", "--html", "new.html").code == 0
    assert "Where the time went" not in Path("new.html").read_text("utf-8")
