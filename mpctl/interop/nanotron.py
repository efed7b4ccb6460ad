"""nanotron's config file, for its Llama models: a plan as one, and one as a job.

Spelling, meanings and limits: nanotron main of 2026-04, src/nanotron/config/. Ranks are numbered tp,
cp, dp, pp, tp fastest. ZeRO 0 and 1; sequence parallelism is `tp_mode: REDUCE_SCATTER`; recomputation
of whole layers; stages by its own estimate of cost, as plans under its runtime cut them
(model/pipeline/filled.py); one chunk a rank; all forward passes first where no pp_engine is named. The
vocabulary is padded to a multiple of tp. The global batch is micro_batch_size x
batch_accumulation_per_replica x dp.

Its log (trainer.py, train_step_logs) begins with `Config(general=GeneralArgs(project='p', ...),
parallelism=ParallelismArgs(dp=2, ...`, as pprint breaks it over lines.

By hand, micro batches of 1, 32 of them and dp 4 are a global batch of 128:

>>> read = read_nanotron("parallelism: {dp: 4, tp: 2}\\ntokens: {micro_batch_size: 1, "
...                      "batch_accumulation_per_replica: 32}")
>>> read.settings["training.global_batch_size"], read.settings["parallel.tp"]
(128, 2)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Flags, nested, read_yaml, unreadable, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, llama_refusals, refused, splits_sequence
from mpctl.interop.log_formats import LauncherLog, PrintedConfig, StepFormat
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.model.layout.topology import zero_stage
from mpctl.model.pipeline.filled import is_filled
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "nanotron",
    chunks=False,
    zero=(0, 1),
    zero_in_pipeline=(0, 1),
    recompute=("none", "full"),
    dtypes=("fp32", "bf16"),
    dropout=False,
)
ENGINES = {"1f1b": "1f1b", "gpipe": "afab"}
PRINTED = {"OneForward": "1f1b", "AllForward": "gpipe"}
"""Words of the classes that its log prints in place of ENGINES."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
STYLES = ("linear", "cosine")
P, M, RATE, ADAM = (
    "parallelism.",
    "model.model_config.",
    "optimizer.learning_rate_scheduler.",
    "optimizer.optimizer_factory.",
)


def _decay_steps(job: JobSpec) -> int:
    t = job.training
    return max(1, (t.lr_decay_steps or t.steps) - t.warmup_steps)


ROWS = (
    ForeignKey("general.project", value="mpctl"),
    ForeignKey("general.run", value="plan"),
    ForeignKey("general.seed", "training.seed", int),
    ForeignKey(f"{P}dp", "parallel.dp", int, value=lambda job: job.sizes["dp"]),
    ForeignKey(f"{P}pp", "parallel.pp", int, 1),
    ForeignKey(f"{P}tp", "parallel.tp", int, 1),
    ForeignKey(f"{P}context_parallel_size", "parallel.cp", int, 1),
    ForeignKey(f"{P}expert_parallel_size", value=1),
    ForeignKey(f"{P}pp_engine", value=lambda job: ENGINES.get(job.parallel.schedule, "1f1b")),
    ForeignKey(f"{P}tp_mode", value=lambda job: "REDUCE_SCATTER" if splits_sequence(job) else "ALL_REDUCE"),
    ForeignKey(f"{P}tp_linear_async_communication", value=splits_sequence),
    ForeignKey(f"{P}recompute_layer", "training.recompute", bool, words={"none": False, "full": True}),
    ForeignKey("tokens.micro_batch_size", "training.micro_batch_size", int),
    ForeignKey("tokens.batch_accumulation_per_replica", value=lambda job: job.num_microbatches),
    ForeignKey("tokens.sequence_length", "model.seq_length", int),
    ForeignKey("tokens.train_steps", "training.steps", int),
    ForeignKey("model.dtype", "training.dtype", str, "bfloat16", DTYPES),
)
MODEL_ROWS = (
    ForeignKey("model.make_vocab_size_divisible_by", "model.vocab_divisor", int, 1, value=1),
    ForeignKey("model.init_method.std", value=lambda job: job.training.init_std),
    ForeignKey(f"{M}is_llama_config", value=True),
    ForeignKey(f"{M}hidden_act", value="silu"),
    ForeignKey(f"{M}hidden_size", "model.hidden", int),
    ForeignKey(f"{M}intermediate_size", "model.ffn", int),
    ForeignKey(f"{M}num_hidden_layers", "model.layers", int),
    ForeignKey(f"{M}num_attention_heads", "model.heads", int),
    ForeignKey(f"{M}num_key_value_heads", "model.kv_heads", int),
    ForeignKey(f"{M}max_position_embeddings", "model.max_positions", int),
    ForeignKey(f"{M}rms_norm_eps", "model.norm_epsilon", float),
    ForeignKey(f"{M}rope_theta", "model.rotary_base", float),
    ForeignKey(f"{M}tie_word_embeddings", "model.tied_embeddings", bool, False),
    ForeignKey(f"{M}vocab_size", "model.vocab", int),
)
OPTIMIZER_ROWS = (
    ForeignKey(f"{ADAM}name", value="adamW"),
    ForeignKey(f"{ADAM}adam_beta1", "training.beta1", float),
    ForeignKey(f"{ADAM}adam_beta2", "training.beta2", float),
    ForeignKey(f"{ADAM}adam_eps", "training.epsilon", float),
    ForeignKey(f"{ADAM}torch_adam_is_fused", value=True),
    ForeignKey("optimizer.zero_stage", "parallel.zero", int, 0, value=zero_stage),
    ForeignKey("optimizer.weight_decay", "training.weight_decay", float),
    ForeignKey("optimizer.clip_grad", "training.clip_norm", float),
    ForeignKey("optimizer.accumulate_grad_in_fp32", value=lambda job: job.training.reduced_dtype == "fp32"),
    ForeignKey(f"{RATE}learning_rate", "training.learning_rate", float),
    ForeignKey(f"{RATE}lr_warmup_steps", "training.warmup_steps", int),
    ForeignKey(f"{RATE}lr_warmup_style", value="linear"),
    ForeignKey(f"{RATE}lr_decay_style", value=lambda job: job.training.lr_schedule),
    ForeignKey(f"{RATE}lr_decay_steps", value=_decay_steps),
    ForeignKey(f"{RATE}min_decay_lr", "training.min_learning_rate", float, value=lambda job: job.training.lowest_rate),
)
EVERY = (*ROWS, *MODEL_ROWS, *OPTIMIZER_ROWS)
LLAMA = {"model.position": "rotary", "model.norm": "rmsnorm", "model.activation": "swiglu", "model.bias": False}
EXPERTS = ("moe_config", "num_local_experts", "num_experts_per_tok", "moe_num_experts")
NO_LAYOUT = (f"{P}tp_recompute_allgather", "tokens.limit", "tokens.val")
"""Beginnings of keys that are not read, and do not change the plan."""


def _refusals(plan: Plan) -> Iterator[Issue]:
    t, model = plan.job.training, plan.job.model
    yield from LIMITS.refusals(plan)
    if t.lr_schedule not in STYLES:
        message = "nanotron decays linearly or as a cosine"
        yield refused("training.lr_schedule", t.lr_schedule, message, "use linear or cosine")
    if t.reduced_dtype not in ("fp32", t.dtype):
        message = f"nanotron accumulates gradients in fp32 or {t.dtype}"
        yield refused("training.gradient_dtype", t.reduced_dtype, message, "use fp32")
    if model is None:
        yield refused("model", "none", "a config of nanotron states a sequence length", "name a model (--model NAME)")
    else:
        yield from llama_refusals(model, "nanotron")
        if model.rotary_scaling is not None:
            yield refused("model.rotary_scaling", "llama3", "nanotron's Llama has other scalings", "leave it out")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "nanotron", divisor=1, schedules=ENGINES)
    if job.parallel.pp > 1 and not is_filled(job):
        yield "approximated: nanotron cuts stages by its own cost of a block, not as the plan does"
    yield "before 2025 there is neither context_parallel_size nor optimizer_factory (PyPI's 0.4)"
    yield "not here: data_stages, tokenizer, checkpoints; start it: torchrun ... run_train.py"


def _body(plan: Plan) -> str:
    return yaml_text(nested(written(plan.job, EVERY)))


def read_nanotron(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config file. Raises InputError with every key that no setting says."""
    return read_values(read_yaml(text))


def read_values(values: Flags) -> ReadJob:
    """The job of the values of a config, by dotted name, also as its log prints them."""
    reader = KeyReader({name: words for name, words in values.items() if words != ("None",)}, "nanotron")
    if not any(name.startswith((P, "tokens.")) for name in values):
        message = "a config of nanotron has `parallelism` and `tokens`, and this text neither"
        raise unreadable(message, "give its file as @FILE")
    if reader.has("model.dtype"):
        reader.flags["model.dtype"] = (reader.value("model.dtype").removeprefix("torch."),)
    reader.read((*ROWS, *OPTIMIZER_ROWS))
    _read_parallelism(reader)
    _read_batch(reader)
    if reader.has(f"{M}num_hidden_layers"):
        reader.read(MODEL_ROWS)
        _read_form(reader)
    known = {row.key for row in EVERY}
    kinds = (P, "tokens.", "optimizer.zero")
    rest = (name for name in reader.flags if name.startswith(kinds) and name not in known)
    return reader.job("nanotron", (name for name in rest if not name.startswith(NO_LAYOUT)))


def _read_parallelism(reader: KeyReader) -> None:
    s = reader.settings
    is_scattered = "REDUCE_SCATTER" in reader.value(f"{P}tp_mode", "ALL_REDUCE").upper()
    s["parallel.sequence_parallel"] = is_scattered and s.get("parallel.tp") != 1
    engine = reader.value(f"{P}pp_engine", ENGINES["gpipe"])
    words = {theirs: ours for ours, theirs in ENGINES.items()} | PRINTED
    found = next((ours for word, ours in words.items() if word in engine), None)
    if found is None:
        reader.wrong(f"{P}pp_engine", f"{engine!r} is not known", "use 1f1b or afab")
    elif s.get("parallel.pp") != 1:
        s["parallel.schedule"] = found
    if reader.number(f"{P}expert_parallel_size", int, 1) != 1:
        reader.wrong(f"{P}expert_parallel_size", "experts over ranks are not read", "use 1, or a job of your own")
    if not reader.is_on("optimizer.accumulate_grad_in_fp32", True) and s.get("training.dtype") == "bf16":
        s["training.gradient_dtype"] = "bf16"


def _read_batch(reader: KeyReader) -> None:
    s, key = reader.settings, "tokens.batch_accumulation_per_replica"
    micro, dp = s.get("training.micro_batch_size"), s.get("parallel.dp")
    count = reader.number(key, int, 1)
    if isinstance(micro, int) and isinstance(dp, int):
        s["training.global_batch_size"] = micro * int(count) * dp
    elif reader.has(key):
        reader.wrong(key, "says nothing without parallelism.dp and tokens.micro_batch_size", "add them")


def _read_form(reader: KeyReader) -> None:
    """The form of the model: Llama's, or Qwen2's with biases of q, k and v."""
    reader.settings |= LLAMA
    if reader.is_on(f"{M}is_qwen2_config"):
        reader.settings["model.bias"] = "qkv"
    elif not reader.is_on(f"{M}is_llama_config", True):
        message = "false: only Llama's and Qwen2's form is read"
        reader.wrong(f"{M}is_llama_config", message, "name the model: --model NAME, and leave model_config out")
    if (act := reader.value(f"{M}hidden_act", "silu")) != "silu":
        reader.wrong(f"{M}hidden_act", f"{act!r} is not read", "use silu, SwiGLU's")
    for name in EXPERTS:
        if any(key.startswith(f"{M}{name}") for key in reader.flags):
            reader.wrong(f"{M}{name}", "experts are not read", "name the model: --model")
    if reader.has(f"{M}rope_scaling"):
        reader.nearest(f"{M}rope_scaling", "planned with plain rotary positions, of the same shape and speed")


_PART = re.compile(r"(\w{1,60})=(?:[A-Za-z_.]{1,60}\(|([^,()]{0,200}))|([()])")
DEEPEST = 20  # calls inside of each other


def _read_dump(text: str, head: str, state: list[str], config: PrintedConfig) -> bool:
    """A line of nanotron's Config(...). state: the names of the calls that it is in, empty for
    those of no keyword."""
    for found in _PART.finditer(text[text.index("]: ") + 3 :] if "]: " in text else text):
        name, value, bracket = found.groups()
        if bracket == "(":
            state.append("")
        elif bracket == ")" and state:
            state.pop()
        elif name and value is None:
            state.append(name)
        elif name and "" not in state[1:]:
            config.add(".".join([*state[1:], name]), value.strip("'\""))
        if (bracket == ")" and not state) or len(state) > DEEPEST:
            return False
    return True


def _printed_job(values: Mapping[str, str]) -> ReadJob | None:
    """The job of the settings of a dump."""
    return read_values({name: (value,) for name, value in values.items()})


LOG = LauncherLog(
    "nanotron",
    "nanotron",
    (
        StepFormat(
            "elapsed_time_per_iteration_ms",
            {
                "number": ("iteration",),
                "milliseconds": ("elapsed_time_per_iteration_ms",),
                "tokens_per_second": ("tokens_per_sec:",),
                "batch": ("global_batch_size",),
                "tokens_per_rank": ("tokens_per_sec_per_gpu",),
                "tflops": ("model_tflops_per_gpu",),
            },
        ),
    ),
    heads=("Config(general=",),
    read=_read_dump,
    ranks=tuple(f"parallelism.{axis}" for axis in ("dp", "tp", "pp", "context_parallel_size")),
    job=_printed_job,
)
LAUNCHER = ForeignLauncher(
    "nanotron",
    "nanotron (main of 2026-04)",
    "yaml",
    _refusals,
    _notes,
    _body,
    read_nanotron,
    LOG,
    script="run_train.py",
    given="--config-file {nanotron}",
)
