"""`mpctl init`: what it writes is a job that plan accepts; typed in a terminal, and without one."""

from __future__ import annotations

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpctl.cli.init import Answers, with_release
from mpctl.cli.init_launch import launch_part
from mpctl.cli.init_layout import choose_layout
from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import load_plan
from mpctl.render.job_file import JobFile, job_text
from mpctl.spec.load import load_job
from tests.cli.calls import Mpctl, assert_refused

CALL = [sys.executable, "-m", "mpctl", "init"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with Path(os.devnull).open() as empty:
        monkeypatch.setattr(sys, "stdin", empty)
        yield tmp_path


def test_without_a_terminal_defaults_are_used_and_named(mpctl: Mpctl, here: Path) -> None:
    said = mpctl("init")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith("wrote job.toml\n") and "this-machine (default)" in said.out
    assert said.out.endswith(
        "next\n  mpctl plan job.toml\n  mpctl launch job.toml --dry-run\n  mpctl launch job.toml\n"
    )
    assert [path.name for path in here.iterdir()] == ["job.toml"]
    job = load_job("job.toml")
    assert job.model is not None and job.world_size == 2 and job.training.steps == 100
    assert mpctl("plan", "job.toml").code == 0
    assert mpctl("launch", "job.toml", "--dry-run").code == 0


@pytest.mark.slow
def test_every_flag_is_written(mpctl: Mpctl) -> None:
    flags = {
        "cluster": "dgx-h100",
        "nodes": 4,
        "gpus-per-node": 8,
        "model": "llama-3-8b",
        "runtime": "mpctl",
        "global-batch-size": 256,
        "tokens": "10B",
    }
    said = mpctl("init", "a.toml", *(w for name, v in flags.items() for w in (f"--{name}", v)))
    assert said.code == 0 and "(default)" not in said.out
    job = load_job("a.toml")
    assert job.cluster.nodes == 4 and job.world_size == 32 and job.training.dtype == "bf16"
    assert job.training.global_batch_size == 256
    tokens = job.training.steps * 256 * 8192
    assert 10e9 <= tokens < 10e9 + 256 * 8192
    assert mpctl("plan", "a.toml").code == 0


@pytest.mark.slow
def test_the_layout_is_the_one_that_search_finds(mpctl: Mpctl) -> None:
    settings = {
        "cluster": "dgx-2x8",
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "model": "gpt2-xl",
        "training.global_batch_size": 64,
    }
    chosen = choose_layout(settings, patience=600).settings
    flags = ("--cluster=dgx-2x8", "--model=gpt2-xl", "--global-batch-size=64", "--dtype=bf16")
    best = mpctl("search", *flags, "--top", 1, "--json").document["suggested"]["settings"]
    assert {name: chosen[f"parallel.{name}"] for name in ("tp", "pp", "dp")} == {
        name: best[name] for name in ("tp", "pp", "dp")
    }
    assert chosen["training.recompute"] == best["recompute"]


@pytest.mark.slow
def test_every_line_has_a_comment_and_none_is_long(mpctl: Mpctl) -> None:
    mpctl("init", "a.toml", "--cluster", "dgx-h100", "--nodes", 8)
    lines = Path("a.toml").read_text("utf-8").splitlines()
    assert all(len(line) <= 100 for line in lines) and len(lines) < 50
    keys = [at for at, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert keys and all("#" in lines[at] or lines[at - 1].startswith("#") for at in keys)


def test_a_release_is_kept_and_its_runtime_named(mpctl: Mpctl) -> None:
    flags = ("--cluster", "dgx-gb200", "--nodes", "1", "--model", "gpt2-medium", "--runtime", "nemo:26.06")
    said = mpctl("init", *flags)
    assert said.code == 0, said.err
    assert "planned as         megatron-core-graphs" in said.out
    assert tomllib.loads(Path("job.toml").read_text("utf-8"))["training"]["runtime"] == "nemo:26.06"


def test_a_release_is_asked_for_where_it_decides_the_figures() -> None:
    answers = Answers({"release": "26.04"}, asks=True)
    assert with_release(answers, "megatron-bridge") == "megatron-bridge-26.04"
    assert answers.rows == [("release", "26.04")]
    assert with_release(answers, "torchtitan") == "torchtitan"
    with pytest.raises(InputError):
        with_release(Answers({"release": "20.01"}, asks=True), "megatron-bridge")


def test_the_layout_is_for_the_runtime_that_is_named(mpctl: Mpctl) -> None:
    flags = ("--cluster=dgx-2x8", "--nodes=1", "--model=gpt2-xl", "--global-batch-size=16")
    said = mpctl("init", "a.toml", *flags, "--runtime", "megatron-core")
    assert said.code == 0
    lines = (
        "mpctl plan a.toml",
        "mpctl plan a.toml --emit megatron",
        "mpctl launch a.toml --dry-run",
        "mpctl launch a.toml",
    )
    assert said.out.endswith("".join(f"\n  {line}" for line in lines) + "\n")
    assert load_job("a.toml").launch.program == ["python", "pretrain_gpt.py", "{megatron}"]
    assert load_job("a.toml").training.runtime == "megatron-core"
    assert "--tensor-model-parallel-size" in mpctl("plan", "a.toml", "--emit", "megatron").out
    said = mpctl("init", "b.toml", *flags)
    assert "mpctl (default); or megatron-core" in " ".join(said.out.split())
    assert load_job("b.toml").training.is_runtime_default
    said = mpctl("init", "c.toml", *flags, "--runtime", "megatron-2022")
    assert said.out.endswith('\n  mpctl launch c.toml --program "python train.py"\n')
    assert '# program = ["python", "train.py"]' in Path("c.toml").read_text("utf-8")
    assert load_job("c.toml").launch.program == []


@pytest.mark.parametrize(("runtime", "zero"), [("megatron-core", 1), ("fsdp2", 2), ("torchtitan", 3), ("mpctl", 1)])
@pytest.mark.parametrize("on", ["slurm", "kubernetes", None])
def test_the_lines_that_come_next_can_be_typed(mpctl: Mpctl, runtime: str, zero: int, on: str | None) -> None:
    """From the file to the text that is submitted, without a scheduler on this machine."""
    settings = {"cluster.preset": "dgx-h100", "cluster.nodes": 2, "cluster.gpus_per_node": 8}
    settings |= {
        "model.preset": "llama-3-8b",
        "training.runtime": runtime,
        "training.dtype": "bf16",
        "parallel.zero": zero,
        "parallel.tp": 8,
    }
    part = launch_part(load_plan(None, settings), Path("a.toml"), on)
    file = JobFile((), settings | part.settings, part.reasons, part.commands, part.stops, part.examples)
    Path("a.toml").write_text(job_text(file), "utf-8")
    *_, (shown, _), (starts, _) = part.commands
    assert shown == f"{starts} --dry-run" and "--submit" in starts
    said = mpctl(*shlex.split(shown)[1:])
    assert said.code == 0, said.err
    assert ("kind: TrainJob" if on == "kubernetes" else "#SBATCH --gpus-per-node=8") in said.out


def test_a_family_stands_for_its_small_model(mpctl: Mpctl) -> None:
    for family in ("gpt", "bert", "t5", "glm"):
        assert mpctl("init", f"{family}.toml", "--family", family).code == 0
        model = load_job(f"{family}.toml").model
        assert model is not None and model.family == family
        assert mpctl("plan", f"{family}.toml").code == 0


def test_presets_by_path_are_written_relative_to_the_job_file(mpctl: Mpctl, here: Path) -> None:
    (here / "jobs").mkdir()
    (here / "ours.toml").write_text('preset = "dgx-2x8"\nnodes = 1\n', "utf-8")
    assert mpctl("init", "jobs/a.toml", "--cluster", "ours.toml", "--model", "gpt2").code == 0
    assert tomllib.loads(Path("jobs/a.toml").read_text())["cluster"]["preset"] == "../ours.toml"
    assert load_job("jobs/a.toml").cluster.nodes == 1
    assert mpctl("plan", "jobs/a.toml").code == 0


def test_a_cluster_without_bandwidths_gets_a_simple_layout(mpctl: Mpctl, here: Path) -> None:
    text = 'nodes = 1\ngpus_per_node = 4\ndevice = "a100-80gb"\n'
    (here / "bare.toml").write_text(text, "utf-8")
    said = mpctl("init", "a.toml", "--cluster", "bare.toml", "--model", "gpt2")
    assert said.code == 0 and "simple, since" in said.out
    assert load_job("a.toml").parallel.tp == 4 and mpctl("plan", "a.toml").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nodes", "0"], "'0' is not a whole number"),
        (["--nodes", "two"], "'two' is not a whole number"),
        (["--cluster", "selen"], "selene"),
        (["--model", "gtp2"], "gpt2"),
        (["--runtime", "megatron-cor"], "megatron-core"),
        (["--family", "mamba"], "there is no small preset of a family 'mamba'"),
        (["--steps", "5", "--tokens", "5"], "exclude each other"),
        (["--model", "gpt2", "--family", "gpt"], "exclude each other"),
        (["--steps", "1.5"], "no number of steps"),
        (["--tokens", "many"], "no number of steps or tokens"),
        (["a.json"], "no name of a TOML file"),
        (["nowhere/a.toml"], "there is no folder nowhere"),
        (["--global-batch-size", "3"], ""),
    ],
)
def test_bad_input_is_refused_and_nothing_is_written(
    mpctl: Mpctl, here: Path, arguments: list[str], words: str
) -> None:
    said = mpctl("init", *arguments)
    if words:
        assert_refused(said, wants_json=False)
        assert words in said.err
        assert list(here.iterdir()) == []
    else:  # three samples are a batch that some layout divides
        assert said.code == 0 and mpctl("plan", "job.toml").code == 0


def test_a_model_that_fits_nowhere_ends_with_3(mpctl: Mpctl, here: Path) -> None:
    said = mpctl("init", "--cluster", "dgx-2x8", "--nodes", 1, "--model", "llama-3-405b")
    assert said.code == 3 and list(here.iterdir()) == []


def test_a_file_is_never_replaced_without_being_told_to(mpctl: Mpctl, here: Path) -> None:
    (here / "job.toml").write_text("mine", "utf-8")
    (here / "link.toml").symlink_to("nowhere")
    said = mpctl("init")
    assert_refused(said, wants_json=False)
    assert "--overwrite" in said.err and (here / "job.toml").read_text() == "mine"
    assert mpctl("init", "link.toml").code == 2
    assert mpctl("init", "--overwrite").code == 0 and load_job("job.toml").world_size == 2


def typed(*lines: str, arguments: tuple[str, ...] = ()) -> tuple[int, str]:
    """Exit code and screen of `mpctl init` in a terminal, where a line is typed at each prompt;
    \\x03 is Ctrl-C."""
    child, master = pty.fork()
    if child == 0:
        os.execv(sys.executable, [*CALL, *arguments])
    screen, answers = "", list(lines)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 0.2)[0]:
            continue
        try:
            chunk = os.read(master, 4096).decode()
        except OSError:
            break
        if not chunk:
            break
        screen += chunk
        if screen.endswith("]: ") and answers:
            line = answers.pop(0)
            os.write(master, line.encode() if line == "\x03" else f"{line}\n".encode())
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), screen.replace("\r", "")


def test_in_a_terminal_it_asks_for_what_is_not_given() -> None:
    code, screen = typed(
        "", "1", "nosuch", "gpt2", "torchtitn", "torchtitan", "16", "2M tokens", arguments=("--cluster", "dgx-2x8")
    )
    assert code == 0, screen
    assert "dgx-2x8 has 2 nodes of 8 NVIDIA A100" in screen and "cluster [" not in screen
    assert "no model preset is called 'nosuch'" in screen  # and it is asked again
    job = load_job("job.toml")
    assert (job.cluster.nodes, job.cluster.gpus_per_node) == (2, 1)
    assert job.model is not None and job.model.name == "gpt2"
    assert "no runtime preset is called 'torchtitn'" in screen
    assert job.training.runtime == "torchtitan"
    assert job.training.steps == -(-2_000_000 // (16 * 1024))


def test_ctrl_c_and_ctrl_d_leave_nothing(here: Path) -> None:
    code, screen = typed("", "\x03")
    assert code in (130, -signal.SIGINT), screen
    assert list(here.iterdir()) == []
    code, screen = typed("\x04")
    assert code == 2 and "the answers ended" in screen and list(here.iterdir()) == []


def test_the_text_is_what_toml_reads_back() -> None:
    values = {
        "name": 'a "b" \\ é \x7f\t😀',
        "parallel.tp": 2,
        "parallel.sequence_parallel": True,
        "training.learning_rate": 3e-4,
        "data.corpus": ["a b", "c"],
    }
    text = job_text(JobFile(["about"], values, {"name": "long " * 30}))
    read = tomllib.loads(text)
    assert read["name"] == values["name"] and read["data"]["corpus"] == ["a b", "c"]
    assert read["parallel"] == {"tp": 2, "sequence_parallel": True}
    assert read["training"]["learning_rate"] == 3e-4
    assert "tp = 2  # tensor-parallel size" in text


def test_a_search_that_takes_too_long_is_given_up() -> None:
    settings = {
        "cluster": "dgx-2x8",
        "cluster.nodes": 2,
        "cluster.gpus_per_node": 8,
        "model": "gpt2",
        "training.global_batch_size": 64,
    }
    chosen = choose_layout(settings, patience=0)
    assert "simple, since the search was given up" in chosen.why
    assert chosen.settings["parallel.tp"] == 4  # 12 heads, and nodes of 8


def test_an_answer_may_be_piped_in_place_of_a_terminal(here: Path) -> None:
    """stdin that is no terminal is not read: the same as in a job of a scheduler."""
    done = subprocess.run(CALL, input="dgx-2x8\n", capture_output=True, text=True, check=True)
    assert "this-machine (default)" in done.stdout


def test_the_longest_sequence_of_a_config_is_said(mpctl: Mpctl, here: Path) -> None:
    config = (
        '{"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, '
        '"vocab_size": 128, "num_attention_heads": 2, "max_position_embeddings": 16384}'
    )
    (here / "config.json").write_text(config, "utf-8")
    said = mpctl("init", "--cluster", "dgx-h100", "--nodes", "1", "--model", "./config.json")
    assert said.code == 0 and "16384 (default), of the config's 16384" in said.out
    job = load_job("job.toml")
    assert job.model is not None and job.model.seq_length == 16384
    assert "config-length" in mpctl("plan", "job.toml").out
