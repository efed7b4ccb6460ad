"""A config of torchtitan as the settings of a job: TOML, flags, a config function, or a log's.

Keys, defaults and meanings: torchtitan 0.2.2 (config/job_config.py, TOML and flags as
`--parallelism.tensor_parallel_degree 8`) and 0.3.0 (config/configs.py, a function that edits a
config, of which only literal values are read: nothing is run), with the names of 2024 in FORMER.
States are sharded over dp_shard x cp: ZeRO 3 where parameters are gathered again in backward, 2
where they are not, and 1 in a pipeline by default (torchtitan.py). A pipeline's local batch is all
micro batches of a step. Unstated stages are as torchtitan infers them: 2 chunks a rank
for looped schedules, the ends a layer less each.

Its log (components/metrics.py), whose tps are tokens a second and *rank*, begins with `Running with
configs: {` and JSON where print_config is on, and always with its mesh and its trainer's batch.

>>> read = read_torchtitan("--parallelism.tensor_parallel_degree 2 --training.local_batch_size 4")
>>> [read.settings[f"{key}"] for key in ("parallel.tp", "parallel.zero", "training.recompute")]
[2, 3, 'selective']
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.interop.command_line import EXPAND, split_command
from mpctl.interop.config_text import Flags, flat_values, python_calls, read_yaml, unreadable
from mpctl.interop.from_megatron import find_cut
from mpctl.interop.log_formats import LONGEST_VALUE, MOST, LauncherLog, PrintedConfig, StepFormat
from mpctl.interop.mapping import NO_SETTINGS, KeyReader, ReadJob
from mpctl.interop.shell_words import is_unexpanded
from mpctl.interop.torchtitan_keys import FLAVORS, ROWS, P, T
from mpctl.model.pipeline.explicit import layout_parts
from mpctl.plan.planning.plan import Overrides
from mpctl.spec.layout_text import write_layout
from mpctl.spec.presets import find_preset

CALL = "ParallelismConfig."
FORMER = {
    f"{T}batch_size": f"{T}local_batch_size",
    f"{T}seed": "debug.seed",
    **{
        f"{T}{name}": f"{P}{name}"
        for name in ("tensor_parallel_degree", "data_parallel_shard_degree", "data_parallel_replicate_degree")
    },
    **{
        f"experimental.{name}": f"{P}{name}"
        for name in (
            "pipeline_parallel_degree",
            "context_parallel_degree",
            "pipeline_parallel_schedule",
            "pipeline_parallel_microbatches",
        )
    },
    f"{P}pipeline_parallel_split_points": f"{P}module_fqns_per_model_part",
    f"{T}max_context_length": f"{T}seq_len",
}
"""Names of other versions."""
DEFAULTS: Flags = {f"{T}seq_len": ("2048",), "activation_checkpoint.selective_ac_option": ("2",)}
"""What job_config.py of TOML and flags takes for absent keys, and a config function does not."""
_OF_FUNCTION = re.compile(r"(?:^|\s)(?:--config(?=[\s=])|CONFIG=)")
CHANGING = (P, T, "optimizer.", "activation_checkpoint.", "compile.")
"""Tables whose keys may change a plan, but for those of NO_LAYOUT and SAME."""
NO_LAYOUT = (
    *(f"{T}{name}" for name in ("dataset", "dataloader", "deterministic", "gc_", "warmup_steps")),
    *(f"activation_checkpoint.{name}" for name in ("memory_budget", "visualize", "preserve", "determinism", "debug")),
    "activation_checkpoint.per_op_sac",
    "compile.components",
    "compile.backend",
)
SAME = {
    f"{P}expert_parallel_comm_backend": "standard",
    f"{P}pipeline_parallel_expert_parallel_overlap": "true",
    f"{P}pipeline_parallel_schedule_csv": "",
    f"{T}mixed_precision_reduce": "float32",
    "optimizer.name": "AdamW",
    "optimizer.implementation": "fused",
}
"""Values that change nothing: 0.2.2's defaults, which a log with print_config prints."""
FLOAT8 = "float8.enable_float8_linear"  # of 2024, before model.converters
PLANNED = {
    "1f1b": "1f1b",
    "interleaved1f1b": "1f1b",
    "gpipe": "gpipe",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
LOOPED = ("interleaved", "loopedbfs", "zbv", "dualpipe")
STAGES = {"default": 3, "always": 3, "never": 2}
_LAYER = re.compile(r"layers\.\d{1,6}\b")
_FUNCTION = re.compile(r"\bmodels\.(\w{1,40})\.config_registry import \w*?\1_(\w{1,40})")
_PYTHON = re.compile(r"^\s{0,8}(?:def|import|from) \w", re.MULTILINE)
PREFIXES = (
    P,
    T,
    "activation_checkpoint",
    "model.",
    "optimizer.",
    "lr_scheduler.",
    "quantize.",
    "debug.",
    "job.",
    "compile.",
)


def read_torchtitan(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config. Raises InputError with every value that no setting says."""
    is_function = _is_python(text) or text.lstrip().startswith("{") or _OF_FUNCTION.search(text)
    return _read(_values(text), {} if is_function else DEFAULTS)


def _read(values: Flags, defaults: Flags) -> ReadJob:
    reader = KeyReader({FORMER.get(name, name): words for name, words in values.items()}, "torchtitan")
    if not any(name.startswith((P, T)) for name in reader.flags):
        message = "a config of torchtitan has `parallelism` or `training`, and this text neither"
        raise unreadable(message, "give its file as @FILE, or flags such as --training.steps 10")
    reader.flags = {**defaults, **reader.flags}
    for name, words in reader.flags.items():
        if name.startswith(PREFIXES) and any(map(is_unexpanded, words)):
            reader.wrong(name, f"{' '.join(words)!r} is for a shell to expand, and none runs here", EXPAND)
    reader.read(ROWS)
    for name, setting in (
        ("nnodes", "nodes"),
        ("nproc_per_node", "gpus_per_node"),
        ("nproc-per-node", "gpus_per_node"),
    ):
        if reader.value(name).isdecimal():
            reader.settings[f"cluster.{setting}"] = int(reader.value(name))
    _read_replicas(reader)
    _read_model(reader)
    _read_batch(reader)
    _read_precision(reader)
    _read_states(reader)
    _read_recompute(reader)
    _read_loss(reader)
    if reader.settings.get("parallel.pp", 1) != 1:
        _read_stages(reader)
    if reader.value(ROTATE) == "alltoall":
        reader.nearest(ROTATE, "alltoall, a ring of keys and values: planned with all_gather, today's torchtitan's way")
    return reader.job("torchtitan", _unread(reader.flags))


def _unread(flags: Flags) -> Iterator[str]:
    """The keys that are not read and may change the plan, with their values."""
    known, no = {*(row.key for row in ROWS), *KNOWN_TOO}, {"false", "none", "None"}
    for name, words in flags.items():
        is_same = SAME.get(name) == " ".join(words) or bool(no & {*words})
        if name.startswith(CHANGING) and not (is_same or name in known or name.startswith(NO_LAYOUT)):
            yield " ".join((name, *words))


def _is_python(text: str) -> bool:
    return "ParallelismConfig(" in text or _PYTHON.search(text) is not None


def _values(text: str) -> Flags:
    """The values of a config in any of its forms."""
    if _is_python(text):
        return flat_values(_python_values(text))
    if text.lstrip().startswith("{"):
        return read_yaml(text)
    try:
        return flat_values(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        if "--" not in text:
            hint = "give a config file, or --parallelism.... flags"
            raise unreadable(f"neither flags nor TOML: {error}", hint) from None
    return _flag_values(text)


def _flag_values(text: str) -> Flags:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise unreadable(f"the flags end early: {error}", "") from None
    start = next((n for n, word in enumerate(words) if word.startswith("--")), len(words))
    line = split_command(shlex.join(words[start:]), {})
    flags = {name.removeprefix("--"): v for name, v in {**line.launcher, **line.flags}.items()}
    named = [word.removeprefix("CONFIG_FILE=") for word in words[:start] if "CONFIG_FILE=" in word]
    file = next(iter(flags.get("job.config_file", flags.get("job.config-file", ()))), "")
    file = file or "".join(named[-1:])
    if not file:
        return flags
    if is_unexpanded(file):
        raise InputError.of("bad-syntax", "--job.config_file", f"{file!r} is for a shell", EXPAND)
    try:
        content = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError.of(
            "no-such-file", "--job.config_file", f"{file}: {error}"[:200], "start mpctl where its path is right"
        ) from None
    return {**_values(content), **flags}


def _python_values(text: str) -> dict[str, object]:
    """The literals assigned to `config.NAME`, and those of the call that makes its parallelism."""
    calls, assigned = python_calls(text)
    found: dict[str, object] = {
        f"{P}{name.removeprefix(CALL)}": value for name, value in calls.items() if name.startswith(CALL)
    }
    for name, value in assigned.items():
        first, _, key = name.partition(".")
        if first not in ("config", "cfg") or key == "parallelism":
            continue
        if key == "activation_checkpoint":
            kind = next((k for k in ("selective", "full") if k in str(value).lower()), "none")
            found[f"{key}.mode"] = kind
        elif key == "loss":
            chunks = re.search(r"\bnum_chunks\s*=\s*(\d+)", str(value))
            found |= {key: value, **({f"{key}.num_chunks": chunks[1]} if chunks else {})}
        elif not (isinstance(value, str) and "(" in value):  # a call is no value
            found[key] = value
    if (model := _FUNCTION.search(text)) is not None:
        found |= {"model.name": model[1], "model.flavor": model[2]}
    if 'model_registry("405B")' in text:
        found["model.flavor"] = "405b"
    return found


def _read_replicas(reader: KeyReader) -> None:
    """dp and ZeRO; a shard degree of -1 is what is left of the ranks."""
    s = reader.settings
    shard = int(reader.number(f"{P}data_parallel_shard_degree", int, -1))
    replicate = int(reader.number(f"{P}data_parallel_replicate_degree", int, 1))
    if shard > 0:
        s["parallel.dp"] = shard * replicate
    if shard > 1 and replicate > 1:  # HSDP: states split inside of a group, whole over groups
        cp = s.get("parallel.cp")
        s["parallel.zero_size"] = shard * (cp if isinstance(cp, int) else 1)
    elif shard < 1 and replicate > 1:
        message = f"{replicate} beside a shard degree of what is left of the ranks"
        reader.wrong(f"{P}data_parallel_replicate_degree", message, f"state {P}data_parallel_shard_degree")
    policy = reader.value(f"{P}fsdp_reshard_after_forward", "default")
    if policy not in STAGES:
        reader.wrong(f"{P}fsdp_reshard_after_forward", f"{policy!r} is not known", f"use {', '.join(STAGES)}")
    is_split = s.get("parallel.cp") != 1 or shard != 1
    is_pipeline = s.get("parallel.pp") != 1 and policy == "default"
    s["parallel.zero"] = 0 if not is_split else 1 if is_pipeline else STAGES.get(policy, 3)
    scattered = reader.is_on(f"{P}enable_sequence_parallel", True)
    s["parallel.sequence_parallel"] = scattered and s.get("parallel.tp") != 1
    if (ep := reader.number(f"{P}expert_parallel_degree", int, 1)) != 1:
        s["parallel.ep"] = ep
    if (etp := reader.number(f"{P}expert_tensor_parallel_degree", int, 1)) != 1:
        s["parallel.etp"] = etp


def _read_model(reader: KeyReader) -> None:
    name, flavor = reader.value("model.name"), reader.value("model.flavor")
    if preset := FLAVORS.get(f"{name} {flavor}".lower()):
        reader.settings["model"] = preset
    elif name:
        message = f"{name} {flavor}: no preset has its shape here"
        reader.nearest("model.flavor", message, "name the model: --model NAME, or --set model=NAME")


def _read_batch(reader: KeyReader) -> None:
    s = reader.settings
    length, dp = s.get("model.seq_length", 0), s.get("parallel.dp")
    tokens = reader.number(f"{T}num_tokens_per_train_step", int, 0)
    if tokens and isinstance(length, int) and length > 0:  # main since 2026-08 counts tokens
        s["training.global_batch_size"] = int(tokens) // length
        micro = int(reader.number(f"{T}num_tokens_per_microbatch_per_dp_rank", int, length))
        s["training.micro_batch_size"] = micro // length
        return
    local = int(reader.number(f"{T}local_batch_size", int, 8))
    whole = int(reader.number(f"{T}global_batch_size", int, -1))
    s["training.micro_batch_size"] = local
    if s.get("parallel.pp") != 1:
        s["training.micro_batch_size"] = reader.number(f"{P}pipeline_parallel_microbatch_size", int, 1)
    if whole > 0:
        s["training.global_batch_size"] = whole
    elif isinstance(dp, int):
        s["training.global_batch_size"] = local * dp
    elif s.get("parallel.pp") != 1:
        reader.wrong(f"{T}global_batch_size", "is not there, nor the shard degree to derive it", "add either")


def _read_precision(reader: KeyReader) -> None:
    """The data type: fewer bits where a converter of the model is named, whose own table says only how."""
    s = reader.settings
    converters = " ".join(reader.flags.get("model.converters", ()))
    if "mx" in converters:
        s["training.dtype"] = "mxfp8"
    elif "float8" in converters or reader.is_on(FLOAT8):
        s |= {"training.dtype": "fp8", "training.fp8_recipe": "tensorwise"}


def _read_states(reader: KeyReader) -> None:
    """Parameters and moments in bf16 or in host memory; logits that are whole on each rank of tp."""
    s, dtype = reader.settings, reader.value(f"{T}dtype", "float32")
    if dtype == "bfloat16":
        s |= {"training.master_weights": False, "training.gradient_dtype": "bf16", "training.optimizer_dtype": "bf16"}
    elif dtype != "float32":
        reader.wrong(f"{T}dtype", f"{dtype!r} is not planned", "use float32 or bfloat16")
    if reader.is_on(OFFLOAD):
        s["training.offload_optimizer"] = True
        if s["parallel.zero"] == 3:
            s["training.offload_parameters"] = True
        else:
            reader.nearest(OFFLOAD, f"planned with parameters on the GPU, as ZeRO {s['parallel.zero']} needs")
    if reader.is_on(WHOLE_LOGITS) and s.get("parallel.tp") != 1:
        reader.nearest(WHOLE_LOGITS, "logits are planned in shares over tp: whole ones take more memory and time")


def _read_recompute(reader: KeyReader) -> None:
    name = "activation_checkpoint.mode"
    mode = reader.value(name, "selective").lower().removesuffix("ac")
    if mode not in ("none", "selective", "full"):
        reader.wrong(name, f"{mode!r} is not planned", "use none, selective or full")
        return
    option = reader.value("activation_checkpoint.selective_ac_option", "op")
    if mode == "selective" and option != "op":
        message = f"{option}: one layer of {option} in full is planned as selective in each"
        reader.nearest("activation_checkpoint.selective_ac_option", message)
    reader.settings["training.recompute"] = mode


def _read_loss(reader: KeyReader) -> None:
    """A loss over chunks, or over all logits, where the text names one."""
    chunks = "loss.num_chunks"
    if reader.has(chunks):
        reader.settings["training.cross_entropy_chunks"] = reader.number(chunks, int, 1)
    if reader.has(chunks) or reader.has("loss"):
        is_whole = not reader.has(chunks) and "Chunked" not in reader.value("loss")
        reader.settings["training.cross_entropy"] = "unfused" if is_whole else "linear"


def _read_stages(reader: KeyReader) -> None:
    """The schedule, and how the layers are cut over pp ranks and chunks."""
    s = reader.settings
    name = f"{P}pipeline_parallel_schedule"
    schedule = reader.value(name, "1F1B")
    s["parallel.schedule"] = PLANNED.get(schedule.lower(), "1f1b")
    if schedule.lower() not in PLANNED:
        reader.nearest(name, f"{schedule} is planned as 1F1B with as many chunks")
    pp, layers = s.get("parallel.pp"), _layers(s)
    if not isinstance(pp, int) or pp < 1:
        return
    parts = f"{P}module_fqns_per_model_part"
    if reader.has(parts):
        counts = [len(_LAYER.findall(words)) for words in reader.flags[parts]]
        if (cut := find_cut(counts, s)) is None and len(counts) % pp == 0:
            text = write_layout(layout_parts([[(0, count) for count in counts[stage::pp]] for stage in range(pp)]))
            cut = {"parallel.pipeline_layout": text, "parallel.vpp": len(counts) // pp}
        if cut is None:
            reader.wrong(parts, f"{len(counts)} parts cannot be dealt to {pp} ranks", "use a multiple of the ranks")
        else:
            s |= cut
        return
    ends = [int(reader.number(f"{P}pipeline_parallel_{end}_stage_less_layers", int, 1)) for end in ("first", "last")]
    is_looped = schedule.lower().startswith(LOOPED)
    per_stage = int(reader.number(f"{P}pipeline_parallel_layers_per_stage", int, 0))
    if layers is None:
        s["parallel.vpp"] = 2 if is_looped else 1
        return
    stages = (2 if is_looped else 1) * pp
    if per_stage > 0:
        stages = -(-(layers + sum(ends)) // per_stage)
    if stages % pp:
        reader.wrong(
            f"{P}pipeline_parallel_layers_per_stage",
            f"{per_stage} make {stages} stages, which {pp} ranks cannot share",
            "use another number, or leave it out",
        )
        return
    if stages != pp:
        s["parallel.vpp"] = stages // pp
    if (layers + sum(ends)) % stages == 0:
        s |= {"parallel.embedding_is_layer": bool(ends[0]), "parallel.loss_is_layer": bool(ends[1])}
    elif layers % stages:
        s["parallel.stage_balance"] = "cost"
        reader.nearest(
            f"{P}pipeline_parallel_degree", f"{layers} layers over {stages} stages are cut by cost as the plan counts"
        )
    else:
        reader.nearest(
            f"{P}pipeline_parallel_degree", "stages of equal layers are planned; torchtitan gives the ends fewer"
        )


def _layers(settings: Mapping[str, object]) -> int | None:
    table = find_preset("models", str(settings.get("model", ""))) or {}
    layers = table.get("layers")
    return layers if isinstance(layers, int) else None


OFFLOAD, WHOLE_LOGITS = f"{T}enable_cpu_offload", f"{P}disable_loss_parallel"
KNOWN_TOO = (
    OFFLOAD,
    WHOLE_LOGITS,
    f"{T}num_tokens_per_train_step",
    f"{T}num_tokens_per_microbatch_per_dp_rank",
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    f"{P}expert_tensor_parallel_degree",
    f"{P}module_fqns_per_model_part",
    f"{P}pipeline_parallel_first_stage_less_layers",
    f"{P}pipeline_parallel_last_stage_less_layers",
    f"{P}pipeline_parallel_layers_per_stage",
    f"{P}num_pp_microbatches",
    f"{P}context_parallel_load_balancer",
    f"{P}context_parallel_rotate_method",
)
"""Keys that are read with others or have no effect here."""


ROTATE = f"{P}context_parallel_rotate_method"
MESH = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "dp_shard": "data_parallel_shard",
    "dp_replicate": "data_parallel_replicate",
}
"""Axes of a printed mesh, `mesh.tp`, as the degrees of `parallelism`."""
_MESH = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(\d{1,6})")
_OLD_MESH = re.compile(r"device mesh with \[([a-z_', ]{1,200})\], \[([\d, ]{1,100})\]")
_TRAINER = re.compile(
    r"local batch size (\d{1,9}), global batch size (\d{1,9}),"
    r"(?: gradient.accumulation.steps:? \d{1,9},)? sequence length (\d{1,9})"
)
_RECOMPUTED = re.compile(r"Applied (\w{1,40}) activation checkpointing")
_FLAVOR = re.compile(r"Building (\w{1,40}) (\w{1,40}) with")


def _read_dump(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of torchtitan's start, whose end no line says. state: the JSON so far."""
    if head.startswith("Running"):
        state[:] = [text[text.index("{") :]]
    elif state:
        state.append(text[:LONGEST_VALUE])
        if text.startswith("}"):
            _add_json("\n".join(state), config)
        if text.startswith("}") or len(state) > MOST:
            state.clear()
    if "device mesh with" in text:
        if old := _OLD_MESH.search(text):
            names = [name.strip(" '") for name in old[1].split(",")]
            for name, size in zip(names, old[2].split(","), strict=False):
                config.add(f"mesh.{name if name != 'dp' else 'dp_shard'}", size)
        for name, size in _MESH.findall(text):
            config.add(f"mesh.{name}", size)
    elif found := _TRAINER.search(text):
        for name, size in zip(("local_batch_size", "global_batch_size", "seq_len"), found.groups(), strict=True):
            config.add(f"training.{name}", size)
    elif found := _RECOMPUTED.search(text):
        config.add("activation_checkpoint.mode", found[1].lower())
    elif found := _FLAVOR.search(text):
        config.add("model.name", found[1])
        config.add("model.flavor", found[2])
    return True


def _add_json(text: str, config: PrintedConfig) -> None:
    try:
        tables = [("", json.loads(text))]
    except (ValueError, RecursionError):
        return
    while tables:
        name, value = tables.pop()
        if isinstance(value, dict):
            tables += [(f"{name}.{key}".strip("."), inner) for key, inner in value.items()]
        else:
            config.add(name, value if isinstance(value, str) else json.dumps(value))


def _printed_job(printed: Mapping[str, str]) -> ReadJob | None:
    """The job of what a log prints: the mesh and the batch, and more with print_config; None
    without them."""
    values = {name: _json_words(text) for name, text in printed.items() if text not in ("None", "null")}
    mesh = {axis: values.pop(f"mesh.{axis}") for axis in MESH if f"mesh.{axis}" in values}
    if not mesh or f"{T}local_batch_size" not in values:
        return None
    values |= {f"{P}{MESH[axis]}_degree": words for axis, words in mesh.items()}
    values.setdefault("activation_checkpoint.mode", ("none",))
    return _read(values, {})


def _json_words(text: str) -> tuple[str, ...]:
    """The elements of a list of torchtitan's JSON, such as the modules of each part of a pipeline;
    another value is one word."""
    try:
        listed = json.loads(text) if text.startswith("[") else text
    except (ValueError, RecursionError):
        listed = text
    return tuple(map(str, listed)) if isinstance(listed, list) else (text,)


LOG = LauncherLog(
    "torchtitan",
    "torchtitan",
    (
        StepFormat(
            "tps:",
            {
                "number": ("step",),
                "seconds": ("step_time",),
                "tokens_per_rank": (" tps",),
                "tflops": ("tflops",),
                "mfu": ("mfu",),
            },
            "validate step",
        ),
        StepFormat("wps:", {"number": ("step",), "tokens_per_rank": (" wps",)}, "validate step", " before 2025"),
    ),
    heads=("Running with configs: {", "Building device mesh with", "-D device mesh with"),
    read=_read_dump,
    ranks=tuple(f"mesh.{axis}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    job=_printed_job,
)
