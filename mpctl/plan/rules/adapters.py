"""Rules about adapters: what they name, their rank, and what base and layout they can have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from mpctl.core.errors import Offer
from mpctl.core.sharding import divisors
from mpctl.core.units import DTYPE_BYTES
from mpctl.model.layout.draft import LayoutDraft
from mpctl.model.operators.adapters import GROUPS, NAMES, Target, is_saved_name, targets_of
from mpctl.plan.rules.check import Check, listed, refusal
from mpctl.spec.adapter import QUANTIZED, AdapterSpec
from mpctl.spec.job import JobSpec

WHERE = "training.adapter"
SHOWN = 12  # names in a hint


class _Named(NamedTuple):
    """What the names of an adapter mean in a model. targets: the adapters of each name; saved: the names of
    modules_to_save that mean a parameter; known: the names that a hint may offer."""

    targets: dict[str, list[Target]]
    saved: frozenset[str]
    known: list[str]


def name_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Every name of targets and modules_to_save is one of the model's, and names each product once."""
    adapter = draft.job.training.adapter
    if adapter is None or draft.job.model is None:
        return
    named = draft.table.once(("names", *adapter.targets, *adapter.modules_to_save), lambda: _find_named(draft, adapter))
    for name in adapter.targets:
        if not named.targets[name]:
            yield _unknown("adapter-target", f"{WHERE}.targets", name, named.known)
    for name in adapter.modules_to_save:
        where = f"{WHERE}.modules_to_save"
        if name == "lm_head" and draft.job.model.tied_embeddings:
            message = "'lm_head' is tied to the word table: trained in one place, it would leave the other behind"
            yield Check("adapter-tied-head", "error", where, message, "save embed_tokens, which trains both")
        elif name not in named.saved:
            yield _unknown("adapter-saved", where, name, ["lm_head", "embed_tokens"])
    yield from _twice(adapter, named)
    yield from _rank(adapter, named)
    grouped = {one.product.name for found in named.targets.values() for one in found if one.product.is_grouped}
    if adapter.kind == "dora" and grouped:
        message = f"dora, but {listed(sorted(grouped))} are matrices of experts, which have no trained lengths in PEFT"
        yield Check("adapter-dora-experts", "error", f"{WHERE}.kind", message, "use kind lora, or targets attention")


def _find_named(draft: LayoutDraft, adapter: AdapterSpec) -> _Named:
    table, model = draft.table, draft.model
    groups = [*(kind for stack in table.stacks for kind in stack.kinds), *(stack.exit for stack in table.stacks)]
    products = [p for group in groups for p in group.products if not (p.adapts or p.is_lookup)]

    def found(name: str) -> list[Target]:
        one = adapter.model_copy(update={"targets": [name]})
        each = (target for product in products for target in targets_of(product, model, one))
        return list({target.name: target for target in each}.values())

    names = [weight.name for weight in table.weights()]
    saved = frozenset(name for name in adapter.modules_to_save if is_saved_name(name, names))
    targets = {name: found(name) for name in adapter.targets}
    is_wrong = not all(targets.values())
    return _Named(targets, saved, [name for name in (*GROUPS, *NAMES) if found(name)] if is_wrong else [])


def _unknown(rule: str, where: str, name: str, known: list[str]) -> Check:
    from difflib import get_close_matches  # only where something is wrong

    near = get_close_matches(name, known, n=1, cutoff=0.5)
    offered = f"{near[0]!r}, or one of " if near else ""
    hint = f"use {offered}{listed(known[:SHOWN])}"
    if rule == "adapter-target" and is_saved_name(name, ["embedding.word.weight"]):
        hint = f"train it in full by {WHERE}.modules_to_save"
    return Check(rule, "error", where, f"{name!r} names nothing in this model", hint)


def _twice(adapter: AdapterSpec, named: _Named) -> Iterator[Check]:
    """A name given twice, or two names of which one means a part of the other's product."""
    where = f"{WHERE}.targets"
    for name, count in Counter(adapter.targets).items():
        if count > 1:
            yield Check("adapter-target-twice", "error", where, f"{name!r} is given {count} times", "name it once")
    for name, found in named.targets.items():
        whole = {one.product.name for one in found if not one.part}
        for other, theirs in named.targets.items():
            parts = {one.product.name for one in theirs if one.part and one.product.name in whole}
            if parts:
                message = f"{other!r} is a part of what {name!r} adapts as one, {listed(sorted(parts))}"
                yield Check("adapter-target-twice", "error", where, message, f"leave out {other!r} or {name!r}")


def _sides(target: Target) -> tuple[int, int]:
    return target.product.matrix.shape[-1], target.rows


def _rank(adapter: AdapterSpec, named: _Named) -> Iterator[Check]:
    """The rank is at most the smaller side of each product."""
    found = [target for targets in named.targets.values() for target in targets]
    if not found:
        return
    least = min(found, key=lambda target: min(_sides(target)))
    side, rule, where = min(_sides(least)), "adapter-rank", f"{WHERE}.rank"
    name = least.name.replace(".lora", "")
    if adapter.rank > side:
        inputs, outputs = _sides(least)
        message = f"{adapter.rank} is above the smaller side of {name}, {outputs} x {inputs}"
        yield Check(rule, "error", where, message, f"use at most {side}, or leave out that target")
    else:
        yield Check(rule, "ok", where, f"{adapter.rank} is at most {side}, the smallest side of a target ({name})")


def layout_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The layout and the software can hold adapters and their base."""
    job = draft.job
    adapter, parallel, costs = job.training.adapter, job.parallel, draft.profile.adapters
    if adapter is None:
        return
    if parallel.tensor_mode != "1d" and parallel.tp > 1:
        message = f"{parallel.tensor_mode} has no adapters: A and B would be cut along both sides"
        yield refusal("adapter-tensor-mode", "parallel.tensor_mode", message, Offer("parallel.tensor_mode", ("1d",)))
    if costs.shards_rank and adapter.rank % parallel.tp:
        where, message = f"{WHERE}.rank", f"tp {parallel.tp} does not divide rank {adapter.rank}, which it cuts"
        legal = tuple(k for k in divisors(adapter.rank) if k <= max(64, parallel.tp))
        yield refusal(
            "adapter-rank-divides",
            where,
            f"{message} under {draft.profile.name}",
            Offer("parallel.tp", legal, noun="tp", near=parallel.tp),
            more=f"rank {-(-adapter.rank // parallel.tp) * parallel.tp}",
        )
    if not adapter.is_quantized:
        return
    if parallel.tp > 1 and not costs.quantized_tensor:
        message = f"tp {parallel.tp}, but {draft.profile.name} cannot cut a base in {adapter.stored_as}"
        more = f"{WHERE}.base_precision bf16"
        offer = Offer("parallel.tp", (1,), noun="tp")
        yield refusal("adapter-quantized-tensor", "parallel.tp", message, offer, more=more)
    if parallel.zero == 3 and not costs.shards_quantized:
        message = f"{draft.profile.name} leaves a base in {adapter.stored_as} whole on every rank; the rest is shared"
        hint = "plan for all of it on each device, or use a base in bf16, which is shared"
        yield Check("adapter-unsharded-base", "warning", "parallel.zero", message, hint)


def base_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The kind, data types and frozen parameters fit together."""
    job = draft.job
    adapter = job.training.adapter
    if adapter is None:
        return
    yield from _precision(job, adapter)
    if job.training.freeze:
        message = f"{job.training.freeze} beside an adapter, which freezes all parameters but its own"
        yield Check("adapter-freeze", "error", "training.freeze", message, f"leave it out, or {WHERE}")


def _precision(job: JobSpec, adapter: AdapterSpec) -> Iterator[Check]:
    where, stored, training = f"{WHERE}.base_precision", adapter.stored_as, job.training.chosen_dtype
    if adapter.kind == "qlora" and not adapter.is_quantized:
        message = f"{stored} is not quantised, and qlora is lora over a quantised base"
        yield Check("adapter-qlora-base", "error", where, message, f"use {listed(QUANTIZED)}, or kind lora")
    if adapter.dtype is not None and DTYPE_BYTES[adapter.dtype] < min(4, max(2, DTYPE_BYTES[training])):
        message = f"{adapter.dtype} is narrower than training.dtype {training}, in which A and B are multiplied"
        yield Check("adapter-dtype", "error", f"{WHERE}.dtype", message, "use fp32, or leave it out")
    device = job.cluster.device
    if stored == "fp8" and device is not None and not device.is_cpu and "fp8" not in device.peak_flops:
        message = f"{device.name} has no fp8 rate, so that a base in fp8 has no kernel there"
        yield Check("adapter-fp8-base", "error", where, message, "use int8 or nf4")
