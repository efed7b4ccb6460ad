"""Logs as rows of `mpctl calibrate`: whose layout they have, and what must agree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError
from mpctl.interop.command_line import split_command
from mpctl.interop.emitted import emit_plan
from mpctl.interop.from_megatron import read_megatron
from mpctl.interop.log_formats import PrintedConfig
from mpctl.interop.log_launchers import read_printed
from mpctl.interop.log_rows import LogLayout, folder_logs, is_log_folder, log_row, log_rows
from mpctl.interop.megatron_log import NAMES, SWITCHED_OFF
from mpctl.interop.megatron_others import parser_flags
from mpctl.measure.calibrate.runs import usable_runs
from tests.interop import example_logs as logs
from tests.interop.jobs import LAYOUTS, plan_of

JOB: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "cluster": {"preset": "dgx-h100"},
    "parallel": {"zero": 1},
    "training": {"global_batch_size": logs.BATCH},
}
H100 = LogLayout(job=JOB, cluster="dgx-h100")


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def issues_of(path: Path, layout: LogLayout) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        log_row(path, layout)
    return {issue.rule: str(issue) for issue in caught.value.issues}


def printed(text: str) -> dict[str, str]:
    """The arguments that Megatron-LM would print for a command line: all that its parser has."""
    line = split_command(text, {name: flag.values for name, flag in parser_flags().items()})
    values = {
        flag.removeprefix("--").replace("-", "_"): "False" if row.values == 0 else row.default
        for flag, row in parser_flags().items()
    } | dict.fromkeys(SWITCHED_OFF.values(), "True")
    for flag, words in line.flags.items():
        if flag in SWITCHED_OFF:
            values[SWITCHED_OFF[flag]] = "False"
            continue
        name = NAMES.get(flag, flag.removeprefix("--").replace("-", "_"))
        values[name] = (words[0] if len(words) == 1 else repr([*words])) if words else "True"
    return {name: value or "None" for name, value in values.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_printed_arguments_are_the_job_of_their_command_line(name: str) -> None:
    text = emit_plan(plan_of(LAYOUTS[name]), "megatron").body
    values = {**printed(text), "world_size": "16"}
    wanted, read = read_megatron(text), read_printed(PrintedConfig("megatron", values))
    assert read is not None
    of_ranks = ("cluster.nodes", "cluster.gpus_per_node")
    here = {key: value for key, value in wanted.settings.items() if key not in of_ranks}
    assert {"parallel.ep": 1, **read.settings} == {"parallel.ep": 1, **here}


def test_printed_arguments_that_no_setting_says_are_refused(tmp_path: Path) -> None:
    lines = "  use_torch_fsdp2 ........ True\n  encoder_num_layers ..... 32\n---- end of arg"
    text = logs.ARGUMENTS.replace("-------------------- end of arg", lines)
    path = write(tmp_path / "a.log", logs.megatron(arguments=text))
    (told,) = issues_of(path, LogLayout(cluster="dgx-h100")).values()
    assert "--use-torch-fsdp2: changes the layout, and no setting" in told


def test_rates_and_lengths_that_no_job_could_have_refuse_no_measured_run(tmp_path: Path) -> None:
    lines = "  lr ....... 0.0\n  min_lr .... 0.1\n  lr_decay_style ... WSD\n  adam_beta2 .... 1\n"
    text = logs.ARGUMENTS.replace("  norm", f"{lines}  norm", 1)
    path = write(tmp_path / "a.log", logs.megatron(arguments=text))
    assert usable_runs([log_row(path, LogLayout(cluster="dgx-h100"))[0]])[0]


def test_a_megatron_log_needs_nothing_but_its_cluster(tmp_path: Path) -> None:
    path = write(tmp_path / "sweep" / "a.log", logs.megatron(arguments=logs.ARGUMENTS))
    row, notes = log_row(path, LogLayout(cluster="dgx-h100"))
    assert row["measured"] == {
        "step_seconds": pytest.approx(logs.STEP),
        "steps": 5,
        "spread": pytest.approx(0.0074, rel=0.01),
    }
    assert (row["id"], row["group"]) == (str(path), "sweep")
    (run,), _ = usable_runs([row])
    p, model = run.job.parallel, run.job.model
    assert (run.job.world_size, run.job.sizes["dp"], p.tp, p.pp, p.zero) == (16, 2, 4, 2, 1)
    assert model is not None and (model.layers, model.vocab, model.bias) == (32, 128256, False)
    assert run.parts["runtimes"] == "megatron-core" and run.job.training.recompute == "none"
    assert notes[0].startswith("megatron: 5 steady lines, left out: 2 warm-up")


def test_nanotrons_and_torchtitans_logs_say_their_layout_too(tmp_path: Path) -> None:
    path = write(tmp_path / "n.log", logs.nanotron())
    (run,), _ = usable_runs([log_row(path, LogLayout(cluster="hf-h100"))[0]])
    p, t, model = run.job.parallel, run.job.training, run.job.model
    assert (run.job.sizes["dp"], p.tp, p.pp, p.zero, p.sequence_parallel) == (4, 2, 2, 1, True)
    assert (t.global_batch_size, t.dtype, run.parts["runtimes"]) == (32, "bf16", "nanotron")
    assert model is not None and (model.layers, model.kv_heads, model.ffn) == (32, 8, 14336)
    path = write(tmp_path / "t.log", logs.torchtitan())
    row, _ = log_row(path, LogLayout(cluster="grand-teton-h100"))
    (run,), _ = usable_runs([row])
    t = run.job.training
    assert (run.job.sizes["dp"], run.job.parallel.zero, t.recompute) == (16, 3, "none")
    assert (t.micro_batch_size, t.global_batch_size) == (1, 32)
    assert row["measured"]["step_seconds"] == pytest.approx(logs.STEP, rel=0.01)
    assert run.job.model is not None and run.job.model.hidden == 4096
    applied = "Applied FullAC activation checkpointing to the model\nTrainer is init"
    write(path, logs.torchtitan().replace("Trainer is init", applied))
    row, _ = log_row(path, LogLayout(cluster="grand-teton-h100"))
    assert usable_runs([row])[0][0].job.training.recompute == "full"


def test_torchtitans_printed_config_says_more(tmp_path: Path) -> None:
    config = {
        "activation_checkpoint": {"mode": "full"},
        "parallelism": {"fsdp_reshard_after_forward": "never", "note": None},
    }
    text = f"Running with configs: {json.dumps(config, indent=2)}\n{logs.torchtitan()}"
    path = write(tmp_path / "t.log", text)
    (run,), _ = usable_runs([log_row(path, LogLayout(cluster="grand-teton-h100"))[0]])
    assert (run.job.training.recompute, run.job.parallel.zero) == ("full", 2)


@pytest.mark.parametrize("name", logs.LOGS)
def test_the_step_of_each_launcher_with_a_job_of_ones_own(name: str, tmp_path: Path) -> None:
    """Also where a log has a rate alone: by hand 1,048,576 tokens / (16 x 32,768 a second)."""
    path = write(tmp_path / "run.log", logs.LOGS[name]())
    row, notes = log_row(path, H100._replace(settings={"cluster.nodes": 2}))
    assert row["measured"]["step_seconds"] == pytest.approx(logs.STEP, rel=0.01)
    runtimes = {"megatron": "megatron-core", "deepspeed": "megatron-deepspeed", "trainer": "fsdp2"}
    assert row["job"]["training"]["runtime"] == runtimes.get(name, name)
    assert any("--set runtime=NAME" in note for note in notes)
    usable_runs([row])


def test_a_runtime_that_is_named_stays(tmp_path: Path) -> None:
    path = write(tmp_path / "run.log", logs.megatron())
    row, notes = log_row(path, H100._replace(settings={"training.runtime": "torchtitan"}))
    assert row["job"]["training"]["runtime"] == "torchtitan" and len(notes) == 1


def test_flags_beside_a_log_are_its_layout(tmp_path: Path) -> None:
    flags = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 "
    flags += "--max-position-embeddings 8192 --vocab-size 128256 --micro-batch-size 1 --bf16 "
    flags += "--global-batch-size 32 --tensor-model-parallel-size 8"
    write(tmp_path / "a.log", logs.megatron())
    write(tmp_path / "a.sh", f"torchrun pretrain_gpt.py {flags}")
    write(tmp_path / "b.out", logs.torchtitan())
    write(tmp_path / "b.toml", 'model = "llama-3-8b"\n[training]\nglobal_batch_size = 32\n')
    assert is_log_folder(tmp_path)
    read = log_rows(folder_logs(tmp_path, LogLayout(cluster="dgx-h100")))
    assert not read.issues and len(read.notes) >= 2
    twice = log_rows(2 * folder_logs(tmp_path, LogLayout(cluster="dgx-h100")))
    assert len(twice.notes) == len(read.notes) + 2 and "(and 1 log more): " in twice.notes[-1]
    (a, b), _ = usable_runs(read.rows)
    assert (a.job.parallel.tp, a.job.world_size, b.job.sizes["dp"]) == (8, 16, 16)


def test_the_vocabulary_of_flags_without_one_is_the_logs(tmp_path: Path) -> None:
    """A script leaves it to the tokenizer, and its nodes to the scheduler."""
    flags = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 "
    flags += "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 32 --bf16"
    script = f"torchrun --nnodes $NODES --nproc-per-node 8 pretrain_gpt.py {flags}"
    layout = LogLayout(flags=("megatron", script), cluster="dgx-h100")
    path = write(tmp_path / "a.log", logs.megatron())
    assert "--vocab-size" in str(issues_of(path, layout))
    words = " > padded vocab (size: 50257) with 175 dummy tokens (new size: 50432)\n"
    path = write(tmp_path / "a.log", words + logs.megatron())
    (run,), _ = usable_runs([log_row(path, layout)[0]])
    assert run.job.model is not None and run.job.model.vocab == 50257
    assert run.job.world_size == logs.WORLD


def test_what_log_and_layout_both_say_must_agree_and_all_of_it_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "run.log", logs.nanotron())
    layout = H100._replace(settings={"cluster.nodes": 1, "model.seq_length": 2048, "training.global_batch_size": 64})
    told = issues_of(path, layout)
    assert told.keys() == {"log-ranks", "log-batch", "log-tokens"}
    assert "the log is of 16 ranks, the layout of 8" in told["log-ranks"]
    assert "steps of 32 samples, and the layout has 64" in told["log-batch"]
    assert "131,000 tokens/s in 2.00 s are" in told["log-tokens"]
    assert "a step of the layout has 131,072" in told["log-tokens"]
    path = write(tmp_path / "pipe.log", logs.deepspeed())
    told = issues_of(path, H100._replace(settings={"training.global_batch_size": 256}))
    assert "16 samples/s in 2.00 s are 32 samples" in told["log-tokens"]


def test_without_a_layout_or_a_cluster_the_way_out_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.log", logs.deepspeed())
    assert "--job FILE), or --from LAUNCHER" in issues_of(path, LogLayout())["log-no-layout"]
    path = write(tmp_path / "run.log", logs.megatron(arguments=logs.ARGUMENTS))
    assert "--cluster NAME" in issues_of(path, LogLayout())["unknown-cluster"]
