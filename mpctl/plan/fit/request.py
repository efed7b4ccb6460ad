"""The input of `mpctl fit`: a model, GPUs, the data and prices, read and checked.

The batch of a step is the same in every row, so that rows are of one training: 64 samples, or the next
multiple of the GPUs. Samples are packed: rows of seq_length tokens without padding.

By hand, 1,000 samples of 500 tokens, 3 epochs, rows of 2,048 tokens, batches of 64: 245 rows packed, 4 steps
an epoch; padded 1,000 rows, 16 steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.core.units import count_text, plural
from mpctl.plan.fit.methods import METHODS, MethodName
from mpctl.plan.planning.layout_settings import LayoutSettings, setting_name
from mpctl.plan.rules.validate import find_errors, with_tried_hints
from mpctl.spec.gpus import CLUSTERS, NamedGpus, cluster_of, device_key, find_device, read_gpus
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job

USUAL_LENGTH, BATCH, EPOCHS = 2048, 64, 3
UNIT_TOKENS = 10_000_000
"""Tokens whose hours are shown where nobody says how many there are."""
ANY = "any"
OF_GPUS = ("cluster", "cluster.nodes", "cluster.gpus_per_node")
RUNTIME = "trl"
"""The runtime that most fine-tuners use."""


class FitData(NamedTuple):
    """The training data. tokens: of the whole training, where samples are not known; mean_length: tokens of a
    sample in the mean, None where every sample fills a row; epochs: EPOCHS where nobody says."""

    tokens: int | None = None
    samples: int | None = None
    epochs: int | None = None
    mean_length: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether the user said how much there is."""
        return self.tokens is not None or self.samples is not None

    def steps(self, seq_length: int, batch: int, *, is_packed: bool = True) -> int:
        """Return the steps of the whole training, whose last batch of an epoch may be smaller.

        >>> FitData(samples=1000, mean_length=500).steps(2048, 64)
        12
        """
        if self.samples is None:
            return _up(self.tokens or UNIT_TOKENS, seq_length * batch)
        is_shorter = self.mean_length is not None and is_packed
        rows = _up(self.samples * (self.mean_length or 0), seq_length) if is_shorter else self.samples
        return (self.epochs or EPOCHS) * _up(rows, batch)

    @property
    def text(self) -> str:
        """`50,000 samples x 3 epochs`."""
        if self.samples is None:
            return f"{count_text(self.tokens or UNIT_TOKENS)} tokens"
        return f"{plural(self.samples, 'sample')} x {plural(self.epochs or EPOCHS, 'epoch')}"


@dataclass(frozen=True)
class FitRequest:
    """A checked request. job: complete, with LoRA's adapter, on the GPUs or, for `--gpus any`, on one of them;
    gpus: None for any; settings: that make the job, by full name; given: those that the user chose; prices: of
    a GPU-hour, by cluster preset; length_text: why samples have this length; is_said: whether the software of
    a job takes its settings, which decides on rows of host memory."""

    model: str
    job: JobSpec
    gpus: NamedGpus | None
    settings: Mapping[str, Any]
    given: Mapping[str, Any]
    methods: tuple[MethodName, ...]
    data: FitData
    prices: Mapping[str, float]
    length_text: str
    is_said: Callable[[Mapping[str, Any]], bool] = lambda _: True

    @property
    def seq_length(self) -> int:
        """Tokens of a row."""
        return self.settings["model.seq_length"]  # type: ignore[no-any-return]

    def price(self, preset: str) -> float | None:
        """The price of an hour of a GPU of a cluster preset."""
        return self.prices.get(preset)

    def on(self, gpus: NamedGpus, **changes: Any) -> FitRequest:
        """The same on other GPUs, or with other settings (`model.seq_length`) as changes of the job.
        Raises InputError."""
        batch = batch_of(max(gpus.counts), self.given)
        own = {key: value for key, value in self.settings.items() if key not in OF_GPUS}
        settings = {**own, **gpus.settings, "training.global_batch_size": batch, **changes}
        return replace(self, job=load_job(None, settings), gpus=gpus, settings=settings)

    def with_methods(self, *methods: MethodName) -> FitRequest:
        """The same for other methods."""
        return replace(self, methods=methods)


def read_request(
    model: str,
    gpus: str,
    *,
    data: FitData,
    settings: Mapping[str, Any],
    prices: Sequence[str] = (),
    seq_length: int | None = None,
    methods: Sequence[MethodName] = METHODS,
    cluster: str | None = None,
) -> FitRequest:
    """Read a request. gpus: `4xa100-80gb` or any, or a count of those of `cluster`; settings: of the job, by
    full name; prices: `1.8`, or `a100-80gb=1.8`. Raises InputError."""
    _require_free(settings)
    named = None if gpus == ANY and cluster is None else _named(gpus, cluster)
    first = named or read_gpus("1xh100")
    batch = batch_of(max(first.counts), settings)
    base = {
        "model": model,
        **first.settings,
        "training.runtime": RUNTIME,
        "training.adapter.kind": "lora",
        **settings,
        "training.global_batch_size": batch,
    }
    length, why = _length(base, seq_length)
    if given := settings.get("training.global_batch_size"):
        why = why if seq_length else f"{plural(given, 'row')} as given, tokens {why}"
    elif seq_length:
        why = f"tokens {why}, rows the default"
    _require_data(data, length)
    base["model.seq_length"] = length
    if data.mean_length is not None:  # attention stays inside of a sample
        base["data.chat.mean_length"] = data.mean_length
    priced, job = read_prices(prices, named), load_job(None, base)
    base["training.runtime"] = job.training.runtime  # the preset of a release
    _require_trainable(job)
    return FitRequest(model, job, named, base, settings, tuple(methods), data, priced, why)


def batch_of(gpus: int, given: Mapping[str, Any]) -> int:
    """Return the samples of a step on so many GPUs: those given, or at least BATCH.

    >>> batch_of(4, {}), batch_of(6, {}), batch_of(512, {})
    (64, 66, 512)
    """
    found: int | None = given.get("training.global_batch_size")
    if found is not None and found % gpus:
        below = found // gpus * gpus
        hint = f"use {' or '.join(str(n) for n in (below, below + gpus) if n)}"
        message = f"{found} samples do not divide over {gpus} GPUs"
        raise InputError.of("batch-divides", "--global-batch-size", message, hint)
    return _up(BATCH, gpus) * gpus if found is None else found


def named_gpus(device: str, count: int) -> NamedGpus | None:
    """Return GPUs of a device (`device_names`), None where the count does not fill its nodes."""
    try:
        return read_gpus(f"{count}x{device}")
    except InputError:
        return None


def _require_free(settings: Mapping[str, Any]) -> None:
    """Raises InputError for settings that rows choose, and those that have an option."""
    chosen = {*map(setting_name, LayoutSettings._fields), "training.adapter.kind", "training.adapter"}
    options = {"model": "MODEL", "model.seq_length": "--seq-length", **dict.fromkeys(OF_GPUS, "--gpus or --cluster")}
    for key, value in settings.items():
        if key in chosen:
            message = f"{value!r} is set, and each row chooses its own"
            raise InputError.of("chosen-by-rows", key, message, "leave it out, or use mpctl plan for one layout")
        if option := options.get(key):
            raise InputError.of("has-option", key, "is an option of this command", f"use {option}")


def _named(text: str, cluster: str | None) -> NamedGpus:
    """The GPUs of --gpus, and of --cluster where it has a count alone. Raises InputError."""
    if cluster is not None and not text.strip().isdecimal():
        message = f"{cluster} has the GPUs already, and {text[:40]!r} is no count of them"
        raise InputError.of("bad-gpus", "--gpus", message, "use --gpus 4, say, or leave out --cluster")
    gpus = read_gpus(text)
    if len(gpus.counts) > 1:
        message = f"{text!r} has {len(gpus.counts)} counts"
        raise InputError.of("bad-gpus", "--gpus", message, "give one, or --gpus any for the fewest that fit")
    if cluster is not None:
        per_node = load_job(None, {"cluster": cluster}).cluster.gpus_per_node or 1
        return NamedGpus({"cluster": cluster, **cluster_of(gpus.counts[0], per_node)}, gpus.counts)
    if not gpus.settings:
        message = f"{text} GPUs of which device is not known"
        meant = f"1x{device}" if (device := find_device(text)) else f"{text}xh100"
        raise InputError.of("bad-gpus", "--gpus", message, f"name it: --gpus {meant}, or --cluster NAME with it")
    return gpus


def _length(settings: Mapping[str, Any], wanted: int | None) -> tuple[int, str]:
    """The tokens of a row and why. Raises InputError for more than the model has positions."""
    model = load_job(None, settings).model
    assert model is not None, "it is named"
    most = model.max_positions
    if wanted is None:
        length = min(USUAL_LENGTH, most)
        return length, "the default" if length == USUAL_LENGTH else "all that the model reads"
    if not 1 <= wanted <= most:
        name = model.name or "the model"
        message = f"{wanted:,} tokens, and {name} reads 1 to {most:,}"
        hint = f"use at most {most}, or a model for longer texts; --set model.max_positions=N if it was extended"
        raise InputError.of("longer-than-positions", "--seq-length", message, hint)
    return wanted, "as given"


def _require_trainable(job: JobSpec) -> None:
    """Raises InputError where the rules refuse the model or its adapters, whatever the layout."""
    errors = [check for check in find_errors(job) if check.where.startswith(("model.", "training.adapter"))]
    if errors:
        raise InputError(check.issue for check in with_tried_hints(job, errors))


def _require_data(data: FitData, length: int) -> None:
    """Raises InputError for amounts that are none, or are given twice."""
    counts = {"--samples": data.samples, "--epochs": data.epochs, "--mean-length": data.mean_length}
    for option, count in counts.items():
        if count is not None and not 1 <= count <= 10**12:
            raise InputError.of("bad-value", option, f"{count:,} is not from 1 to 1e12", f"for example {option} 1000")
    if data.tokens is not None and data.samples is not None:
        raise InputError.of("given-twice", "--tokens", "is given with --samples", "leave one of them out")
    if data.epochs is not None and data.samples is None:
        raise InputError.of("no-samples", "--epochs", "are of samples, and none are given", "add --samples N")
    if data.mean_length is not None and data.samples is None:
        raise InputError.of("no-samples", "--mean-length", "is of samples, and none are given", "add --samples N")
    if data.mean_length is not None and data.mean_length > length:
        message = f"{data.mean_length:,} tokens, and --seq-length cuts samples at {length:,}"
        raise InputError.of("longer-than-rows", "--mean-length", message, "use a longer --seq-length")


def read_prices(texts: Sequence[str], named: NamedGpus | None) -> dict[str, float]:
    """Return the price of a GPU-hour by cluster preset. named: the GPUs that a number alone is the price of.

    >>> read_prices(["a100-80gb=1.8", "h100=2.5"], None)
    {'dgx-a100': 1.8, 'dgx-h100': 2.5}
    """
    prices = {}
    for text in texts:
        device, _, amount = text.rpartition("=")
        try:
            price = float(amount)
        except ValueError:
            price = -1.0
        if not (isfinite(price) and 0 < price <= 1e6):
            message = f"{text[:40]!r} is no price of a GPU-hour above 0"
            raise InputError.of("bad-price", "--price", message, "for example --price 1.8 or --price a100-80gb=1.8")
        if not device and named is None:
            message = f"{text[:40]!r} is the price of which GPU?"
            raise InputError.of("bad-price", "--price", message, "for example --price a100-80gb=1.8 --price h100=2.5")
        own = named.settings["cluster"] if named is not None else ""
        prices[CLUSTERS[device_key(device, "--price")] if device else own] = price
    return prices


def _up(amount: int, unit: int) -> int:
    return -(-amount // unit)
