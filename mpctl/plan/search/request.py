"""A search request: the job, fixed settings, bounds, numbers of GPUs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mpctl.core.axes import FILLING
from mpctl.core.errors import InputError, Issue
from mpctl.plan.planning.layout_settings import LayoutSettings, setting_name
from mpctl.plan.planning.whole_run import power_of_gpu
from mpctl.plan.search.space import SearchSpace
from mpctl.spec.gpus import cluster_of
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.load import Source, load_partial, parse_settings, require_job
from mpctl.spec.names import full_names

if TYPE_CHECKING:
    from mpctl.spec.presets import PresetFile

FIELDS = LayoutSettings._fields
SETTINGS = {setting_name(name): name for name in FIELDS}
CUTS = ("first_stage_layers", "last_stage_layers")
OVER_COUNTS = ("cost", "days", "energy")
"""Objectives that compare numbers of GPUs."""


@dataclass(frozen=True)
class SearchRequest:
    """The input of a search.

    job: complete. typed: every setting that overrides it. fixed: the fields of a layout among
    those, which the search does not vary. largest: fields with the largest value that is tried.
    warnings: keys of the job under a former name. price: of a GPU-hour, if known. gives_layout:
    whether the job sets a searched setting of its layout; if not, its layout has defaults only and
    is not reported. tokens: of the run whose days and cost are wanted. presets: the user's presets that the job
    starts from. opens_batch: whether the job says no global batch, so that the search has the one of its own sizes.
    """

    job: JobSpec
    typed: dict[str, Any]
    fixed: dict[str, Any]
    largest: dict[str, int]
    warnings: tuple[Issue, ...] = ()
    price: float | None = None
    gives_layout: bool = True
    tokens: int | None = None
    presets: tuple[PresetFile, ...] = ()
    opens_batch: bool = False

    def space(self, gpus: int | None = None) -> SearchSpace:
        """The layouts to search, on the job's number of GPUs or on another."""
        job = self.job if gpus in (None, self.job.world_size) else with_gpus(self.job, gpus)
        return SearchSpace(job, self.fixed, self.largest)


def read_request(
    source: Source,
    overrides: Mapping[str, Any],
    fix: Sequence[str],
    largest: Mapping[str, int],
    price: float | None = None,
    tokens: int | None = None,
    read: Mapping[str, Any] = MappingProxyType({}),
) -> SearchRequest:
    """The request of a command line: settings of `overrides` and `fix` (`["tp=2"]`) that are fields
    of a layout are fixed, as is a tensor mode other than 1d that the job sets; any other setting
    changes the job. read: settings of another launcher's script, which fix nothing. Raises
    InputError."""
    typed = {**full_names(overrides), **parse_settings(fix, "--fix")}
    cuts = {f"parallel.{key}" for key in CUTS}
    loaded = load_partial(source, {**{key: read[key] for key in read if key not in cuts}, **typed})
    job = require_job(loaded)
    fixed = {SETTINGS[key]: _value(job, key) for key in typed if key in SETTINGS}
    fixed = {**_own_mode(job, fixed), **fixed}
    _require_searchable(job)
    if price is None:
        price = job.cluster.operations.price_per_gpu_hour
    given = _gives_layout(job, {*fixed, *(SETTINGS.get(key) for key in loaded.open_settings)})
    opens = "training.global_batch_size" in loaded.open_settings
    return SearchRequest(job, typed, fixed, dict(largest), loaded.warnings, price, given, tokens, loaded.presets, opens)


def _gives_layout(job: JobSpec, except_: Container[str | None]) -> bool:
    tables = {"parallel": job.parallel.model_fields_set, "training": job.training.model_fields_set}
    names = (name for name in FIELDS if name not in except_)
    return any(key in tables[table] for table, key in (setting_name(n).split(".") for n in names))


def _own_mode(job: JobSpec, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The tensor mode of a job that sets another than 1d, with the depth that it sets."""
    p = job.parallel
    if p.tensor_mode == "1d" or "tensor_mode" in fixed:
        return {}
    depth = {"tensor_depth": p.tensor_depth} if p.tensor_depth else {}
    return {"tensor_mode": p.tensor_mode, **depth}


def _value(job: JobSpec, where: str) -> Any:
    table, key = where.split(".")
    return getattr(getattr(job, table), key)


def _require_searchable(job: JobSpec) -> None:
    if job.model is None:
        raise InputError.of("no-model", "model", "a search needs a model", "use --model gpt2, say")
    if job.cluster.device is None:
        raise InputError.of(
            "no-device",
            "cluster.device",
            "a search needs a device's figures",
            "use --cluster selene, say; `mpctl presets` lists all",
        )
    for key in CUTS:
        if getattr(job.parallel, key) is not None:
            raise InputError.of(
                "cut-is-searched", f"parallel.{key}", "is given, and the search cuts the layers itself", "leave it out"
            )


def require_answerable(request: SearchRequest, objective: str) -> None:
    """Raises InputError for days or energy without tokens, and for energy without power."""
    if objective not in ("days", "energy"):
        return
    if request.tokens is None:
        message = f"{objective} are of a run" if objective == "days" else "energy is of a run"
        raise InputError.of("no-tokens", "--tokens", f"{message} of so many tokens", "name them: --tokens 1T, say")
    if objective == "energy" and power_of_gpu(request.job.cluster) is None:
        raise InputError.of(
            "no-power", "cluster.operations.watts_per_gpu", "no power is known", "set it, or cluster.device.watts"
        )


def varied(space: SearchSpace) -> list[str]:
    """The fields of a layout that take more than one value in the space. Member settings are read
    from one family of each choice of axis sizes, to avoid generating every layout."""

    every = [((axes.pp, space.microbatches(axes)), axes) for axes in space.axes()]
    pipelines = {key: list(space.pipelines(*key)) for key in {key for key, _ in every}}
    families = [axes for key, axes in every if pipelines[key]]
    values: dict[str, set[Any]] = {name: set(map(itemgetter(at), families)) for at, name in enumerate(FIELDS)}
    for at, name in enumerate(("vpp", "schedule", "stage_balance")):
        values[name] = {cut[at] for cuts in pipelines.values() for cut in cuts}
    of_sizes = {family.rank_sizes: family for family in families}
    for setting in space.member_settings:
        values[setting.name] = {v for f in of_sizes.values() for v in setting.values(space, f)}
    values["zero_size"] = {
        size
        for family in of_sizes.values()
        for zero, order in product(space.zero_stages(family), space.orders(family))
        for size in space.zero_sizes(family._replace(zero=zero, order=order))
    }
    if space.tries_overlap and any(family.ep > 1 for family in families):
        values["moe_overlap"] = {False, True}
    return [name for name in FIELDS if len(values[name]) > 1]


def with_gpus(job: JobSpec, gpus: int) -> JobSpec:
    """The complete job on `gpus` GPUs of its cluster: part of a node, or full nodes. Raises
    InputError where they do not fill nodes."""
    per_node = job.cluster.gpus_per_node or 1
    size = {key.removeprefix("cluster."): count for key, count in cluster_of(gpus, per_node).items()}
    cluster = job.cluster.model_copy(update=size)
    free = job.parallel.model_copy(update={FILLING: None})
    return complete(job.model_copy(update={"cluster": cluster, "parallel": free}))


def gpu_counts(gpus: str | Sequence[int] | None, objective: str, job: JobSpec) -> list[int]:
    """The numbers of GPUs to search, rising: those of `gpus`, as numbers or as text (`8,16,32`); for
    `all`, powers of two up to the cluster's number, and that. Without `gpus`, `all` for the objectives
    cost, days and energy, else the cluster's number. Raises InputError."""
    if gpus is None and objective not in OVER_COUNTS:
        return [job.world_size]
    if gpus in (None, "all"):
        return sorted({*(1 << k for k in range(job.world_size.bit_length())), job.world_size})
    try:
        given = [int(word) for word in gpus.split(",")] if isinstance(gpus, str) else [*(gpus or ())]
    except (ValueError, TypeError):
        given = []
    counts = sorted({count for count in given if isinstance(count, int)})
    if not counts or counts[0] < 1 or not all(isinstance(count, int) for count in given):
        raise InputError.of(
            "bad-gpus", "--gpus", f"{gpus!r} is not a list of counts", "for example --gpus 8,16,32, or --gpus all"
        )
    return counts
