"""A runtime is one TOML file: named by MPCTL_PRESETS it is planned with, searched with and listed.

A preset of a user's is untrusted: whatever is wrong with it is an InputError that names its file.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpctl.cli.app import run
from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.plan import make_plan
from mpctl.plan.search.find import find_layouts
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.load import load_job
from mpctl.spec.presets import VARIABLE, find_file, preset_names, presets_root
from mpctl.spec.runtime import get_profile
from mpctl.spec.schema import job_schema

TOY = """
name = "Toy trainer"
spread = 0.1
spread_apart = 0.2
source = "made up for a test"

[runs]
recompute = ["full"]
zero = [1]
pipeline = false

[operators]
hidden = { forward = 6.0, backward = 10.0 }
width = { forward = 2.0, backward = 2.0 }
inner = { forward = 1.2, backward = 2.0 }
scores = { forward = 4.5, backward = 5.5 }
logits = { forward = 20.0, backward = 16.0 }
gradient_bytes = 6.0
optimizer_bytes = 48.0

[overlap]
tp = 0.0
pp = 0.0
dp = 0.0

[host]
layer = 8e-4

[memory]
kernels = "megatron"
"""
JOB: dict[str, Any] = {
    "cluster": "selene",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 4,
    "model": "gpt2",
    "training.global_batch_size": 16,
    "training.dtype": "bf16",
    "training.runtime": "toy",
}


def place(folder: Path, kind: str, name: str, text: str) -> Path:
    path = folder / kind / f"{name}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place(tmp_path, "runtimes", "toy", TOY)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path


def issues_of(overrides: dict[str, Any]) -> list[Any]:
    with pytest.raises(InputError) as caught:
        make_plan(load_job(None, overrides))
    return list(caught.value.issues)


@pytest.mark.usefixtures("folder")
def test_it_is_planned_with() -> None:
    estimate = make_plan(load_job(None, JOB)).estimate
    assert estimate is not None and not isinstance(estimate.time, str)
    megatron = make_plan(load_job(None, {**JOB, "training.runtime": "megatron-2022"})).estimate
    assert megatron is not None and not isinstance(megatron.time, str)
    assert estimate.time.total != megatron.time.total
    assert estimate.time.extrapolates  # it was fitted to nothing


@pytest.mark.usefixtures("folder")
def test_a_search_tries_what_it_runs() -> None:
    space = SearchSpace(load_job(None, {**JOB, "training.recompute": "full"}))
    layouts = list(space.layouts())
    assert {layout.tp for layout in layouts} == {1, 2, 4}
    assert {(n.pp, n.recompute) for n in layouts} == {(1, "full")}
    assert {layout.zero for layout in layouts} == {1}
    assert find_layouts(space, top=1).best[0].layout in layouts


@pytest.mark.usefixtures("folder")
def test_the_schema_and_an_error_name_it() -> None:
    schema = job_schema()["$defs"]["TrainingSpec"]["properties"]["runtime"]
    names = schema["anyOf"][0]["enum"]
    assert names == preset_names("runtimes") and "toy" in names
    (issue,) = issues_of({**JOB, "training.runtime": "toyy"})
    assert issue.where == "training.runtime"
    assert "'toy'" in issue.message and issue.hint == "use toy"


def test_without_its_folder_it_is_unknown() -> None:
    (issue,) = issues_of(JOB)
    assert "'toy'" in issue.message and "'torchtitan'" in issue.message


COPIED: tuple[tuple[str, ...], ...] = (
    ("--tokens", "1T", "--set", "parallel.zero=1", "--tp", "2"),
    ("--tokens", "1T", "--set", "parallel.zero=1", "--set", "checkpoint.asynchronous=false", "--tp", "2"),
    ("--set", "training.dtype=fp8", "--set", "parallel.pp=4", "--set", "parallel.zero=2"),
    ("--set", "training.dtype=fp8", "--set", "training.fp8_recipe=tensorwise", "--tp", "2"),
    ("--set", "parallel.tp_comm_overlap=true", "--tp", "4", "--set", "parallel.sequence_parallel=true"),
    ("--set", "training.attention_dropout=0.1", "--pp", "2", "--explain"),
    ("--model", "mixtral-8x7b", "--set", "parallel.ep=8", "--set", "training.moe_aux_loss_coeff=0.01"),
)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("options", COPIED, ids=" ".join)
def test_a_copy_of_mpctls_profile_plans_the_same(
    options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place(folder, "runtimes", "a-fork", (presets_root() / "runtimes/mpctl.toml").read_text())

    def shown(runtime: str, *how: str) -> str:
        model = () if "--model" in options else ("--model", "llama-3-8b")
        where = ("--cluster", "dgx-h100", "--nodes", "2", "--runtime", runtime)
        assert run(["plan", *model, *where, *options, *how]) in (0, 3)  # 3: it does not fit
        out = capsys.readouterr().out.replace("a-fork", "mpctl")
        if "--json" in how:
            return json.dumps({**json.loads(out), "figures_from": []})
        return re.sub(r"^figures:.*?(?=^step time)", "", out, flags=re.DOTALL | re.MULTILINE)

    for how in ((), ("--json",)):
        assert shown("a-fork", *how) == shown("mpctl", *how)


def test_the_command_lists_it_with_its_file(folder: Path) -> None:
    place(folder, "clusters", "selene", 'nodes = 2\ngpus_per_node = 4\ndevice = "a100-80gb"\n')
    environment = {**os.environ, VARIABLE: str(folder)}
    call = [sys.executable, "-m", "mpctl", "presets", "--json"]
    done = subprocess.run(call, env=environment, capture_output=True, check=True, text=True)
    listing = json.loads(done.stdout)
    assert "toy" in listing["runtimes"] and listing["clusters"] == preset_names("clusters")
    assert listing["user"] == {
        "clusters": {"selene": {"file": str(folder / "clusters/selene.toml"), "hides_another": True}},
        "runtimes": {"toy": {"file": str(folder / "runtimes/toy.toml"), "hides_another": False}},
    }


def test_a_users_preset_hides_the_bundled_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'name = "Mine"\nnodes = 2\ngpus_per_node = 4\ndevice = "a100-80gb"\n'
    mine = place(folder, "clusters", "selene", text)
    assert load_job(None, {"cluster": "selene"}).cluster.name == "Mine"
    file = find_file("clusters", "selene")
    assert file is not None and file.path == mine and file.hides
    first = tmp_path / "first"
    place(first, "clusters", "selene", text.replace("Mine", "First"))
    monkeypatch.setenv(VARIABLE, os.pathsep.join([str(first), str(folder)]))
    assert load_job(None, {"cluster": "selene"}).cluster.name == "First"


def test_each_profile_is_read_once_for_each_search_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_profile("toy") is get_profile("toy")
    other = folder / "other"
    place(other, "runtimes", "toy", TOY.replace("Toy trainer", "Other"))
    monkeypatch.setenv(VARIABLE, str(other))
    assert get_profile("toy").name == "Other"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[host]", "[hots]"), "hots: there is no such key"),
        (("layer = 8e-4", 'layer = "slow"'), "host.layer: 'slow': it is not a number with a unit"),
        (("spread = 0.1\n", ""), "spread is required"),
        (('kernels = "megatron"', 'kernels = "triton"'), "kernels 'triton' are not known"),
        (("zero = [1]", "zero = [4]"), "runs.zero.0: input should be less than or equal to 3"),
        (("zero = [1]", "zero = []"), "runs.zero: list should have at least 1 item"),
        (("[runs]", "[runs"), "is not TOML"),
    ],
)
def test_a_wrong_profile_names_its_file(folder: Path, change: tuple[str, str], message: str) -> None:
    path = place(folder, "runtimes", "toy", TOY.replace(*change))
    issues = issues_of(JOB)
    assert any(message in issue.message for issue in issues)
    assert all(issue.where == str(path) for issue in issues)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("clusters", "nodes = 0\n", "nodes: input should be greater than or equal to 1"),
        ("clusters", "gpus = 8\n", "gpus: there is no such key"),
        ("clusters", 'device = "mine"\n', "no device preset is called 'mine'"),
        ("clusters", 'preset = "mine"\n', "presets start from each other: mine -> mine"),
        ("clusters", "nodes = \xff", "is not TOML"),
        ("models", "layers = true\n", "layers: input should be a valid integer"),
    ],
)
def test_a_wrong_preset_names_its_file(folder: Path, kind: str, text: str, message: str) -> None:
    path = folder / kind / "mine.toml"
    path.parent.mkdir()
    path.write_bytes(text.encode("latin-1"))
    (issue,) = issues_of({kind[:-1]: "mine"})
    assert message in issue.message
    assert issue.where == ("cluster.device" if "device" in text else str(path))


def test_a_folder_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    (issue,) = issues_of({"model": "gpt2"})
    assert issue.where == VARIABLE and "none is not a folder" in issue.message


def test_paths_in_a_users_presets_are_relative_to_their_files(folder: Path) -> None:
    place(folder, "jobs", "mine", 'model = "gpt2"\n[data]\npath = "texts"\n')
    assert load_job("mine").data.path == str(folder / "jobs" / "texts")
    place(folder, "models", "mine", 'hf_config = "hf"\n')
    (issue,) = issues_of({"model": "mine"})
    assert str(folder / "models" / "hf") in issue.message


def test_an_oversized_file_is_not_read(folder: Path) -> None:
    path = place(folder, "clusters", "mine", "# " + "x" * 2**20)
    (issue,) = issues_of({"cluster": "mine"})
    assert issue.where == str(path) and "more than" in issue.message


def test_a_profile_is_read_again_when_its_file_changes(folder: Path, tmp_path: Path) -> None:
    """In one process, as in a notebook: an edited file, and one that is removed."""
    assert get_profile("toy").spread == 0.1
    path = place(tmp_path, "runtimes", "toy", TOY.replace("spread = 0.1", "spread = 0.17"))
    assert get_profile("toy").spread == 0.17
    path.unlink()
    with pytest.raises(InputError, match="toy"):
        get_profile("toy")


def test_a_job_with_adapters_has_figures_of_its_own(folder: Path, tmp_path: Path) -> None:
    seen = '\n[seen]\ndevices = ["A", "B"]\n'
    own = "\n[with_adapters]\nspread = 0.3\noverlap = { dp = 0.5 }\nseen = { gpus = 8 }\n"
    place(tmp_path, "runtimes", "toy", TOY + seen + own)
    adapters = JOB | {"training.adapter.rank": 8, "training.runtime": "toy"}
    plain, tuned = (JobLayout.of(load_job(None, job)).profile for job in (JOB, adapters))
    assert (plain.spread, plain.overlap.dp, plain.seen.devices) == (0.1, 0.0, ["A", "B"])
    assert (tuned.spread, tuned.overlap.dp, tuned.seen.devices, tuned.seen.gpus) == (0.3, 0.5, [], 8)
    assert (tuned.spread_apart, tuned.overlap.tp, tuned.host) == (plain.spread_apart, plain.overlap.tp, plain.host)
    with_it = make_plan(load_job(None, adapters)).estimate
    assert with_it is not None and with_it.layout.profile is tuned


@pytest.mark.parametrize(
    "wrong", ["with_adapters = 3", "[with_adapters]\nhost = 1", "[with_adapters.host]\nlayers = 1"]
)
def test_wrong_figures_for_adapters_name_the_file(folder: Path, tmp_path: Path, wrong: str) -> None:
    line, table = (wrong, "") if wrong.startswith("with") else ("", wrong)
    path = place(tmp_path, "runtimes", "toy", f"{line}\n{TOY}\n{table}\n")
    (issue,) = issues_of(JOB)  # whether or not the job has adapters
    assert issue.where == str(path) and ("host" in issue.message or "with_adapters" in issue.message)
