"""`mpctl runs`: every kind of ending has its status; nothing in a folder can break the list."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run as mpctl
from mpctl.core.errors import InputError
from mpctl.core.locks import hold_lock
from mpctl.render.runs import COLUMNS, _width, shown_columns
from mpctl.run.history.listing import list_runs
from mpctl.run.history.saved import is_running
from mpctl.run.history.show import open_runs
from tests.cli.calls import Mpctl
from tests.run.history.made import BEGAN, FAILURE, make_run, record, summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of every ending, a bench's runs one folder deeper, and folders that are no runs."""
    runs = tmp_path / "runs"
    make_run(runs / "done", ended=summary(), checkpoints=(10, 20))
    make_run(runs / "asked", steps=7, ended=summary("stopped"), checkpoints=(7,))
    make_run(runs / "dead", steps=5, ended=summary("failed", failure=FAILURE))
    make_run(runs / "killed", steps=12)
    make_run(runs / "bench" / "strong-1-r1")
    (runs / "notes" / "deep").mkdir(parents=True)
    (runs / "read.me").write_text("not a folder")
    return runs


def by_name(folder: Path) -> dict[str, dict[str, object]]:
    return {row["name"]: row for row in list_runs(folder)["runs"]}


def test_each_ending_has_its_word(folder: Path) -> None:
    rows = by_name(folder)
    assert {name: row["status"] for name, row in rows.items()} == {
        "done": "finished",
        "asked": "stopped",
        "dead": "failed",
        "killed": "interrupted",
        "bench/strong-1-r1": "finished",  # a bench writes no summary, but reached its last step
    }
    assert list_runs(folder)["others"] == ["notes"]


def test_a_row_says_what_the_run_reached(folder: Path) -> None:
    row = by_name(folder)["done"]
    assert (row["step"], row["steps"]) == (20, 20)
    assert row["loss"] == record(20)["loss"]
    assert row["validation_loss"] == record(20)["loss"] + 0.25
    assert row["tokens_per_second"] == 512.0
    assert (row["model"], row["layout"]) == ("gpt 2 x 32", "tp 2")
    assert row["checkpoints"] == 2
    manifest = folder / "done/checkpoints/step-10/manifest.json"
    assert row["checkpoint_bytes"] == 2 * (1000 + manifest.stat().st_size)
    assert row["started"] == "2026-09-21T14:13:20+00:00" and BEGAN == 1_790_000_000
    assert row["ended"] == "2026-09-21T14:13:30+00:00"


def test_the_last_validation_may_lie_far_back(tmp_path: Path) -> None:
    make_run(tmp_path / "a", steps=19)
    assert by_name(tmp_path)["a"]["validation_loss"] == record(10)["loss"] + 0.25


def test_a_held_lock_is_a_running_launch(folder: Path) -> None:
    """And asking leaves the lock to whoever wants it next."""
    path = folder / "killed"
    with hold_lock(path):
        assert by_name(folder)["killed"]["status"] == "running"
        assert by_name(folder)["killed"]["ended"] is None
    assert not is_running(path)
    with hold_lock(path):
        pass


def test_sorting(folder: Path) -> None:
    rows = list_runs(folder, sort="step")["runs"]
    assert [row["step"] for row in rows] == [5, 7, 12, 20, 20]
    rows = list_runs(folder, sort="step", reverse=True)["runs"]
    assert [row["step"] for row in rows] == [20, 20, 12, 7, 5]
    (folder / "dead/metrics.jsonl").unlink()
    for reverse in (False, True):  # what has no loss comes last either way
        assert list_runs(folder, sort="loss", reverse=reverse)["runs"][-1]["name"] == "dead"
    with pytest.raises(InputError, match=r"no column 'price'.*validation_loss"):
        list_runs(folder, sort="price")


def test_a_run_may_be_named_itself(folder: Path) -> None:
    listing = list_runs(folder / "done")
    assert [row["name"] for row in listing["runs"]] == ["done"] and listing["others"] == []


@pytest.mark.parametrize("name", ["job.json", "summary.json", "metrics.jsonl", "checkpoints/step-10/manifest.json"])
def test_no_damage_breaks_the_list(folder: Path, name: str, call: Mpctl) -> None:
    """Each file cut at any place, filled with foreign JSON, random bytes, or made a folder."""
    path = folder / "done" / name
    whole, draw = path.read_bytes(), random.Random(7)
    foreign = [
        b"",
        b"[]",
        b"null",
        b"3",
        b'{"step": 1}',
        b'{"schema": 1}',
        b"{" * 5000,
        b"\xff\0",
        b'{"step": true, "loss": NaN}\n',
        b'{"status": "finished", "plan_beside_run": [1]}',
        b'{"training": {"steps": "many"}}',
        draw.randbytes(200),
    ]
    cuts = [whole[: draw.randrange(len(whole))] for _ in range(6)]
    for content in (*foreign, *cuts):
        path.write_bytes(content)
        said = call("runs", folder, "--json")
        assert said.code == 0, said.err
        assert len(said.document["runs"]) == 5
        assert call("show", folder / "done").code == 0
    path.unlink()
    path.mkdir()
    assert call("runs", folder).code == 0
    if name != "job.json":
        assert call("show", folder / "done").code == 0


def places(document: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of everything in a JSON document but the document itself."""
    inner = document.items() if isinstance(document, dict) else ()
    for key, value in enumerate(document) if isinstance(document, list) else inner:
        yield (*path, key)
        yield from places(value, (*path, key))


def test_any_part_of_a_summary_may_be_missing_or_odd(folder: Path, call: Mpctl) -> None:
    path, draw = folder / "done/summary.json", random.Random(3)
    whole = path.read_text()
    for *way, last in draw.sample(list(places(json.loads(whole))), 25):
        document = json.loads(whole)
        held = document
        for key in way:
            held = held[key]
        if draw.random() < 0.5:
            del held[last]
        else:
            held[last] = draw.choice([None, True, -1, 0, 1e308, "x", [], {}, float("nan")])
        path.write_text(json.dumps(document))
        assert call("show", folder / "done").code == 0
    path.write_text(whole)


def test_damage_is_told(folder: Path, call: Mpctl) -> None:
    (folder / "done/job.json").write_text("{")
    (folder / "asked/summary.json").write_text('{"status": "splendid"}')
    said = call("runs", folder)
    assert "! done: job.json is not valid JSON" in said.out
    assert "! asked: summary.json: status: Input should be" in said.out
    rows = by_name(folder)
    assert rows["done"]["status"] == "unreadable" and rows["done"]["step"] == 20
    assert rows["asked"]["status"] == "interrupted"


def test_a_damaged_line_costs_itself_alone(folder: Path) -> None:
    metrics = folder / "done/metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    lines[3] = "garbage\n"
    lines[9] = '{"step": 10}\n'
    metrics.write_text("".join(lines) + '{"step": 21, "lo')
    (run,) = open_runs([folder / "done"])
    assert [r["step"] for r in run.records] == [s for s in range(1, 21) if s not in (4, 10)]
    assert run.step == 20


def test_a_folder_that_is_none_is_refused(tmp_path: Path, call: Mpctl) -> None:
    said = call("runs", tmp_path / "nowhere", "--json")
    assert said.code == 2 and "no-such-folder" in said.issues
    (tmp_path / "runs").mkdir()
    assert call("runs", tmp_path / "runs").out == f"no runs in {tmp_path / 'runs'}\n"


def test_names_from_strangers_do_not_steer_the_terminal(tmp_path: Path, call: Mpctl) -> None:
    make_run(tmp_path / "bad\x1b[2Jname", **{"model.name": "m\x1b]0;title\x07"})
    for said in (
        call("runs", tmp_path),
        call("show", tmp_path / "bad\x1b[2Jname"),
        call("show", tmp_path / "bad\x1b[2Jname", "--plot", "loss"),
    ):
        assert said.code == 0
        assert "\x1b" not in said.out and "\x07" not in said.out


def test_a_narrow_terminal_loses_the_least_important_columns(folder: Path) -> None:
    rows = list_runs(folder)["runs"]
    assert shown_columns(rows, 200) == list(COLUMNS)
    narrow = shown_columns(rows, 80)
    assert narrow == list(COLUMNS)[: len(narrow)] and len(narrow) < len(COLUMNS)
    assert _width(rows, narrow) <= 80
    assert shown_columns(rows, 10) == list(COLUMNS)[:5]


def test_piped_lines_are_whole(folder: Path, call: Mpctl) -> None:
    lines = call("runs", folder).out.splitlines()
    assert len(lines) == 7 and lines[0].split()[-1] == "checkpoints"
    done = next(line for line in lines if line.startswith("done"))
    assert "finished" in done and "20/20" in done and "2.3283" in done and "tp 2" in done


def test_json_is_one_document(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mpctl(["runs", str(folder), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "mpctl.runs/1" and len(document["runs"]) == 5
    assert document["others"] == ["notes"]
