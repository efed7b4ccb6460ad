"""Propose explicit pipeline layouts where no equal number of layers makes stages equally long.

Embedding, output head with its loss, and layers of multi-token prediction are items beside the layers of a
virtual stage, each as long as the time model says (bound.py): a head over 128,256 tokens takes as long as 2.4
layers of Llama 3 8B. A layout (parallel.pipeline_layout) is proposed where its slowest stage is faster by WORTH
than that of every cut that settings give with as many chunks or more, and where there is none. Its
text says the cut, so that no worker needs the seconds.

By hand, 32 layers on 4 stages, a head as long as 2.4: even stages 8 + 2.4 = 10.4; `Et*8|t*9|t*9|t*6L` 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from mpctl.model.pipeline.balance import counts_beside, stage_costs
from mpctl.model.pipeline.schedule.legality import is_schedule
from mpctl.plan.planning.layout_settings import LayoutSettings
from mpctl.plan.search.bound import StepTimeBound
from mpctl.spec.layout_text import LayoutPart, parse_layout, repeated
from mpctl.spec.schedules import SCHEDULES

WORTH = 0.02
"""By how much its slowest stage is faster: half of RANKING_ERROR (planning/difference.py)."""
UNIT = 16
"""Costs are in this part of the longest layer, so that layouts of about the same costs share one text."""


class ItemCosts(NamedTuple):
    """Costs of one micro batch: of each layer, the embedding, layers of multi-token prediction, and heads with
    their losses."""

    layers: tuple[int, ...]
    entry: int
    prediction: int
    exit: int

    def items(self, parts: int, *, apart: bool) -> list[int]:
        """The costs beside layers of each virtual stage. apart: the last one has heads and losses alone."""
        found = [0] * parts
        found[0] += max(1, self.entry)
        found[-1 - apart] += self.prediction
        found[-1] += max(1, self.exit)
        return found


class Cut(NamedTuple):
    """An explicit layout: chunks a stage, and its text."""

    vpp: int
    text: str


class PipelineLayouts:
    """The families of a search's space, explicit layouts among them. bound: that of the search. proposes: whether
    there are others than a fixed one."""

    def __init__(self, bound: StepTimeBound, *, proposes: bool = True) -> None:
        self.bound, self.evaluator, self.space = bound, bound.evaluator, bound.evaluator.space
        fixed, runs = self.space.fixed, self.space.runs
        self.given: str | None = fixed.get("pipeline_layout")
        can_say = runs.layouts and bool(runs.emit or runs.launched) and self.space.model.decoder_layers is None
        self.proposes = proposes and can_say and "stage_balance" not in fixed

    def families(self, axes: LayoutSettings) -> Iterator[LayoutSettings]:
        """Every pipeline over these axes: those of the space, then explicit layouts; the one that is fixed alone."""
        if self.given is not None:
            yield from self._with(axes, [Cut(len(parse_layout(self.given).parts) // axes.pp, self.given)])
            return
        usual = list(self.space.families(axes))
        yield from usual
        if self.proposes and axes.pp > 1 and axes.tensor_mode == "1d":
            yield from self._with(axes, self._cuts(axes, usual))

    def _with(self, axes: LayoutSettings, cuts: Sequence[Cut]) -> Iterator[LayoutSettings]:
        for cut in cuts:
            for schedule in self._schedules(axes, cut.vpp):
                yield axes._replace(vpp=cut.vpp, schedule=schedule, pipeline_layout=cut.text)

    def _schedules(self, axes: LayoutSettings, vpp: int) -> list[str]:
        """The schedules that deal parts out in rounds, with a whole backward."""
        pp, m = axes.pp, self.space.microbatches(axes)
        return self.evaluator.cached(("cuts' schedules", pp, m, vpp), lambda: self._find_schedules(pp, m, vpp))

    def _find_schedules(self, pp: int, m: int, vpp: int) -> list[str]:
        names = self.space.schedules(pp, vpp) if vpp == 1 or self.space.runs.chunks else ()
        plain = (name for name in names if not (SCHEDULES[name].is_v or SCHEDULES[name].splits_backward))
        return [name for name in plain if is_schedule(name, stages=pp, microbatches=m, chunks=vpp)]

    def _cuts(self, axes: LayoutSettings, usual: Sequence[LayoutSettings]) -> list[Cut]:
        costs = self._item_costs(axes)
        if costs is None:
            return []
        others = [family for family in usual if not SCHEDULES[family.schedule].is_v]
        slowest = dict[int, float]()
        for family in others:
            slowest[family.vpp] = min(slowest.get(family.vpp, inf), self._slowest(family, costs))
        key = "cuts", axes.pp, costs, *slowest.items()
        return self.evaluator.cached(key, lambda: list(self._find_cuts(axes.pp, costs, slowest)))

    def _item_costs(self, axes: LayoutSettings) -> ItemCosts | None:
        """Costs of layers and ends over these axes; None where a link states no bandwidth."""
        bounds = self.bound.costs(axes)
        if bounds is None:
            return None
        key = "item costs", *axes.layer_key, axes.moe_overlap
        return self.evaluator.cached(key, lambda: self._find_costs(axes))

    def _find_costs(self, axes: LayoutSettings) -> ItemCosts:
        bounds = self.bound.costs(axes)
        assert bounds is not None
        unit = UNIT / max(kind.work.seconds for kind in bounds.kinds)
        layers = [round(unit * kind.work.seconds) for kind in bounds.kinds]
        predicts = self.bound.prediction_seconds(axes) if self.space.model.mtp_layers else 0.0
        entry, exit_ = bounds.ends.seconds - bounds.exit.seconds, bounds.exit.seconds - predicts
        kinds = self.evaluator.table(axes.tp).layer_kinds
        return ItemCosts(
            tuple([layers[kind] for kind in kinds]), round(unit * entry), round(unit * predicts), round(unit * exit_)
        )

    def _find_cuts(self, pp: int, costs: ItemCosts, slowest: Mapping[int, float]) -> Iterator[Cut]:
        """Layouts that are worth their text, at most one for each number of chunks. slowest: by chunks, the cost
        of the slowest stage of what settings cut."""
        single = list(self._counts(pp, 1, costs))
        least = min((slowest_of for slowest_of, _, _ in single), default=0)  # chunks change nothing
        chunks = {1, *slowest} if max(slowest, default=1) > 1 else {1, *_usual_chunks(len(costs.layers), pp)}
        for vpp in sorted(chunks):
            known = min((time for count, time in slowest.items() if count >= vpp), default=inf) / (1 + WORTH)
            if least > known or not self.space.admits("vpp", vpp):
                continue
            best: tuple[float, list[int], bool] = (inf, [], False)
            for found in single if vpp == 1 else self._counts(pp, vpp, costs):
                best = min(best, found) if found[0] * (1 + WORTH) <= best[0] else best
            if best[0] <= known and best[1]:
                yield Cut(vpp, self._text(best[1], apart=best[2]))

    def _slowest(self, family: LayoutSettings, costs: ItemCosts) -> int:
        """The cost of the slowest stage of a family of the space."""
        key = "slowest", costs, *self.evaluator.stages_key(family)
        return self.evaluator.cached(key, lambda: self._find_slowest(family, costs))

    def _find_slowest(self, family: LayoutSettings, costs: ItemCosts) -> int:
        stages = self.evaluator.stages(self.space.job_of(family), family)
        counts = [stop - start for chunk in zip(*stages, strict=True) for start, stop in chunk]
        return max(stage_costs(costs.layers, costs.items(len(counts), apart=False), counts, family.pp))

    def _counts(self, pp: int, vpp: int, costs: ItemCosts) -> Iterator[tuple[float, list[int], bool]]:
        """(cost of the slowest stage, layers of each virtual stage, whether the prediction is apart from the loss)
        of the best cut with the prediction in the last virtual stage, and of that with it before."""
        for apart in (False, True) if self.space.model.mtp_layers else (False,):
            items = costs.items(pp * vpp, apart=apart)
            if items.count(0) <= len(costs.layers):
                counts = counts_beside(costs.layers, items, pp=pp, closed=int(apart))
                yield max(stage_costs(costs.layers, items, counts, pp)), counts, apart

    def _text(self, counts: Sequence[int], *, apart: bool) -> str:
        """The layout in a text that is quick to write: equal virtual stages in a row are a group."""
        parts = [LayoutPart(layers=count) for count in counts]
        parts[0] = parts[0]._replace(embedding=True)
        parts[-1] = parts[-1]._replace(loss=True)
        parts[-1 - apart] = parts[-1 - apart]._replace(predictions=self.space.model.mtp_layers)
        runs = [(repeated(part.text), len([*run])) for part, run in groupby(parts)]
        *front, (last, _) = [(f"({text}|)*{n}" if n > 1 else f"{text}|", n) for text, n in runs]
        return "".join(text for text, _ in front) + last.removesuffix("|")


def _usual_chunks(layers: int, pp: int) -> list[int]:
    """Numbers of chunks that leave some 2 to 4 layers to each, as recipes do: of 61 layers on 4 stages 4 or 8."""
    return [1 << k for k in range(1, 8) if layers <= 5 * (pp << k) and 3 * (pp << k) <= 2 * (layers + 2)]
