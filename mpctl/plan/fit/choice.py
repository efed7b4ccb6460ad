"""A row on its GPUs, with the hours and the price of the data; and which of several rows to advise.

Hours are steps times the planned seconds of one: without loading, saving and validation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mpctl.core.errors import InputError
from mpctl.core.units import bytes_text, part_text
from mpctl.plan.estimate.kernels import MissingFigure
from mpctl.plan.fit.methods import OFFLOAD, TITLES
from mpctl.plan.fit.request import FitRequest
from mpctl.plan.fit.rows import FitEvaluator, FitRow
from mpctl.spec.gpus import device_names

NUMBERS = ("", "one", "two", "three", "four")
MAKERS = ("NVIDIA ", "GeForce ", "AMD ", "Instinct ")


@dataclass(frozen=True)
class FitChoice:
    """A row of a request, whose GPUs are named."""

    request: FitRequest
    row: FitRow

    @property
    def gpus(self) -> int:
        """How many GPUs."""
        return self.row.job.world_size

    @property
    def device(self) -> str:
        """The device's name without its maker's and what is in brackets."""
        device = self.row.job.cluster.device
        name = device.name.partition(" (")[0] if device else "GPU"
        for word in MAKERS:
            name = name.removeprefix(word)
        return name

    @property
    def place(self) -> str:
        """`one RTX 4090`, `64 H100-SXM5-80GB`."""
        count = NUMBERS[self.gpus] if self.gpus < len(NUMBERS) else f"{self.gpus:,}"
        return f"{count} {self.device}"

    @property
    def title(self) -> str:
        """`LoRA rank 16`, `full fine-tuning`."""
        adapter = self.row.job.training.adapter
        return f"{TITLES[self.row.method]} rank {adapter.rank}" if adapter else "full fine-tuning"

    @property
    def memory_text(self) -> str:
        """`11.2 of 24.0 GiB`."""
        device = self.row.job.cluster.device
        return part_text(self.row.bytes, device.memory_bytes if device else 0)

    @property
    def host_text(self) -> str:
        """`68.2 GiB`, or `68.2 of 64.0 GiB`, of a host; empty where nothing waits there."""
        size, have = self.row.host_bytes, self.row.job.cluster.host_memory
        return "" if not size else bytes_text(size) if have is None else part_text(size, have)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a job that plans this row, by full name."""
        own = dict(self.request.settings)
        if self.row.method == "full":
            own = {key: value for key, value in own.items() if not key.startswith("training.adapter")}
        steps = {"training.steps": self.steps} if self.request.data.is_given else {}
        return {**own, **self.row.settings, **steps}

    @property
    def steps(self) -> int:
        """Steps of the whole training."""
        return self.request.data.steps(self.request.seq_length, self.row.job.training.global_batch_size or 1)

    @property
    def hours(self) -> float | None:
        """Hours of the whole training; None where the row does not fit."""
        time = self.row.time
        return None if time is None else self.steps * time.total / 3600

    @property
    def price(self) -> float | None:
        """The price of these hours, in the currency of the prices given; None where none is known."""
        assert self.request.gpus is not None, "a choice is of named GPUs"
        hourly = self.request.price(self.request.gpus.settings.get("cluster", ""))
        return None if hourly is None or self.hours is None else hourly * self.gpus * self.hours

    @property
    def gpus_text(self) -> str:
        """`4xa100-80gb`, as --gpus takes it; a cluster of another preset by its own name."""
        assert self.request.gpus is not None, "a choice is of named GPUs"
        preset = self.request.gpus.settings["cluster"]
        name = next((device for device, known in device_names().items() if known == preset), preset)
        return f"{self.gpus}x{name}"


def choices(request: FitRequest) -> list[FitChoice]:
    """Return every row of a request on its own GPUs, of host memory those that its software takes. Raises InputError
    where no time can be stated."""
    try:
        rows = list(FitEvaluator(request.job, request.given).rows(request.methods))
    except MissingFigure as error:
        hint = "use another data type, or another GPU"
        raise InputError.of("no-rate", "training.dtype", str(error), hint) from None
    found = [FitChoice(request, row) for row in rows]
    return [one for one in found if OFFLOAD.keys().isdisjoint(one.row.settings) or request.is_said(one.settings)]


def advised(found: Iterable[FitChoice]) -> FitChoice | None:
    """Return the row to use: LoRA where it fits the GPUs, else QLoRA, else the fastest that fits; None if none
    does. Of the rows of a method the fastest; the first of those that are as fast is the plainest."""
    fitting = [one for one in found if one.row.fits]
    plain = [one for one in fitting if not one.row.offloads]
    for method in ("lora", "qlora"):
        if own := [one for one in plain if one.row.method == method]:
            return fastest(own)
    return fastest(plain or fitting) if fitting else None


def fastest(found: Iterable[FitChoice]) -> FitChoice:
    """Return the fastest row, or an earlier one that is slower by less than two percent."""
    every = list(found)
    most = max(one.row.tokens_per_second for one in every)
    return next(one for one in every if one.row.tokens_per_second >= 0.98 * most)
