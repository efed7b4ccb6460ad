"""The job files in examples/launch: what each hands to its scheduler, and the plain trainer on CPU ranks."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from mpctl.interop.emitted import emit_plan
from mpctl.plan.planning.plan import load_plan
from mpctl.run.launch.program import flags_of
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl
from tests.run.launch.command import start

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted((EXAMPLES / "launch").glob("*.toml"))


def typed(path: Path) -> list[str]:
    """The line in a file's head that launches it."""
    found = re.search(r"^# +mpctl (launch .*)$", path.read_text("utf-8"), re.M)
    assert found
    return shlex.split(found[1].replace(path.name, str(path)))


def text_of(mpctl: Mpctl, path: Path) -> str:
    said = mpctl(*typed(path), "--dry-run")
    assert said.code == 0, said.err
    return said.out


def test_every_scheduler_has_both() -> None:
    names = {path.stem for path in FILES}
    assert names == {f"{on}-{what}" for on in ("slurm", "kubernetes", "ssh") for what in ("megatron", "train")}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_starts_is_what_was_planned(
    mpctl: Mpctl, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words of each rank's program, with the flags that `plan --emit` prints."""
    (tmp_path / "pretrain_gpt.py").touch()
    monkeypatch.chdir(tmp_path)
    text, job = text_of(mpctl, path), load_job(str(path))
    (shown,) = re.findall(r"^# each rank runs, in .*:\n#   (.*)$", text, re.M)
    flags = flags_of(emit_plan(load_plan(str(path)), "megatron"))[1] if job.model else []
    at = job.launch.program.index("{megatron}") if flags else len(job.launch.program)
    words = shlex.split(shown)
    assert words == [*job.launch.program[:at], *flags, *job.launch.program[at + 1 :]]
    assert (job.cluster.nodes, job.world_size) == (8, 64)
    CHECKS[job.launch.on](text, job)


def check_script(text: str, job: JobSpec) -> None:
    options = set(re.findall(r"^#SBATCH (.*)$", text, re.M))
    assert options >= {"--nodes=8", "--ntasks-per-node=1", "--gpus-per-node=8", "--partition=gpu", "--time=12:00:00"}
    assert options >= {"--exclusive", "--mem=0", "--requeue"}
    assert f"launch --resume --run-dir /data/runs/{job.name} --on slurm &" in text


def check_manifest(text: str, job: JobSpec) -> None:
    trainer = yaml.safe_load(text)["spec"]["trainer"]
    assert trainer["image"] == "registry.example.com/trainer:1"
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (8, 8)
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    assert trainer["command"][:5] == ["mpctl", "launch", "--resume", "--run-dir", f"/mnt/runs/{job.name}"]
    assert "# each rank runs, in /workspace" in text


def check_commands(text: str, job: JobSpec) -> None:
    hosts = re.findall(r"^# node (\d), (n\d):\nssh .* -- n\d 'exec .* --node=(\d)", text, re.M)
    assert hosts == [(str(n), f"n{n + 1}", str(n)) for n in range(8)]
    assert f"/data/runs/{job.name}" in text


CHECKS = {"slurm": check_script, "kubernetes": check_manifest, "ssh": check_commands}


def test_json_has_the_script_and_the_files(mpctl: Mpctl) -> None:
    path = EXAMPLES / "launch" / "slurm-megatron.toml"
    document = mpctl(*typed(path), "--dry-run", "--json").document
    assert document["document"].startswith("#!/bin/bash\n") and document["job_id"] is None
    job = json.loads(document["files"]["job.json"])
    assert document["program"] == job["launch"]["program_argv"] and set(document["files"]) == {"job.json", "plan.json"}


def test_a_site_that_shares_nodes(mpctl: Mpctl) -> None:
    path = EXAMPLES / "launch" / "slurm-train.toml"
    off = [word for key in ("exclusive", "requeue") for word in ("--set", f"launch.slurm.{key}=false")]
    options = re.findall(r"^#SBATCH (--\S+)", mpctl(*typed(path), "--dry-run", *off).out, re.M)
    assert "--no-requeue" in options and not {"--exclusive", "--mem=0", "--requeue"} & set(options)


@pytest.mark.slow
@pytest.mark.parametrize("on", ["slurm", "kubernetes", "ssh"])
def test_the_plain_trainer_trains_on_two_cpu_ranks(tmp_path: Path, on: str) -> None:
    sets = {"launch.program_dir": str(EXAMPLES), "launch.program": ["python", "train_ddp.py", "--steps", "20"]}
    here = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    sizes = ["--nodes", "1", "--gpus-per-node", "2", "--device", "cpu", "--on", "local"]
    file, run = str(EXAMPLES / "launch" / f"{on}-train.toml"), tmp_path / "run"
    done = start(["launch", file, *sizes, *here, "--run-dir", str(run)], run)
    done.ended()
    assert done.summary["status"] == "finished", done.stderr
    assert [record["step"] for record in done.records] == list(range(1, 21))
    assert done.losses[-1] < done.losses[0]
