"""A plan as a config file of nanotron, for its Llama models.

Spelling and limits: nanotron main of 2026-04, src/nanotron/config/. Ranks are numbered tp, cp, dp,
pp, tp fastest. ZeRO 0 and 1; sequence parallelism is `tp_mode: REDUCE_SCATTER`; recomputation of
whole layers; stages by its own estimate of cost; one chunk a rank. The vocabulary is padded to a
multiple of tp.

By hand, micro batch 1, dp 2 and a global batch of 128: batch_accumulation_per_replica 64.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Issue
from mpctl.interop.emitted import EmitTarget, Scalar, Tree, plan_notes, yaml_text
from mpctl.interop.limits import LauncherLimits, llama_refusals, refused
from mpctl.model.layout.topology import zero_stage
from mpctl.model.pipeline.filled import is_filled
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec

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
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
STYLES = {"linear": "linear", "cosine": "cosine"}


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
        hint = "name a model (--model NAME)"
        yield refused("model", "none", "a config of nanotron states a sequence length", hint)
    else:
        yield from llama_refusals(model, "nanotron")
        if model.rotary_scaling is not None:
            message = "nanotron's Llama has other scalings"
            yield refused("model.rotary_scaling", "llama3", message, "leave it out")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "nanotron", divisor=1, schedules=ENGINES)
    if job.parallel.pp > 1 and not is_filled(job):
        yield "approximated: nanotron cuts stages by its own cost of a block, not as the plan does"
    yield "before 2025 there is neither context_parallel_size nor optimizer_factory (PyPI's 0.4)"
    yield "not here: data_stages, tokenizer, checkpoints; start it: torchrun ... run_train.py"


def _body(plan: Plan) -> str:
    job = plan.job
    seed, model = job.training.seed, job.model
    assert model is not None  # refused
    return yaml_text(
        {
            "general": {"project": "mpctl", "run": "plan", "seed": seed},
            "parallelism": _parallelism(job),
            "tokens": {
                "micro_batch_size": job.training.micro_batch_size,
                "batch_accumulation_per_replica": job.num_microbatches,
                "sequence_length": model.seq_length,
                "train_steps": job.training.steps,
            },
            "model": {
                "dtype": DTYPES[job.training.dtype],
                "make_vocab_size_divisible_by": 1,
                "init_method": {"std": job.training.init_std},
                "model_config": _model(model),
            },
            "optimizer": _optimizer(job),
        }
    )


def _parallelism(job: JobSpec) -> Tree:
    p = job.parallel
    is_split = p.sequence_parallel and p.tp > 1
    return {
        "dp": job.sizes["dp"],
        "pp": p.pp,
        "tp": p.tp,
        "context_parallel_size": p.cp,
        "expert_parallel_size": 1,
        "pp_engine": ENGINES.get(p.schedule, "1f1b"),
        "tp_mode": "REDUCE_SCATTER" if is_split else "ALL_REDUCE",
        "tp_linear_async_communication": is_split,
        "recompute_layer": job.training.recompute == "full",
    }


def _model(model: ModelSpec) -> Tree:
    return {
        "is_llama_config": True,
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.max_positions,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "tie_word_embeddings": model.tied_embeddings,
        "vocab_size": model.vocab,
    }


def _optimizer(job: JobSpec) -> Tree:
    t = job.training
    factory: Tree = {
        "name": "adamW",
        "adam_beta1": t.beta1,
        "adam_beta2": t.beta2,
        "adam_eps": t.epsilon,
        "torch_adam_is_fused": True,
    }
    return {
        "optimizer_factory": factory,
        "zero_stage": zero_stage(job),
        "weight_decay": t.weight_decay,
        "clip_grad": t.clip_norm,
        "accumulate_grad_in_fp32": t.reduced_dtype == "fp32",
        "learning_rate_scheduler": _rates(t),
    }


def _rates(training: TrainingSpec) -> dict[str, Scalar]:
    last = training.lr_decay_steps or training.steps
    return {
        "learning_rate": training.learning_rate,
        "lr_warmup_steps": training.warmup_steps,
        "lr_warmup_style": "linear",
        "lr_decay_style": STYLES[training.lr_schedule],
        "lr_decay_steps": max(1, last - training.warmup_steps),
        "min_decay_lr": training.lowest_rate,
    }


TARGET = EmitTarget("nanotron", "nanotron (main of 2026-04)", "yaml", _refusals, _notes, _body)
