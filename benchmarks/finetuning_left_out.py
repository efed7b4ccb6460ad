"""Errors of steps with adapters on sources that their figures did not see:
`python -m benchmarks.finetuning_left_out >> benchmarks/results/finetuning.md` (half a minute).

Every figure of [with_adapters] that was fitted to step times (FITTED) starts at its prior, which is the figure of the
same profile without adapters, and takes the value of a short list that is best for the other sources; layouts
count once, and a value must gain a hundredth of the error to replace another. A figure that no other source
determines stays at its prior. `all`: fitted to all sources in the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import expm1, log
from typing import Any, NamedTuple

from mpctl.measure.calibrate.runs import with_value
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.batch.rows import as_others_run, load_row
from mpctl.plan.estimate.time import find_step_time
from tests.finetuning import finetuning_rows, judged_rows

PEFT = ("other", "fsdp", "fsdp2")
SHIFTS = (1.0, 1.05, 1.1, 1.18, 1.25)
ROUNDS, GAIN = 2, 0.01
DEQUANTIZE = "adapters.dequantize"  # of int4-gptq


class Figure(NamedTuple):
    """A figure of some runtimes, at dotted paths; values: its prior, then others to try."""

    runtimes: tuple[str, ...]
    paths: tuple[str, ...]
    values: tuple[float, ...]


FITTED = (
    Figure(("other",), ("overlap.zero",), (0.89, 0.45, 0.0)),
    Figure(("fsdp", "fsdp2"), ("adapters.pcie_gathers",), (0.0, 12e9, 6e9, 3e9)),
    Figure(PEFT, ("adapters.host",), (0.0, 5e-5, 1.1e-4, 2e-4)),
    Figure(("other",), ("host.gather",), (0.0, 1e-3, 2e-3, 4e-3)),
    Figure(("other",), (DEQUANTIZE,), (1.0, 0.5, 0.25, 0.125, 0.06)),
    Figure(("other",), ("operators.flash", "operators.flash_backward"), (0.8, 1.0, 1.2)),
    Figure(("other",), ("shift_apart",), (1.1, *SHIFTS)),
    Figure(("fsdp",), ("operators.flash", "operators.flash_backward"), (0.65, 0.8, 1.0, 1.2, 1.5)),
    Figure(("fsdp",), ("shift_apart",), (1.18, *SHIFTS)),
    Figure(("megatron-core-graphs",), ("operators.cast_bytes",), (3.3, 2.0, 1.3)),
    Figure(("megatron-core-graphs",), ("operators.flash",), (0.97, 1.3, 1.6)),
    Figure(("megatron-core-graphs",), ("operators.flash_backward",), (0.9, 1.15, 1.4)),
    Figure(("amd-megatron",), ("shift_apart",), (1.18, *SHIFTS)),
)


@dataclass(frozen=True)
class Layout:
    """The measured steps of one layout, their source, and plans of it by the values that matter to it."""

    group: str
    layout: JobLayout
    seconds: list[float]
    known: dict[tuple[float, ...], float]

    def errors(self, values: Mapping[Figure, float]) -> list[float]:
        """log(planned / measured) under these values."""
        runtime = self.layout.job.training.runtime
        key = tuple(values[figure] for figure in FITTED if runtime in figure.runtimes)
        if key not in self.known:
            self.known[key] = self._seconds(values)
        return [log(self.known[key] / seconds) for seconds in self.seconds]

    def _seconds(self, values: Mapping[Figure, float]) -> float:
        profile, runtime = self.layout.profile, self.layout.job.training.runtime
        for figure, value in values.items():
            for path in figure.paths if runtime in figure.runtimes else ():
                changed: Any = {"int4-gptq": value} if path == DEQUANTIZE else value
                profile = with_value(profile, path, changed)
        time = find_step_time(self.layout, profile)
        assert not isinstance(time, str), time
        return time.total


def measured_layouts() -> list[Layout]:
    """The layouts with adapters whose steps were measured."""
    found: dict[str, Layout] = {}
    for row, judged in zip(finetuning_rows(), judged_rows(), strict=True):
        if judged.has_adapter and judged.step:
            if (key := str(row["job"])) not in found:
                job = load_row(row["job"]).job
                assert job is not None
                found[key] = Layout(row["group"], JobLayout.of(as_others_run(job)[0]), [], {})
            found[key].seconds.append(judged.step[1])
    return list(found.values())


def error(layouts: Iterable[Layout], values: Mapping[Figure, float]) -> float:
    """The sum over layouts of the mean absolute error of their steps."""
    errors = (layout.errors(values) for layout in layouts)
    return sum(sum(map(abs, each)) / len(each) for each in errors)


def fit(layouts: Sequence[Layout]) -> dict[Figure, float]:
    """The values that are best for these layouts, one figure after another."""
    values: dict[Figure, float] = {figure: figure.values[0] for figure in FITTED}
    for figure in FITTED * ROUNDS:
        own = [each for each in layouts if each.layout.job.training.runtime in figure.runtimes]
        least = error(own, values)
        for value in figure.values:
            if (found := error(own, {**values, figure: value})) < least * (1 - GAIN):
                values, least = {**values, figure: value}, found
    return values


def main() -> None:
    """Print a line a source: mean absolute error of its layouts, fitted with it and without it."""
    layouts = measured_layouts()
    groups: dict[str, list[Layout]] = defaultdict(list)
    for each in layouts:
        groups[each.group].append(each)
    whole = fit(layouts)
    totals = [0.0, 0.0]
    print("\n## Sources left out\n\nBy `python -m benchmarks.finetuning_left_out`, which says how.\n")
    print("| source | layouts | error, fitted to all | left out | figures that stay at their prior without it |")
    print("|---|---|---|---|---|")
    for name, own in groups.items():
        without = fit([each for each in layouts if each.group != name])
        lost = [f"{f.runtimes[0]}: {f.paths[0]}" for f in FITTED if without[f] == f.values[0] != whole[f]]
        found = [mean_error(own, values) for values in (whole, without)]
        totals = [total + len(own) * each for total, each in zip(totals, found, strict=True)]
        print(f"| {name} | {len(own)} | {found[0]:.1f} % | {found[1]:.1f} % | {', '.join(lost)} |")
    shown = " | ".join(f"{total / len(layouts):.1f} %" for total in totals)
    print(f"| **all** | {len(layouts)} | {shown} | |")


def mean_error(layouts: Sequence[Layout], values: Mapping[Figure, float]) -> float:
    """Mean over layouts of |planned - measured| / measured, percent."""
    errors = [[abs(expm1(r)) for r in layout.errors(values)] for layout in layouts]
    return 100 * sum(sum(each) / len(each) for each in errors) / len(errors)


if __name__ == "__main__":
    main()
