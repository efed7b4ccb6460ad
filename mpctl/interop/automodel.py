"""NeMo AutoModel's recipe for fine-tuning: a plan as its YAML, and one as a job.

Spelling, meanings and limits: nemo-automodel 0.7, components/distributed/config.py, _peft/lora.py,
optim/optimizer.py, training/step_scheduler.py and quantization/qlora.py. FSDP 2 shards without a pipeline
here (`reshard_after_forward` is ZeRO 3, its default but for pipelines and experts over ranks), `ddp` has
replicas. Computing is in bf16 over parameters of `torch_dtype`: fp32 where all of the model is trained. A and
B have the type of the weights below them, bf16 over a quantised base, or `lora_dtype`; scale is alpha / dim.
Dropout is after B by default. `match_all_linear` has the head, too, so that all-linear is written as
`exclude_modules`.

By hand, dim and alpha default to 8 and 32:

>>> read = read_automodel("{model: {pretrained_model_name_or_path: gpt2}, step_scheduler: {local_batch_size: 2}, "
...                       "peft: {target_modules: ['*_proj']}, distributed: {tp_size: 2}}")
>>> [read.settings[key] for key in ("training.adapter.rank", "training.adapter.alpha", "parallel.tp")]
[8, 32, 2]
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Issue
from mpctl.interop.config_text import nested, read_yaml, unreadable, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, dp_degrees, refused, splits_sequence
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.interop.megatron_flags import LR_SCHEDULES
from mpctl.interop.peft_keys import ADAPTER, alpha_of, is_nested, peft_refusals, read_base, stored_as, targets_of
from mpctl.interop.trainer_keys import DATASET, MODEL, TORCH, Trained, hub_id, set_trained, trainer_notes, unread_keys
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec

LIMITS = LauncherLimits(
    "NeMo AutoModel",
    cp_comm=("all_gather",),
    pp=False,
    dtypes=("fp32", "bf16"),
    zero=(0, 2, 3),
    recompute=("none", "full"),
    dropout=False,
    zero_size="dp",
    adapters=("lora", "qlora", "dora"),
    bases=("nf4", "bf16", "fp32"),
    bf16_states=True,
)
D, P, S, R, Q = "distributed.", "peft.", "step_scheduler.", "lr_scheduler.", "quantization."
ADAM = "optimizer."
RECOMPUTE = {word: word for word in ("selective", "full")}
NEMO, HEAD = "nemo_automodel.", "*lm_head*"


def trained_by(job: JobSpec) -> Trained:
    """Data type and fp32 copies of the parameters that AutoModel trains (module)."""
    t = job.training
    if t.adapter:
        return Trained("fp32" if t.dtype == "fp32" or t.adapter.dtype == "fp32" else "bf16")
    return Trained("bf16" if t.dtype == "bf16" and t.master_weights is False else "fp32")


def _read_as(job: JobSpec) -> str:
    """The type of the parameters that are read."""
    t = job.training
    base = t.adapter.stored_as if t.adapter else None
    return TORCH[base if base in TORCH else t.chosen_dtype] if t.adapter else TORCH[trained_by(job).dtype]


def _lora_dtype(job: JobSpec) -> str | None:
    dtype = job.training.adapter.dtype if job.training.adapter else None
    return TORCH.get(dtype or "")


ADAPTER_ROWS = (
    ForeignKey(f"{P}_target_", value=f"{NEMO}components._peft.lora.PeftConfig"),
    ForeignKey(f"{P}target_modules", value=lambda job: [f"*.{name}" for name in targets_of(job) or []] or None),
    ForeignKey(f"{P}exclude_modules", value=lambda job: [HEAD] if targets_of(job) is None else None),
    ForeignKey(f"{P}dim", f"{ADAPTER}rank", int, 8),
    ForeignKey(f"{P}alpha", f"{ADAPTER}alpha", int, 32, value=alpha_of),
    ForeignKey(f"{P}dropout", f"{ADAPTER}dropout", float, 0.0),
    ForeignKey(f"{P}dropout_position", value="pre"),
    ForeignKey(
        f"{P}use_dora", value=lambda job: job.training.adapter is not None and job.training.adapter.kind == "dora"
    ),
    ForeignKey(f"{P}lora_dtype", value=_lora_dtype),
    ForeignKey(f"{Q}load_in_4bit", value=lambda job: stored_as(job) == "nf4" or None),
    ForeignKey(f"{Q}bnb_4bit_quant_type", value=lambda job: "nf4" if stored_as(job) == "nf4" else None),
    ForeignKey(f"{Q}bnb_4bit_use_double_quant", f"{ADAPTER}double_quantization", bool, value=is_nested),
    ForeignKey(f"{Q}bnb_4bit_compute_dtype", value=lambda job: "bfloat16" if stored_as(job) == "nf4" else None),
    ForeignKey(f"{Q}bnb_4bit_quant_storage", value=lambda job: "bfloat16" if stored_as(job) == "nf4" else None),
)
ROWS = (
    ForeignKey("recipe", value="TrainFinetuneRecipeForNextTokenPrediction"),
    ForeignKey(f"{S}global_batch_size", "training.global_batch_size", int),
    ForeignKey(f"{S}local_batch_size", "training.micro_batch_size", int),
    ForeignKey(f"{S}max_steps", "training.steps", int),
    ForeignKey("dist_env.backend", value="nccl"),
    ForeignKey("rng._target_", value=f"{NEMO}components.training.rng.StatefulRNG"),
    ForeignKey("rng.seed", "training.seed", int),
    ForeignKey("rng.ranked", value=True),
    ForeignKey("model._target_", value=f"{NEMO}NeMoAutoModelForCausalLM.from_pretrained"),
    ForeignKey("model.pretrained_model_name_or_path", value=hub_id),
    ForeignKey("model.torch_dtype", value=_read_as),
    ForeignKey("model.attn_implementation", value=lambda job: _attention(job)),
    ForeignKey(f"{D}strategy", value=lambda job: "fsdp2" if zero_stage(job) or job.parallel.tp > 1 else "ddp"),
    ForeignKey(f"{D}dp_size", value="none"),
    ForeignKey(f"{D}dp_replicate_size", value=lambda job: dp_degrees(job)[0] if zero_stage(job) else None),
    ForeignKey(f"{D}tp_size", "parallel.tp", int, 1),
    ForeignKey(f"{D}cp_size", "parallel.cp", int, 1),
    ForeignKey(f"{D}sequence_parallel", "parallel.sequence_parallel", bool, False, value=splits_sequence),
    ForeignKey(f"{D}ep_size", "parallel.ep", int, value=lambda job: job.parallel.ep if job.parallel.ep > 1 else None),
    ForeignKey(
        f"{D}activation_checkpointing", "training.recompute", str, False, {"none": False, "full": True}, RECOMPUTE
    ),
    ForeignKey(f"{D}reshard_after_forward", value=lambda job: zero_stage(job) == 3 if zero_stage(job) else None),
    ForeignKey(f"{ADAM}_target_", value="torch.optim.AdamW"),
    ForeignKey(f"{ADAM}lr", "training.learning_rate", float),
    ForeignKey(f"{ADAM}betas", value=lambda job: [job.training.beta1, job.training.beta2]),
    ForeignKey(f"{ADAM}eps", "training.epsilon", float),
    ForeignKey(f"{ADAM}weight_decay", "training.weight_decay", float),
    ForeignKey(f"{R}lr_decay_style", "training.lr_schedule", str, None, LR_SCHEDULES),
    ForeignKey(f"{R}lr_warmup_steps", "training.warmup_steps", int),
    ForeignKey(f"{R}lr_decay_steps", "training.lr_decay_steps", int),
    ForeignKey(f"{R}min_lr", "training.min_learning_rate", float, value=lambda job: job.training.lowest_rate),
    ForeignKey(f"{R}wsd_decay_steps", "training.lr_wsd_decay_steps", int),
    ForeignKey("clip_grad_norm.max_norm", "training.clip_norm", float, 1.0),
    ForeignKey("packed_sequence.packed_sequence_size", "model.seq_length", int),
    ForeignKey("loss_fn._target_", value=f"{NEMO}components.loss.masked_ce.MaskedCrossEntropy"),
    ForeignKey("dataset._target_", value=DATASET),
    ForeignKey("dataloader._target_", value="torchdata.stateful_dataloader.StatefulDataLoader"),
    ForeignKey("dataloader.collate_fn", value=f"{NEMO}components.datasets.utils.default_collater"),
)
SHARDED, PIPELINE = ("fsdp2", "megatron_fsdp", "megatron-fsdp", "mfsdp"), f"{D}pp_size"
RESHARD, EXPERTS = f"{D}reshard_after_forward", f"{D}moe.reshard_after_forward"


def _attention(job: JobSpec) -> str:
    return "flash_attention_2" if job.model is None or job.model.attention == "flash" else "eager"


def _refusals(plan: Plan) -> Iterator[Issue]:
    job, p, t, who = plan.job, plan.job.parallel, plan.job.training, "NeMo AutoModel"
    yield from LIMITS.refusals(plan)
    yield from peft_refusals(job, who, dtypes=True)
    if job.model is None or job.model.family != "gpt":
        yield refused("model", job.model.family if job.model else "none", f"{who} tunes decoders", "name one: --model")
    if zero_stage(job) == 0 and p.cp > 1:
        yield refused("parallel.cp", p.cp, f"{who} splits sequences with FSDP 2", "use zero 2 or 3, or cp 1")
    if zero_stage(job) == 0 and p.tp > 1 and job.sizes["dp"] > 1:
        yield refused("parallel.zero", 0, f"{who} combines tp with shards alone", "use zero 2 or 3")
    if t.lr_schedule == "wsd" and t.lr_wsd_decay_style != "exponential":
        yield refused(
            "training.lr_wsd_decay_style", t.lr_wsd_decay_style, "only its default is written", "use exponential"
        )
    if t.master_weights and trained_by(job).dtype == "bf16":
        message = f"{who} keeps no fp32 copies of bf16 parameters"
        yield refused("training.master_weights", "true", message, "use master_weights false, or adapter.dtype fp32")
    adapter = t.adapter
    if adapter and adapter.rslora:
        yield refused(
            f"{ADAPTER}rslora", "true", f"{who} multiplies by alpha / dim", "use rslora false, with its alpha"
        )
    if adapter and adapter.modules_to_save:
        saved = ", ".join(adapter.modules_to_save)
        yield refused(f"{ADAPTER}modules_to_save", saved, f"{who} freezes all but adapters", "leave it out")
    if adapter and adapter.is_quantized and p.tp > 1:
        yield refused("parallel.tp", p.tp, "bitsandbytes' weights are not split over tp", "use tp 1, or base bf16")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "NeMo AutoModel", divisor=0)
    yield from trainer_notes(job, trained_by(job))
    nodes = job.cluster.nodes
    ranks = f"--nproc-per-node {job.cluster.gpus_per_node}" + (f" --nnodes {nodes}" if nodes > 1 else "")
    yield f"start it: automodel FILE {ranks}"


def _body(plan: Plan) -> str:
    job = plan.job
    return yaml_text(nested(written(job, (*ROWS, *(ADAPTER_ROWS if job.training.adapter else ())))))


def read_automodel(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a recipe. Raises InputError with every value that no setting says."""
    values = {name: words for name, words in read_yaml(text).items() if words not in (("none",), ("None",))}
    reader = KeyReader(values, "automodel")
    if not any(name.startswith((S, D, "model.")) for name in values):
        message = "a recipe of NeMo AutoModel has step_scheduler, model and distributed, and this text none"
        raise unreadable(message, "give its file as @FILE")
    if reader.value("packed_sequence.packed_sequence_size", "0") == "0":
        values.pop("packed_sequence.packed_sequence_size", None)
        if length := reader.value("dataset.seq_length", reader.value("dataset.seq_len")):
            values["packed_sequence.packed_sequence_size"] = (length,)
        reader.nearest("packed_sequence", "rows are planned full: without packing, shorter samples take less time")
    reader.read(ROWS)
    s = reader.settings
    if (model := reader.value("model.pretrained_model_name_or_path")) not in ("", MODEL):
        s["model"] = model
    if reader.value("model.attn_implementation") == "eager":
        s["model.attention"] = "unfused"
    if int(reader.number(PIPELINE, int, 1)) > 1:
        s["parallel.pp"] = int(reader.number(PIPELINE, int, 1))
    _read_optimizer(reader)
    if reader.value(f"{D}strategy", "fsdp2") in SHARDED:
        whole = s.get("parallel.pp", 1) == 1  # layers stay gathered over a pipeline's micro batches
        if s.get("parallel.ep", 1) != 1:
            whole = reader.is_on(EXPERTS)
        s["parallel.zero"] = 3 if reader.is_on(RESHARD, whole) else 2
        _read_replicas(reader, typed)
    s["training.dtype"] = "bf16"
    is_half = reader.value("model.torch_dtype", "auto") not in ("float32", "fp32", "torch.float32")
    if any(name.startswith(P) for name in values):
        is_half = _read_adapter(reader, is_half=is_half)
    set_trained(s, is_half=is_half)
    known = {row.key for row in (*ROWS, *ADAPTER_ROWS)} | {PIPELINE, EXPERTS, f"{D}dp_size", f"{P}use_triton"}
    apart = tuple(
        name for name in values if name.startswith(("benchmark.", "ci.", "checkpoint.", "validation", "rng."))
    )
    return reader.job("fsdp2-automodel", unread_keys(reader, {*known, *apart, f"{P}match_all_linear"}))


def _read_replicas(reader: KeyReader, typed: Overrides) -> None:
    """Set the ranks that share states, by the number of groups of them."""
    s, key = reader.settings, f"{D}dp_replicate_size"
    groups, sizes = (
        int(reader.number(key, int, 1)),
        [typed.get(f"cluster.{name}") for name in ("nodes", "gpus_per_node")],
    )
    if groups <= 1:
        return
    if not all(isinstance(size, int) for size in sizes):
        reader.nearest(key, f"{groups} groups of states, of a number of ranks that is not known", "add --gpus")
        return
    inner = groups * int(str(s.get("parallel.tp", 1))) * int(str(s.get("parallel.pp", 1)))
    s["parallel.zero_size"] = max(1, int(str(sizes[0])) * int(str(sizes[1])) // inner)


def _read_optimizer(reader: KeyReader) -> None:
    s, name = reader.settings, reader.value(f"{ADAM}_target_", "torch.optim.AdamW").rsplit(".", 1)[-1]
    if name not in ("Adam", "AdamW", "FusedAdam"):
        reader.wrong(f"{ADAM}_target_", f"{name!r} is not read", "use torch.optim.AdamW")
    for key, word in zip(("beta1", "beta2"), reader.flags.get(f"{ADAM}betas", ()), strict=False):
        try:
            s[f"training.{key}"] = float(word)
        except ValueError:
            reader.wrong(f"{ADAM}betas", f"{word!r} is not a number", "use two, such as [0.9, 0.999]")


def _read_adapter(reader: KeyReader, *, is_half: bool) -> bool:
    """Set the adapter; whether A and B have 16 bits. is_half: whether the weights below have."""
    s, in_4_bits = reader.settings, reader.is_on(f"{Q}load_in_4bit")
    reader.read(ADAPTER_ROWS)
    read_base(
        reader,
        in_4_bits=in_4_bits,
        in_8_bits=reader.is_on(f"{Q}load_in_8bit"),
        dora=reader.is_on(f"{P}use_dora"),
        nested=reader.is_on(f"{Q}bnb_4bit_use_double_quant", default=True),
        quant=f"{Q}bnb_4bit_quant_type",
    )
    if not is_half and not in_4_bits:
        s[f"{ADAPTER}base_precision"] = "fp32"
    names = [name.strip("*.") for name in reader.flags.get(f"{P}target_modules", ("*_proj",))]
    if reader.is_on(f"{P}match_all_linear"):
        names = ["all-linear", "lm_head"]
    s[f"{ADAPTER}targets"] = ["all-linear" if name == "_proj" else name for name in names]
    if others := [name for name in reader.flags.get(f"{P}exclude_modules", ()) if name.strip("*.") != "lm_head"]:
        reader.nearest(f"{P}exclude_modules", f"{', '.join(others)}: planned with adapters, too")
    if s[f"{ADAPTER}dropout"] and reader.value(f"{P}dropout_position", "post") == "post":
        reader.nearest(f"{P}dropout_position", "post: planned before A, of the same time and more memory")
    return reader.value(f"{P}lora_dtype", "bfloat16" if is_half or in_4_bits else "float32") != "float32"


LAUNCHER = ForeignLauncher(
    "automodel",
    "NeMo AutoModel 0.7",
    "yaml",
    _refusals,
    _notes,
    _body,
    read_automodel,
    script="-m nemo_automodel.recipes.llm.train_ft",
    given="--config {automodel}",
    runtime="fsdp2-automodel",
)
