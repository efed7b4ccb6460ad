"""Curves as a picture, PNG or SVG, by matplotlib: nothing of it needs a display."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from mpctl.errors import InputError
from mpctl.render.curves import axis_of, legend, mean, whose, window, y_axis
from mpctl.runs.show import Series

# Okabe and Ito's colours, which readers with any colour vision tell apart; styles tell them apart
# in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
SUFFIXES = (".png", ".svg")
SETTINGS: Any = {"svg.hashsalt": "mpctl", "svg.fonttype": "none", "font.size": 10.0,
                 "axes.spines.top": False, "axes.spines.right": False,
                 "text.parse_math": False}  # fmt: skip
"""How matplotlib draws: no word is taken for a formula, one figure always gives the same bytes."""
FEW = 40  # points, up to which each is marked


def check_picture(path: Path) -> None:
    """Raises InputError unless a picture can be written there."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError.of("bad-suffix", "--out", f"{path} is neither PNG nor SVG",
                            f"end its name in {' or '.join(SUFFIXES)}")  # fmt: skip
    if not has_matplotlib():
        raise InputError.of("extra-missing", "--out", "the package matplotlib is not installed",
                            "pip install 'mpctl[plot]', or leave --out away to draw in the "
                            "terminal")  # fmt: skip


def has_matplotlib() -> bool:
    """Whether the package matplotlib can be imported; it is not imported here."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:
        return False


def write_picture(path: Path, series: Sequence[Series], x: str) -> None:
    """Write the curves as PNG or SVG, by the suffix of path. x: the metric of the horizontal axis.

    Raises InputError where the file cannot be written.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=(8.0, 4.5), dpi=150, layout="constrained")
        _draw(figure, series, x)
        save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure of matplotlib, always with the same bytes. Raises InputError where the file
    cannot be written."""
    try:
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        with catch_warnings():
            simplefilter("ignore", UserWarning)  # a letter that the font lacks is drawn as a box
            figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise InputError.of("unwritable", "--out", f"{path}: {error.strerror or error}",
                            "name a file in a folder that exists") from None  # fmt: skip


def _draw(figure: Any, series: Sequence[Series], x: str) -> None:
    from matplotlib.ticker import MaxNLocator

    across, up = axis_of(x, (v for s in series for v in s.x)), y_axis(series)
    axes = figure.subplots()
    for one, name, (colour, style) in zip(series, legend(series), _looks(series), strict=True):
        _draw_curve(axes, across.scaled(one.x), up.scaled(one.y), name, colour, style)
    axes.set(xlabel=across.label, ylabel=up.label)
    axes.set_title(f"{up.name} of {whose(series)}", loc="left", fontweight="bold")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=x == "step"))
    axes.grid(alpha=0.3, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    averaged = max(window(len(s.x)) for s in series)
    if len(series) > 1 or averaged > 1:
        words = f"bold: mean of {averaged} points" if averaged > 1 else None
        axes.legend(title=words, title_fontsize="small", framealpha=0.85, edgecolor="none")


def _draw_curve(
    axes: Any, xs: list[float], ys: list[float], name: str, colour: str, style: str
) -> None:
    """A long curve as its running mean over a pale one of every point."""
    count = window(len(xs))
    if count > 1:
        axes.plot(xs, ys, color=colour, alpha=0.25, linewidth=0.6)
    axes.plot(xs, mean(ys, count), label=name, color=colour, linestyle=style, linewidth=1.6,
              marker="o" if len(xs) <= FEW else None, markersize=3.0)  # fmt: skip


def _looks(series: Sequence[Series]) -> list[tuple[str, str]]:
    """Colour and style of each curve: runs differ in colour and metrics in style, or metrics in
    colour where there is one run."""
    runs, metrics = (list(dict.fromkeys(names)) for names in
                     ((s.run for s in series), (s.metric for s in series)))  # fmt: skip
    places = [(runs.index(s.run), metrics.index(s.metric)) for s in series]
    if len(runs) == 1:
        places = [(metric, 0) for _, metric in places]
    return [(COLOURS[c % len(COLOURS)], STYLES[(s + c // len(COLOURS)) % len(STYLES)])
            for c, s in places]  # fmt: skip
