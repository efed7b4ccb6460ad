"""Watches an attempt for stragglers and slow links, and says when one is named and when it is over.

Once a second, in large worlds less often, it compares what the ranks have logged (stragglers.py,
slow_links.py). What is named or over is a message of the launch, a line of RUN/slow.jsonl and a
RunChange, which `launch.metrics` and `launch.hook` get; what is slow now is in
RUN/nodes/status.json.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mpctl.model.layout.topology import job_topology
from mpctl.records.rundir.breadcrumb import FINISHED
from mpctl.records.rundir.slow import SlowPart, append_slow
from mpctl.run.launch.attempt import AttemptState
from mpctl.run.launch.cluster import Attempt
from mpctl.run.launch.slow_links import LinkWatch
from mpctl.run.launch.stragglers import StragglerWatch
from mpctl.spec.job import JobSpec

CHECK_SECONDS = 1.0
RANKS_PER_SECOND = 500
"""Larger worlds are compared less often, so that the launcher has time for other things."""
WORSE = 1.5
"""The growth of the ratio at which a slow part is named again."""


@dataclass
class SlowPartsMonitor:
    """The slow parts of one attempt. path: RUN/slow.jsonl; on_change: called with what is slow now,
    and a sentence for each part that was named or is over; now: by their keys."""

    job: JobSpec
    path: Path
    on_change: Callable[[Sequence[SlowPart], Sequence[str]], None]
    clock: Callable[[], float] = time.monotonic
    now: dict[tuple[object, ...], SlowPart] = field(default_factory=dict)
    next_check: float = float("-inf")

    def __post_init__(self) -> None:
        topology = job_topology(self.job)
        ranks = range(self.job.world_size)
        stages = [topology.coords(rank)["pp"] for rank in ranks]
        self.stragglers = StragglerWatch(stages, self.job.launch.device == "cpu")
        self.links = LinkWatch()

    def poll(self, attempt: Attempt) -> None:
        """Compare the ranks when that is due."""
        now = self.clock()
        if now >= self.next_check:
            pause = max(CHECK_SECONDS, self.job.world_size / RANKS_PER_SECOND)
            self.next_check = now + pause
            self.check(attempt.snapshot())

    def check(self, state: AttemptState) -> None:
        """Compare the ranks in this state; nothing until all have reported."""
        ranks = state.ranks
        shared_states = {rank: seen.breadcrumb for rank, seen in ranks.items()}
        if len(ranks) < self.job.world_size or any(c.start == FINISHED for c in shared_states.values()):
            return
        hosts = {rank: node.host for node in state.nodes for rank in node.ranks}
        self.stragglers.hosts = self.links.hosts = hosts
        times = {rank: shared_state.steps for rank, shared_state in shared_states.items()}
        newest = min(of.last for of in times.values())
        found = self.stragglers.find(times)
        progress = {rank: shared_state.collectives for rank, shared_state in shared_states.items()}
        found += self.links.find(times, progress, self.stragglers.growth(times))
        self._compare(found, newest)

    def _compare(self, found: Sequence[SlowPart], newest: int) -> None:
        """Report what is new, worse or over."""
        before, after = self.now, {part.key: part for part in found}
        named = [part for key, part in after.items() if _is_news(part, before.get(key))]
        over = [replace(before[key], until=newest) for key in before.keys() - after.keys()]
        # One that was named keeps the figures of then.
        self.now = {k: p if p in named else before[k] for k, p in after.items()}
        if named or over:
            append_slow(self.path, [*over, *named])
            still = {(part.kind, rank) for part in found for rank in part.ranks}
            gone = (part for part in over if not still & {(part.kind, r) for r in part.ranks})
            words = [f"{part.name} is no longer slow at step {newest}" for part in gone]
            self.on_change(list(self.now.values()), [*words, *(part.text for part in named)])


def _is_news(part: SlowPart, before: SlowPart | None) -> bool:
    return before is None or part.ratio >= WORSE * before.ratio
