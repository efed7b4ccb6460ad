"""A plan as a config function of torchtitan, which edits a Trainer.Config.

Spelling and limits: torchtitan 0.3.0, config/configs.py, distributed/parallel_dims.py and
pipeline_parallel.py. Ranks are numbered tp, cp, dp_shard, dp_replicate, pp, tp fastest; states are
sharded over dp_shard x cp. FSDP that never gathers again is ZeRO 2, always ZeRO 3; in a pipeline
gradients are reduced once a step, and parameters stay whole by default, which is ZeRO 1's traffic.

The functions of models/llama3/config_registry.py bring RoPE scaling of factor 8 and an optimizer,
that of 405B products in fp8 and asynchronous tensor parallelism: the plan's stand in their place.

Models with experts or latent attention: torchtitan_experts.py.

Formulas of the optimizer: components/optimizer/. The scheduler warms up, holds the peak and decays
up to total_steps; the rate of every step is that of train/runtime/optimizer.py. With wsd over 100 steps
and a decay of 20: total_steps 100, decay_ratio 0.2.

Keys and flavours: torchtitan_keys.py.

By hand, 80 layers in 4 stages of 5 chunks: pipeline_parallel_layers_per_stage 80 / 20 = 4, with no
layers less on the first and last stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mpctl.core.errors import Issue
from mpctl.interop import torchtitan_experts as mixtures
from mpctl.interop.config_text import Value, python_call, python_value
from mpctl.interop.emitted import ForeignLauncher, plan_notes
from mpctl.interop.from_torchtitan import LOG, read_torchtitan
from mpctl.interop.limits import LauncherLimits, llama_refusals, refused
from mpctl.interop.mapping import written
from mpctl.interop.torchtitan_keys import (
    ADAM,
    DECAY_TYPES,
    LOSS_CHUNKS,
    OPTIMIZER,
    PARALLELISM,
    RATE,
    RATES,
    SCHEDULES,
    TRAINING,
    P,
    find_flavor,
)
from mpctl.model.layout.topology import zero_stage
from mpctl.model.pipeline.placement import StagePlacement
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.check import listed
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

LIMITS = LauncherLimits(
    "torchtitan",
    cp_comm=("all_gather",),
    v_schedules=("zbv", "dualpipev"),
    zero=(0, 2, 3),
    zero_in_pipeline=(0, 1, 2, 3),
    dtypes=("fp32", "bf16"),
    dropout=False,
    ep=True,
    zero_size="dp",
    losses=("unfused", "linear"),
    loss_chunks=True,
)
MAIN = (
    "    import sys",
    "",
    "    from torchtitan.train import main",
    "",
    '    sys.argv += ["--module", "__main__", "--config", "mpctl_plan"]',
    "    main()",
)
"""Starts torchtitan's own command with the plan, where the text is run as a script."""
LACKING = ('    raise SystemExit("lay_out needs a config of this model: call it in a function of yours")',)
RECOMPUTE = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def _refusals(plan: Plan) -> Iterator[Issue]:
    job = plan.job
    yield from LIMITS.refusals(plan)
    if job.sizes["cp"] > 1 and zero_stage(job) == 0:
        yield refused("parallel.zero", 0, "torchtitan shards over cp wherever it is above 1", "use zero 2 or 3")
    if job.training.reduced_dtype != "fp32":
        message = "torchtitan reduces gradients in fp32"
        yield refused("training.gradient_dtype", job.training.reduced_dtype, message, "use fp32")
    t, end = job.training, job.training.lr_decay_steps
    if t.lr_schedule == "wsd" and t.lr_wsd_decay_style not in DECAY_TYPES:
        message = f"torchtitan decays {listed([*DECAY_TYPES])}"
        style = t.lr_wsd_decay_style
        yield refused("training.lr_wsd_decay_style", style, message, "use minus_sqrt")
    if end is not None and end < t.steps:
        message = f"torchtitan has no rate for the steps from there to {t.steps}"
        yield refused("training.lr_decay_steps", end, message, f"use {t.steps} or more, or fewer steps")
    chunks = 1 if t.cross_entropy == "unfused" else t.cross_entropy_chunks or LOSS_CHUNKS
    if job.model is not None and (tokens := t.micro_batch_size * job.model.seq_length // job.parallel.cp) % chunks:
        message = f"torchtitan cuts the {tokens} tokens of a rank in {chunks} equal chunks for their loss"
        hint = f"use a multiple of {chunks * job.parallel.cp}, or cross_entropy unfused"
        yield refused("model.seq_length", job.model.seq_length, message, hint)
    if (model := job.model) is not None and mixtures.is_of_experts(model):
        yield from mixtures.expert_refusals(job, model)
    elif model is not None:
        yield from llama_refusals(model, "torchtitan")


def _notes(plan: Plan) -> Iterator[str]:
    job = plan.job
    yield from plan_notes(plan, "torchtitan", divisor=0, schedules=SCHEDULES)
    if job.parallel.pp > 1 and zero_stage(job):
        yield "in a pipeline gradients are reduced once, after all micro batches of a step"
    if job.training.recompute == "selective":
        yield "approximated: SelectiveAC saves products and collectives, not all but attention"
    if not _leaves_norms(plan):
        yield "approximated: norms decay too, as the first stage has none to name a group of"
    yield "not here: data, tokenizer, checkpoints, logging; initial weights are torchtitan's"
    yield "attention ends where a document ends, in the plan where the sequence does"
    if (model := job.model) is None:
        yield "no model is named: lay_out edits the config of any model"
    elif find_flavor(model) is None:
        more = f"; {text}" if (text := mixtures.shape_text(model)) else ""
        yield (
            f"no config of this model in torchtitan 0.3: give lay_out one of {model.layers} "
            f"layers, hidden {model.hidden}, ffn {model.ffn}, {model.heads} heads, "
            f"{model.kv_heads} kv heads, vocabulary {model.vocab} and norm epsilon "
            f"{model.norm_epsilon:g}, without converters to fewer bits{more}"
        )
    if model is not None and model.router_bias:
        yield "approximated: torchtitan centres each change of the biases over the experts"
    yield "main since 2026-08-20 counts batches in tokens: num_tokens_per_microbatch_per_dp_rank"
    if job.model is not None and find_flavor(job.model) is not None:
        yield "start it: torchrun ... FILE --hf_assets_path FOLDER; FILE is this text"


def _body(plan: Plan) -> str:
    job = plan.job
    imports, ready = _config_lines(job.model)
    return "\n".join(
        [
            "from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer",
            "from torchtitan.components.optimizer import ParamGroupConfig",
            "from torchtitan.config import ParallelismConfig",
            "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
            *imports,
            "",
            "",
            "def lay_out(config):",
            f"    config.parallelism = {python_call('ParallelismConfig', _parallelism(plan), '    ')}",
            f"    config.activation_checkpoint = {RECOMPUTE[job.training.recompute]}",
            "    config.compile.enable_async_tensor_parallel = False",
            *_loss_lines(job),
            *(f"    config.{key} = {python_value(value)}" for key, value in written(job, TRAINING)),
            *_optimizer_lines(plan),
            *(_layer_lines(job, job.model) if job.model else []),
            "    return config",
            *ready,
            "",
            "",
            'if __name__ == "__main__":',
            *(MAIN if ready else LACKING),
        ]
    )


def _config_lines(model: ModelSpec | None) -> tuple[list[str], list[str]]:
    """The import of a model's config function, and the function that lays the plan over it. That of
    405B converts products to fp8: it begins with 70B's."""
    if (found := find_flavor(model)) is None:
        return [], []
    folder, flavor = found
    is_405b = flavor == "405b"
    function = f"{folder}_{'70b' if is_405b else flavor}"
    registry = ["from torchtitan.models.llama3 import model_registry"] if is_405b else []
    changes = [
        '    config.model_spec = model_registry("405B")',
        '    config.hf_assets_path = "./assets/hf/Llama-3.1-405B"',
    ]
    return (
        [*registry, f"from torchtitan.models.{folder}.config_registry import {function}"],
        [
            "",
            "",
            "def mpctl_plan():",
            f"    config = {function}()",
            *(changes if is_405b else []),
            "    return lay_out(config)",
        ],
    )


def _loss_lines(job: JobSpec) -> Iterator[str]:
    """The job's own way to compute its loss; torchtitan's configs have ChunkedLossWrapper over the loss."""
    if job.training.cross_entropy == "unfused":
        yield "    config.loss = config.loss.loss_fn"
    elif chunks := job.training.cross_entropy_chunks or (job.training.cross_entropy and LOSS_CHUNKS):
        yield f"    config.loss.num_chunks = {chunks}"


def _layer_lines(job: JobSpec, model: ModelSpec) -> Iterator[str]:
    """Positions and routers of each layer's config."""
    scaling = model.rotary_scaling
    yield "    for layer in config.model_spec.model.layers:"
    yield "        rope = layer.attention.rope"
    yield f"        rope.theta, rope.max_seq_len = {model.rotary_base}, {model.seq_length}"
    yield f'        rope.scaling = "{"llama" if scaling else "none"}"'
    if scaling is not None:
        yield f"        rope.scaling_factor = {scaling.factor}"
        yield f"        rope.low_freq_factor = {scaling.low_freq_factor}"
        yield f"        rope.high_freq_factor = {scaling.high_freq_factor}"
        original = int(scaling.original_max_position)
        yield f"        rope.original_max_position_embeddings = {original}"
    yield from mixtures.yarn_lines(model)
    yield from mixtures.router_lines(job, model)


def _parallelism(plan: Plan) -> dict[str, Value]:
    return {**_named(written(plan.job, PARALLELISM), P), **(_stage_layers(plan) if plan.job.parallel.pp > 1 else {})}


def _named(values: Iterable[tuple[str, Value]], table: str) -> dict[str, Value]:
    """Keys without the name of their table."""
    return {key.removeprefix(table): value for key, value in values}


def _stage_layers(plan: Plan) -> dict[str, Value]:
    """Equal stages by their number of layers, others by the names of their modules."""
    p, stages = plan.job.parallel, plan.stages
    if stages is None:
        return {}
    placement = StagePlacement.of(p)
    places = map(placement.place, range(placement.stages * placement.chunks))
    parts = [stages[place.stage][place.chunk] for place in places]
    is_even = p.stage_balance == "even" and not (p.first_stage_layers or p.last_stage_layers or p.pipeline_layout)
    ends = int(p.embedding_is_layer), int(p.loss_is_layer)
    if is_even:
        return {
            "pipeline_parallel_layers_per_stage": (parts[-1][1] + sum(ends)) // len(parts),
            "pipeline_parallel_first_stage_less_layers": ends[0],
            "pipeline_parallel_last_stage_less_layers": ends[1],
        }
    names = [[f"layers.{n}" for n in range(*span)] for span in parts]
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "lm_head"]
    return {"module_fqns_per_model_part": names}


NORMS_AND_BIASES, ALL = r"(norm\.weight|bias)$", ".*"


def _leaves_norms(plan: Plan) -> bool:
    """Whether norms have a separate group. Each group needs a parameter on each stage, and a first
    stage without layers has the word table alone."""
    start, stop = plan.stages[0][0] if plan.stages else (0, 1)
    return plan.job.training.weight_decay == 0 or stop > start


def _optimizer_lines(plan: Plan) -> Iterator[str]:
    """The body of a function that sets optimizer and scheduler of `config`."""
    job, t = plan.job, plan.job.training
    rates = ", ".join(f'"{key}": {python_value(value)}' for key, value in _named(written(job, OPTIMIZER), ADAM).items())
    groups = {NORMS_AND_BIASES: 0.0} if t.weight_decay and _leaves_norms(plan) else {}
    yield f"    adamw = {{{rates}}}"
    yield "    config.optimizer = OptimizersContainer.Config(param_groups=["
    for pattern, decay in {**groups, ALL: t.weight_decay}.items():
        yield f'        ParamGroupConfig(pattern=r"{pattern}", optimizer_name="AdamW",'
        yield f'                         optimizer_kwargs={{**adamw, "weight_decay": {decay}}}),'
    yield "    ])"
    rate = python_call("LRSchedulersContainer.Config", _named(written(job, RATES), RATE), "    ")
    yield f"    config.lr_scheduler = {rate}"


LAUNCHER = ForeignLauncher(
    "torchtitan", "torchtitan 0.3", "python", _refusals, _notes, _body, read_torchtitan, LOG, "{torchtitan}"
)
