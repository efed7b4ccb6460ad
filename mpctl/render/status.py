"""What a run does at this moment, in words."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator

from rich.text import Text

from mpctl.render.console import NamedRows, get_console
from mpctl.render.line import clock
from mpctl.render.runs import STYLES, moment_text
from mpctl.render.show import Row, failure_text
from mpctl.runs.status import LauncherRow, RankRow, StatusDocument
from mpctl.units import bytes_text, plural, ranks_text, seconds_text

SILENT_SECONDS = 5.0
"""A rank beats twice a second; without a heartbeat for so long it is named."""
MOST_GROUPS, MOST_NAMED = 8, 8
NOT_RUNNING = "not begun, or ended"


def print_status(status: StatusDocument) -> None:
    """Print the status of a run on stdout; what is wrong stands at its end."""
    console = get_console()
    title = Text.assemble((status["name"], "bold"), "  ")
    title.append(status["status"], STYLES[status["status"]])
    title.append(" (stopping)" if status["is_stopping"] else "")
    console.print(title.append(_progress(status)), soft_wrap=True)
    console.print(NamedRows(_rows(status)))
    for text in _troubles(status):
        console.print(Text.assemble(("! ", "bold yellow"), text), soft_wrap=True)


def _progress(status: StatusDocument) -> str:
    """`  step 12 of 80 (15 %), 0:00:58 left`."""
    step, steps = status["step"], status["steps"]
    if not steps:
        return f"  step {step:,}" if step else ""
    left = status["seconds_left"]
    until = "" if left is None else f", {clock(left)} left"
    return f"  step {step:,} of {steps:,} ({100 * step // steps} %){until}"


def _rows(status: StatusDocument) -> Iterator[Row]:
    if status["loss"] is not None:
        validation = status["validation_loss"]
        more = "" if validation is None else f", validation {validation:.4f}"
        yield "loss", f"{status['loss']:.4f}{more}"
    if status["step_seconds"] is not None:
        speed = status["tokens_per_second"] or 0
        yield "step time", f"{seconds_text(status['step_seconds'])}, {speed:,.0f} tokens/s"
    if status["mfu"] is not None and status["hfu"] is not None:
        yield "MFU, HFU", f"{status['mfu']:.1%}, {status['hfu']:.1%} of the device's data sheet"
    if status["last_step_seconds"] is not None:
        yield "last step", f"{age_text(status['last_step_seconds'])} ago"
    yield "checkpoint", _checkpoint(status)
    if status["launcher"] is not None:
        yield "launcher", _launcher(status["launcher"], status)
        if status["job_state"] is not None:
            yield "job", f"{status['launcher']['job_id']}: {status['job_state']}"
        hosts = status["launcher"]["hosts"] or []
        if len(hosts) > 1:
            few = hosts if len(hosts) <= 8 else [*hosts[:4], f"... {hosts[-1]}"]
            yield "hosts", f"{len(hosts):,}: {', '.join(few)}"
    yield from _rank_rows(status)
    failure = status["failure"]
    if failure is not None:
        yield "failure", failure_text(failure)
    yield "run directory", status["path"]
    if status["status"] in ("stopped", "failed", "interrupted") and status["checkpoint"]:
        yield "go on with", shlex.join(["mpctl", "launch", "--resume", "--run-dir", status["path"]])


def _checkpoint(status: StatusDocument) -> str:
    saved, seconds = status["checkpoint"], status["checkpoint_seconds"]
    if saved is None:
        return "none"
    when = "" if seconds is None else f", {age_text(seconds)} ago"
    damage = f"; damaged: {saved['problem']}" if saved["problem"] else ""
    return f"step {saved['step']:,} ({bytes_text(saved['bytes'])}){when}{damage}"


def _launcher(launcher: LauncherRow, status: StatusDocument) -> str:
    since = "" if launcher["started"] is None else f", since {moment_text(launcher['started'])}"
    job = "" if launcher["job_id"] is None else f" job {launcher['job_id']}"
    text = f"{launcher['backend']}{job} on {launcher['host']}, process {launcher['pid']}{since}"
    if status["status"] == "submitted":
        return f"submitted to {launcher['backend']} from {launcher['host']}{since}"
    if status["status"] == "running":
        return text if launcher["is_alive"] else f"{text}; as seen from this host"
    return f"{text}; it has ended"


def _rank_rows(status: StatusDocument) -> Iterator[Row]:
    """The ranks by what they do; of a run that has ended only those that ended in the midst of
    something."""
    is_running, groups = status["status"] == "running", defaultdict(list)
    for rank in status["ranks"]:
        if is_running or rank["doing"]:
            groups[rank["doing"] or NOT_RUNNING].append(rank)
    if not groups:
        return
    count = f"{status['world_size'] or len(status['ranks']):,}"
    yield "ranks", f"{count}{_heartbeats(status) if is_running else '; when they ended:'}"
    shown = list(groups.items())[:MOST_GROUPS]
    for doing, ranks in shown:
        yield f"  {ranks_text((rank['rank'] for rank in ranks), most=2)}", doing
    rest = [rank for _, ranks in list(groups.items())[MOST_GROUPS:] for rank in ranks]
    if rest:
        yield "  others", f"{plural(len(rest), 'rank')} at other parts of their step"


def _heartbeats(status: StatusDocument) -> str:
    ages = [age for rank in status["ranks"] if (age := rank["heartbeat_seconds"]) is not None]
    if not ages:
        return ""
    beating = sum(age < SILENT_SECONDS for age in ages)
    who = "all" if beating == len(status["ranks"]) else f"{beating:,}"
    return f", {who} with a heartbeat in the last {SILENT_SECONDS:g} s"


def _troubles(status: StatusDocument) -> Iterator[str]:
    """What a person should look at: ranks that do not answer, whom they wait for, damaged files."""
    if status["status"] == "running":
        silent = [rank for rank in status["ranks"] if _is_silent(rank)]
        for rank in silent[:MOST_NAMED]:
            seconds = rank["heartbeat_seconds"] or 0
            yield f"{rank_text(rank)}: no heartbeat for {age_text(seconds)}{_process(rank)}"
        if len(silent) > MOST_NAMED:
            yield f"and {plural(len(silent) - MOST_NAMED, 'other rank')} without a heartbeat"
    if status["waiting"]:
        yield status["waiting"]
    yield from status["problems"]


def _is_silent(rank: RankRow) -> bool:
    age = rank["heartbeat_seconds"]
    return age is not None and age >= SILENT_SECONDS


def _process(rank: RankRow) -> str:
    return "" if rank["process"] is None else f"; its process is {rank['process']}"


def rank_text(rank: RankRow) -> str:
    """`rank 3 (n2; tp 1, cp 0, dp 1, pp 0)`."""
    coords = ", ".join(f"{axis} {index}" for axis, index in rank["coords"].items())
    return f"rank {rank['rank']} ({'; '.join(filter(None, (rank['host'], coords)))})"


def age_text(seconds: float) -> str:
    """An age: `0.4 s`, `58 s`, `3.2 min`, `5.0 h`, `2.1 days`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 2 * 86400:
        return seconds_text(seconds)
    return f"{seconds / 86400:.1f} days"
