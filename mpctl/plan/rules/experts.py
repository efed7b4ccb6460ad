"""Rules about mixtures of experts and latent attention.

The ranks of a job with experts are numbered a second time, etp x ep x edp x pp (axes.py,
`expert_order`): etp x ep x pp must divide the world, and a stage must consist of the same ranks in
both views. By hand, 16 ranks with tp 2, pp 2 and ep 4 in order tp-cp-ep-pp-dp: pp steps over 2
ranks in the dense view and over 4 in that of experts, and is refused.

No token is dropped, so that no rule asks for a capacity. Sources: arXiv 2504.14960 (both views);
megatron-core 0.19, parallel_state.py and transformer_config.py (the assertions).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from math import prod

from mpctl.core.axes import dense_order, expert_order, parse_order, sizes_text
from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import bytes_text, plural
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.layout.link_levels import topology_levels
from mpctl.plan.rules.check import MOST_OFFERED, Check, divides, refusal
from mpctl.plan.rules.layout import domain_text
from mpctl.plan.rules.sizes import kept_experts, needs_sequence_parallel, views_agree
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

VIEW = ("etp", "ep", "edp", "pp")
EXPERT_KEYS = (
    "experts_per_token",
    "expert_ffn",
    "shared_expert_ffn",
    "shared_expert_gate",
    "dense_layers",
    "moe_layer_every",
    "router_score",
    "router_renormalize",
    "router_bias",
    "router_groups",
    "router_groups_per_token",
    "router_scale",
)
LATENT_KEYS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Widths that latent attention needs, with those of DeepSeek-V3."""
EXCHANGES = 4  # of rows, each layer and micro batch: dispatch and combination, both ways


def view_rules(draft: LayoutDraft) -> Iterator[Check]:
    """etp x ep x pp divides the world, and the stages of both views are the same ranks."""
    job = draft.job
    if not job.has_experts:
        return
    sizes, world, rule = job.expert_sizes, job.world_size, "expert-world-size"
    inner = sizes["etp"] * sizes["ep"] * sizes["pp"]
    if inner == sizes["pp"] and world % inner:
        return  # world-size says it
    if world % inner == 0:
        yield Check(rule, "ok", "parallel.ep", f"{sizes_text(sizes, VIEW)} fills {world} ranks")
        yield from _pipelines(job)
        return
    chosen = sizes_text(sizes, ("etp", "ep", "pp"))
    message = f"{chosen} = {inner} does not divide {plural(world, 'rank')}"
    offers = []
    for axis in ("ep", "etp"):
        rest = inner // sizes[axis]
        legal = tuple(size for size in divisors(world) if world % (rest * size) == 0)
        if sizes[axis] > 1:
            offers.append(Offer(f"parallel.{axis}", legal, axis, near=sizes[axis]))
    more = "" if any(offer.values for offer in offers) else f"a pp that divides {world}"
    yield refusal(rule, "parallel.ep", message, *offers, more=more)


def _pipelines(job: JobSpec) -> Iterator[Check]:
    """The stages of both views, where each fills the world."""
    order, sizes, experts = job.parallel.order, job.sizes, job.expert_sizes
    try:
        axes = parse_order(dense_order(order), sizes)
    except ValueError:
        return  # axis-order says what is wrong
    if prod(sizes.values()) != job.world_size or views_agree(sizes, experts, order):
        return
    before = [tuple(takewhile(lambda axis: axis != "pp", names)) for names in (axes, expert_order(order))]
    texts = [
        f"{sizes_text(view, names) or '1 rank'} = {prod(view[axis] for axis in names)}"
        for view, names in zip((sizes, experts), before, strict=True)
    ]
    message = f"{order}: stages of dense layers are {texts[0]} ranks apart, those of experts "
    message += f"{texts[1]}"
    last = "-".join([*(axis for axis in order.split("-") if axis != "pp"), "pp"])
    legal = tuple(ep for ep in divisors(job.world_size) if views_agree(sizes, _with_ep(job, ep), order))
    yield refusal(
        "same-pipelines",
        "parallel.order",
        message,
        Offer("parallel.order", (last,), "order"),
        Offer("parallel.ep", legal, "ep", near=experts["ep"]),
    )


def _with_ep(job: JobSpec, ep: int) -> dict[str, int]:
    sizes = {**job.expert_sizes, "ep": ep, "edp": 1}
    return {**sizes, "edp": job.world_size // prod(sizes.values())}


def expert_size_rules(draft: LayoutDraft) -> Iterator[Check]:
    """ep divides the experts, etp their width and tp that of the shared experts; without experts
    both are 1. tp cuts the tokens too, so that none is routed twice."""
    job = draft.job
    p, model = job.parallel, job.model
    if model is None:
        return
    if model.experts is None:
        for axis in ("ep", "etp"):
            if (size := getattr(p, axis)) > 1:
                message = f"{size}, and the model has no experts"
                offer = Offer(f"parallel.{axis}", (1,), axis)
                yield refusal("ep-needs-experts", f"parallel.{axis}", message, offer, more="give model.experts")
        return
    yield divides("ep-divides-experts", "parallel.ep", model.experts, p.ep, "experts")
    noun = "columns of an expert"
    yield divides("etp-divides-experts", "parallel.etp", model.expert_width, p.etp, noun)
    if width := model.shared_expert_ffn:
        noun = "columns of the shared experts"
        yield divides("tp-divides-shared-experts", "parallel.tp", width, p.tp, noun)
    if needs_sequence_parallel(job) and not p.sequence_parallel and p.tensor_mode == "1d":
        message = f"false with tp {p.tp}: each of {p.tp} ranks would route the same tokens"
        yield refusal(
            "experts-split-tokens",
            "parallel.sequence_parallel",
            message,
            Offer("parallel.tp", (1,), "tp"),
            more="--sequence-parallel",
        )


def expert_mode_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Experts and latent attention run in tensor mode 1d alone."""
    job = draft.job
    mode, model = job.parallel.tensor_mode, job.model
    has_experts = job.has_experts
    if mode == "1d" or not (has_experts or (model is not None and model.is_mla)):
        return
    what = "experts are" if has_experts else "latent attention is"
    message = f"{mode} cuts samples and hidden states, and {what} not run so"
    offer = Offer("parallel.tensor_mode", ("1d",), "tensor_mode")
    if needs_sequence_parallel(job):
        split = (("parallel.sequence_parallel", True),)
        offer = offer._replace(also=split, suffix=" with --sequence-parallel")
    yield refusal("experts-in-1d", "parallel.tensor_mode", message, offer)


def router_rules(draft: LayoutDraft) -> Iterator[Check]:
    """A token's experts exist, also in the groups that it keeps; settings of experts that belong
    together."""
    model = draft.job.model
    if model is None:
        return
    if model.experts is None:
        yield from _keys_of_none(model)
        return
    yield from _choice(model, model.experts)
    if model.shared_expert_gate and not model.shared_expert_ffn:
        yield Check(
            "shared-expert-gate",
            "error",
            "model.shared_expert_gate",
            "true, and there are no shared experts to multiply",
            "give model.shared_expert_ffn, or use false",
        )
    if model.router_bias and model.router_score != "sigmoid":
        offer = Offer("model.router_score", ("sigmoid",), "router_score")
        message = "true, and biases are added to sigmoids, not to softmax"
        yield refusal("router-bias", "model.router_bias", message, offer, more="router_bias false")
    if not model.layers_with_experts:
        every = f" and moe_layer_every {model.moe_layer_every}" * (model.moe_layer_every > 1)
        message = f"dense_layers {model.dense_layers}{every} leave none of "
        message += f"{plural(model.layers, 'layer')} with experts"
        fewer = max(0, model.layers - 1 if model.moe_layer_every == 1 else 0)
        yield Check(
            "layers-with-experts",
            "error",
            "model.dense_layers",
            message,
            f"use at most {fewer}, moe_layer_every 1, or no experts",
        )


def _keys_of_none(model: ModelSpec) -> Iterator[Check]:
    for key in EXPERT_KEYS:
        if (value := getattr(model, key)) != ModelSpec.model_fields[key].default:
            text = str(value).lower() if isinstance(value, bool) else value
            yield Check(
                "expert-keys",
                "error",
                f"model.{key}",
                f"{text}, and there are no experts",
                "give model.experts, or leave it out",
            )


def _up_to(most: int) -> tuple[int, ...]:
    """The largest numbers up to a bound; a bound may be millions."""
    return tuple(range(max(1, most - MOST_OFFERED + 1), most + 1))


def _choice(model: ModelSpec, experts: int) -> Iterator[Check]:
    """How many experts a token chooses, and from which groups."""
    k, groups, kept = (model.experts_per_token, model.router_groups, model.router_groups_per_token)
    where = "model.experts_per_token"
    if k > experts:
        offer = Offer(where, _up_to(experts), "experts_per_token", near=k)
        yield refusal(
            "experts-per-token", where, f"{k} is above {plural(experts, 'expert')}", offer, more=f"model.experts {k}"
        )
    elif k == 1 and model.router_score == "softmax" and model.router_renormalize:
        yield Check(
            "router-weight-of-one",
            "warning",
            "model.router_renormalize",
            "true with experts_per_token 1: the only weight is 1, so that the loss does not train the router",
            "use false",
        )
    yield from _groups(model, experts)
    if experts % groups == 0 and kept <= groups and k <= experts < k * groups // kept:
        least = -(-k * groups // experts)
        message = f"{k} is above the {kept_experts(model)} experts of {plural(kept, 'kept group')}"
        yield refusal(
            "experts-in-groups",
            where,
            message,
            Offer(where, _up_to(kept_experts(model)), near=k),
            more=f"router_groups_per_token {least}",
        )


def _groups(model: ModelSpec, experts: int) -> Iterator[Check]:
    groups, kept, where = model.router_groups, model.router_groups_per_token, "model.router_groups"
    best = 2 if model.router_score == "sigmoid" and kept < groups else 1
    legal = tuple(n for n in divisors(experts) if experts // n >= best and n >= kept)
    offer = Offer(where, legal, "router_groups", near=groups)
    if experts % groups:
        message = f"{groups} does not divide {experts} experts"
        yield refusal("router-groups", where, message, offer)
    elif experts // groups < best:
        message = f"{groups} of {plural(experts, 'expert')}: sigmoids choose a group by its best 2"
        yield refusal("router-groups", where, message, offer)
    if kept > groups:
        at, rule = "model.router_groups_per_token", "router-groups-kept"
        offer = Offer(at, _up_to(groups), near=kept)
        yield refusal(rule, at, f"{kept} is above {plural(groups, 'group')}", offer)


def balance_rules(draft: LayoutDraft) -> Iterator[Check]:
    """An auxiliary loss of a micro batch's tokens changes with the layout, and so does that of the
    global batch in software that counts its micro batches one by one: mpctl counts those of the
    step before."""
    job = draft.job
    t, where = job.training, "training.moe_load_balancing"
    has_experts = job.model is not None and job.model.experts is not None
    if not has_experts or not t.moe_aux_loss_coeff:
        return
    over = {"micro_batch": "a micro batch"}
    if not draft.profile.experts.balances_by_step:
        over["global"] = "the samples of a step so far, in the order of micro batches"
    if t.moe_load_balancing in over:
        yield Check(
            "balance-follows-layout",
            "warning",
            where,
            f"{t.moe_load_balancing}: the loss balances {over[t.moe_load_balancing]}, so "
            "that it depends on micro_batch_size and dp",
            "use sequence, which no layout changes",
        )


def overlap_rules(draft: LayoutDraft) -> Iterator[Check]:
    """What Megatron asks of one micro batch's forward beside another's backward (combined_1f1b.py)."""
    job, where = draft.job, "training.moe_overlap"
    p, t, model = job.parallel, job.training, job.model
    if not t.moe_overlap:
        return
    rule, off = "moe-overlap", "moe_overlap false"
    if not job.has_experts or p.ep == 1:
        yield refusal(rule, where, f"true with ep {p.ep}: no rows are sent over ep", more=f"ep above 1, or {off}")
        return
    if p.pp > 1 and p.vpp == 1:
        message = f"true with pp {p.pp} and vpp 1: a stage needs several chunks, one forward and one backward"
        yield refusal(rule, where, message, more=f"vpp above 1, or {off}")
    dispatcher = t.moe_dispatcher or draft.profile.experts.dispatcher
    if dispatcher == "allgather":
        message = "true with moe_dispatcher allgather: rows are sent by an all-to-all, or once to each rank"
        offer = Offer("training.moe_dispatcher", ("alltoall", "deepep", "hybridep"), "moe_dispatcher")
        yield refusal(rule, where, message, offer, more=off)
    if t.recompute == "full":
        message = "true with recompute full: the backward would send its rows again"
        yield refusal(rule, where, message, Offer("training.recompute", ("selective", "none"), "recompute"), more=off)
    if model is not None and model.mtp_layers > 1:
        message = f"true with mtp_layers {model.mtp_layers}: at most one layer of multi-token prediction"
        yield refusal(rule, where, message, Offer("model.mtp_layers", (0, 1), "mtp_layers"), more=off)
    if t.chosen_dtype in ("fp64", "fp32", "tf32"):
        message = f"true with dtype {t.chosen_dtype}: parameters of 16 bits"
        yield refusal(rule, where, message, Offer("training.dtype", ("bf16", "fp16"), "dtype"), more=off)


def capacity_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Buffers of experts' rows have room for what is routed to them, and the kernels that fill them; a stash keeps no
    more than they hold."""
    t, rule, where = draft.job.training, "moe-capacity", "training.moe_capacity"
    capacity, stash = t.moe_capacity, t.moe_stash
    if t.moe_stash_host is not None and stash is None:
        more = "give training.moe_stash, or leave it out"
        yield refusal(rule, "training.moe_stash_host", f"{t.moe_stash_host:g}, and there is no stash", more=more)
    if capacity is None:
        if stash is not None:
            more = "give training.moe_capacity, or leave it out"
            yield refusal(rule, "training.moe_stash", f"{stash:g}, and buffers have no capacity", more=more)
        return
    dispatcher = t.moe_dispatcher or draft.profile.experts.dispatcher
    if draft.job.model is not None and draft.job.model.experts is None:
        yield refusal(rule, where, f"{capacity:g}, and there are no experts", more="leave it out")
    elif dispatcher != "hybridep":
        message = f"{capacity:g} with moe_dispatcher {dispatcher}: of those planned hybridep alone has fixed buffers"
        yield refusal(rule, where, message, Offer("training.moe_dispatcher", ("hybridep",), "moe_dispatcher"))
    for key, value in (("moe_load", t.moe_load), ("moe_stash", stash)):
        if value is not None and value > capacity:
            message = f"{capacity:g} is below {key} {value:g}: the step would run again without it"
            yield refusal(rule, where, message, more=f"use {value:g} or more")


def routing_not_launched(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the key, message and hint of each setting of experts' rows that mpctl's layers do not run."""
    t = job.training
    if t.moe_overlap:
        message = "true: one micro batch's rows beside another's are planned, not run by `mpctl launch`"
        yield "training.moe_overlap", message, "use false"
    if t.moe_capacity is not None:
        message = f"{t.moe_capacity:g}: buffers of a fixed size are planned, not run by `mpctl launch`"
        yield "training.moe_capacity", message, "leave it out: buffers grow with the rows"


def latent_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Latent attention has its widths, an even part of a head with positions, and no setting of
    heads with keys and values of their own; other attention has none of its widths."""
    model = draft.job.model
    if model is None:
        return
    if not model.is_mla:
        for key in ("q_lora_rank", *LATENT_KEYS):
            if (value := getattr(model, key)) is not None:
                yield Check(
                    "latent-widths",
                    "error",
                    f"model.{key}",
                    f"{value}, and attention_kind is {model.attention_kind}",
                    "use attention_kind mla, or leave it out",
                )
        return
    for key, usual in LATENT_KEYS.items():
        if getattr(model, key) is None:
            yield Check(
                "latent-widths", "error", f"model.{key}", "attention_kind mla needs it", f"DeepSeek-V3 has {usual}"
            )
    if (model.qk_rope_head_dim or 0) % 2:
        yield Check(
            "latent-rotary",
            "error",
            "model.qk_rope_head_dim",
            f"{model.qk_rope_head_dim} is odd, but rotary positions turn pairs of columns",
            f"use {(model.qk_rope_head_dim or 0) + 1}",
        )
    yield from _latent_form(model)


def _latent_form(model: ModelSpec) -> Iterator[Check]:
    form = {
        "position": ("rotary", "keys share columns with rotary positions"),
        "rotary_fraction": (1.0, "qk_rope_head_dim says how many columns turn"),
        "kv_heads": (model.heads, "each head has keys and values of the latent"),
        "qk_norm": (False, "its norms are those of the latents"),
    }
    for key, (wanted, why) in form.items():
        if (value := getattr(model, key)) != wanted:
            text, use = (str(v).lower() if isinstance(v, bool) else v for v in (value, wanted))
            yield Check(
                "latent-form", "error", f"model.{key}", f"{text}, and attention_kind is mla: {why}", f"use {use}"
            )
    if model.biased & {"qkv", "output"}:
        yield Check(
            "latent-form",
            "error",
            "model.bias",
            f"{model.bias}, and latent attention has no biases",
            "use false or mlp",
        )


def expert_domain_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Rows of tokens go between all ranks of etp x ep, four times a layer and micro batch; links
    outside an NVLink domain carry them slowest."""
    job, topology = draft.job, draft.topology
    if topology is None or not job.has_experts or job.parallel.ep * job.parallel.etp == 1:
        return
    domain, *_ = topology_levels(job.cluster, topology)
    shown, count = topology.straddling("etp_ep", domain.ranks)
    rule, where = "ep-within-nvlink-domain", "parallel.ep"
    if not count:
        inside = domain_text(domain, topology.gpus_per_node)
        yield Check(rule, "ok", where, f"every group of etp x ep stays in its {inside}")
        return
    group = shown[0]
    held = [
        sum(rank // domain.ranks == network for rank in group) for network in {rank // domain.ranks for rank in group}
    ]
    leaves = 1 - sum((ranks / len(group)) ** 2 for ranks in held)
    noun = "group of etp x ep leaves its" if count == 1 else "groups of etp x ep leave their"
    message = f"{count} {noun} {domain_text(domain, topology.gpus_per_node)}"
    legal = tuple(ep for ep in divisors(domain.ranks // job.parallel.etp or 1) if ep < job.parallel.ep)
    offer = Offer(where, legal, "ep", near=job.parallel.ep)
    check = refusal(rule, where, f"{message}: {_price(job, leaves)}", offer)
    yield check._replace(status="warning")


def _price(job: JobSpec, leaves: float) -> str:
    """Describe the traffic that leaves a domain. leaves: the share of a rank's rows."""
    model, p, t = job.model, job.parallel, job.training
    share = f"{leaves:.0%} of the rows"
    if model is None:
        return f"{share} of each exchange cross it"
    tokens = t.micro_batch_size * model.seq_length // (p.cp * (p.tp if p.sequence_parallel else 1))
    sent = p.etp * model.experts_per_token * tokens * model.hidden * t.value_bytes
    return (
        f"{share}, {bytes_text(leaves * sent)} of {bytes_text(sent)} a rank, cross it in each of "
        f"{EXCHANGES} exchanges a layer and micro batch"
    )
