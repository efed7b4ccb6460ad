"""The schedule of a step as a picture: a row for each stage, time from left to right.

A forward is light, a backward hatched, a weights' gradient dotted, and what is empty is bubble. A
micro batch's number stands where there is room for it. Where a step has more actions than a picture
can show, its beginning and its end are drawn, and its middle, which repeats, is a gap; of very many
stages the first and the last are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mpctl.estimate.timeline import StepLine
from mpctl.pipeline.schedule.orders import Action
from mpctl.render.markup import Raw, el, join, number
from mpctl.units import plural, seconds_text

SERIES = {"forward": 0, "backward": 1, "backward_input": 1, "backward_weight": 2}
NAMES = ("forward", "backward", "weight gradient")
LEFT, WIDTH, ROW, GAP, TOP = 62, 1000, 24, 34, 8
WHOLE, SHOWN_ACTIONS, SHOWN_ROWS = 120, 80, 32
LETTER = 6.2  # units that a digit takes


@dataclass(frozen=True)
class Scale:
    """From seconds to units of the picture. Shown are the windows [0, first] and [last, end]; where
    they do not meet, there is a gap between them.
    """

    first: float
    last: float
    end: float

    @property
    def is_whole(self) -> bool:
        """Whether the whole step is shown, without a gap."""
        return self.first >= self.last

    @property
    def unit(self) -> float:
        """Units of the picture for a second."""
        shown = self.end if self.is_whole else self.first + self.end - self.last
        return (WIDTH - LEFT - (0 if self.is_whole else GAP)) / (shown or 1)

    def at(self, seconds: float) -> float:
        """The horizontal coordinate of a moment."""
        if self.is_whole or seconds <= self.first:
            return LEFT + seconds * self.unit
        return WIDTH - (self.end - seconds) * self.unit

    def shows(self, start: float, end: float) -> bool:
        """Whether an action from start to end lies inside of a window."""
        return self.is_whole or end <= self.first or start >= self.last

    @classmethod
    def of(cls, step: StepLine) -> Scale:
        """The scale of a step: whole for a few actions; of many, the first and the last of every
        stage."""
        line, half = step.line, max(SHOWN_ACTIONS // 2, min(2 * len(step.line.orders), WHOLE))
        longest = max(map(len, line.ends))
        if longest <= max(WHOLE, 2 * half) and not step.skipped:
            return cls(line.makespan, line.makespan, line.makespan)
        first = min(ends[min(half, len(ends)) - 1] for ends in line.ends)
        last = max(starts[-min(half, len(starts))] for starts in line.starts)
        return cls(first, last, line.makespan)


@dataclass(frozen=True)
class Picture:
    """The timeline of a step, which a page and a file draw."""

    step: StepLine
    scale: Scale

    @classmethod
    def of(cls, step: StepLine) -> Picture:
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
        """What is shown, for readers who do not see it."""
        stages, m = len(self.step.line.orders), self.step.microbatches
        batches = plural(m, "micro batch", "micro batches")
        where = f"{batches} on {plural(stages, 'stage')}"
        return f"Schedule of {where}, {seconds_text(self.step.seconds)}"

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
        scale = self.scale
        ends = (
            [(0.0, scale.end)] if scale.is_whole else [(0.0, scale.first), (scale.last, scale.end)]
        )
        for start, end in ends:
            x, width = scale.at(start), (end - start) * scale.unit
            yield el("path", d=_box(x, top + 2, width, ROW - 4), class_="idle")

    def _actions(self, stage: int, top: float) -> Iterator[Raw]:
        paths: dict[int, list[str]] = {}
        labels: list[Raw] = []
        for action, start, end in self._shown(stage):
            series, x = SERIES[action.kind], self.scale.at(start)
            width = (end - start) * self.scale.unit
            paths.setdefault(series, []).append(_box(x, top + 2, width, ROW - 4))
            text = self._text(action, start)
            if width >= LETTER * len(text) + 2:
                middle = number(x + width / 2)
                labels.append(el("text", text, x=middle, y=number(top + ROW / 2 + 4)))
        for series, boxes in sorted(paths.items()):
            yield el("path", d="".join(boxes), class_=f"s s{series}")
        yield el("g", *labels, class_="n")

    def _shown(self, stage: int) -> Iterator[tuple[Action, float, float]]:
        line = self.step.line
        for timed in zip(line.orders[stage], line.starts[stage], line.ends[stage], strict=True):
            if self.scale.shows(timed[1], timed[2]):
                yield timed

    def _text(self, action: Action, start: float) -> str:
        """The micro batch, with its chunk where there are several; after the gap those that are not
        played count too."""
        late = self.step.skipped if not self.scale.is_whole and start >= self.scale.last else 0
        many = any(action.chunk for action in self.step.line.orders[0])
        return f"{action.microbatch + late}" + (f".{action.chunk}" if many else "")

    def _axis(self) -> Raw:
        base = TOP + ROW * len(self.rows) + 4
        return join(
            el(
                "g",
                el("path", d=f"M{number(x)} {base}v5", class_="tick"),
                el("text", seconds_text(seconds), x=number(x), y=base + 17, text_anchor=anchor),
            )
            for x, seconds, anchor in self._ticks()
        )

    def _ticks(self) -> Iterable[tuple[float, float, str]]:
        """(x, seconds, anchor); beyond the gap the seconds of what is not played count too."""
        scale, late = self.scale, self.step.seconds - self.step.line.makespan
        if scale.is_whole:
            anchors = ("start", "middle", "middle", "middle", "end")
            times = [scale.end * part / 4 for part in range(5)]
            return [(scale.at(t), t, anchor) for t, anchor in zip(times, anchors, strict=True)]
        near = [(scale.at(t), t, anchor) for t, anchor in ((0.0, "start"), (scale.first, "end"))]
        far = [
            (WIDTH - (scale.end - t) * scale.unit, t + late, anchor)
            for t, anchor in ((scale.last, "start"), (scale.end, "end"))
        ]
        return [*near, *far]


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h-{number(width)}z"


def legend_names(step: StepLine) -> list[str]:
    """The kinds of work that the schedule has, in words."""
    kinds = {SERIES[action.kind] for action in step.line.orders[0]}
    return [name for at, name in enumerate(NAMES) if at in kinds]
