"""Whether the ranks of a program are hung, from what can be seen from outside: their heartbeats and
the processor time of all that they have started.

A rank is silent while it sends no heartbeat and uses less than IDLE_SHARE of a processor: threads
that wait in libraries wake up now and then. Silent for `launch.timeout_seconds`, it is hung. A rank
on a GPU computes on the host while it waits for a peer, so that this says nothing about it; where
the program sends heartbeats, `launch.heartbeat_seconds` bounds the time between two of them.

Which collective a rank waits in is not known of a program. Where ranks of this Python answer with
their stacks, their places are named instead: the rank that is alone at its place is likely the one
that the others wait for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpctl.core.units import ranks_text
from mpctl.run.launch.attempt import AttemptState, RankState
from mpctl.run.launch.verdict import Verdict
from mpctl.spec.launch import LaunchSpec

IDLE_SHARE = 0.005
SHOWN_PLACES = 4
DOING = re.compile(r"step (\d{1,15})")


@dataclass
class HeardRank:
    """A rank since its last sign of life. beats: its heartbeats then; processor_seconds: used until
    then; silent, unheard: seconds since it computed or sent a heartbeat, and since it sent one."""

    beats: int = 0
    processor_seconds: float = 0.0
    silent: float = 0.0
    unheard: float = 0.0


@dataclass
class ProgramWatch:
    """Watches the ranks of one attempt."""

    launch: LaunchSpec
    ranks: dict[int, HeardRank] = field(default_factory=dict)

    def check(self, ranks: Mapping[int, RankState], elapsed: float) -> Verdict | None:
        """The hang that is seen at this moment. elapsed: seconds since the last check."""
        for rank, now in ranks.items():
            if now.process and now.breadcrumb.is_working:
                self._hear(self.ranks.setdefault(rank, HeardRank()), now, elapsed)
            else:
                self.ranks.pop(rank, None)
        patience, interval = self.launch.longest_wait_seconds, self.launch.heartbeat_seconds
        # Ranks that hang together become silent within seconds of each other.
        silent = sorted(r for r, heard in self.ranks.items() if heard.silent >= patience / 2)
        if any(heard.silent >= patience for heard in self.ranks.values()):
            who = "its process is" if len(silent) == 1 else f"{ranks_text(silent)} are"
            state = ranks[silent[0]].process
            return Verdict(
                silent[0] if len(silent) == 1 else None,
                f"no heartbeat and no processor time used for {patience:g} s "
                f"(launch.timeout_seconds); {who} in state '{state}'",
            )
        unheard = sorted(
            r for r, heard in self.ranks.items() if interval is not None and heard.beats and heard.unheard >= interval
        )
        if unheard:
            return Verdict(
                unheard[0] if len(unheard) == 1 else None,
                f"no heartbeat of {ranks_text(unheard)} for {interval:g} s (launch.heartbeat_seconds)",
            )
        return None

    def _hear(self, heard: HeardRank, now: RankState, elapsed: float) -> None:
        used = abs(now.processor_seconds - heard.processor_seconds)  # less once a child has ended
        beats = now.breadcrumb.beats
        heard.unheard = 0.0 if beats != heard.beats else heard.unheard + elapsed
        if beats != heard.beats or used > IDLE_SHARE * self.launch.longest_wait_seconds:
            heard.beats, heard.processor_seconds, heard.silent = beats, now.processor_seconds, 0.0
        else:
            heard.silent += elapsed


def with_places(verdict: Verdict, places: Mapping[int, str]) -> Verdict:
    """The verdict with where the ranks are, the places with the fewest ranks first."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, place in sorted(places.items()):
        ranks[place].append(rank)
    if not ranks:
        return verdict
    fewest = sorted(ranks.items(), key=lambda item: len(item[1]))[:SHOWN_PLACES]
    said = "; ".join(f"{ranks_text(found)} at {place}" for place, found in fewest)
    return replace(verdict, error=f"{verdict.error}: {said}")


def reached_step(state: AttemptState) -> int:
    """Return the highest step that a rank reports; 0 if none does."""
    found = (DOING.fullmatch(text) for text in state.doing().values())
    return max((int(match[1]) for match in found if match), default=0)
