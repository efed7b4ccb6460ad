"""The layouts that a launcher can express, as one row, and the issues of a plan beyond them.

A refusal has the value, the bound and a way out. By hand: a launcher with `pp=False` and a plan
with pp 4 give

    parallel.pp: 4, and accelerate has no pipeline (use pp 1, or --emit megatron)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mpctl.core.axes import DEFAULT_ORDER, expert_order, used_axes
from mpctl.core.errors import Issue
from mpctl.interop.config_text import word
from mpctl.model.layout.topology import job_topology, zero_copies, zero_stage
from mpctl.plan.estimate.network import Network
from mpctl.plan.planning.plan import Plan
from mpctl.plan.rules.check import listed
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.job import JobSpec
from mpctl.spec.model import VARIANTS, ModelSpec, is_set
from mpctl.spec.parallel import CpComm
from mpctl.spec.runtime import job_profile
from mpctl.spec.schedules import SCHEDULES
from mpctl.spec.training import TrainingSpec


@dataclass(frozen=True, slots=True)
class LauncherLimits:
    """The layouts that one launcher can express; each field lists the possible values.

    orders: of ranks, fastest-varying axis first; None where any order is possible. chunks: whether
    a rank may hold several chunks; v_schedules: schedules of the shape of a V. zero: stages;
    zero_in_pipeline: those with pp above 1.
    tensor_modes, dtypes, recompute: settings of a job. offload, partition: of saved activations.
    ep, etp: whether experts are dealt to ranks, and each expert is cut. zero_size: the groups that
    ZeRO may divide states over if not all of dp x cp: any, or those with all of cp (`dp`). adapters:
    kinds; bases: data types of their frozen weights other than training.dtype. optimizers. host: what
    may be kept in host memory. bf16_states: moments, or parameters without fp32 copies.
    moments: data types of moments, besides. losses: ways to compute the cross entropy that can be
    asked for; chunks of one, and MLPs in tiles. offload_settings: keys of what is offloaded, and how.
    """

    launcher: str
    orders: tuple[str, ...] | None = (DEFAULT_ORDER,)
    pp: bool = True
    tp: bool = True
    cp: bool = True
    cp_comm: tuple[CpComm, ...] = ()
    chunks: bool = True
    v_schedules: tuple[str, ...] = ()
    sequence_parallel: bool = True
    zero: tuple[int, ...] = (0, 1, 2, 3)
    zero_in_pipeline: tuple[int, ...] = (0, 1, 2, 3)
    tensor_modes: tuple[str, ...] = ("1d",)
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    recompute: tuple[str, ...] = ("none", "selective", "full")
    offload: bool = False
    partition: bool = False
    dropout: bool = True
    ep: bool = False
    etp: bool = False
    zero_size: Literal["none", "dp", "any"] = "none"
    adapters: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ("adamw",)
    host: tuple[str, ...] = ()
    bf16_states: bool = False
    losses: tuple[str, ...] = ()
    loss_chunks: bool = False
    tiled_mlp: bool = False
    moments: tuple[str, ...] = ("fp32",)
    offload_settings: tuple[str, ...] = ()

    def refusals(self, plan: Plan) -> Iterator[Issue]:
        """An issue for each setting of the job that the launcher cannot express."""
        job, p, t, who = plan.job, plan.job.parallel, plan.job.training, self.launcher
        if p.pp > 1 and not self.pp:
            yield refused("parallel.pp", p.pp, f"{who} has no pipeline", "use pp 1")
        if p.tp > 1 and not self.tp:
            yield refused("parallel.tp", p.tp, f"{who} has no tensor parallelism here", "use tp 1, or --emit axolotl")
        if p.cp > 1 and not self.cp:
            yield refused("parallel.cp", p.cp, f"{who} has no context parallelism here", "use cp 1")
        if (comm := p.stated_cp_comm) is not None and comm not in self.cp_comm and self.cp:
            message = f"{who} has no setting that says it"
            if self.cp_comm:
                message = f"{who} runs cp by {listed(self.cp_comm)}"
            yield refused("parallel.cp_comm", comm, message, "leave cp_comm out")
        for axis, is_there, what in (("ep", self.ep, "deals no experts to ranks"), ("etp", self.etp, "cuts no expert")):
            if (size := getattr(p, axis)) > 1 and not is_there:
                yield refused(f"parallel.{axis}", size, f"{who} {what} here", f"use {axis} 1, or --emit megatron")
        if p.vpp > 1 and not self.chunks:
            yield refused("parallel.vpp", p.vpp, f"{who} runs one chunk a rank", "use vpp 1")
        if p.pp > 1 and SCHEDULES[p.schedule].is_v and p.schedule not in self.v_schedules:
            hint = f"use {listed((*self.v_schedules, '1f1b'))}"
            yield refused("parallel.schedule", p.schedule, f"{who} does not have this schedule", hint)
        if splits_sequence(job) and not self.sequence_parallel:
            message = f"{who} does not split the sequence over tp"
            yield refused("parallel.sequence_parallel", "true", message, "use --no-sequence-parallel")
        if p.tensor_mode not in self.tensor_modes:
            hint = f"use tensor_mode {listed(self.tensor_modes)}"
            if "2d" not in self.tensor_modes:
                hint += ", or --emit colossalai"
            yield refused("parallel.tensor_mode", p.tensor_mode, f"{who} has no such tensor mode", hint)
        if self.orders is not None and find_order(job, self.orders) is None:
            message = f"{who} numbers its ranks {listed(self.orders)}, which are other groups"
            yield refused("parallel.order", p.order, message, f"use order {listed(self.orders)}")
        legal = self.zero_in_pipeline if p.pp > 1 else self.zero
        if (stage := zero_stage(job)) not in legal:
            where = " with a pipeline" if p.pp > 1 and stage in self.zero else ""
            yield refused("parallel.zero", stage, f"{who} has ZeRO {listed(legal)}{where}", f"use zero {listed(legal)}")
        if (copies := zero_copies(job)) > 1 and self.zero_size == "none":
            message = f"{who} divides states over all of dp x cp"
            hint = "leave zero_size out, or --emit megatron or torchtitan"
            yield refused("parallel.zero_size", p.zero_size, message, hint)
        elif job.sizes["dp"] % copies and self.zero_size == "dp":
            message = f"{who} divides states over all of cp at least, which is {p.cp}"
            yield refused("parallel.zero_size", p.zero_size, message, f"use a multiple of {p.cp}")
        if t.dtype not in self.dtypes:
            takes = listed(self.dtypes)
            yield refused("training.dtype", t.dtype, f"{who} takes {takes}", f"use dtype {takes}")
        if t.recompute not in self.recompute:
            message = f"{who} recomputes {listed(self.recompute)}"
            yield refused("training.recompute", t.recompute, message, f"use {listed(self.recompute)}")
        for key, is_said in (("partition_activations", self.partition), ("offload_activations", self.offload)):
            if getattr(t, key) and not is_said:
                yield refused(f"training.{key}", "true", f"{who} has no setting that does the same", f"use {key} false")
        if not self.dropout and (largest := max(t.dropout, t.attention_dropout)) > 0:
            yield refused("training.dropout", largest, f"{who}'s models have no dropout", "use dropout 0")
        if t.freeze:
            message = f"{who} has no setting for frozen parameters"
            yield refused("training.freeze", ", ".join(t.freeze), message, "leave training.freeze empty")
        yield from self._adapter(t.adapter)
        yield from self._optimizer(t)
        yield from self._loss(t)

    def _adapter(self, adapter: AdapterSpec | None) -> Iterator[Issue]:
        """Issues of adapters and of the precision of the weights below them."""
        if adapter is None:
            return
        who = self.launcher
        if adapter.kind not in self.adapters:
            has = f"{who} has {listed(self.adapters)}" if self.adapters else f"{who} trains no adapters"
            other = f"use {listed(self.adapters)}" if self.adapters else "leave training.adapter out"
            hint = f"{other}, or --emit trl, axolotl, llama-factory or megatron-bridge"
            yield refused("training.adapter", adapter.kind, has, hint)
        elif (base := adapter.stored_as) is not None and base not in self.bases:
            message = f"{who} stores frozen weights in {listed(self.bases) or 'the data type alone'}"
            hint = f"use {listed(self.bases)}, or leave it out" if self.bases else "leave it out"
            yield refused("training.adapter.base_precision", base, message, hint)

    def _loss(self, t: TrainingSpec) -> Iterator[Issue]:
        """Issues of the way to compute the cross entropy, and of tiles."""
        who, way = self.launcher, t.cross_entropy
        if way is not None and way not in self.losses:
            has = f"has {listed(self.losses)}" if self.losses else "has no setting for it"
            hint = f"use {listed(self.losses)}, or leave it out" if self.losses else "leave it out"
            yield refused("training.cross_entropy", way, f"{who} {has} here", hint)
        for key, is_said in (("cross_entropy_chunks", self.loss_chunks), ("tiled_mlp", self.tiled_mlp)):
            if (parts := getattr(t, key)) is not None and not is_said:
                yield refused(f"training.{key}", parts, f"{who} has no setting for it here", "leave it out")

    def _optimizer(self, t: TrainingSpec) -> Iterator[Issue]:
        """Issues of the update rule, its states and their place."""
        who = self.launcher
        if t.optimizer not in self.optimizers:
            message, hint = f"{who} takes {listed(self.optimizers)} here", f"use {listed(self.optimizers)}"
            yield refused("training.optimizer", t.optimizer, message, hint)
        for key in ("offload_optimizer", "offload_parameters"):
            if getattr(t, key) and key not in self.host:
                message, hint = f"{who} has no setting here that keeps them in host memory", "leave it out"
                yield refused(f"training.{key}", "true", message, hint)
        for key in ("offload_fraction", "offload_overlap"):
            value, usual = getattr(t, key), TrainingSpec.model_fields[key].default
            if t.offload_optimizer and value != usual and key not in self.offload_settings:
                yield refused(f"training.{key}", word(value), f"{who} has no setting here for it", f"use {word(usual)}")
        types = (*self.moments, "bf16") if self.bf16_states else self.moments
        narrow = (("optimizer_dtype", t.optimizer_dtype, types), ("master_weights", t.master_weights, (True,)))
        for key, value, known in narrow:
            is_said = value in (None, *known) or (key == "master_weights" and self.bf16_states)
            if not is_said:
                message = f"{who} has no setting here for states in {'8' if value == 'fp8' else '16'} bits"
                yield refused(f"training.{key}", word(value), message, "leave it out")


def refused(setting: str, value: object, message: str, hint: str = "") -> Issue:
    """The issue of a setting that a launcher cannot express: for `training.dtype` its rule is
    `emit-dtype`."""
    rule = (setting.partition(".")[2] or setting).replace("_", "-")
    return Issue(f"emit-{rule}", setting, f"{value}, and {message}", hint)


def splits_sequence(job: JobSpec) -> bool:
    """Whether sequence parallelism has an effect: with tp 1 launchers turn it off."""
    return job.parallel.sequence_parallel and job.parallel.tp > 1


def overlaps_products(job: JobSpec) -> bool:
    """Whether the plan sends sequence parallelism's messages during products: as the job or else the runtime has it."""
    said = job.parallel.tp_comm_overlap
    if said is None and job_profile(job.training).overlap.products:
        said = Network(job.cluster, job_topology(job)).multicasts("tp")
    return splits_sequence(job) and bool(said)


def dp_degrees(job: JobSpec) -> tuple[int, int]:
    """dp as (replicate, shard): the ranks of dp with equal shares of ZeRO, and those that divide
    states together with cp.

    By hand, dp 8 and cp 2 with ZeRO over 4 ranks: 4 x 2; ZeRO over all: 1 x 8; no ZeRO: 8 x 1.
    """
    dp, copies = job.sizes["dp"], zero_copies(job)
    return (copies, dp // copies) if zero_stage(job) else (dp, 1)


def uneven_refusals(plan: Plan, message: str) -> Iterator[Issue]:
    """An issue if pipeline stages hold unequal numbers of layers, for the setting that causes
    them."""
    p = plan.job.parallel
    if p.pipeline_layout or len({sum(stop - start for start, stop in chunks) for chunks in plan.stages or ()}) > 1:
        ends = ("pipeline_layout", "first_stage_layers", "last_stage_layers", "embedding_is_layer", "loss_is_layer")
        key = next((key for key in ends if getattr(p, key)), "stage_balance")
        yield refused(f"parallel.{key}", getattr(p, key), message, "use stages of equal layers")


def find_order(job: JobSpec, orders: tuple[str, ...]) -> str | None:
    """The first of these orders that numbers the ranks as the job's order does, if one does; for a
    job with experts in both views."""
    own = _numbering(job, job.parallel.order)
    return next((other for other in orders if _numbering(job, other) == own), None)


def _numbering(job: JobSpec, order: str) -> tuple[str, ...]:
    """The axes of more than one rank of the dense view, then of the experts'."""
    sizes, experts = job.expert_sizes, expert_order(order) if job.has_experts else ()
    return (*used_axes(order, job.sizes), *(axis for axis in experts if sizes[axis] > 1))


FORM = {"norm": "rmsnorm", "position": "rotary", "activation": "swiglu"}


def llama_refusals(model: ModelSpec, who: str) -> Iterator[Issue]:
    """Issues of a model that is not of Llama's form: RMSNorm, rotary positions, SwiGLU, no biases.
    Several launchers only have models of this form. who: the launcher, for messages."""
    if model.family != "gpt":
        message = f"{who}'s models here are decoders"
        yield refused("model.family", model.family, message, "use family gpt, or --emit torch")
    of_llama = f"{who}'s models here are of Llama's form"
    for key, value in FORM.items():
        if (found := getattr(model, key)) != value:
            yield refused(f"model.{key}", found, of_llama, f"use {key} {value}, or --emit torch")
    if model.bias:
        yield refused("model.bias", "true", f"{who}'s models here have no biases", "use bias false, or --emit torch")
    if model.norm_order != "pre":
        yield refused("model.norm_order", model.norm_order, f"{who} has norms before", "use norm_order pre")
    for key in VARIANTS:
        if is_set(model, key):
            yield refused(f"model.{key}", getattr(model, key), of_llama, "leave it out, or --emit torch")
    if model.head_size * model.heads != model.hidden:
        hint = f"use head_dim {model.hidden // model.heads}"
        yield refused("model.head_dim", model.head_size, f"{who} takes hidden / heads", hint)
