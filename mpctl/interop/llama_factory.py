"""LLaMA-Factory's YAML: a plan as one, and one as a job.

Spelling, meanings and limits: llamafactory 0.9.5, hparams/, model/ and its examples; the rest as in
trainer_keys.py and peft_keys.py. ZeRO is DeepSpeed's, its configuration a table of the same file. The
model is read in the type that it trains in, bf16 or fp16; what is trained is fp32, unless `pure_bf16`.
Rows are packed with boundaries by `neat_packing`. Recomputation is on unless
`disable_gradient_checkpointing`.

By hand, alpha is 2 x rank where it is absent:

>>> read = read_llama_factory("{stage: sft, finetuning_type: lora, lora_rank: 8, cutoff_len: 2048, bf16: true}")
>>> read.settings["training.adapter.rank"], read.settings.get("training.adapter.alpha")
(8, None)
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Issue
from mpctl.interop.config_text import nested, read_yaml, unreadable, yaml_text
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.limits import LauncherLimits, refused
from mpctl.interop.mapping import NO_SETTINGS, ForeignKey, KeyReader, ReadJob, written
from mpctl.interop.peft_keys import (
    BASES,
    KINDS,
    adapter_rows,
    is_nested,
    peft_refusals,
    read_base,
    read_names,
    saved_of,
    stored_as,
    targets_of,
)
from mpctl.interop.trainer_keys import (
    DATASET,
    MODEL,
    OPTIMIZERS,
    Trained,
    attention_word,
    deepspeed_table,
    hub_id,
    leave_to_data,
    read_deepspeed,
    read_global_batch,
    read_liger,
    read_trainer,
    set_trained,
    sharded_by_deepspeed,
    trainer_notes,
    trainer_refusals,
    trainer_rows,
    unread_keys,
)
from mpctl.model.layout.topology import zero_stage
from mpctl.plan.estimate.loss import loss_way
from mpctl.plan.planning.plan import Overrides, Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import job_profile

LIMITS = LauncherLimits(
    "LLaMA-Factory",
    pp=False,
    tp=False,
    cp=False,
    sequence_parallel=False,
    dtypes=("bf16", "fp16"),
    recompute=("none", "full"),
    dropout=False,
    adapters=KINDS,
    bases=BASES,
    optimizers=tuple(OPTIMIZERS),
    host=("offload_optimizer", "offload_parameters"),
    bf16_states=True,
    losses=("unfused", "linear"),
)
TEMPLATE = "TEMPLATE"


def trained_by(job: JobSpec) -> Trained:
    """Data type and fp32 copies of the parameters that LLaMA-Factory trains (module)."""
    t = job.training
    if zero_stage(job) > 0:
        return sharded_by_deepspeed(job)
    is_low = t.adapter.dtype == "bf16" if t.adapter else t.master_weights is False
    return Trained("bf16" if is_low and t.dtype == "bf16" else "fp32")


def _is_pure(job: JobSpec) -> bool | None:
    return True if trained_by(job) == Trained("bf16") else None


def _liger(job: JobSpec) -> bool | None:
    """Liger's head and loss together: what TRL's profile plans where the job says nothing."""
    return True if loss_way(job.training, job_profile(job.training)) == "linear" else None


def _bits(job: JobSpec) -> int | None:
    return {"nf4": 4, "int8": 8}.get(stored_as(job) or "")


ADAPTER_ROWS = (
    *adapter_rows(rank="lora_rank", dropout="lora_dropout", dora="use_dora", rslora="use_rslora", default={"rank": 8}),
    ForeignKey("lora_target", value=lambda job: ",".join(targets_of(job) or ["all"])),
    ForeignKey("additional_target", value=lambda job: ",".join(saved_of(job) or []) or None),
    ForeignKey("quantization_bit", value=_bits),
    ForeignKey("quantization_type", value=lambda job: "nf4" if stored_as(job) == "nf4" else None),
    ForeignKey("double_quantization", "training.adapter.double_quantization", bool, value=is_nested),
)
ROWS = (
    ForeignKey("model_name_or_path", value=hub_id),
    ForeignKey("stage", value="sft"),
    ForeignKey("do_train", value=True),
    ForeignKey("finetuning_type", value=lambda job: "lora" if job.training.adapter else "full"),
    ForeignKey("dataset", value=DATASET),
    ForeignKey("template", value=TEMPLATE),
    ForeignKey("output_dir", value="output"),
    ForeignKey("flash_attn", value=lambda job: attention_word(job, "fa2", "disabled")),
    *trainer_rows(
        length="cutoff_len",
        batch="per_device_train_batch_size",
        optimizer="optim",
        schedule="lr_scheduler_type",
        rate=5e-5,
        word=lambda job: OPTIMIZERS[job.training.optimizer],
    ),
    ForeignKey("pure_bf16", value=_is_pure),
    ForeignKey("packing", value=True),
    ForeignKey("neat_packing", value=True),
    ForeignKey("disable_gradient_checkpointing", "training.recompute", bool, False, {"none": True, "full": False}),
    ForeignKey("enable_liger_kernel", value=_liger),
    ForeignKey("deepspeed", value=lambda job: deepspeed_table(job) if zero_stage(job) else None),
)
DEFAULTS = {"cutoff_len": "2048", "per_device_train_batch_size": "8", "finetuning_type": "lora"}


def _refusals(plan: Plan) -> Iterator[Issue]:
    job, t, stage = plan.job, plan.job.training, zero_stage(plan.job)
    yield from LIMITS.refusals(plan)
    yield from trainer_refusals(job, "LLaMA-Factory", trained_by(job))
    yield from peft_refusals(job, "LLaMA-Factory", dtypes=False)
    for key, least in (("offload_optimizer", 1), ("offload_parameters", 3)):
        if getattr(t, key) and stage < least:
            message = f"DeepSpeed moves it with ZeRO {least} and above"
            yield refused(f"training.{key}", "true", message, f"use zero {max(least, 2)}, or leave it out")
    if t.adapter and t.adapter.stored_as == "int8" and stage == 3:
        message = "LLaMA-Factory shards weights in 4 bits alone"
        yield refused("training.adapter.base_precision", "int8", message, "use nf4, or zero 0 to 2")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "LLaMA-Factory", divisor=0)
    yield from trainer_notes(job, trained_by(job))
    yield f"fill in {TEMPLATE} too: the model's chat format, such as llama3 or qwen"
    nodes = job.cluster.nodes
    ranks = f' NNODES={nodes} NODE_RANK="$NODE_RANK" MASTER_ADDR="$MASTER_ADDR"' if nodes > 1 else ""
    yield f"start it: FORCE_TORCHRUN=1 NPROC_PER_NODE={job.cluster.gpus_per_node}{ranks} llamafactory-cli train FILE"


def _body(plan: Plan) -> str:
    job = plan.job
    rows = (*ROWS[:4], *(ADAPTER_ROWS if job.training.adapter else ()), *ROWS[4:])
    return yaml_text(nested(written(job, rows)))


def read_llama_factory(text: str, typed: Overrides = NO_SETTINGS) -> ReadJob:
    """The job of a config file. Raises InputError with every value that no setting says."""
    reader = KeyReader(read_yaml(text), "llama-factory")
    if not {"stage", "finetuning_type"} & {*reader.flags}:
        message = "a config of LLaMA-Factory has stage and finetuning_type, and this text neither"
        raise unreadable(message, "give its file as @FILE")
    for name, words in DEFAULTS.items():
        reader.flags.setdefault(name, (words,))
    if reader.is_on("pure_bf16"):
        reader.flags["bf16"] = ("true",)
    s, kind = reader.settings, reader.value("finetuning_type")
    if (stage := reader.value("stage", "sft")) not in ("sft", "pt"):
        reader.wrong("stage", f"{stage}: supervised fine-tuning is planned alone", "use sft or pt")
    if kind not in ("lora", "full"):
        reader.wrong("finetuning_type", f"{kind!r} is not planned", "use lora or full")
    leave_to_data(reader)
    reader.read(ROWS)
    if (model := reader.value("model_name_or_path")) not in ("", MODEL):
        s["model"] = model
    if reader.value("flash_attn", "auto") == "disabled":
        s["model.attention"] = "unfused"
    read_trainer(reader, optimizer="optim", schedule="lr_scheduler_type")
    if not reader.is_on("use_unsloth"):
        s["training.cross_entropy"] = "unfused"  # transformers' own
    read_liger(reader, "enable_liger_kernel")
    is_deepspeed = read_deepspeed(reader)
    if kind == "lora":
        _read_adapter(reader)
    set_trained(s, is_half=reader.is_on("pure_bf16"), has_masters=is_deepspeed)
    if not (reader.is_on("packing") or reader.is_on("neat_packing")):
        reader.nearest("packing", "rows are planned full: without packing, shorter samples take less time")
    read_global_batch(reader, typed)
    known = {row.key for row in (*ROWS, *ADAPTER_ROWS)} | {"quantization_method"}
    known |= {name for name in reader.flags if name.startswith("deepspeed.")}
    runtime = "unsloth" if reader.is_on("use_unsloth") else "deepspeed" if is_deepspeed else "trl"
    return reader.job(runtime, unread_keys(reader, {*known, "use_unsloth"}))


def _read_adapter(reader: KeyReader) -> None:
    reader.read(ADAPTER_ROWS)
    bits = int(reader.number("quantization_bit", int, 16))
    if bits not in (4, 8, 16):
        reader.wrong("quantization_bit", f"{bits} is not planned", "use 4 or 8")
    read_base(
        reader,
        in_4_bits=bits == 4,
        in_8_bits=bits == 8,
        dora=reader.is_on("use_dora"),
        nested=reader.is_on("double_quantization", default=True),
        quant="quantization_type",
    )
    read_names(reader, "lora_target", "targets", every=("all",))
    read_names(reader, "additional_target", "modules_to_save")


LAUNCHER = ForeignLauncher(
    "llama-factory",
    "LLaMA-Factory 0.9.5",
    "yaml",
    _refusals,
    _notes,
    _body,
    read_llama_factory,
    script="-m llamafactory.launcher",
)
