"""A command line of Megatron-LM as the settings of a job.

Settings without a flag have Megatron's defaults (dropout 0.1, weight decay 0.01, ...), so that the
plan is of the job that would run. dp follows from the ranks: torchrun's --nnodes and
--nproc-per-node, where the text has them, else --nodes and --gpus-per-node. Flags that change the
layout or the model's shape and have no setting are errors. Others are named in warnings: those of
data, logs and the like in one, those that change training, memory or speed with their values in
another, and each that is planned as the nearest setting in a separate one. Names are those of
megatron-core 0.19.2.

At most one of four flags sets the chunks of a rank: their number, the layers in each, a fork's V
(megatron_fork.py), or the layout of every part, `Et*3|(tt|)*6,tL` (spec/layout_text.py). A layout
becomes the settings that cut the layers the same way, where there are any, else
parallel.pipeline_layout.

`--tensor-model-parallel-size 2 --bf16` is {"parallel.tp": 2, "training.dtype": "bf16"} and the
defaults.

>>> layer_counts("Et*3|(tt|)*2,tL")
[3, 2, 2, 1]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mpctl.core.axes import AXIS_NAMES
from mpctl.core.errors import InputError, Issue
from mpctl.core.sharding import divisors
from mpctl.core.units import plural
from mpctl.interop import megatron_experts, megatron_fork
from mpctl.interop.command_line import EXPAND, CommandLine, split_command
from mpctl.interop.config_text import Flags
from mpctl.interop.mapping import NO_SETTINGS, KeyReader, ReadJob, says_ranks
from mpctl.interop.megatron_flags import (
    BATCH_FLAGS,
    CHUNKS,
    CP_COMM,
    CP_SIZES,
    FP16_FLAGS,
    FUSION,
    IMPLEMENTATION,
    INSTANCES,
    LAYERS_A_CHUNK,
    LAYOUT,
    LAYOUT_FLAGS,
    MODEL_FLAGS,
    NARROW_FLAGS,
    RECOMPUTE,
    RECOMPUTE_FLAGS,
    ROPE_SCALING,
    ROWS,
    TRAINING_FLAGS,
    read_cp_comm,
    read_loss,
    read_recompute,
    read_strategy,
    read_variants,
)
from mpctl.interop.megatron_optimizers import read_optimizer
from mpctl.interop.megatron_others import SOFTWARE, is_apart, is_neutral, known_flags, refusal_of
from mpctl.interop.shell_words import is_unexpanded
from mpctl.interop.vocabulary import vocabularies
from mpctl.model.pipeline.stages import Span, UnevenLayersError, job_stages, spans_of
from mpctl.plan.planning.plan import Overrides
from mpctl.plan.rules.check import Check, listed
from mpctl.plan.rules.layout import is_countable
from mpctl.spec.layout_text import PipelineLayout, parse_layout, write_layout
from mpctl.spec.load import job_from_raw
from mpctl.spec.runtime import is_same_software
from mpctl.spec.schedules import SCHEDULES

SAMPLES = {
    "--train-samples": "training.steps",
    "--lr-decay-samples": "training.lr_decay_steps",
    "--lr-warmup-samples": "training.warmup_steps",
    "--lr-wsd-decay-samples": "training.lr_wsd_decay_steps",
}
"""Flags that count samples where a job counts steps."""
OLDER = {"--no-async-tensor-model-parallel-allreduce": 0}
"""Flags of older versions that do not affect a plan, with the number of their values."""
READ = frozenset(
    (
        *megatron_experts.READ,
        *megatron_fork.READ,
        *(row.key for row in ROWS),
        *SAMPLES,
        *OLDER,
        LAYERS_A_CHUNK,
        "--step-batch-size-schedule",
        "--lr-warmup-fraction",
        "--recompute-activations",
        "--padded-vocab-size",
        "--use-rotary-position-embeddings",
        "--no-position-embedding",
        "--transformer-impl",
        "--use-mcore-models",
        "--use-flash-attn",
    )
)
"""Every flag that is read, by itself or with others."""


def read_megatron(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a command line of Megatron-LM.

    text: the flags alone, or the full command with torchrun and the program. typed: the settings
    that override it, of which the ranks and their axes are read. Raises InputError with every flag
    that is invalid, unknown to Megatron-LM, or changes the layout in a way that jobs cannot
    express, and for flags that leave the vocabulary open.
    """
    counts = {name: flag.values for name, flag in known_flags().items()} | OLDER
    read = read_command(split_command(text, counts), typed)
    if "model.layers" in read.settings and not {*read.settings, *typed} & {"model", "model.vocab"}:
        return _with_vocabulary(read, typed)
    return read


def _with_vocabulary(read: ReadJob, typed: Overrides) -> ReadJob:
    """The job with the vocabulary of the presets that have exactly its shape. Raises InputError where
    there are none, or several vocabularies."""
    found = vocabularies({**read.settings, **typed})
    if len({*found.values()}) == 1:
        name, vocab = next(iter(found.items()))
        message = (
            f"--vocab-size is not there: planned with {vocab:,}, that of preset {name}, which has exactly this shape"
        )
        hint = f"add --vocab-size {vocab}, or --set model.vocab=N for another"
        warning = Check("megatron-vocabulary", "warning", "--vocab-size", message, hint)
        return ReadJob({**read.settings, "model.vocab": vocab}, (*read.warnings, warning))
    message = "is not there, and no tokenizer is asked for the vocabulary"
    offers = ", ".join(f"{vocab} ({name})" for name, vocab in found.items())
    hint = f"add it: presets of this shape have {offers}" if found else "add it, or --set model.vocab=N"
    raise InputError.of("megatron-flag", "--vocab-size", message, hint)


def read_command(line: CommandLine, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a command line that is split already. Raises InputError as read_megatron."""
    _check_is_expanded(line.flags)
    reader = KeyReader(line.flags, "megatron")
    unknown = [flag for flag in line.flags if flag not in READ]
    reader.issues += [issue for flag in unknown if (issue := refusal_of(flag, line.flags[flag]))]
    _read_cluster(reader, line.launcher)
    _read_layout(reader)
    if reader.has(INSTANCES):
        read_instances(reader, find_replicas(reader, line.launcher, typed), INSTANCES)
    _read_precision(reader)
    given = "selective" if reader.has("--recompute-activations") else reader.value(RECOMPUTE[0])
    read_recompute(reader, given, RECOMPUTE)
    _read_model(reader)
    megatron_experts.read_experts(reader)
    reader.read(TRAINING_FLAGS)
    read_optimizer(reader)
    _read_samples(reader)
    if reader.has("--lr-warmup-fraction"):
        _read_warmup(reader)
    _read_pipeline(reader)
    runtime = megatron_experts.runtime_of_flags(line.flags)
    is_theirs = is_same_software(runtime, str(typed.get("training.runtime", runtime)))
    read_loss(reader, FUSION, IMPLEMENTATION, absent="unfused" if is_theirs else None)
    if reader.issues:
        raise InputError(reader.issues)
    ignored = {flag: line.flags[flag] for flag in unknown}
    if runtime == megatron_experts.GRAPHS:
        ignored = {flag: values for flag, values in ignored.items() if flag not in megatron_experts.CAPTURE}
    settings = {**reader.settings, "training.runtime": runtime}
    return ReadJob(settings, (*_warnings(ignored), *reader.warnings))


def _check_is_expanded(flags: Flags) -> None:
    """Raises InputError for flags that are read and have a shell's variables as values."""
    message = "is for a shell to expand, and none runs here"
    issues = [
        Issue("bad-syntax", flag, f"{' '.join(values)!r} {message}", EXPAND)
        for flag, values in flags.items()
        if flag in READ and any(map(is_unexpanded, values))
    ]
    if issues:
        raise InputError(issues)


def _warnings(unread: Flags) -> Iterator[Check]:
    said = {flag: values for flag, values in unread.items() if not is_neutral(flag, values)}
    apart = [flag for flag in said if is_apart(flag)]
    if apart:
        message = f"{', '.join(apart)}: ignored"
        hint = "flags for data, checkpoints and logging, which do not change the plan"
        yield Check("megatron-flags", "warning", "--from", message, hint)
    changes = [" ".join((flag, *said[flag])) for flag in said if flag not in apart]
    if changes:
        message = f"{', '.join(changes)}: not read, and may change model, training, memory or speed"
        yield Check("megatron-changes", "warning", "--from", message, "the plan is of the job without them")


def _read_cluster(reader: KeyReader, launcher: Flags) -> None:
    """torchrun's nodes and ranks a node, where they are numbers and not a shell's variables."""
    for names, setting in (
        (("--nnodes", "--nnode"), "cluster.nodes"),
        (("--nproc-per-node", "--nproc_per_node"), "cluster.gpus_per_node"),
    ):
        for name in names:
            if name in launcher and launcher[name] and launcher[name][0].isdecimal():
                reader.settings[setting] = int(launcher[name][0])


def _read_layout(reader: KeyReader) -> None:
    reader.read((*LAYOUT_FLAGS, *BATCH_FLAGS, *RECOMPUTE_FLAGS))
    s = reader.settings
    read_cp_comm(reader, CP_COMM, CP_SIZES)
    s["parallel.sequence_parallel"] = reader.has("--sequence-parallel") and s.get("parallel.tp") != 1
    if s["parallel.sequence_parallel"]:
        s["parallel.tp_comm_overlap"] = reader.has("--tp-comm-overlap")
    if reader.has("--use-tp-pp-dp-mapping"):
        s["parallel.order"] = "tp-cp-pp-dp"
    s["parallel.zero"] = _zero(reader)
    if reader.has("--no-gradient-accumulation-fusion") and not reader.has("--use-megatron-fsdp"):
        reader.nearest("--no-gradient-accumulation-fusion", "planned with the sum of gradients in the product's kernel")
    overlaps_gather = reader.has("--overlap-param-gather")
    if s["parallel.zero"] and s["parallel.overlap_gradients"] and not overlaps_gather:
        message = "planned with --overlap-param-gather too, as one setting says both"
        hint = "add it, or plan without both: --set parallel.overlap_gradients=false"
        reader.nearest("--overlap-grad-reduce", message, hint)
    if reader.has("--step-batch-size-schedule"):
        _read_batch_schedule(reader)


def _read_batch_schedule(reader: KeyReader) -> None:
    """`0:768 250B:1536` is planned with its last batch."""
    flag = "--step-batch-size-schedule"
    if reader.has("--global-batch-size"):
        reader.wrong(flag, "is given together with --global-batch-size", "leave one of them out")
    last = reader.value(flag).replace(",", " ").split()[-1:]
    _, _, batch = "".join(last).partition(":")
    if not batch.isdecimal():
        hint = "give THRESHOLD:BATCH ..., such as 0:768 250B:1536"
        reader.wrong(flag, f"{reader.value(flag)!r} has no batch at its end", hint)
        return
    reader.settings["training.global_batch_size"] = int(batch)
    reader.nearest(flag, f"planned with its last batch, {batch}", "--global-batch-size N plans another")


def _zero(reader: KeyReader) -> int:
    """The distributed optimizer is ZeRO 1; Megatron-FSDP has a flag for its stage."""
    if not reader.has("--use-megatron-fsdp"):
        return int(reader.has("--use-distributed-optimizer"))
    return read_strategy(reader, "--data-parallel-sharding-strategy")


def find_replicas(reader: KeyReader, launcher: Flags, typed: Overrides) -> int | None:
    """dp x cp; None where neither torchrun's words, nor a log (`--world-size`), nor the settings
    that override the flags say how many ranks there are."""
    axes = {f"parallel.{axis}" for axis in AXIS_NAMES}
    settings = {
        key: value for key, value in {**reader.settings, **typed}.items() if key.startswith("cluster") or key in axes
    }
    if (ranks := launcher.get("--world-size", ("",))[0]).isdecimal():
        settings |= {"cluster.nodes": 1, "cluster.gpus_per_node": int(ranks)}
    if not any(says_ranks(key) for key in settings):
        return None
    try:
        sizes = job_from_raw({}, settings).sizes
    except InputError:  # told where the whole job is read
        return None
    return sizes["dp"] * sizes["cp"]


def read_instances(reader: KeyReader, replicas: int | None, key: str) -> None:
    """Instances of the distributed optimizer divide dp x cp, so that the number of ranks is needed.
    By hand, 16 ranks, tp 2 and 2 instances: zero_size 4."""
    count = int(reader.number(key, int, 1))
    if count < 1:
        hint = f"use {listed(divisors(replicas))}" if replicas else "use 1 or more"
        reader.wrong(key, f"{count} is not 1 or more", hint)
    elif count == 1:
        return
    elif not reader.settings.get("parallel.zero", 1):
        message = f"{count}: {SOFTWARE} ends on it without the distributed optimizer"
        reader.wrong(key, message, "add --use-distributed-optimizer, or use 1")
    elif replicas is None:
        message = "planned as 1, as nothing says how many ranks there are"
        reader.nearest(key, message, f"add --nodes and --gpus-per-node, or --zero-size N, dp x cp / {count}")
    elif replicas % count:
        reader.wrong(key, f"{count} does not divide dp x cp = {replicas}", f"use {listed(divisors(replicas))}")
    else:
        reader.settings["parallel.zero_size"] = replicas // count


def _read_precision(reader: KeyReader) -> None:
    s = reader.settings
    if reader.has("--fp16"):
        s["training.dtype"] = "fp16"
        reader.read(FP16_FLAGS)
        s["training.gradient_dtype"] = "fp32" if reader.has("--accumulate-allreduce-grads-in-fp32") else "fp16"
        return
    dtype = "bf16" if reader.has("--bf16") else "fp32"
    if reader.has("--fp4-format"):
        dtype = "nvfp4"
    elif reader.has("--fp8-format"):
        dtype = "mxfp8" if reader.value("--fp8-recipe") == "mxfp8" else "fp8"
    s["training.dtype"] = dtype
    if dtype == "fp8":
        _read_fp8(reader)
    for flag, planned in NARROW_FLAGS.get(dtype, {}).items():
        given = reader.value(flag, planned)
        if flag != "--fp8-recipe" and given != planned:  # formats are of one size and speed
            reader.nearest(flag, f"{given} is planned as {planned}")
    if dtype != "fp32" and reader.has("--grad-reduce-in-bf16"):
        s["training.gradient_dtype"] = "bf16"
    elif dtype in NARROW_FLAGS:  # the runtime's are of recipes that reduce in bf16
        s["training.gradient_dtype"] = "fp32"


def _read_fp8(reader: KeyReader) -> None:
    """The scaling recipe: scales of blocks of a tensor, and recipes of the user, are planned as
    current scaling of full tensors."""
    recipe = reader.value("--fp8-recipe", "delayed")
    if recipe == "delayed":
        length = reader.number("--fp8-amax-history-len", int, 1)
        reader.settings["training.fp8_amax_history_len"] = length
        if length != 1 and reader.value("--fp8-amax-compute-algo") != "max":
            message = "most_recent is planned as max: the largest element of the history counts"
            reader.nearest("--fp8-amax-compute-algo", message)
        return
    reader.settings["training.fp8_recipe"] = "tensorwise"
    if recipe != "tensorwise":
        reader.nearest("--fp8-recipe", f"{recipe} is planned as tensorwise")


def _read_model(reader: KeyReader) -> None:
    """The shape; without --num-layers only stated sizes, for a model that is named elsewhere."""
    has_shape = reader.has("--num-layers")
    reader.read(MODEL_FLAGS, defaults=has_shape)
    _read_implementation(reader)
    if reader.has("--padded-vocab-size"):
        _read_padded_vocabulary(reader)
    if not has_shape:
        return
    s = reader.settings
    has_bias = not reader.has("--disable-bias-linear")
    is_tanh = has_bias and not reader.has("--no-bias-gelu-fusion")
    s["model.bias"] = has_bias
    s["model.activation"] = "gelu_tanh" if is_tanh else "gelu"
    if reader.has("--swiglu"):
        s["model.activation"] = "swiglu"
        hidden = s.get("model.hidden")
        if isinstance(hidden, int) and not reader.has("--ffn-hidden-size"):
            s["model.ffn"] = int((4 * hidden * 2 / 3) / 64) * 64  # as Megatron's validate_args
    read_variants(reader)
    s["model.tied_embeddings"] = not reader.has("--untie-embeddings-and-output-weights")
    if reader.has("--group-query-attention"):
        s["model.kv_heads"] = reader.number("--num-query-groups", int, 1)
    if reader.has("--use-rotary-position-embeddings"):
        s["model.position"] = "rotary"
    elif reader.has("--no-position-embedding") and s.get("model.position") != "rotary":
        message = f"{SOFTWARE} ends on it except with rotary positions, where it does nothing"
        reader.wrong("--no-position-embedding", message, "use --position-embedding-type none")
    if s.get("model.position") == "rotary":
        s["model.rotary_base"] = float(reader.number("--rotary-base", float, 10000.0))
    if reader.has("--use-rope-scaling"):
        factor = float(reader.number("--rope-scaling-factor", float, 8.0))
        s["model.rotary_scaling"] = {"factor": factor, **ROPE_SCALING}


def _read_implementation(reader: KeyReader) -> None:
    """Megatron's local layers have attention that writes its scores to memory, whatever its
    backend."""
    implementation = reader.value("--transformer-impl", "transformer_engine")
    if implementation == "local" and not megatron_fork.has_flash(reader):
        reader.settings["model.attention"] = "unfused"
        message = "local: planned as unfused attention with Transformer Engine's other kernels"
        reader.nearest("--transformer-impl", message)
    elif implementation not in ("local", "transformer_engine"):
        message = f"{implementation!r} is none that a job can say"
        reader.wrong("--transformer-impl", message, "use transformer_engine or local")


def _read_padded_vocabulary(reader: KeyReader) -> None:
    """The stated rows of the word table: the padding multiple becomes its part on a rank."""
    flag, s = "--padded-vocab-size", reader.settings
    rows, tp = reader.number(flag, int, 0), s.get("parallel.tp")
    vocab = s.setdefault("model.vocab", rows)
    if not isinstance(rows, int) or not isinstance(tp, int) or not isinstance(vocab, int):
        return
    if tp < 1 or rows < 1 or rows % tp:
        reader.wrong(flag, f"{rows} rows cannot be split over tp {tp}", "use a multiple of tp")
    elif rows < vocab:
        reader.wrong(flag, f"{rows} rows cannot hold --vocab-size {vocab}", f"use {vocab} or more")
    else:
        s["model.vocab_divisor"] = rows // tp


def _read_samples(reader: KeyReader) -> None:
    """Samples as steps of the global batch, as Megatron-LM makes iterations of them."""
    batch = reader.settings.get("training.global_batch_size")
    for flag, setting in SAMPLES.items():
        if not reader.has(flag):
            continue
        samples = reader.number(flag, int, 0)
        if isinstance(batch, int) and batch > 0:
            reader.settings[setting] = int(samples) // batch
        else:
            reader.nearest(flag, "not planned, as --global-batch-size is not there to make steps of samples", "add it")


def _read_warmup(reader: KeyReader) -> None:
    """A fraction of the iterations over which the rate decays, by default all."""
    flag, s = "--lr-warmup-fraction", reader.settings
    if s.get("training.warmup_steps"):
        reader.wrong(flag, "is given together with --lr-warmup-iters", "leave one of them out")
    steps = s.get("training.lr_decay_steps", s.get("training.steps"))
    fraction = reader.number(flag, float, 0.0)
    if isinstance(steps, int):
        s["training.warmup_steps"] = round(fraction * steps)
    else:
        reader.nearest(flag, "planned without a warm-up, as neither --train-iters nor --lr-decay-iters is there")


def _read_pipeline(reader: KeyReader) -> None:
    given = [flag for flag in (CHUNKS, LAYERS_A_CHUNK, LAYOUT, megatron_fork.V) if reader.has(flag)]
    if len(given) > 1:
        message = f"is given together with {' and '.join(given[1:])}; Megatron-LM takes one of them"
        reader.wrong(given[0], message, "leave the others out")
        return
    megatron_fork.read_fork(reader)
    try:
        for flag in given:
            text = reader.value(flag)
            if flag == megatron_fork.V:
                reader.settings["parallel.vpp"] = 2
            elif flag == LAYOUT:
                reader.settings |= cut_as(text, reader.settings)
            elif (chunks := _chunks(flag, text, reader.settings)) > 1:
                reader.settings["parallel.vpp"] = chunks
    except InputError as error:
        reader.issues += error.issues


def _chunks(flag: str, text: str, settings: Mapping[str, object]) -> int:
    """Chunks a rank; LAYERS_A_CHUNK states the layers of each instead."""
    if not text.isdecimal() or int(text) < 1:
        raise _wrong(flag, f"{text!r} is not a number above 0")
    count = int(text)
    if flag == CHUNKS:
        return count
    layers, pp = settings.get("model.layers"), settings.get("parallel.pp")
    if not isinstance(layers, int) or not isinstance(pp, int):
        raise _wrong(LAYERS_A_CHUNK, "says nothing without --num-layers", f"use {CHUNKS}")
    ends = ("parallel.embedding_is_layer", "parallel.loss_is_layer")
    layers += sum(bool(settings.get(end)) for end in ends)
    if layers % (pp * count):
        raise _wrong(LAYERS_A_CHUNK, f"{count} x {pp} stages does not divide {plural(layers, 'layer')}")
    return layers // (pp * count)


def layer_counts(text: str) -> list[int]:
    """Layers of each part of a layout. Raises InputError with all its errors."""
    return [part.layers for part in _parsed(text, LAYOUT).parts]


def _parsed(text: str, flag: str) -> PipelineLayout:
    layout = parse_layout(text)
    if layout.problems:
        shown = f"{text[:60]!r}"
        raise InputError(
            [Issue("megatron-flag", flag, f"{shown}, {problem}", problem.hint) for problem in layout.problems]
        )
    return layout


def cut_as(text: str, settings: Mapping[str, object], flag: str = LAYOUT) -> dict[str, object]:
    """The settings that cut the layers as a layout does: evenly, by the ends, by cost, or as it says. Raises
    InputError where it fits neither the stages nor the layers."""
    layout, pp = _parsed(text, flag), settings.get("parallel.pp")
    if not isinstance(pp, int) or len(layout.parts) % pp:
        raise _wrong(flag, f"{len(layout.parts)} parts cannot be dealt to {pp} stages")
    if settings.get("model.layers") not in (None, layout.layers):
        raise _wrong(flag, f"has {layout.layers} layers, --num-layers {settings['model.layers']}")
    cut = None if layout.separates_prediction else find_cut([part.layers for part in layout.parts], settings)
    if cut is not None:
        return cut
    return {"parallel.pipeline_layout": write_layout(layout.parts), "parallel.vpp": len(layout.parts) // pp}


def find_cut(counts: list[int], settings: Mapping[str, object]) -> dict[str, object] | None:
    """The settings that deal parts of so many layers to the stages, part i to rank i mod pp or as the
    schedule's V does; None where none do."""
    pp = settings.get("parallel.pp")
    if not isinstance(pp, int) or pp < 1 or not counts or len(counts) % pp:
        return None
    vpp = len(counts) // pp
    for cut in _cuts(counts, pp, vpp):
        tried = {**settings, **cut, "parallel.vpp": vpp}
        is_v = SCHEDULES[str(settings.get("parallel.schedule", "1f1b"))].is_v
        if _stages(tried, sum(counts)) == spans_of(counts, pp, is_v=is_v):
            return {**cut, "parallel.vpp": vpp}
    return None


def _cuts(counts: list[int], pp: int, vpp: int) -> Iterator[dict[str, object]]:
    ends = "parallel.first_stage_layers", "parallel.last_stage_layers"
    yield {}
    for embedding, loss in ((True, True), (True, False), (False, True)):
        yield {"parallel.embedding_is_layer": embedding, "parallel.loss_is_layer": loss}
    first, last = sum(counts[::pp]), sum(counts[pp - 1 :: pp])
    yield {ends[0]: first}
    yield {ends[1]: last}
    yield {ends[0]: first, ends[1]: last}
    yield {"parallel.stage_balance": "cost"}


def _stages(settings: Mapping[str, object], layers: int) -> list[list[Span]] | None:
    """How settings cut the layers; None where they are invalid or do not cut them."""
    try:
        job = job_from_raw({}, dict(settings))
        if job.parallel.stage_balance == "cost" and not (job.model and is_countable(job.model)):
            return None
        return job_stages(job, layers)
    except (UnevenLayersError, InputError):
        return None


def _wrong(flag: str, message: str, hint: str = "") -> InputError:
    return InputError.of("megatron-flag", flag, message, hint)
