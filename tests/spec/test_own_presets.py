"""Presets of one's own: files by path, and names that are found in the nearest folder.

By hand: with clusters/selene.toml in ./presets and in ~/.config/mpctl/presets, `--cluster selene`
is the first; a path is taken as it stands, relative to the file that names it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run
from mpctl.core.errors import InputError, Issue
from mpctl.plan.batch.answers import answers
from mpctl.spec.gpus import read_gpus
from mpctl.spec.load import load_job
from mpctl.spec.presets import VARIABLE, find_file, lasting_name, own_folders, presets_root
from mpctl.spec.runtime import get_profile

CLUSTER = 'name = "{}"\nnodes = 2\ngpus_per_node = 4\ndevice = "a100-80gb"\n'


def place(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; tmp_path/config is the user's folder of settings."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return folder


def issue_of(source: str | None, overrides: dict[str, Any] | None = None) -> Issue:
    with pytest.raises(InputError) as caught:
        load_job(source, overrides)
    (issue,) = caught.value.issues
    return issue


def cluster_name(value: str) -> str | None:
    return load_job(None, {"cluster": value}).cluster.name


def test_gpus_of_an_own_node_without_a_network_are_one_node(here: Path) -> None:
    place(here / "presets/clusters/mi350x-node.toml", CLUSTER.format("a node").replace("a100-80gb", "mi350x"))
    assert read_gpus("4xmi350x").settings == {"cluster": "mi350x-node", "cluster.nodes": 1, "cluster.gpus_per_node": 4}
    with pytest.raises(InputError) as caught:
        read_gpus("8xmi350x")
    (issue,) = caught.value.issues
    assert issue.rule == "gpus-one-node" and "use at most 4" in issue.hint


def test_the_nearest_folder_wins(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cluster_name("selene") == "Selene"
    place(tmp_path / "config/mpctl/presets/clusters/selene.toml", CLUSTER.format("of the user"))
    assert cluster_name("selene") == "of the user"
    place(here / "presets/clusters/selene.toml", CLUSTER.format("of the folder"))
    assert cluster_name("selene") == "of the folder"
    place(tmp_path / "named/clusters/selene.toml", CLUSTER.format("of the variable"))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    assert cluster_name("selene") == "of the variable"
    assert cluster_name("presets/clusters/selene.toml") == "of the folder"


def test_a_copy_of_a_bundled_preset_is_the_bundled_one(here: Path) -> None:
    """As in a clone beside an installed mpctl; a copy that was changed is another."""
    bundled = presets_root() / "clusters" / "selene.toml"
    copy = place(here / "presets/clusters/selene.toml", bundled.read_text("utf-8"))
    found = find_file("clusters", "selene")
    assert found is not None and (found.path, found.is_bundled, found.hides) == (bundled, True, False)
    place(copy, CLUSTER.format("changed"))
    found = find_file("clusters", "selene")
    assert found is not None and (found.path, found.hides) == (Path("presets") / "clusters" / "selene.toml", True)


def test_without_xdg_config_home_it_is_dot_config(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "relative/is/ignored"):
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert own_folders() == (Path("presets"), tmp_path / ".config/mpctl/presets")


def test_a_checkout_s_presets_are_the_bundled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(presets_root().parent)
    file = find_file("clusters", "selene")
    assert file is not None and (file.is_bundled or presets_root().name != "presets")
    assert not file.hides


def test_a_file_s_path_stands_where_a_name_does(here: Path) -> None:
    place(here / "mine.toml", CLUSTER.format("Mine"))
    place(here / "sub/model.toml", 'preset = "gpt2"\nlayers = 4\n')
    place(here / "sub/device.toml", 'preset = "a100-80gb"\nmemory_bytes = 1000\n')
    runtime = (presets_root() / "runtimes/fsdp.toml").read_text("utf-8")
    place(here / "sub/toy.toml", runtime.replace('name = "', 'name = "Toy of '))
    read = load_job(
        None,
        {
            "cluster": "mine.toml",
            "cluster.device": "sub/device.toml",
            "model": "./sub/model.toml",
            "training.runtime": "sub/toy.toml",
        },
    )
    assert read.cluster.name == "Mine" and read.model is not None and read.model.layers == 4
    assert read.cluster.device is not None and read.cluster.device.memory_bytes == 1000
    assert read.model.name == "model"
    assert get_profile(read.training.runtime).name.startswith("Toy of ")


def test_a_path_in_a_file_is_relative_to_the_file(here: Path, tmp_path: Path) -> None:
    """job -> cluster -> device, each in a folder of its own, read from a third one."""
    place(here / "jobs/base.toml", 'model = "../shape"\n[training]\nruntime = "fsdp"\n')
    place(here / "shape", 'preset = "gpt2"\nlayers = 6\n')
    place(here / "jobs/a.toml", 'preset = "./base.toml"\ncluster = "../clusters/c.toml"\n')
    place(here / "clusters/c.toml", CLUSTER.format("C").replace("a100-80gb", "d.toml"))
    place(here / "clusters/d.toml", 'preset = "h200"\nname = "D"\n')
    for source in ("jobs/a.toml", str(here / "jobs/a.toml")):
        read = load_job(source)
        assert read.cluster.device is not None and read.cluster.device.name == "D"
        assert read.model is not None and read.model.layers == 6


def test_a_missing_file_and_a_missing_name_say_where_was_looked(here: Path, tmp_path: Path) -> None:
    issue = issue_of(None, {"cluster": "selen"})
    assert "selene" in issue.hint and "looked in presets/clusters, " in issue.hint
    assert str(tmp_path / "config/mpctl/presets/clusters") in issue.hint
    assert "and the bundled ones" in issue.hint
    issue = issue_of(None, {"cluster": "no/selen.toml"})
    assert issue.message == "there is no file 'no/selen.toml'" and "selene" in issue.hint
    Path("mine.toml").write_text('preset = "selene"\n')
    assert "write ./mine.toml" in issue_of(None, {"cluster": "mine"}).hint
    issue = issue_of("gpt3-175b-102")
    assert "gpt3-175b-1024" in issue.hint and "presets/jobs" in issue.hint
    issue = issue_of(None, {"training.runtime": "no/fsdp.toml"})
    assert issue.where == "training.runtime" and "'no/fsdp.toml'" in issue.message


@pytest.mark.parametrize("name", ["..", "../selene", "../../x", "/etc/hostname", "a\x00/b", "x" * 5000])
def test_what_is_no_preset_is_refused(here: Path, name: str) -> None:
    place(here / "presets/selene.toml", CLUSTER.format("outside"))
    issue = issue_of(None, {"cluster": name})
    assert issue.rule in ("unknown-preset", "bad-preset")


def test_only_a_regular_file_of_at_most_one_mebibyte_is_read(here: Path) -> None:
    os.mkfifo(here / "pipe.toml")
    place(here / "large.toml", "#" * (2**20 + 1))
    place(here / "link.toml", CLUSTER.format("Mine")).rename(here / "target")
    (here / "link.toml").symlink_to("target")
    assert cluster_name("link.toml") == "Mine"
    for name, message in (
        ("pipe.toml", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("large.toml", "more than 1,048,576 bytes"),
        (".//", "not a regular file"),
    ):
        assert message in issue_of(None, {"cluster": name}).message


def test_files_that_start_from_each_other_are_refused(here: Path) -> None:
    place(here / "a.toml", 'preset = "b/a.toml"\n')
    place(here / "b/a.toml", 'preset = "../a.toml"\n')
    assert "presets start from each other: a -> a -> a" in issue_of(None, {"model": "a.toml"}).message
    for k in range(40):
        place(here / f"{k}.toml", f'preset = "{k + 1}.toml"\n')
    assert "more than 16 presets" in issue_of(None, {"model": "0.toml"}).message
    place(here / "c.toml", 'preset = "c/gpt2.toml"\n')  # equal names of two files are no circle
    place(here / "c/gpt2.toml", 'preset = "gpt2"\n')
    assert load_job(None, {"model": "c.toml"}).model is not None


def test_a_batch_s_files_are_relative_to_it(here: Path) -> None:
    place(here / "sets/mine.toml", CLUSTER.format("Mine"))
    line = json.dumps({"cluster": "mine.toml", "model": "gpt2", "tp": 2}).encode()
    (answer,) = answers([line], here / "sets")
    assert answer["fits"] is True
    (answer,) = answers([line], here)
    assert [issue["rule"] for issue in answer["issues"]] == ["unknown-preset"]


def test_a_run_writes_down_what_finds_its_runtime_from_anywhere(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = (presets_root() / "runtimes/fsdp.toml").read_text("utf-8")
    toy = place(here / "presets/runtimes/toy.toml", runtime.replace('name = "', 'name = "Toy '))
    assert lasting_name("runtimes", "toy") == str(toy) and lasting_name("runtimes", "fsdp") == "fsdp"
    assert get_profile("toy").name.startswith("Toy")
    monkeypatch.chdir("/")
    with pytest.raises(InputError):
        get_profile("toy")
    assert get_profile(str(toy)).name.startswith("Toy")


def test_the_list_says_where_each_comes_from(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place(here / "presets/clusters/selene.toml", CLUSTER.format("Mine"))
    place(here / "presets/clusters/broken.toml", "nodes =")
    place(tmp_path / "config/mpctl/presets/models/tiny.toml", 'preset = "gpt2"\nlayers = 2\n')
    text = 'preset = "a100-80gb"\nmemory_bytes = "48 GiB"\npeak_flops = { bf16 = "1 PFLOP/s" }\n'
    place(here / "presets/devices/mine.toml", text)
    assert run(["presets"]) == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "./presets, hides another" in rows["selene"] and "✗ is not TOML" in rows["broken"]
    assert str(tmp_path / "config/mpctl/presets")[:20] in rows["tiny"]
    assert "bundled" in rows["gpt2"] and "48 GiB; TFLOP/s: bf16 1000" in rows["mine"]
    assert run(["presets", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert files["clusters"]["selene"] == "presets/clusters/selene.toml"
    assert files["clusters"]["dgx-a100"] is None
    assert files["models"]["tiny"] == str(tmp_path / "config/mpctl/presets/models/tiny.toml")


def test_a_file_is_shown_with_its_kind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = CLUSTER.format("Mine") + "# the last line"
    place(here / "mine.toml", text)
    assert run(["presets", "clusters", "mine.toml"]) == 0
    assert capsys.readouterr().out == text
    assert run(["presets", "mine.toml"]) == 2
    assert "mpctl presets KIND mine.toml" in capsys.readouterr().err
