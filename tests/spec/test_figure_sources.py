"""Every output names the user's presets behind its figures: those that hide a bundled one, and others.

By hand: a fitted copy of dgx-h100 in ./presets hides the bundled cluster; a job that names another cluster
above it no longer depends on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run
from mpctl.plan.batch.answers import answers
from mpctl.plan.planning.plan import load_plan
from mpctl.spec.figure_sources import FigureSource, sources_text
from mpctl.spec.presets import VARIABLE, presets_root

HIDES = "./presets/clusters/dgx-h100.toml hides the bundled one"
JOB = ["--cluster", "dgx-h100", "--nodes", "1", "--model", "gpt2", "--runtime", "megatron-core"]


def copy_of(kind: str, name: str, folder: Path = Path("presets"), to: str | None = None) -> Path:
    """A changed copy of a bundled preset."""
    path = folder / kind / f"{to or name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = (presets_root() / kind / f"{name}.toml").read_text("utf-8")
    path.write_text(f"# a copy\n{text}", "utf-8")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory without presets elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path


def sources(overrides: dict[str, Any], source: str | None = None) -> list[FigureSource]:
    return load_plan(source, {"training.runtime": "megatron-core", "model": "gpt2", **overrides}).figures_from


def test_bundled_presets_are_not_named(here: Path) -> None:
    assert sources({"cluster": "dgx-h100"}) == []


def test_each_preset_of_the_user_is_named_with_what_it_hides(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = copy_of("clusters", "dgx-h100")
    assert sources({"cluster": "dgx-h100"}) == [
        {"path": str(cluster), "kind": "clusters", "name": "dgx-h100", "hides": True}
    ]
    device = copy_of("devices", "h100-sxm")
    model = copy_of("models", "gpt2", here / "named")
    monkeypatch.setenv(VARIABLE, str(here / "named"))
    runtime = copy_of("runtimes", "megatron-core", here / "config" / "mpctl" / "presets")
    found = sources({"cluster": "dgx-h100"})
    assert [(s["path"], s["kind"], s["hides"]) for s in found] == [
        (str(cluster), "clusters", True),
        (str(device), "devices", True),
        (str(model), "models", True),
        (str(runtime), "runtimes", True),
    ]
    text = f"./{cluster}, ./{device}, {model} and {runtime} hide the bundled ones"
    assert sources_text(found) == text


def test_a_name_of_the_users_own_hides_nothing(here: Path) -> None:
    copy_of("clusters", "dgx-h100", to="ours")
    found = sources({"cluster": "ours"})
    assert [s["hides"] for s in found] == [False]
    assert sources_text(found) == "./presets/clusters/ours.toml"


def test_a_preset_that_another_one_replaces_is_not_named(here: Path) -> None:
    copy_of("clusters", "dgx-h100")
    job = here / "job.toml"
    job.write_text('cluster = "dgx-h100"\nmodel = "gpt2"\n', "utf-8")
    assert [s["name"] for s in sources({}, str(job))] == ["dgx-h100"]
    assert sources({"cluster": "selene"}, str(job)) == []
    assert [s["name"] for s in sources({"cluster.nodes": 1}, str(job))] == ["dgx-h100"]


def test_presets_that_start_from_each_other_are_all_named(here: Path) -> None:
    copy_of("clusters", "dgx-h100")
    path = here / "presets" / "clusters" / "mine.toml"
    path.write_text('preset = "dgx-h100"\nnodes = 1\n', "utf-8")
    assert [s["name"] for s in sources({"cluster": "mine"})] == ["mine", "dgx-h100"]


def test_a_line_of_a_batch_names_them_whether_its_table_was_read_before_or_not(here: Path) -> None:
    copy_of("clusters", "dgx-h100")
    line = json.dumps({"cluster": "dgx-h100", "model": "gpt2"}).encode()
    first, again, other = answers([line, line, b'{"cluster": "selene", "model": "gpt2"}'])
    assert first["figures_from"] == again["figures_from"] == sources({"cluster": "dgx-h100"})
    assert "figures_from" not in other


@pytest.mark.parametrize(
    "command",
    [
        ["plan", *JOB],
        ["search", *JOB, "--fix", "pp=1", "--fix", "tp=1", "--top", "1"],
        ["plan", "--compare", "job.toml", "micro_batch_size=2"],
        ["init", "new.toml", *JOB, "--global-batch-size", "8"],
    ],
    ids=["plan", "search", "compare", "init"],
)
def test_commands_name_them_in_their_heads(here: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (here / "job.toml").write_text(
        '[cluster]\npreset = "dgx-h100"\nnodes = 1\n[model]\npreset = "gpt2"\n'
        '[training]\nruntime = "megatron-core"\nglobal_batch_size = 16\n',
        "utf-8",
    )
    copy_of("clusters", "dgx-h100")
    assert run(command) == 0
    assert HIDES in capsys.readouterr().out
    if command[0] != "init":
        assert run([*command, "--json"]) == 0
        assert '"path": "presets/clusters/dgx-h100.toml"' in capsys.readouterr().out


def test_a_page_names_them(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy_of("clusters", "dgx-h100")
    assert run(["plan", *JOB, "--html", "plan.html"]) == 0
    assert HIDES in (here / "plan.html").read_text("utf-8")
