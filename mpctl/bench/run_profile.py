"""The profiled steps of a run, read back, with the clocks of its hosts made one.

Ranks of one host share a clock. Between hosts the last all-reduce over the world of each step (its
status) tells: it ends on all ranks at about the same moment, since none can leave it before the
last has joined. So a host's offset is the median over the steps of the difference between the
first ends on both hosts; it is as exact as a small message is fast.

By hand, the last all-reduce of a step ends at 12.0 and 12.3 on host a, at 905.1 and 905.0 on host
b: to times of b are added 12.0 - 905.0 = -893.0 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median

from pydantic import TypeAdapter, ValidationError

from mpctl.errors import InputError
from mpctl.rundir.collective_log import LONGEST_RANK_LIST
from mpctl.rundir.profile_files import PROFILE, ProfiledStep, ProfileEvent

Steps = Mapping[int, Mapping[int, ProfiledStep]]
"""What each rank did in each profiled step: by step, then by rank."""
_LINE = TypeAdapter(ProfiledStep)


@dataclass(frozen=True)
class RunProfile:
    """The profile of a run. offsets: seconds to be added to times of a clock, by its name, so that
    all are times of one; foreign: lines of its files that are no profiled steps."""

    steps: Steps
    offsets: Mapping[str, float]
    foreign: int = 0

    @property
    def lines(self) -> Iterator[ProfiledStep]:
        """Every rank's line of every step, by step and rank."""
        return (ranks[rank] for ranks in self.steps.values() for rank in sorted(ranks))

    @property
    def missing(self) -> list[int]:
        """Ranks of the run that recorded no step, or not all that others did."""
        size = max(line["world_size"] for line in self.lines)
        return [r for r in range(size) if any(r not in ranks for ranks in self.steps.values())]

    def events(self, line: ProfiledStep) -> Iterator[ProfileEvent]:
        """The events of a line, in times of the one clock."""
        offset = self.offsets.get(line["clock"], 0.0)
        for event in line["events"]:
            moved: ProfileEvent = {**event, "began": event["began"] + offset,
                                   "ended": event["ended"] + offset}  # fmt: skip
            if "started" in event:
                moved["started"] = event["started"] + offset
            yield moved


def read_run_profile(run: Path) -> RunProfile:
    """The profile of the run in directory `run`. Raises InputError where there is none."""
    steps: defaultdict[int, dict[int, ProfiledStep]] = defaultdict(dict)
    foreign = 0
    try:
        for path in sorted((run / PROFILE).glob("rank-*.jsonl")):
            for content in path.read_bytes().splitlines():
                if (line := parse_step(content)) is None:
                    foreign += 1
                else:  # a later attempt's line of the same step counts
                    steps[line["step"]][line["rank"]] = line
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror}"
        raise InputError.of(
            "no-profile", str(run), message, "check the path and its rights"
        ) from None
    if not steps:
        raise InputError.of(
            "no-profile", str(run), f"{run / PROFILE} holds no profiled step",
            "launch the job with --profile 5-7, which records steps 5 to 7",
        )  # fmt: skip
    ordered = {step: steps[step] for step in sorted(steps)}
    return RunProfile(ordered, clock_offsets(ordered), foreign)


def parse_step(content: bytes) -> ProfiledStep | None:
    """The step in a line of a rank's file; None where it holds none."""
    try:
        line = _LINE.validate_json(content)
    except ValidationError:
        return None
    times = (e[key] for e in line["events"] for key in ("began", "ended", "started") if key in e)
    is_rank = 0 <= line["rank"] < line["world_size"] <= LONGEST_RANK_LIST
    return line if is_rank and all(map(isfinite, times)) else None


def clock_offsets(steps: Steps) -> dict[str, float]:
    """Seconds to be added to the times of each clock: 0 for the first rank's; a clock of which no
    common step is known is left as it is."""
    first: defaultdict[str, dict[int, float]] = defaultdict(dict)
    for step, ranks in steps.items():
        for rank in sorted(ranks):
            ends = first[ranks[rank]["clock"]]
            if (end := _meeting(ranks[rank])) is not None:
                ends[step] = min(ends.get(step, end), end)
    reference = next(iter(first.values()), {})
    return {
        clock: median(reference[step] - ends[step] for step in common)
        if ends is not reference and (common := reference.keys() & ends.keys())
        else 0.0
        for clock, ends in first.items()
    }


def _meeting(line: ProfiledStep) -> float | None:
    """When the last all-reduce over the world ended in a step, None where there was none."""
    end = next((event["ended"] for event in line["events"] if event["name"] == "step"), None)
    ends = [event["ended"] for event in line["events"]
            if event.get("axis") == "world" and (end is None or event["ended"] <= end)]  # fmt: skip
    return max(ends, default=None)
