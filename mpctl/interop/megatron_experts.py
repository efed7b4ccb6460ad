"""Experts and latent attention in the words of Megatron-LM, written and read.

Names, defaults and meanings: megatron-core 0.19.2, megatron/training/arguments.py,
core/transformer/transformer_config.py and core/transformer/moe/. Three defaults are not mpctl's:
experts are cut as tp cuts the dense layers (`--expert-tensor-parallel-size` is tp, a job's etp is
1), the auxiliary loss is that of a micro batch with factor 0, and an integer `--moe-layer-freq N`
gives experts to the first layer of every N, where a job's moe_layer_every means the last one: a
list says either, and is what is written. A group's score there is the sum of its best
k / groups_per_token experts (`group_limited_topk`); a job's is its best expert under softmax, the
best two under sigmoid. Softmax comes after the choice by default, which is what renormalized
weights are. Norms of the latents are `--qk-layernorm`; positions of latent attention are yarn of
factor 1 by default, which is plain rotary; another factor is YaRN's (yarn.py).

>>> layer_pattern([False, True, True, True])
'([0]*1+[1]*3)'
>>> layer_pattern([False, True, False, True])
'([0]*1+[1]*1)*2'
>>> read_pattern("[0]*1+([1]*2+[0])*2")
[False, True, True, False, True, True, False]
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from mpctl.core.errors import Issue
from mpctl.interop.config_text import Value
from mpctl.interop.limits import refused
from mpctl.interop.mapping import ForeignKey, KeyReader, written
from mpctl.interop.megatron_flags import SOFTWARE
from mpctl.interop.megatron_others import is_neutral
from mpctl.plan.rules.check import Check
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import get_profile
from mpctl.spec.yarn import USUAL, YarnScales, find_yarn, is_usual

RUNTIME, GRAPHS = "megatron-core", "megatron-core-graphs"
CAPTURE = ("--cuda-graph-impl", "--cuda-graph-scope")
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}
BALANCING = {"sequence": "seq_aux_loss", "global": "global_aux_loss", "micro_batch": "aux_loss", "none": "none"}
KIND, BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
DISPATCHERS: dict[str, dict[str, str]] = {
    "alltoall": {KIND: "alltoall"},
    "allgather": {KIND: "allgather"},
    "deepep": {KIND: "flex", BACKEND: "deepep"},
    "hybridep": {KIND: "flex", BACKEND: "hybridep"},
    "rows": {KIND: "alltoall"},
}
"""Keys are values of training.moe_dispatcher; `rows` is mpctl's all-to-all of rows."""
BEST_OF_GROUP = {"softmax": 1, "sigmoid": 2}
"""Experts whose scores are a group's score, by model.router_score."""

VIEW_FLAGS = (
    ForeignKey("--expert-model-parallel-size", "parallel.ep", int, 1),
    ForeignKey("--expert-tensor-parallel-size", "parallel.etp", int),
)
EXPERT_FLAGS = (
    ForeignKey("--num-experts", "model.experts", int),
    ForeignKey("--moe-router-topk", "model.experts_per_token", int, 2),
    ForeignKey("--moe-ffn-hidden-size", "model.expert_ffn", int),
    ForeignKey("--moe-router-score-function", "model.router_score", str, "softmax", SCORES),
    ForeignKey("--moe-router-load-balancing-type", "training.moe_load_balancing", str, "aux_loss", BALANCING),
    ForeignKey("--moe-aux-loss-coeff", "training.moe_aux_loss_coeff", float, 0.0),
)
SHARED = ForeignKey("--moe-shared-expert-intermediate-size", "model.shared_expert_ffn", int)
BIAS_RATE = ForeignKey("--moe-router-bias-update-rate", "training.moe_bias_update_rate", float, 1e-3)
Z_LOSS = ForeignKey("--moe-z-loss-coeff", "training.moe_z_loss_coeff", float)
SCALE = ForeignKey("--moe-router-topk-scaling-factor", "model.router_scale", float)
LATENT_FLAGS = (
    ForeignKey("--q-lora-rank", "model.q_lora_rank", int),
    ForeignKey("--kv-lora-rank", "model.kv_lora_rank", int, 32),
    ForeignKey("--qk-head-dim", "model.qk_nope_head_dim", int, 128),
    ForeignKey("--qk-pos-emb-head-dim", "model.qk_rope_head_dim", int, 64),
    ForeignKey("--v-head-dim", "model.v_head_dim", int, 128),
)
OTHER_FLAGS = (SHARED, BIAS_RATE, Z_LOSS, SCALE)
ALL_FLAGS = (*VIEW_FLAGS, *EXPERT_FLAGS, *OTHER_FLAGS, *LATENT_FLAGS)
LAYER_FREQ = "--moe-layer-freq"
COMBINED = (
    LAYER_FREQ,
    "--moe-router-pre-softmax",
    "--moe-router-enable-expert-bias",
    "--moe-router-num-groups",
    "--moe-router-group-topk",
    "--moe-shared-expert-gate",
)
"""Flags of experts that make a setting together with others."""
KERNELS = (
    "--moe-router-dtype",
    "--moe-grouped-gemm",
    "--moe-permute-fusion",
    KIND,
    BACKEND,
    "--moe-enable-deepep",
    "--moe-expert-capacity-factor",
)
"""Flags of how experts are computed and reached, and of how many tokens they take."""
OVERLAP, DELAYED, SHARED_BESIDE = (
    "--overlap-moe-expert-parallel-comm",
    "--delay-wgrad-compute",
    "--moe-shared-expert-overlap",
)
FUSER = "--use-transformer-engine-op-fuser"
CAPACITY, STASH, STASHED, ON_HOST = (
    "--moe-expert-rank-capacity-factor",
    "--moe-paged-stash",
    "--moe-paged-stash-buffer-size-factor-cuda",
    "--moe-paged-stash-buffer-size-factor-cpu",
)
EVEN = "--moe-router-force-load-balancing"
ROOM = (OVERLAP, DELAYED, CAPACITY, STASH, STASHED, ON_HOST, EVEN, FUSER)
"""Flags of what runs beside rows, and of how many there is room for."""
POSITIONS = ("--rope-type", "--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
READ = (*(flag.key for flag in ALL_FLAGS), *COMBINED, *KERNELS, *ROOM, *POSITIONS, "--multi-latent-attention")


def expert_flags(job: JobSpec) -> Iterator[tuple[str, Value]]:
    """The flags of a job's experts with their values, True for a switch; the number of experts and
    the sizes of their view alone where no model is named."""
    model, p, t = job.model, job.parallel, job.training
    if model.experts if model is not None else max(p.ep, p.etp) > 1:
        yield from written(job, VIEW_FLAGS)
    if model is None or not model.experts:
        return
    yield from written(job, EXPERT_FLAGS)
    if not all(layers := layers_with_experts(model)):
        yield LAYER_FREQ, layers
    if model.shared_expert_ffn:
        yield from written(job, [SHARED])
    if model.shared_expert_gate:
        yield "--moe-shared-expert-gate", True
    if model.router_score == "softmax" and not model.router_renormalize:
        yield "--moe-router-pre-softmax", True
    if model.router_bias:
        yield "--moe-router-enable-expert-bias", True
        yield from written(job, [BIAS_RATE])
    if limits_groups(model):
        yield "--moe-router-num-groups", model.router_groups
        yield "--moe-router-group-topk", model.router_groups_per_token
    if model.router_scale != 1:
        yield from written(job, [SCALE])
    if t.moe_z_loss_coeff:
        yield from written(job, [Z_LOSS])
    yield from (("--moe-router-dtype", "fp32"), ("--moe-grouped-gemm", True))
    yield "--moe-permute-fusion", True
    yield from DISPATCHERS[t.moe_dispatcher or get_profile(t.runtime).experts.dispatcher].items()
    if t.moe_overlap:
        yield OVERLAP, True
    if t.moe_capacity is not None:
        yield CAPACITY, t.moe_capacity
        yield FUSER, True
    if t.moe_stash is not None:
        yield STASH, True
        yield STASHED, t.moe_stash
    if t.moe_stash_host is not None:
        yield ON_HOST, t.moe_stash_host


def latent_flags(job: JobSpec) -> Iterator[tuple[str, Value]]:
    """The flags of latent attention with their values, True for a switch; none for heads with keys
    and values of their own."""
    if job.model is not None and job.model.is_mla:
        yield from (("--multi-latent-attention", True), ("--qk-layernorm", True))
        yield from written(job, LATENT_FLAGS)
        if (yarn := find_yarn(job.model)) is not None:
            scales = (yarn.factor, yarn.mscale, yarn.mscale_all_dim)
            yield from zip(POSITIONS[1:], scales, strict=True)


def layers_with_experts(model: ModelSpec) -> list[int]:
    """1 for each layer with experts, 0 for a dense one."""
    return [int(model.has_experts(layer)) for layer in range(model.layers)]


def limits_groups(model: ModelSpec) -> bool:
    """Whether a token's experts lie in fewer groups than there are."""
    return model.router_groups_per_token < model.router_groups


def expert_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    """Issues of experts and latent attention that Megatron-Core cannot have; who: the launcher, for
    messages."""
    if model.experts:
        yield from _router_refusals(model, who)
        if model.bias is True:
            message = f"{who}'s experts have biases where all linear layers have them"
            yield refused("model.bias", "true", message, "use bias false or qkv")
    elif model.is_mla and model.bias is True:
        message = f"{who}'s latent attention has a bias where all linear layers have one"
        yield refused("model.bias", "true", message, "use bias false")
    if model.is_mla:
        if model.norm != "rmsnorm":
            message = f"{who} norms the latents as it does the layers, and here they have no biases"
            yield refused("model.norm", model.norm, message, "use norm rmsnorm")
        if model.rotary_scaling is not None:
            message = f"{who}'s latent attention has yarn, no scaling of Llama 3.1's form"
            yield refused("model.rotary_scaling", "llama3", message, "leave it out")
        if (scaling := model.yarn_scaling) is not None and not is_usual(scaling):
            message = f"{who} starts from 4096 tokens, with beta_fast 32 and beta_slow 1"
            yield refused("model.yarn_scaling", f"{scaling}", message, "use those")


def _router_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    k, where = model.experts_per_token, "model.router_renormalize"
    if model.router_score == "softmax" and model.router_renormalize and k == 1:
        message = f"{who} takes softmax before the choice where a token has 1 expert"
        yield refused(where, "true", message, "use router_renormalize false")
    if model.router_score == "sigmoid" and model.router_renormalize != (k > 1):
        is_on = str(model.router_renormalize).lower()
        message = f"{who} divides sigmoids by their sum where a token has several experts, here {k}"
        other = str(k > 1).lower()
        yield refused(where, is_on, message, f"use router_renormalize {other}")
    if limits_groups(model):
        kept, best = model.router_groups_per_token, BEST_OF_GROUP[model.router_score]
        if k // kept != best:
            message = (
                f"{who} scores a group by its best {k} // {kept} = {k // kept} experts, a job with "
                f"{model.router_score} by its best {best}"
            )
            hint = f"use experts_per_token {best * kept}, or router_groups 1"
            yield refused("model.router_groups_per_token", kept, message, hint)


def expert_notes(job: JobSpec) -> Iterator[str]:
    """Yield notes on a job's experts and latents."""
    model = job.model
    if model is None:
        return
    if model.experts:
        yield (
            f"experts' view: etp {job.parallel.etp} x ep {job.parallel.ep} x edp "
            f"{job.expert_sizes['edp']} x pp {job.parallel.pp}; without its flag etp would be tp"
        )
        yield "no token is dropped: no capacity factor"
        if job.training.moe_overlap:
            yield "one micro batch's rows beside another's need CUDA_DEVICE_MAX_CONNECTIONS above 1, such as 32"
    if model.is_mla and model.yarn_scaling is None:
        yield "positions of latent attention are yarn of factor 1, which is plain rotary"


def layer_pattern(layers: Sequence[int]) -> str:
    """Write the layers with experts as a Python list expression: the shortest repeating part, by runs of
    equal layers."""
    size = len(layers)
    for period in range(1, size + 1):
        repeats, rest = divmod(size, period)
        if rest == 0 and list(layers) == list(layers[:period]) * repeats:
            break
    runs = [f"[{kind:d}]*{len([*run])}" for kind, run in groupby(layers[:period])]
    return f"({'+'.join(runs)})" + (f"*{repeats}" if repeats > 1 else "")


LONGEST = 10_000  # layers of a pattern


def read_pattern(text: str) -> list[bool]:
    """The layers to which a pattern of lists of 0 and 1, sums, products and brackets gives experts.
    Raises ValueError for another text, and for more than LONGEST layers."""
    if len(text) > LONGEST:
        raise ValueError(f"{text[:60]!r}... has more than {LONGEST:,} letters")
    lists = re.sub(r"\[([01,]*)\]", lambda found: f"({found[1].replace(',', '')})", text)
    flat, before = re.sub(r"\s", "", lists), ""
    while flat != before:
        before = flat
        flat = re.sub(r"\(([01]*)\)(?:\*(\d{1,5}))?", _repeated, flat)
        flat = re.sub(r"(?<=[01])\+(?=[01])", "", flat)
    if not re.fullmatch(f"[01]{{1,{LONGEST}}}", flat):
        raise ValueError(f"{text[:60]!r} is no list of 0 and 1")
    return [kind == "1" for kind in flat]


def _repeated(found: re.Match[str]) -> str:
    times = int(found[2] or 1)
    if len(found[1]) * times > LONGEST:
        raise ValueError(f"more than {LONGEST:,} layers")
    return found[1] * times


def pattern_settings(layers: list[bool]) -> dict[str, int] | None:
    """dense_layers and moe_layer_every that give experts to these layers, one or more; None where
    no two do.

    >>> pattern_settings([False, True, True]), pattern_settings([False, True, False, True])
    ({'dense_layers': 1, 'moe_layer_every': 1}, {'dense_layers': 0, 'moe_layer_every': 2})
    """
    first, *others = (n for n, has_experts in enumerate(layers) if has_experts)
    every = others[0] - first if others else first + 1
    dense = max(0, first - every + 1)
    last_of_every = [n >= dense and (n + 1) % every == 0 for n in range(len(layers))]
    return {"dense_layers": dense, "moe_layer_every": every} if last_of_every == layers else None


def read_experts(reader: KeyReader) -> None:
    """The settings of experts and latent attention. Without --num-layers the shape is that of a
    model named elsewhere, so that only stated sizes are read."""
    _read_view(reader)
    if reader.has("--multi-latent-attention"):
        _read_latent(reader)
    else:
        _say_nothing(reader, (flag.key for flag in LATENT_FLAGS), "--multi-latent-attention")
    if reader.has("--num-experts") and reader.value("--num-experts") != "0":
        _read_router(reader)
        _read_layers(reader)
        _read_kernels(reader)
        _read_room(reader)
    else:
        flags = (*(flag.key for flag in (*EXPERT_FLAGS[1:], *OTHER_FLAGS)), *COMBINED)
        _say_nothing(reader, flags, "--num-experts")


def _say_nothing(reader: KeyReader, flags: Iterable[str], without: str) -> None:
    for flag in flags:
        if reader.has(flag) and not is_neutral(flag, reader.flags[flag]):
            reader.wrong(flag, f"says nothing without {without}", "add it, or leave this out")


def _read_view(reader: KeyReader) -> None:
    """ep and etp; where the flag is absent, etp is tp."""
    reader.read(VIEW_FLAGS, defaults=False)
    s, flag = reader.settings, "--expert-tensor-parallel-size"
    if reader.has(flag) or not (reader.has("--num-experts") or s.get("parallel.ep", 1) != 1):
        return
    tp = s.get("parallel.tp", 1)
    s["parallel.etp"] = tp
    if tp != 1:
        message = f"is not there, and {SOFTWARE} takes tp: etp {tp} is planned"
        hint = "with 1 every expert is on one rank"
        reader.warnings.append(Check("megatron-default", "warning", flag, message, hint))


def _read_router(reader: KeyReader) -> None:
    """Read how experts are chosen and weighted."""
    reader.read((*EXPERT_FLAGS, *OTHER_FLAGS))
    s, k = reader.settings, reader.settings.get("model.experts_per_token")
    for flag in ("--moe-router-load-balancing-type", "--moe-aux-loss-coeff"):
        if len(values := reader.flags.get(flag, ())) > 1:
            reader.wrong(flag, f"{' '.join(values)}: a job has one of them", "give one value")
    is_softmax, before = s.get("model.router_score") == "softmax", "--moe-router-pre-softmax"
    s["model.router_renormalize"] = not reader.has(before) if is_softmax else k != 1
    if is_softmax and k == 1 and not reader.has(before):
        reader.wrong("--moe-router-topk", f"1: {SOFTWARE} ends on it without {before}", "add it")
    s["model.router_bias"] = reader.has("--moe-router-enable-expert-bias")
    s["model.shared_expert_gate"] = reader.has("--moe-shared-expert-gate")
    kept = "--moe-router-group-topk"
    if not reader.has(kept):
        return
    s["model.router_groups"] = reader.number("--moe-router-num-groups", int, 1)
    s["model.router_groups_per_token"] = groups = reader.number(kept, int, 1)
    best = BEST_OF_GROUP["softmax" if is_softmax else "sigmoid"]
    if isinstance(k, int) and groups > 0 and k // groups != best:
        message = f"{groups}: a group's score is there the sum of its best {k} // {groups} experts"
        reader.wrong(kept, message, f"a job's is of the best {best}: use --moe-router-topk {best * int(groups)}")


def _read_layers(reader: KeyReader) -> None:
    """Read the layers with experts: a list, or N for the first layer of every N."""
    flag, total = LAYER_FREQ, reader.settings.get("model.layers")
    text = reader.value(flag, "1")
    if text == "1" or not isinstance(total, int):
        return
    try:
        layers = read_pattern(text) if "[" in text else _first_of_every(int(text), total)
    except ValueError as error:
        reader.wrong(flag, str(error), "give N, or a list such as ([0]*3+[1]*58)")
        return
    if len(layers) != total:
        reader.wrong(flag, f"has {len(layers)} layers, --num-layers {total}", "make them equal")
        return
    found = pattern_settings(layers) if any(layers) else None
    if found is None:
        message = f"{text[:60]}: a job has experts in the last layer of every N after the first D"
        reader.wrong(flag, message, "use a list such as ([0]*3+[1]*58) or ([0]*1+[1]*1)*12")
        return
    reader.settings |= {f"model.{key}": value for key, value in found.items()}


def _first_of_every(every: int, total: int) -> list[bool]:
    if every < 1:
        raise ValueError(f"{every} is not a number above 0")
    return [n % every == 0 for n in range(total)]


def _read_kernels(reader: KeyReader) -> None:
    """Check settings of experts for which a job has one value, and read the dispatcher."""
    s, flag = reader.settings, "--moe-expert-capacity-factor"
    if reader.number(flag, float, -1.0) >= 0:
        message = f"{reader.value(flag)}: which tokens are dropped depends on the layout"
        reader.wrong(flag, message, "leave it out: every token reaches its experts")
    if (dtype := reader.value("--moe-router-dtype", "is not there")) != "fp32":
        reader.nearest("--moe-router-dtype", f"{dtype}: the router is planned in fp32")
    for flag, how in (
        ("--moe-grouped-gemm", "the products of all experts in one kernel"),
        ("--moe-permute-fusion", "rows permuted in one kernel"),
    ):
        if not reader.has(flag):
            reader.nearest(flag, f"is not there: planned with {how}")
    if s.get("parallel.ep", 1) != 1 or s.get("parallel.etp", 1) != 1:
        _read_dispatcher(reader)
    if not reader.has("--disable-bias-linear"):
        reader.nearest("--disable-bias-linear", "is not there: experts are planned without biases")


def runtime_of_flags(flags: Mapping[str, Sequence[str]]) -> str:
    """The runtime whose figures are a command's: those of a CUDA graph of a whole iteration where it captures one."""
    return GRAPHS if any("full_iteration" in flags.get(flag, ()) for flag in CAPTURE) else RUNTIME


def _read_dispatcher(reader: KeyReader) -> None:
    """Read the dispatcher, if it differs from that of the runtime's profile."""
    kind = reader.value(KIND, "allgather")
    found = reader.value(BACKEND, "deepep") if kind == "flex" else kind
    if found not in DISPATCHERS or found == "rows":
        flag = BACKEND if kind == "flex" else KIND
        known = "alltoall, allgather or flex; of flex deepep or hybridep"
        reader.wrong(flag, f"{found!r} is none of those that a job can say", f"use {known}")
    elif found != get_profile(runtime_of_flags(reader.flags)).experts.dispatcher:
        reader.settings["training.moe_dispatcher"] = found


def _read_room(reader: KeyReader) -> None:
    """Read what runs beside the rows of experts, how many there is room for, and whether they are forced to be even."""
    s = reader.settings
    if reader.has(OVERLAP):
        s["training.moe_overlap"] = True
        if reader.has(SHARED_BESIDE):
            reader.wrong(SHARED_BESIDE, f"{SOFTWARE} ends on it with {OVERLAP}", "leave one of them out")
    if reader.has(DELAYED):
        if reader.has(OVERLAP):
            reader.nearest(DELAYED, "weights' gradients are planned beside those of inputs; the guide has 0.4 % for it")
        else:
            reader.wrong(DELAYED, f"{SOFTWARE} ends on it without {OVERLAP}", "add that, or leave this out")
    if reader.has(EVEN):
        s["training.moe_load"] = 1.0
    if reader.has(CAPACITY):
        s["training.moe_capacity"] = reader.number(CAPACITY, float, 1.0)
    elif reader.has(FUSER):
        reader.nearest(FUSER, "planned with the kernels of the runtime's figures")
    if reader.has(STASH):
        s["training.moe_stash"] = reader.number(STASHED, float, 1.1)
        if pages := abs(reader.number(ON_HOST, float, 0.0)):  # below 0, of the rows of a first step, not the mean
            s["training.moe_stash_host"] = pages


def _read_latent(reader: KeyReader) -> None:
    """Latent attention: ranks and widths of heads, norms of the latents, plain positions."""
    s = reader.settings
    reader.read(LATENT_FLAGS)
    s |= {"model.attention_kind": "mla", "model.qk_norm": False}
    if not reader.has("--qk-layernorm"):
        reader.nearest("--qk-layernorm", "is not there: planned with norms of both latents")
    if reader.has("--group-query-attention"):
        message = f"{SOFTWARE} ends on it with --multi-latent-attention"
        reader.wrong("--group-query-attention", message, "leave one of them out")
    if reader.value("--rope-type", "yarn") == "yarn":
        _read_yarn(reader)


def _read_yarn(reader: KeyReader) -> None:
    """YaRN by its factor and two scales, whose defaults are 1 and 0; factor 1 is none."""
    defaults = zip(POSITIONS[1:], (1.0, 1.0, 0.0), strict=True)
    yarn = YarnScales(*(float(reader.number(flag, float, value)) for flag, value in defaults))
    if yarn.factor <= 1:
        return
    s = reader.settings
    widths = (s.get("model.qk_nope_head_dim"), s.get("model.qk_rope_head_dim"))
    s["model.yarn_scaling"] = {**USUAL, "factor": yarn.factor, "attention_factor": yarn.attention_factor}
    columns = sum(width for width in widths if isinstance(width, int))
    if columns > 0 and (scale := yarn.attention_scale(columns)) is not None:
        s["model.attention_scale"] = scale
