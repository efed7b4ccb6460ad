"""Configs of torchtitan and nanotron read back: what --emit writes, their own forms, what is wrong.

Other forms are examples of our own, in the format of torchtitan 0.2.2 and nanotron of 2026-04.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.interop.command_line import read_flags
from mpctl.interop.emitted import emit_plan, get_launcher
from mpctl.interop.from_torchtitan import LOG
from mpctl.interop.mapping import ReadJob
from mpctl.plan.planning.plan import Plan, load_plan
from tests.interop import test_deepspeed, test_nanotron, test_torchtitan
from tests.interop.jobs import SMALL, Settings
from tests.interop.test_torchtitan import SHAPE

# What a config says of a plan: the layout, the batch, the precision, the shape of the model.
SIZES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")
SHAPED = {"layers", "hidden", "ffn", "heads", "kv_heads", "vocab", "seq_length", "bias", "activation", "norm"}
SHAPED |= {"position", "rotary_base", "tied_embeddings"}
TRAINED = ("micro_batch_size", "global_batch_size", "dtype", "recompute", "steps", "seed")
LLAMA: Settings = {
    "model": "llama-3-8b",
    "cluster.nodes": 2,
    "cluster.gpus_per_node": 8,
    "training.global_batch_size": 64,
    "training.dtype": "bf16",
}


def facts(plan: Plan) -> dict[str, Any]:
    job = plan.job
    return {
        **{name: job.sizes.get(name, getattr(job.parallel, name, None)) for name in SIZES},
        **{name: getattr(job.training, name) for name in TRAINED},
        "zero": job.parallel.zero,
        "zero size": job.parallel.zero_size,
        "stages": plan.stages,
        "sequence parallel": job.parallel.sequence_parallel and job.parallel.tp > 1,
    }


def read_with(launcher: str, text: str) -> ReadJob:
    reader = get_launcher(launcher).read
    assert reader is not None
    return reader(text, {})


def issues_of(launcher: str, text: str) -> str:
    with pytest.raises(InputError) as caught:
        read_with(launcher, text)
    return "\n".join(map(str, caught.value.issues))


def _on_32_layers(layout: Settings) -> Settings:
    """2 chunks instead of 3, ends of 7 and 9."""
    changed = {"parallel.vpp": 2, "parallel.first_stage_layers": 7, "parallel.last_stage_layers": 9}
    return {key: changed.get(key, value) for key, value in layout.items()}


def _outside(settings: Settings, *tables: str) -> Settings:
    return {key: value for key, value in settings.items() if key.startswith(tables)}


RANKS: Settings = {"cluster.nodes": 2, "cluster.gpus_per_node": 8}
BOTH_WAYS: dict[tuple[str, str], tuple[Settings, Settings]] = {
    **{
        ("torchtitan", name): ({**LLAMA, **_on_32_layers(layout)}, RANKS)
        for name, layout in test_torchtitan.LAYOUTS.items()
        if not _outside(layout, "model.")
    },
    **{
        ("nanotron", name): ({**SMALL, **SHAPE, **layout, "training.runtime": "nanotron"}, RANKS)
        for name, layout in test_nanotron.LAYOUTS.items()
    },
    **{
        ("deepspeed", name): ({**SMALL, **layout}, _outside({**SMALL, **layout}, "model.", "cluster."))
        for name, layout in test_deepspeed.LAYOUTS.items()
    },
}
"""Jobs by launcher and name, each with the settings that the launcher's file leaves to others."""


@pytest.mark.parametrize(("launcher", "name"), BOTH_WAYS)
def test_what_is_written_is_read_as_the_same_plan(launcher: str, name: str) -> None:
    """DeepSpeed leaves steps and seed to the script; nanotron's file has the shape of the model."""
    job, more = BOTH_WAYS[launcher, name]
    plan = load_plan(None, job)
    read = load_plan(None, {**more, **read_with(launcher, emit_plan(plan, launcher).text).settings})
    wanted, found = facts(plan), facts(read)
    for key in ("steps", "seed") if launcher == "deepspeed" else ():
        wanted.pop(key), found.pop(key)
    assert found == wanted
    if launcher == "nanotron":
        shapes = [plan_.job.model.model_dump(include=SHAPED) for plan_ in (plan, read) if plan_.job.model]
        assert shapes[0] == shapes[1]


def test_deepspeeds_json() -> None:
    text = """{"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 256,
      "zero_optimization": {"stage": 3, "mics_shard_size": 8, "overlap_comm": false},
      "bf16": {"enabled": true}, "gradient_clipping": "auto"}"""
    s = read_with("deepspeed", text).settings
    assert (s["parallel.zero"], s["parallel.zero_size"], s["training.dtype"]) == (3, 8, "bf16")
    assert s["parallel.overlap_gradients"] is False and "training.clip_norm" not in s
    told = issues_of(
        "deepspeed",
        """{"gradient_accumulation_steps": 4, "train_micro": 1,
      "zero_optimization": {"offload_optimizer": {"device": "nvme"}},
      "communication_data_type": "int8"}""",
    )
    assert all(word in told for word in ("'nvme'", "train_batch_size", "'int8'"))


TOML = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[quantize.linear.float8]
recipe_name = "rowwise"
"""


def test_torchtitans_toml_flags_and_both(tmp_path: Path) -> None:
    read = read_with("torchtitan", TOML)
    s = read.settings
    assert (s["model"], s["parallel.tp"], s["parallel.dp"], s["parallel.zero"]) == ("llama-3-8b", 2, 8, 3)
    assert (s["training.micro_batch_size"], s["training.global_batch_size"]) == (2, 16)
    assert s["training.dtype"] == "bf16" and "training.fp8_recipe" not in s
    assert [w.rule for w in read.warnings] == ["torchtitan-nearest"]
    file = tmp_path / "llama.toml"
    file.write_text(TOML)
    line = f'torchrun --nnodes 2 --nproc_per_node=8 -m torchtitan.train --job.config_file "{file}"'
    s = read_with("torchtitan", f"{line} --parallelism.tensor_parallel_degree 4").settings
    assert (s["parallel.tp"], s["cluster.nodes"], s["cluster.gpus_per_node"]) == (4, 2, 8)
    s = read_with("torchtitan", f"CONFIG_FILE={file} ./run_train.sh --training.steps 7").settings
    assert (s["parallel.tp"], s["training.steps"]) == (2, 7)
    old = "--training.batch_size 3 --training.tensor_parallel_degree 8"
    s = read_with("torchtitan", f"{old} --experimental.pipeline_parallel_degree 1").settings
    assert (s["training.micro_batch_size"], s["parallel.tp"]) == (3, 8)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        ("model.converters=quantize.linear.float8", "fp8"),
        ("float8.enable_float8_linear", "fp8"),
        ("model.converters=quantize.linear.mx", "mxfp8"),
        ("quantize.linear.float8.enable_fsdp_float8_all_gather", "bf16"),
        ("quantize.linear.mx.recipe_name=mxfp8_cublas", "bf16"),
    ],
)
def test_converters_alone_make_torchtitans_products_narrow(words: str, dtype: str) -> None:
    """torchtitan/protocols/model_converter.py; a log prints the tables of converters that are off, too."""
    assert read_with("torchtitan", f"--training.steps 7 --{words}").settings["training.dtype"] == dtype
    key, _, value = words.partition("=")
    printed = {"mesh.dp_shard": "8", "training.local_batch_size": "1", "model.converters": "[]"}
    assert LOG.job is not None
    read = LOG.job({**printed, key: f'["{value}"]' if "converters" in key else value or "true"})
    assert read is not None and read.settings["training.dtype"] == dtype


def test_torchtitans_absent_keys_are_job_configs_defaults() -> None:
    """0.2.2's job_config.py; a function that edits a config of 0.3 has the values of that."""
    for text in ("[training]\nlocal_batch_size = 1", "--training.local_batch_size 1"):
        read = read_with("torchtitan", text)
        assert read.settings["model.seq_length"] == 2048
        assert [w.message.split(":")[0] for w in read.warnings] == ["activation_checkpoint.selective_ac_option"]
    python = "def f(config):\n    config.training.local_batch_size = 1\n"
    for text in (python, "--module llama3 --config llama3_8b --training.local_batch_size 1"):
        read = read_with("torchtitan", text)
        assert "model.seq_length" not in read.settings and not read.warnings


STATES = """
[training]
dtype = "bfloat16"
enable_cpu_offload = true
dataset = "c4"
seq_len = 4096
[optimizer]
name = "Muon"
beta2 = 0.9
implementation = "fused"
early_step_in_backward = true
[parallelism]
tensor_parallel_degree = 2
disable_loss_parallel = true
expert_parallel_comm_backend = "deepep"
[activation_checkpoint]
mode = "full"
memory_budget = 0.5
[compile]
enable = true
components = ["model", "loss"]
"""


def test_torchtitans_keys_are_read_or_named() -> None:
    read = read_with("torchtitan", STATES)
    s, told = read.settings, {warning.rule: warning.message for warning in read.warnings}
    assert (s["training.optimizer_dtype"], s["training.gradient_dtype"], s["training.master_weights"]) == (
        "bf16",
        "bf16",
        False,
    )
    assert s["training.offload_optimizer"] and s["training.offload_parameters"] and s["training.beta2"] == 0.9
    assert "disable_loss_parallel" in told["torchtitan-nearest"]
    assert told["torchtitan-changes"].partition(": not read")[0] == (
        "optimizer.name Muon, optimizer.early_step_in_backward true, "
        "parallelism.expert_parallel_comm_backend deepep, compile.enable true"
    )
    assert not load_plan(None, {"model": "llama-3-8b", **RANKS, "training.global_batch_size": 64, **s}).errors


def test_torchtitans_stages_are_those_that_it_infers() -> None:
    """By hand, 80 layers and 1 for each end in parts of 41: 2 stages; 32 over 4 x 2 chunks."""
    flags = "--model.name llama3 --model.flavor {} --parallelism.pipeline_parallel_degree {} "
    flags += "--training.global_batch_size 64 --parallelism.pipeline_parallel_schedule {} "
    s = read_with(
        "torchtitan", flags.format("70B", 2, "1F1B") + "--parallelism.pipeline_parallel_layers_per_stage 41"
    ).settings
    assert s["parallel.embedding_is_layer"] and s["parallel.loss_is_layer"]
    assert "parallel.vpp" not in s and s["parallel.zero"] == 1
    read = read_with("torchtitan", flags.format("8B", 4, "Interleaved1F1B"))
    assert read.settings["parallel.vpp"] == 2
    assert "equal layers" in str([str(w.issue) for w in read.warnings])
    for schedule, ours in (("ZBVZeroBubble", "zbv"), ("DualPipeV", "dualpipev")):
        read = read_with("torchtitan", flags.format("70B", 4, schedule))
        assert (read.settings["parallel.schedule"], read.settings["parallel.vpp"]) == (ours, 2)
        assert "planned as 1F1B" not in str([str(w.issue) for w in read.warnings])
    told = issues_of(
        "torchtitan", flags.format("70B", 4, "1F1B") + "--parallelism.pipeline_parallel_layers_per_stage 4"
    )
    assert "4 make 21 stages, which 4 ranks cannot share" in told


def test_what_no_job_says_is_refused_at_once() -> None:
    flags = "--parallelism.data_parallel_replicate_degree 2 --parallelism.context_parallel_degree 2 "
    s = read_with("torchtitan", f"{flags} --parallelism.data_parallel_shard_degree 4").settings
    assert (s["parallel.zero_size"], s["parallel.dp"]) == (8, 8)  # 4 x cp 2, of 2 x 4
    told = issues_of(
        "torchtitan",
        "--parallelism.data_parallel_replicate_degree 2 "
        "--activation_checkpoint.mode memory_budget --training.mixed_precision_param "
        "int8 --training.steps many",
    )
    assert all(word in told for word in ("what is left", "memory_budget", "'int8'", "'many'"))
    text = "parallelism: {expert_parallel_size: 4, pp_engine: zb}\nmodel: {dtype: int8}\n"
    told = issues_of("nanotron", f"{text}tokens: {{batch_accumulation_per_replica: 2}}")
    assert all(word in told for word in ("experts", "'zb'", "'int8'", "parallelism.dp"))
    assert "neither" in issues_of("nanotron", "a: 1") and "no YAML" in issues_of("nanotron", "a: [")
    assert "neither" in issues_of("torchtitan", "x = 1")
    assert "for a shell" in issues_of("torchtitan", "--training.steps $STEPS")
    known = "megatron, megatron-bridge, torchtitan, deepspeed, accelerate, trl, axolotl, llama-factory, automodel or "
    with pytest.raises(InputError, match=f"use {known}nanotron"):
        read_flags("horovod", "--x 1")


def test_a_bomb_of_aliases_is_no_config() -> None:
    names = "abcdefghij"
    text = "a: &a {x: 1, y: 2}\n" + "".join(
        f"{b}: &{b} {{{', '.join(f'k{n}: *{a}' for n in range(9))}}}\n" for a, b in pairwise(names)
    )
    assert "more than 5,000 values" in issues_of("nanotron", text)
    assert "more than 5,000 values" in issues_of("nanotron", "a: &a {b: *a}")  # it holds itself


WORDS = [
    "--parallelism.tensor_parallel_degree",
    "--training.local_batch_size",
    "8",
    "-1",
    "x",
    "{",
    "}",
    "parallelism:",
    "[training]",
    "=",
    "\n",
    "tokens: {dp: 2}",
    "ParallelismConfig(",
    "'",
    '"',
    "$X",
    "config.parallelism = ParallelismConfig(a=1)",
    "def f(config):\n",
    "0",
    "1e9",
    "&a",
    "*a",
    "--parallelism.pipeline_parallel_degree",
    '{"train_batch_size": ',
    "ds_config =",
    "- ",
    "[[",
]


TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=20).map(" ".join)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["torchtitan", "nanotron", "deepspeed"]), TEXTS)
def test_any_text_is_a_job_or_refused_in_words(launcher: str, text: str) -> None:
    try:
        assert read_with(launcher, text).settings
    except InputError as error:
        assert all(issue.message for issue in error.issues)
