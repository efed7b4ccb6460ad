"""Curves drawn in the terminal with plotext: as wide as it is, in ASCII where it knows no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from mpctl.render.console import get_console
from mpctl.render.curves import PlotAxis, axis_of, legend, mean, ticks, whose, window, y_axis
from mpctl.runs.series import Series

COLOURS = ("blue+", "orange+", "green+", "magenta+", "cyan+", "red+")
RICH = ("bright_blue", "bright_yellow", "bright_green", "bright_magenta", "bright_cyan",
        "bright_red")  # fmt: skip
SIGNS = "*o+x#@%&"
LINES = str.maketrans("┌┐└┘┬┴├┤┼─│", "+++++++++-|")
POINTS = 1000  # of a curve at most: more than a terminal is wide
HEIGHT, LEAST = 22, (30, 8)


def print_plot(series: Sequence[Series], x: str) -> None:
    """Print curves on stdout, as wide as the terminal."""
    console = get_console()
    shown = console.is_terminal
    width = max(LEAST[0], console.width)
    height = max(LEAST[1], min(HEIGHT, console.height - 4) if shown else HEIGHT)
    coloured = console.color_system is not None and not console.no_color
    text = plot_text(series, x, width=width, height=height, coloured=coloured,
                     ascii_only=console.options.ascii_only)  # fmt: skip
    console.width = width
    console.print(text, no_wrap=True, overflow="crop")


def plot_text(
    series: Sequence[Series], x: str, *, width: int, height: int, coloured: bool, ascii_only: bool
) -> Text:
    """The curves, and below them a line for each that names it. Curves differ by colour, or where
    there is none by the signs that draw them. width, height: in characters.
    """
    across, up = axis_of(x, (v for s in series for v in s.x)), y_axis(series)
    fine = not ascii_only and (coloured or len(series) == 1)
    signs = ["braille" if fine else SIGNS[n % len(SIGNS)] for n in range(len(series))]
    drawn = _draw(series, across, up, signs, (width, height)).string(colorless=not coloured)
    drawn = drawn.translate(LINES) if ascii_only else drawn
    parts: list[Any] = [
        (f"{up.label} of {whose(series)}", "bold"),
        "\n",
        Text.from_ansi(drawn.rstrip("\n")),
    ]
    for number, name in enumerate(legend(series)):
        mark = "-" if ascii_only and fine else "──" if fine else signs[number] * 2
        parts += ["\n  ", (mark, RICH[number % len(RICH)] if coloured else ""), f" {name}"]
    return Text.assemble(*parts)


def _draw(
    series: Sequence[Series],
    across: PlotAxis,
    up: PlotAxis,
    signs: list[str],
    size: tuple[int, int],
) -> Any:
    """A plotext matrix."""
    import plotext as untyped

    plotext: Any = untyped
    plotext.terminal.limit(False, False)  # the size is ours to choose
    figure: Any = type(plotext.figure)(plotext.terminal)
    figure.plot_size(*size).theme("colorless").legend(False).label(across.label, axis="x")
    for number, one in enumerate(series):
        colour = plotext.pixel(foreground=COLOURS[number % len(COLOURS)])
        marker = plotext.marker(signs[number], colour)
        every = max(1, len(one.y) // POINTS)
        ys = mean(up.scaled(one.y), window(len(one.y)))[::every]
        curve = figure.signal(across.scaled(one.x)[::every], ys, marker=marker)
        figure.draw(curve.lines(True))
    _set_ticks(figure, "x", across.scaled(v for s in series for v in s.x), size[0] // 12)
    shown = (v for s in series for v in mean(s.y, window(len(s.y))))
    _set_ticks(figure, "y", up.scaled(shown), size[1] // 3)
    return figure.build()


def _set_ticks(figure: Any, axis: str, values: list[float], count: int) -> None:
    """Round numbers in place of plotext's own."""
    positions = ticks(min(values), max(values), count)
    side = "lower" if axis == "x" else "left"
    figure.ruler(axis, side).ticks(positions, labels=[f"{position:g}" for position in positions])
