"""Text for a fit of own runs: figures that moved and their uncertainty, aspects that no run covers, and
the most informative next run.

A figure is reported if its shift, or the root of 1 - variance (the uncertainty that the fit removed),
changes the steps of these runs by LEAST or more. The report gives its value, the bounds of nine of ten
cases, its value before, and what it adds to a step.

By hand, steps change by 3 % for a standard deviation of a figure's prior, of which 0.6 are left:
3 % x 0.8 = 2.4 %, reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, expm1, inf, log, sqrt
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.errors import Issue, IssueEntry
from mpctl.core.units import plural, seconds_text
from mpctl.measure.calibrate.outside import OutsideRun
from mpctl.measure.calibrate.own_fit import FreeFigure, OwnFit
from mpctl.measure.calibrate.runs import FARTHEST, Run
from mpctl.plan.estimate.step import QUANTILE
from mpctl.plan.estimate.system import unknown_parts
from mpctl.plan.rules.check import listed
from mpctl.spec.presets import PresetReader

LEAST = 0.01  # of a step
ODD = 0.25  # weight of a run, beside 1.25 of a typical one: four times the noise away
LARGE = 2.0  # a factor that is not said in percent
MOST_LINES = 8


class _Words(NamedTuple):
    """Phrase for a figure and its format: part (a fraction), seconds, times (relative to the previous
    figure), figure."""

    text: str
    form: str


WORDS = {
    "intra_node.efficiency": _Words("messages inside a node reach {} of the link", "part"),
    "intra_node.start": _Words("a collective inside a node starts after {}", "seconds"),
    "intra_node.latency": _Words("a message's latency inside a node is {}", "seconds"),
    "inter_node.efficiency": _Words("messages between nodes reach {} of the link", "part"),
    "inter_node.start": _Words("a collective between nodes starts after {}", "seconds"),
    "inter_node.latency": _Words("a message's latency between nodes is {}", "seconds"),
    "inter_node.decay": _Words("a collective's bandwidth falls with its nodes by the power {}", "figure"),
    "kernels.products": _Words("large matrix products reach {} of the peak", "part"),
    "kernels.memory": _Words("kernels reach {} of the memory's bandwidth", "part"),
    "kernels.flash": _Words("attention's forward reaches {} of the peak", "part"),
    "kernels.flash_backward": _Words("attention's backward reaches {} of the peak", "part"),
    "kernels.misaligned": _Words("products of sides that 64 does not divide run at {}", "part"),
    "kernels.unaligned": _Words("products of sides that 8 does not divide run at {}", "part"),
    "kernels.depth": _Words("a product's tile costs {} more elements of depth", "figure"),
    "kernels.waves": _Words("{} of a product's unfilled last wave is lost", "part"),
    "kernels.launch": _Words("a kernel takes at least {}", "seconds"),
    "kernels.host": _Words("the host takes {} times the profile's seconds", "figure"),
    "operators.passes": _Words("kernels between products move {} times the bytes", "times"),
    "operators.gradient_bytes": _Words("adding up a gradient moves {} bytes", "figure"),
    "operators.optimizer_bytes": _Words("the optimizer moves {} bytes a parameter", "figure"),
    "operators.cast_bytes": _Words("a cast moves {} bytes an element", "figure"),
    "overlap.tp": _Words("{} of the sums over tp hides behind products", "part"),
    "overlap.products": _Words("{} of the gathers over tp hides behind products", "part"),
    "overlap.pp": _Words("{} of messages between stages hides behind work", "part"),
    "overlap.dp": _Words("{} of the gradients hides behind the backward", "part"),
    "overlap.gather": _Words("{} of gathered parameters hides behind the forward", "part"),
    "overlap.zero": _Words("{} of ZeRO 3's messages hides behind work", "part"),
    "overlap.cp": _Words("{} of messages over cp hides behind attention", "part"),
    "overlap.drag": _Words("messages slow down what hides them by {}", "part"),
    "host.layer": _Words("the host takes {} for a layer's forward", "seconds"),
    "host.split": _Words("the host takes {} more for a layer split over tp", "seconds"),
    "host.rank_in_pipeline": _Words("a layer takes {} more for each rank of tp in a pipeline across nodes", "seconds"),
    "host.micro_batch": _Words("the host takes {} for a micro batch", "seconds"),
    "host.message": _Words("the host takes {} at each end of a hand-over", "seconds"),
    "host.sync": _Words("a layer at tp 8 takes {} more for ranks that wait", "seconds"),
    "host.step": _Words("the host takes {} once a step", "seconds"),
    "experts.grouped": _Words("products of several experts run at {} of single ones", "part"),
    "experts.wait": _Words("a layer waits {} for the rows of its experts", "seconds"),
    "experts.exchange": _Words("exchanges of rows reach {} of the link", "part"),
    "experts.once": _Words("exchanges that send once reach {} of the link", "part"),
}

# What runs may have had none of: words for it, how to have it, whether a run has it.
ASPECTS: tuple[tuple[str, str, Callable[[Run], bool]], ...] = (
    ("tensor parallelism", "parallel.tp above 1", lambda run: run.job.parallel.tp > 1),
    ("pipelines", "parallel.pp above 1", lambda run: run.job.parallel.pp > 1),
    ("replicas", "parallel.dp above 1", lambda run: run.job.sizes["dp"] > 1),
    ("several nodes", "two nodes or more", lambda run: _nodes(run) > 1),
)


class FigureRow(TypedDict):
    """A figure that may have moved: its preset, as KIND/NAME, and key; its values before and after,
    and the bounds of nine of ten cases."""

    preset: str
    key: str
    before: float
    value: float
    low: float
    high: float


class WrittenPresets(NamedTuple):
    """Presets that were written. reader: who reads the folder from now on; None: nobody, unless MPCTL_PRESETS
    names it."""

    folder: Path
    paths: Sequence[Path]
    reader: PresetReader | None


class OwnDocument(TypedDict):
    """Output of `mpctl calibrate --json`. presets: files written; read_by: who reads them from now on without
    naming them in MPCTL_PRESETS; unusable: rows that could not be planned, with the reason; outside: runs
    outside the band of their plans under the presets before the fit; errors: relative errors of each run's
    estimate, before the fit, after it, and with the run left out; band: by runtime, the factor that covers
    nine of ten future runs."""

    schema: Literal["mpctl.calibrate/1"]
    presets: list[str]
    read_by: PresetReader | None
    unusable: list[IssueEntry]
    outside: list[OutsideRun]
    errors: dict[str, dict[str, float]]
    band: dict[str, float]
    doubts: list[str]
    learnt: list[str]
    telling: list[str]
    figures: list[FigureRow]


def own_document(
    fit: OwnFit, written: WrittenPresets, unusable: Sequence[Issue], outside: Sequence[OutsideRun]
) -> OwnDocument:
    """The fit as a document."""
    columns = {"before": fit.before, "fitted": fit.fitted, "left_out": fit.left_out}
    return {
        "schema": "mpctl.calibrate/1",
        "presets": list(map(str, written.paths)),
        "read_by": written.reader,
        "unusable": [issue.as_dict() for issue in unusable],
        "outside": list(outside),
        "errors": {
            name: {run: expm1(sum(own) / len(own)) for run, own in column.items()} for name, column in columns.items()
        },
        "band": {name: exp(QUANTILE * spread) for name, spread in fit.spreads.items()},
        "doubts": list(fit.doubts),
        "learnt": list(fit.learnt),
        "telling": list(fit.telling),
        "figures": [_row(fit, i) for i in range(len(fit.figures))],
    }


def _row(fit: OwnFit, number: int) -> FigureRow:
    figure, shift = fit.figures[number], fit.posterior.shifts[number]
    reach = QUANTILE * sqrt(fit.posterior.covariance[number][number])
    return {
        "preset": f"{figure.constant.kind}/{figure.constant.name}",
        "key": figure.key,
        "before": figure.start,
        "value": figure.value(shift),
        "low": figure.value(shift - reach),
        "high": figure.value(shift + reach),
    }


def _nodes(run: Run) -> int:
    topology = run.layout.topology
    return -(-topology.world_size // topology.gpus_per_node)


def doubt_words(fit: OwnFit) -> list[str]:
    """A line for each run so far from what a fit to the others says that it hardly counts."""
    odd: dict[str, float] = {}
    for at, weight, error in zip(fit.owners, fit.posterior.weights, fit.posterior.left_out, strict=True):
        if weight < ODD:
            odd.setdefault(fit.runs[at].id, -error)
    return [
        f"{name} took {_change_text(expm1(off))} a fit to the others says, and hardly counts"
        for name, off in odd.items()
    ]


def learnt_words(fit: OwnFit) -> list[str]:
    """One line for each figure that the runs told something of, what tells most of their steps
    first, and one of what no run tells."""
    lines: list[tuple[float, str]] = []
    for i, figure in enumerate(fit.figures):
        shift, variance = fit.posterior.shifts[i], fit.posterior.covariance[i][i]
        slopes = [row[i] for row in fit.slopes]
        told = fmean(map(abs, slopes)) * max(abs(shift), sqrt(max(1 - variance, 0.0)))
        if figure.path == "step_factor":
            lines.append((inf, _factor_text(figure, shift, sqrt(variance))))
        elif figure.constant.layers is None and told >= LEAST and _is_moved(figure, shift):
            added = expm1(fmean(slopes) * shift)
            lines.append((told, _figure_text(figure, shift, sqrt(variance), added)))
    lines.sort(key=lambda line: -line[0])
    words = [text for _, text in lines[:MOST_LINES]] + _layer_words(fit)
    words += _elsewhere_words(fit)
    missing = [name for name, _, has in ASPECTS if not any(map(has, fit.runs))]
    if missing:
        count = plural(len(fit.runs), "run")
        says = "says" if len(fit.runs) == 1 else "say"
        words.append(f"{count} {says} nothing of {listed(missing)}")
    return words


def _elsewhere_words(fit: OwnFit) -> list[str]:
    """Describe how the presets of this fit change plans for other clusters."""
    pairs = zip(fit.figures, fit.posterior.shifts, strict=True)
    shared = {
        figure.constant.name
        for figure, shift in pairs
        if figure.constant.kind != "clusters" and figure.constant.layers is None and _is_moved(figure, shift)
    }
    words = []
    if shared:
        words.append(
            f"figures of {' and '.join(sorted(shared))} moved: under the presets of this "
            "fit plans on other clusters move with them"
        )
    for name in dict.fromkeys(run.parts["runtimes"] for run in fit.runs):
        own = [run for run in fit.runs if run.parts["runtimes"] == name]
        forgotten = set(own[0].profile.seen.clusters) - {run.job.cluster.name for run in own}
        if forgotten and is_elsewhere(own):
            others = plural(len(forgotten), "cluster")
            words.append(
                f"{name} then counts as measured on these runs' clusters alone, and no "
                f"longer on {others} that its preset names"
            )
    return words


def is_elsewhere(runs: Sequence[Run]) -> bool:
    """Whether the profile of these runs had not been measured on a system of theirs."""
    return any(unknown_parts(run.job.cluster, run.profile) for run in runs)


def _layer_words(fit: OwnFit) -> list[str]:
    """One line of the factors on layers, where they differ from 1 by LEAST or more."""
    found = sorted(
        (value / figure.start, figure.constant.layers[1])
        for figure, value in zip(fit.figures, fit.values.values(), strict=True)
        if figure.constant.layers
    )
    moved = [one for one in found if abs(one[0] - 1) >= LEAST]
    if not moved:
        return []
    ends = dict.fromkeys((moved[0], moved[-1]))
    takes = " to ".join(f"{factor:.2f} times ({shape})" for factor, shape in ends)
    shapes = plural(len(moved), "shape")
    return [f"beside these figures, layers of {shapes} on a rank take {takes} as long"]


def _is_moved(figure: FreeFigure, shift: float) -> bool:
    return abs(figure.value(shift) - figure.start) > 1e-3 * abs(figure.start)


def _factor_text(figure: FreeFigure, shift: float, sure: float) -> str:
    value = figure.value(shift)
    band = band_text(figure.constant.slack * sure)
    return (
        f"{figure.constant.name}: everything takes {_change_text(value - 1)} the presets' "
        f"figures say "
        f"(factor {value:.3g}, {band}; before: {figure.start:.3g})"
    )


def band_text(spread: float) -> str:
    """Nine of ten cases of this spread: `+-18 %`, or beyond 100 % a factor."""
    factor = exp(min(QUANTILE * spread, log(FARTHEST)))
    return f"+-{_percent(factor - 1)}" if factor <= LARGE else f"a factor of {factor:.1f}"


def _change_text(change: float) -> str:
    """`0.35` -> `35 % longer than`, `4` -> `5.0 times as long as`."""
    if change > LARGE - 1:
        return f"{change + 1:.1f} times as long as"
    share = _percent(abs(change))
    return f"{share} {'longer' if change > 0 else 'less'} than" if share != "0 %" else "as long as"


def _figure_text(figure: FreeFigure, shift: float, sure: float, added: float) -> str:
    words = WORDS.get(figure.path, _Words(f"{figure.path} is {{}}", "figure"))
    reach = QUANTILE * sure
    low, value, high, before = (
        _form(number, words.form)
        for number in (figure.value(shift - reach), figure.value(shift), figure.value(shift + reach), figure.start)
    )
    effect = f"; steps {100 * added:+.0f} %" if abs(added) >= LEAST / 2 else ""
    return f"{figure.constant.name}: {words.text.format(value)} ({low} to {high}; before: {before}{effect})"


def _form(value: float, form: str) -> str:
    if form == "part":
        return _percent(value)
    return seconds_text(value) if form == "seconds" else f"{value:.3g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def telling_words(fit: OwnFit) -> list[str]:
    """Suggest what to run next: aspects that no run covers, then a layout like the least certain one
    with its run left out, then the figure that causes most of that uncertainty."""
    words = [
        f"a run with {way}: nothing is known of {name} here"
        for name, way, has in ASPECTS
        if not any(map(has, fit.runs))
    ]
    posterior = fit.posterior
    at = max(range(len(posterior.unsure)), key=posterior.unsure.__getitem__)
    run = fit.runs[fit.owners[at]]
    band = band_text(sqrt(posterior.unsure[at]))
    words.append(f"another run like {run.id} ({_layout(run)}), which the others estimate to {band}")
    due = [abs(slope) * sqrt(posterior.covariance[i][i]) for i, slope in enumerate(fit.slopes[at])]
    figure = fit.figures[max(range(len(due)), key=due.__getitem__)]
    words.append(f"least sure of what it needs: {figure.constant.name}'s {figure.key}")
    return words


def _layout(run: Run) -> str:
    parallel = run.job.parallel
    sizes = (f"{name} {size}" for name, size in (("tp", parallel.tp), ("pp", parallel.pp), ("dp", run.job.sizes["dp"])))
    return ", ".join((*sizes, f"micro batches of {run.job.training.micro_batch_size}"))
