"""`mpctl checkpoint`: tables for people, documents for scripts, exit code 1 for a damaged one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import COMMANDS
from mpctl.cli.app import run as mpctl

RECORDED = Path(__file__).parents[1] / "recorded" / "run-0.1.0" / "run"
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of version 0.1.0 with checkpoints of steps 2 and 4 (a copy), tp 2."""
    shutil.copytree(RECORDED, tmp_path / "run")
    shutil.copytree(tmp_path / "run/checkpoints/step-2", tmp_path / "run/checkpoints/step-4")
    manifest = tmp_path / "run/checkpoints/step-4/manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 4'))
    return tmp_path / "run"


def document(capsys: Capture, *argv: str, code: int = 0) -> Any:
    assert mpctl(["checkpoint", *argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_list_says_what_there_is(run: Path, capsys: Capture) -> None:
    listed = document(capsys, "list", str(run))
    assert listed["schema"] == "mpctl.checkpoints/1"
    rows = [(row["step"], row["tp"], row["pp"]) for row in listed["checkpoints"]]
    assert rows == [(2, 2, 1), (4, 2, 1)]
    assert all(row["problems"] == [] and not row["verified"] for row in listed["checkpoints"])
    assert mpctl(["checkpoint", "list", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "tp 2 x pp 1" in shown and shown.count("complete") == 2


def test_damage_has_exit_code_1(run: Path, capsys: Capture) -> None:
    """Of sizes: told by each command. Of bits: by verify, of the newest or of all."""
    flip(run / "checkpoints/step-2/shard-1.safetensors")
    assert document(capsys, "list", str(run))["set_aside"] == []
    assert document(capsys, "verify", str(run))["checkpoints"][0]["verified"]
    found = document(capsys, "verify", str(run), "--all", code=1)["checkpoints"]
    assert [bool(row["problems"]) for row in found] == [True, False]
    assert "shard-1.safetensors: its bytes are not those" in found[0]["problems"][0]
    (run / "checkpoints/step-4/shard-0.safetensors").write_bytes(b"")
    for command in ("list", "inspect", "verify"):
        assert mpctl(["checkpoint", command, str(run)]) == 1
        shown = " ".join(capsys.readouterr().out.split())
        assert "damaged" in shown and "has 0 bytes" in shown
    assert mpctl(["checkpoint", "inspect", str(run / "checkpoints/step-2")]) == 0


def test_an_inspection_says_what_is_in_it(run: Path, capsys: Capture) -> None:
    inspected = document(capsys, "inspect", str(run))
    assert inspected["checkpoint"]["step"] == 4
    assert [shard["tp"] for shard in inspected["shards"]] == [0, 1]
    word = next(p for p in inspected["parameters"] if p["name"] == "embedding.word.weight")
    assert (word["dims"], word["shards"], word["updates"]) == ([0], [0, 1], 2)
    assert mpctl(["checkpoint", "inspect", str(run), "--parameters"]) == 0
    shown = capsys.readouterr().out
    assert "embedding.word.weight" in shown and "sha256 of each file" in shown


def test_what_is_no_checkpoint_is_bad_input(tmp_path: Path, capsys: Capture) -> None:
    for name in (tmp_path, tmp_path / "checkpoints/step-3"):
        assert mpctl(["checkpoint", "list", str(name)]) == 2
        assert "has no checkpoint" in capsys.readouterr().err


def test_another_layout_is_written_to_a_run_directory(run: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "out"
    argv = ("reshard", str(run / "checkpoints/step-2"), str(out), "--tp", "1", "--pp", "2")
    (row,) = document(capsys, *argv)["checkpoints"]
    assert (row["step"], row["tp"], row["pp"], row["problems"]) == (2, 1, 2, [])
    job = json.loads((out / "job.json").read_text())
    assert (job["parallel"]["tp"], job["parallel"]["pp"]) == (1, 2)
    assert mpctl(["checkpoint", *argv]) == 2  # it is occupied now
    assert "out-occupied" in capsys.readouterr().err
    again = ["launch", "--resume", "--run-dir", str(out), "--dry-run"]
    corpus = RECORDED.parent / "text.txt"
    assert mpctl([*again, "--set", f'data.corpus=["{corpus}"]']) == 0


def test_a_checkpoint_of_0_1_0_is_written_for_a_grid(run: Path, tmp_path: Path, capsys: Capture) -> None:
    """A run of 2.5d goes on in 2d; the depth is none of its settings then."""
    out, batch = tmp_path / "out", ["--set", "micro_batch_size=4", "--set", "global_batch_size=4"]
    argv = ["reshard", str(run / "checkpoints/step-2"), str(out), "--tp", "8", *batch]
    mode = ["--tensor-mode", "2.5d", "--set", "tensor_depth=2"]
    (row,) = document(capsys, *argv, *mode)["checkpoints"]
    assert (row["tp"], row["problems"]) == (8, [])
    rows = document(capsys, "inspect", str(out))["parameters"]
    dims = {row["name"]: row["dims"] for row in rows}
    assert dims["embedding.word.weight"] == [0, 1] and dims["final_norm.weight"] == [0]
    assert mpctl(["checkpoint", "inspect", str(out), "--parameters"]) == 0
    assert "dim 0 and 1" in capsys.readouterr().out
    job = json.loads((out / "job.json").read_text())["parallel"]
    assert (job["tensor_mode"], job["tensor_depth"]) == ("2.5d", 2)
    assert (row["tensor_mode"], row["tensor_depth"]) == ("2.5d", 2)
    assert mpctl(["checkpoint", "list", str(out)]) == 0
    assert "tp 8 (2.5d, depth 2) x pp 1" in capsys.readouterr().out
    again = ["launch", "--resume", "--run-dir", str(out), "--dry-run", "--json", "--tp", "4"]
    corpus = f'data.corpus=["{RECORDED.parent / "text.txt"}"]'
    assert mpctl([*again, "--tensor-mode", "2d", "--set", corpus]) == 0
    job = json.loads(capsys.readouterr().out)["job"]["parallel"]
    assert (job["tp"], job["tensor_mode"], job["tensor_depth"]) == (4, "2d", None)
    _says_nothing_of_another_mode(out, capsys)


def _says_nothing_of_another_mode(out: Path, capsys: Capture) -> None:
    """A job that went on in another mode on as many ranks is not what cut the checkpoint."""
    job = json.loads((out / "job.json").read_text())
    for mode in ("1d", "3d"):
        job["parallel"] |= {"tensor_mode": mode, "tensor_depth": None}
        (out / "job.json").write_text(json.dumps(job))
        assert document(capsys, "list", str(out))["checkpoints"][0]["tensor_mode"] is None


def test_weights_is_a_former_name(tmp_path: Path, capsys: Capture) -> None:
    """`mpctl weights import` is still read; the list of commands has the name of today."""
    assert mpctl(["weights", "import", str(tmp_path), str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    assert "checkpoint" in COMMANDS and "weights" not in COMMANDS
