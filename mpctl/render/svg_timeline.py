"""The schedule of a step as a picture: a row for each stage, time from left to right.

A forward is light, a backward hatched, a weights' gradient dotted, and what is empty is bubble. A
micro batch's number is written where there is room for it. Where a step has more actions than a
picture can show, its beginning, a stretch of its steady part and its end are drawn, and what lies
between is a gap; of very many stages the first and the last are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpctl.core.units import plural, seconds_text
from mpctl.model.pipeline.schedule.orders import Action
from mpctl.plan.estimate.timeline import StepLine
from mpctl.render.markup import Raw, el, join, number

SERIES = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 2}
NAMES = ("forward", "backward", "weight gradient")
LEFT, WIDTH, ROW, GAP, TOP = 62, 1000, 24, 34, 8
WHOLE, SHOWN_ACTIONS, SHOWN_ROWS = 120, 80, 32
WINDOWS, NAMED_WIDTH = ("warm-up", "steady part", "cool-down"), 190
LETTER = 6.2  # units that a digit takes


@dataclass(frozen=True)
class Scale:
    """Converts seconds to units of the picture. windows: the stretches of time that are shown, in order,
    with a gap between two of them."""

    windows: tuple[tuple[float, float], ...]

    @property
    def is_whole(self) -> bool:
        """Whether the full step is shown, without a gap."""
        return len(self.windows) == 1

    @property
    def unit(self) -> float:
        """Units of the picture for a second."""
        shown = sum(end - start for start, end in self.windows)
        return (WIDTH - LEFT - GAP * (len(self.windows) - 1)) / (shown or 1)

    @property
    def lefts(self) -> list[float]:
        """The horizontal coordinate at which each window begins."""
        lefts = [float(LEFT)]
        for start, end in self.windows[:-1]:
            lefts.append(lefts[-1] + (end - start) * self.unit + GAP)
        return lefts

    def boxes(self, start: float, end: float) -> Iterator[tuple[float, float]]:
        """The place of a time span from start to end, as x and width, clipped to each window."""
        for left, (first, last) in zip(self.lefts, self.windows, strict=True):
            begins, ends = max(start, first), min(end, last)
            if begins < ends:
                yield left + (begins - first) * self.unit, (ends - begins) * self.unit

    @classmethod
    def of(cls, step: StepLine) -> Scale:
        """The scale of a step: complete for a few actions; for many, the first and the last of
        every stage, and between them as much time in which every stage alternates forwards and
        backwards."""
        line, half = step.line, max(SHOWN_ACTIONS // 2, min(2 * len(step.line.orders), WHOLE))
        longest = max(map(len, line.ends))
        if longest <= max(WHOLE, 2 * half) and not step.skipped:
            return cls(((0.0, line.makespan),))
        steady, cool_down = _steady_part(step)
        count = 3 * half // 5 if steady < cool_down else half
        first = min(ends[min(count, len(ends)) - 1] for ends in line.ends)
        last = max(starts[-min(count, len(starts))] for starts in line.starts)
        windows = [(0.0, first), (steady, min(steady + first, cool_down)), (last, line.makespan)]
        return cls(tuple(_joined(window for window in windows if window[0] < window[1])))


def _steady_part(step: StepLine) -> tuple[float, float]:
    """Span from the first time that all stages have begun backwards until one of them has no forwards left."""
    begun, left = [], []
    line = step.line
    for order, starts, ends in zip(line.orders, line.starts, line.ends, strict=True):
        begun.append(next(t for a, t in zip(order, starts, strict=True) if a.kind != "forward"))
        left.append(max(t for a, t in zip(order, ends, strict=True) if a.kind == "forward"))
    return max(begun), min(left)


def _joined(windows: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Windows by their start, those that meet as one."""
    joined: list[tuple[float, float]] = []
    for start, end in windows:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


@dataclass(frozen=True)
class StepPicture:
    """The timeline of a step, which a page and a file draw."""

    step: StepLine
    scale: Scale

    @classmethod
    def of(cls, step: StepLine) -> StepPicture:
        """The picture of a step, on the scale that suits it."""
        return cls(step, Scale.of(step))

    @property
    def rows(self) -> list[int | None]:
        """The stages from top to bottom; None stands for those that are left out."""
        stages = len(self.step.line.orders)
        if stages <= SHOWN_ROWS:
            return list(range(stages))
        half = SHOWN_ROWS // 2
        return [*range(half), None, *range(stages - half, stages)]

    @property
    def height(self) -> int:
        """Units that rows and axis take."""
        return TOP + ROW * len(self.rows) + 26

    @property
    def label(self) -> str:
        """Description of the picture, for screen readers."""
        stages, m = len(self.step.line.orders), self.step.microbatches
        batches = plural(m, "micro batch", "micro batches")
        where = f"{batches} on {plural(stages, 'stage')}"
        return f"Schedule of {where}, {seconds_text(self.step.seconds)}"

    def element(self) -> Raw:
        """The picture of a page, below the legend of its colours."""
        return el(
            "svg",
            el("title", self.label),
            el("g", legend(self.step)),
            el("g", self.draw(), transform="translate(0 20)"),
            viewBox=f"0 0 {WIDTH + 2} {self.height + 20}",
            role="img",
            aria_label=self.label,
            class_="timeline",
        )

    def draw(self) -> Raw:
        """The rows and the axis of time."""
        rows = join(self._row(at, stage) for at, stage in enumerate(self.rows))
        return join([rows, self._axis()])

    def _row(self, at: int, stage: int | None) -> Raw:
        top = TOP + at * ROW
        middle = top + ROW / 2 + 3
        if stage is None:
            left_out = len(self.step.line.orders) - SHOWN_ROWS
            return el("text", f"… {left_out} more stages", x=LEFT, y=number(middle), class_="dim")
        shares = self.step.line.busy[stage] / (self.step.line.makespan or 1)
        return el(
            "g",
            el("title", f"stage {stage}: {shares:.0%} busy, {1 - shares:.0%} bubble"),
            el("text", f"stage {stage}", x=LEFT - 6, y=number(middle), text_anchor="end"),
            *self._idle(top),
            *self._actions(stage, top),
        )

    def _idle(self, top: float) -> Iterator[Raw]:
        for left, (start, end) in zip(self.scale.lefts, self.scale.windows, strict=True):
            width = (end - start) * self.scale.unit
            yield el("path", d=_box(left, top + 2, width, ROW - 4), class_="idle")
        for left in self.scale.lefts[1:]:
            middle = number(top + ROW / 2 + 4)
            yield el("text", "…", x=number(left - GAP / 2), y=middle, text_anchor="middle")

    def _actions(self, stage: int, top: float) -> Iterator[Raw]:
        paths: dict[int, list[str]] = {}
        labels: list[Raw] = []
        line = self.step.line
        for action, *span in zip(line.orders[stage], line.starts[stage], line.ends[stage], strict=True):
            for x, width in self.scale.boxes(*span):
                box = _box(x, top + 2, width, ROW - 4)
                paths.setdefault(SERIES[action.kind], []).append(box)
                text = self._text(action, span[0])
                if width >= LETTER * len(text) + 2:
                    middle = number(x + width / 2)
                    labels.append(el("text", text, x=middle, y=number(top + ROW / 2 + 4)))
        for series, boxes in sorted(paths.items()):
            yield el("path", d="".join(boxes), class_=f"s s{series}")
        yield el("g", *labels, class_="n")

    def _text(self, action: Action, start: float) -> str:
        """The micro batch, with its chunk where there are several; after the last gap those that
        are not played count too."""
        late = self.step.skipped if start >= self.scale.windows[-1][0] else 0
        many = any(action.chunk for action in self.step.line.orders[0])
        return f"{action.microbatch + late}" + (f".{action.chunk}" if many else "")

    def _axis(self) -> Raw:
        base = TOP + ROW * len(self.rows) + 4
        ticks = (
            el(
                "g",
                el("path", d=f"M{number(x)} {base}v5", class_="tick"),
                el("text", seconds_text(seconds), x=number(x), y=base + 17, text_anchor=anchor),
            )
            for x, seconds, anchor in self._ticks()
        )
        names = (
            el("text", name, x=number(x), y=base + 17, text_anchor="middle", class_="dim") for x, name in self._names()
        )
        return join([*ticks, *names])

    def _ticks(self) -> Iterator[tuple[float, float, str]]:
        """(x, seconds, anchor); beyond the last gap the seconds of what is not played count too."""
        scale = self.scale
        if scale.is_whole:
            (_, end), *_ = scale.windows
            for part, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
                yield LEFT + end * scale.unit * part / 4, end * part / 4, anchor
            return
        for left, window in zip(scale.lefts, scale.windows, strict=True):
            is_last = window is scale.windows[-1]
            late = self.step.seconds - self.step.line.makespan if is_last else 0.0
            for seconds, anchor in zip(window, ("start", "end"), strict=True):
                yield left + (seconds - window[0]) * scale.unit, seconds + late, anchor

    def _names(self) -> Iterator[tuple[float, str]]:
        """(x, name) of the windows that are wide enough, where there are three."""
        if len(self.scale.windows) != len(WINDOWS):
            return
        rows = zip(self.scale.lefts, self.scale.windows, WINDOWS, strict=True)
        for left, (start, end), name in rows:
            width = (end - start) * self.scale.unit
            if width >= NAMED_WIDTH:
                yield left + width / 2, name


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"


def legend(step: StepLine) -> Raw:
    """A swatch and a word for each kind of work that the schedule has, and for the bubble."""
    kinds = {SERIES[action.kind] for action in step.line.orders[0]}
    swatches = [(name, f"s s{at}") for at, name in enumerate(NAMES) if at in kinds]
    parts, x = [], 0.0
    for name, style in [*swatches, ("bubble", "idle")]:
        parts.append(el("path", d=f"M{number(x)} 0h18v12h-18z", class_=style))
        parts.append(el("text", name, x=number(x + 24), y=11))
        x += 24 + 7 * len(name) + 20
    return join(parts)
