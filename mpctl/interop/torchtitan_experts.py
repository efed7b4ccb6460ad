"""Experts and latent attention of a plan in torchtitan's models deepseek_v3 and qwen3.

Spelling and limits: torchtitan 0.3.0, models/common/moe.py, models/deepseek_v3 and models/qwen3,
distributed/parallel_dims.py. Experts are dealt to the ranks of dp_shard x cp x tp, ep fastest, and
none is cut. The router takes softmax or sigmoids before the choice, and groups by the best two of
each. Load is balanced by biases alone, each step's change centred over the experts; there is no
auxiliary loss. A config's shape is that of its flavour: experts, widths and ranks are not set here.

By hand, tp 2, cp 1 and dp 8 sharded: ep may be 1, 2, 4, 8 or 16.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Issue
from mpctl.interop.limits import FORM, dp_degrees, refused
from mpctl.spec.job import JobSpec
from mpctl.spec.model import VARIANTS, ModelSpec, is_set
from mpctl.spec.yarn import find_yarn

TAKEN = ("experts", "attention_kind", "qk_norm")
"""Entries of VARIANTS that torchtitan's models with experts support."""


def is_of_experts(model: ModelSpec) -> bool:
    """Whether a model is one of deepseek_v3's or qwen3's kind rather than of Llama's form."""
    return model.experts is not None or model.is_mla


def expert_refusals(job: JobSpec, model: ModelSpec) -> Iterator[Issue]:
    """Issues of a model with experts or latent attention that torchtitan cannot have."""
    for key, value in FORM.items():
        if (found := getattr(model, key)) != value:
            message = "torchtitan's models with experts have others"
            yield refused(f"model.{key}", found, message, f"use {key} {value}, or --emit torch")
    if model.bias:
        message = "torchtitan's models with experts have no biases here"
        yield refused("model.bias", model.bias, message, "use bias false, or --emit torch")
    yarn = find_yarn(model)
    has_yarn = yarn is not None and yarn.attention_factor == 1
    of_yarn = ("yarn_scaling", "attention_scale") if has_yarn else ()
    for key in VARIANTS:
        if key not in (*TAKEN, *of_yarn) and is_set(model, key):
            message = "torchtitan's models with experts have no such setting here"
            yield refused(f"model.{key}", getattr(model, key), message, "leave it out")
    if model.experts is not None:
        yield from _router_refusals(job, model)


def _router_refusals(job: JobSpec, model: ModelSpec) -> Iterator[Issue]:
    t, p = job.training, job.parallel
    if t.moe_load_balancing != "none" and t.moe_aux_loss_coeff:
        message = "torchtitan has no auxiliary loss"
        yield refused("training.moe_load_balancing", t.moe_load_balancing, message, "use moe_load_balancing none")
    if t.moe_z_loss_coeff:
        yield refused("training.moe_z_loss_coeff", t.moe_z_loss_coeff, "torchtitan has no z-loss", "use 0")
    if model.shared_expert_gate:
        yield refused("model.shared_expert_gate", "true", "torchtitan's shared experts here have no gate", "use false")
    if model.router_groups_per_token < model.router_groups and model.router_score == "softmax":
        message = "torchtitan scores a group by its best two, softmax here by its best one"
        yield refused("model.router_groups", model.router_groups, message, "use router_groups 1")
    sizes = job.sizes
    ranks = sizes["cp"] * sizes["tp"] * dp_degrees(job)[1]
    if ranks % p.ep:
        message = f"torchtitan deals experts to the ranks that shard, which are {ranks}"
        yield refused("parallel.ep", p.ep, message, "use zero 3, or an ep that divides them")


def shape_text(model: ModelSpec) -> str:
    """Describe the experts and latents that a config for lay_out needs; empty for a dense model without latents."""
    words = []
    if model.experts is not None:
        every = f", in the last layer of every {model.moe_layer_every}"
        words.append(
            f"{model.experts} experts of width {model.expert_width}, {model.experts_per_token} a "
            f"token{every * (model.moe_layer_every > 1)}, {model.dense_layers} dense layers, "
            f"shared experts of width {model.shared_expert_ffn}"
        )
    if model.is_mla:
        words.append(
            f"latents of {model.q_lora_rank or 0} and {model.kv_lora_rank}, heads of "
            f"{model.qk_nope_head_dim} + {model.qk_rope_head_dim} and {model.v_head_dim}"
        )
    return "; ".join(words)


def yarn_lines(model: ModelSpec) -> Iterator[str]:
    """Lines of the same loop that set YaRN of latent attention, after those of plain positions;
    the square of its magnitude is in the scale of the scores."""
    yarn, scaling = find_yarn(model), model.yarn_scaling
    if yarn is None or scaling is None:
        return
    yield f'        rope.scaling, rope.rope_factor = "yarn", {scaling.factor}'
    yield f"        rope.beta_fast, rope.beta_slow = {scaling.beta_fast}, {scaling.beta_slow}"
    yield f"        rope.original_seq_len = {int(scaling.original_max_position)}"
    yield f"        rope.truncate = {scaling.truncate}"
    yield f"        layer.attention.mscale = {yarn.mscale_all_dim}"


def router_lines(job: JobSpec, model: ModelSpec) -> Iterator[str]:
    """Lines of the loop over config.model_spec.model.layers that set each router."""
    if model.experts is None:
        return
    rate = job.training.moe_bias_update_rate if model.router_bias else None
    limits = model.router_groups_per_token < model.router_groups
    groups = (model.router_groups, model.router_groups_per_token) if limits else (None, None)
    yield "        if layer.moe is not None:"
    yield f"            layer.moe.load_balance_coeff = {rate or None}"
    yield "            router = layer.moe.router"
    yield f'            router.score_func = "{model.router_score}"'
    yield f"            router.route_norm = {model.router_renormalize}"
    yield f"            router.route_scale = {model.router_scale}"
    yield f"            router.num_expert_groups = {groups[0]}"
    yield f"            router.num_limited_groups = {groups[1]}"
