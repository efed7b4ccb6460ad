"""Ways to fine-tune a model: what is trained, by which optimizer, with states on which ranks.

A row of `mpctl fit` is a method and a sharding. Of full fine-tuning the first optimizer of OPTIMIZERS
that fits is taken, so that nobody gets 8-bit moments without need; adapters are too small for it to matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import RuntimeSupport

MethodName = Literal["full", "lora", "qlora"]
METHODS: tuple[MethodName, ...] = ("full", "lora", "qlora")
TITLES: Mapping[str, str] = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
EIGHT_BIT = {"training.optimizer": "adamw-8bit"}
NO_MASTERS = {"training.master_weights": False}
PURE = {**NO_MASTERS, "training.optimizer_dtype": "bf16"}
OPTIMIZERS: tuple[Mapping[str, Any], ...] = ({}, EIGHT_BIT, PURE, {**EIGHT_BIT, **NO_MASTERS})
"""Settings of the optimizer, the runtime's own first, then with ever fewer bytes a parameter."""
OFFLOAD = {"training.offload_optimizer": True, "training.offload_parameters": True}


class Sharding(NamedTuple):
    """A way to place states that people choose by name; FSDP is ZeRO 3. settings: beside its ZeRO stage."""

    name: str
    zero: int
    settings: Mapping[str, Any] = {}


ONE = (Sharding("one GPU", 0), Sharding("one GPU, offload", 3, OFFLOAD))
SEVERAL = (Sharding("DDP", 0), Sharding("ZeRO 2", 2), Sharding("FSDP", 3), Sharding("FSDP, offload", 3, OFFLOAD))


def shardings(runs: RuntimeSupport, world: int) -> list[Sharding]:
    """Return the shardings that a runtime has on so many GPUs, the plainest first.

    >>> [one.name for one in shardings(RuntimeSupport(zero=[0, 3]), 4)]
    ['DDP', 'FSDP', 'FSDP, offload']
    """
    stages = {0, *runs.zero} if world == 1 else {*runs.zero}
    return [one for one in (ONE if world == 1 else SEVERAL) if one.zero in stages]


def optimizers(method: MethodName, given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of the optimizers to try. given: settings that the user chose, which stay."""
    for settings in OPTIMIZERS if method == "full" else OPTIMIZERS[:1]:
        if given.keys().isdisjoint(settings):
            yield settings


def with_training(job: JobSpec, settings: Mapping[str, Any]) -> JobSpec:
    """Return the job with these settings of [training], by full name."""
    values = {name.removeprefix("training."): value for name, value in settings.items()}
    return job.model_copy(update={"training": job.training.model_copy(update=values)}) if values else job


def with_method(job: JobSpec, method: MethodName) -> JobSpec:
    """Return the job, whose adapter is LoRA's, under a method."""
    adapter = job.training.adapter
    assert adapter is not None, "the request has one"
    chosen = None if method == "full" else adapter.model_copy(update={"kind": method})
    return job.model_copy(update={"training": job.training.model_copy(update={"adapter": chosen})})


def optimizer_text(settings: Mapping[str, Any]) -> str:
    """`adamw-8bit, pure bf16`; empty for the runtime's own."""
    words = [str(settings["training.optimizer"])] if "training.optimizer" in settings else []
    return ", ".join([*words, *["pure bf16"] * ("training.master_weights" in settings)])


def parallel_text(layout: LayoutSettings) -> str:
    """`tp 2 pp 4`: the axes that split a model or a sample."""
    axes = {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "ep": layout.ep}
    return " ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
