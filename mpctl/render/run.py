"""A run on a terminal: a bar with loss, speed and time left; then its summary.

On a terminal one line moves; elsewhere a line is printed every tenth of the way. All on stderr:
stdout is for the result.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired

from rich.text import Text
from typing_extensions import TypedDict  # pydantic needs it to validate them before Python 3.12

from mpctl.core.units import MFU_CONVENTION, bytes_text, count_text, plural, seconds_text
from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import StepRecord, loss_text
from mpctl.records.rundir.summary import STATES, ExpertSummary, PlanAndRun, RankComparison, RunSummary, SaveSummary
from mpctl.render.console import get_console, marked, say
from mpctl.render.output import print_json
from mpctl.render.parts import Facts, Part, Sentence, Style
from mpctl.render.progress import progress_bar
from mpctl.render.terminal import print_parts
from mpctl.run.launch.launch_plan import HostCommand, LaunchPlan
from mpctl.spec.figure_sources import sources_text

if TYPE_CHECKING:
    from mpctl.records.rundir.summary import Failure

UNKNOWN_STEPS = 1000  # of a program: every hundredth step is a line where there is no terminal
USUAL_GOODPUT = 0.9  # from which on a summary does not mention it
MOST_SLOW = 4


class RunView:
    """Shows the records of a run as they come. steps: of the job, None where it is not known; done:
    steps that were trained before."""

    def __init__(self, steps: int | None, predicted: float | None, *, done: int = 0) -> None:
        self.steps, self.predicted = steps, predicted
        self.console = get_console(stderr=True)
        self.validation: float | None = None
        self.bar = progress_bar(self.console)
        self.task = self.bar.add_task(self._head(done), total=steps, completed=done, note="starting")

    def _head(self, step: int) -> str:
        return f"step {step}" if self.steps is None else f"step {step}/{self.steps}"

    def __enter__(self) -> RunView:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self.bar.stop()

    def record(self, record: StepRecord) -> None:
        """Show the figures of a step."""
        self.validation = record.get("validation_loss", self.validation)
        note = " · ".join(step_figures(record, self.validation, self.predicted))
        step, head = record["step"], self._head(record["step"])
        self.bar.update(self.task, description=head, completed=step, note=note)
        each = (self.steps or UNKNOWN_STEPS) // 10
        due = step % max(1, each) == 0 or "validation_loss" in record
        if not self.console.is_terminal and (due or step in (1, self.steps)):
            self._print(f"{head}  {note}")

    def event(self, message: str) -> None:
        """Print a message of the run, marked `!`."""
        self._print(marked("!", message))

    def _print(self, line: str | Text) -> None:
        with suppress(OSError):  # the terminal is gone (SIGHUP): the run still ends in order
            self.console.print(line, soft_wrap=True)


def step_figures(record: StepRecord, validation: float | None, predicted: float | None) -> list[str]:
    """The figures of a step, most important first: `loss 5.31`, `val 5.40`, `4,812 tokens/s`, `851
    ms a step`, `745 ms predicted`.
    """
    parts = [loss_text(record, digits=3)]
    if validation is not None:
        parts.append(f"val {validation:.3f}")
    if record["tokens_per_second"]:  # a program need not say
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    parts.append(f"{seconds_text(record['step_seconds'])} a step")
    return [*parts, f"{seconds_text(predicted)} predicted"] if predicted else parts


def print_summary(summary: RunSummary, run_dir: str) -> None:
    """Print a run's summary on stdout."""
    print_parts(summary_parts(summary, run_dir))


STYLE: dict[str, Style] = {"finished": "passed", "failed": "failed"}


def summary_parts(summary: RunSummary, run_dir: str) -> Iterator[Part]:
    status = summary["status"]
    yield Sentence(f"{status} after {plural(summary['steps'], 'step')}", STYLE.get(status, "head"))
    yield Facts(list(summary_rows(summary)))
    yield Sentence(f"run directory  {run_dir}")


def summary_rows(summary: PlanAndRun) -> Iterator[tuple[str, str]]:
    """The results, measurements and comparison with the plan, as name and text."""
    yield "loss", _loss(summary["final_loss"])
    yield from _validation_rows(summary)
    if summary["step_seconds"] is not None:
        predicted = summary["predicted_step_seconds"]
        forecast = f", predicted {seconds_text(predicted)}" if predicted else ""
        yield "step time", f"{seconds_text(summary['step_seconds'])} (median){forecast}"
        if sources := summary.get("figures_from"):
            yield "figures", sources_text(sources)
        if communication := summary.get("communication_seconds"):
            axes = sorted(communication.items(), key=lambda item: -item[1])
            shown = ", ".join(f"{axis} {seconds_text(spent)}" for axis, spent in axes)
            share = sum(communication.values()) / summary["step_seconds"]
            yield "communication", f"{share:.0%} of rank 0's step: {shown}"
        if summary["tokens_per_second"]:
            yield "tokens/s", f"{summary['tokens_per_second']:,.0f}"
        yield from _utilization(summary)
        yield from expert_rows(summary.get("experts"))
        if summary["tokens"]:
            yield "tokens", count_text(summary["tokens"])
        goodput = summary.get("goodput")
        if goodput is not None and goodput < USUAL_GOODPUT:
            yield "goodput", f"{goodput:.1%} of the time since the first step, in steps that count"
    yield from _slow_rows(summary.get("slow", []))
    if summary["saves"] is not None:
        yield "saving", _saving(summary["saves"])
    ranks = summary["plan_beside_run"]
    if ranks:
        yield "plan = run", _agreement(ranks)
        yield from _memory(ranks)
        peak = max(rank["peak_memory_bytes"] for rank in ranks)
        reserved = max(rank.get("reserved_memory_bytes") or 0 for rank in ranks)
        more = f", {bytes_text(reserved)} reserved by the allocator" if reserved else ""
        yield "peak memory", f"{bytes_text(peak)} on the fullest rank{more}"


def expert_rows(experts: ExpertSummary | None) -> Iterator[tuple[str, str]]:
    """The load of experts and of their ranks, and the loss that balances it."""
    if experts is not None:
        expert, rank, near = experts["expert_load"], experts["rank_load"], experts["near_ties"]
        load = f"fullest expert {expert:.2f}, fullest rank {rank:.2f} times the mean"
        ties = f", {near:,.0f} near ties a step" if near else ""
        yield "experts", f"{load}; auxiliary loss {experts['aux_loss']:.4g}{ties}"


def _slow_rows(slow: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the first MOST_SLOW delays of the run, a sentence each."""
    for part in slow[:MOST_SLOW]:
        until = "" if part["until"] is None else f"; until step {part['until']}"
        yield "slow", f"{part['text']}{until}"
    if len(slow) > MOST_SLOW:
        yield "slow", f"{len(slow) - MOST_SLOW} more times: see slow.jsonl"


def _utilization(summary: PlanAndRun) -> Iterator[tuple[str, str]]:
    """MFU and HFU; for a run on GPUs of unknown peak, a note on that."""
    mfu, hfu = summary.get("mfu"), summary.get("hfu")
    gpu = next((name for r in summary["plan_beside_run"] if (name := r.get("device"))), None)
    if mfu is not None and hfu is not None:
        of = "the device's data sheet" if gpu is None else f"the data sheet of {gpu}"
        yield "MFU, HFU", f"{mfu:.1%}, {hfu:.1%} of {of}, {MFU_CONVENTION}"
    elif gpu is not None:
        yield "MFU, HFU", f"not known: no device preset has the peak of {gpu}; name cluster.device"


def _validation_rows(summary: PlanAndRun) -> Iterator[tuple[str, str]]:
    """Validation losses at the end and, where it was measured, before training."""
    if summary["validation_loss"] is not None:
        first, last = summary["initial_validation_loss"], summary["validation_loss"]
        yield "validation loss", _change(first, last)
    for name, last in summary["validation_losses"].items():
        yield f"  of {name}", _change(summary["initial_validation_losses"].get(name), last)


def _change(first: float | None, last: float | None) -> str:
    return _loss(last) if first is None else f"{_loss(first)} → {_loss(last)}"


def _saving(saves: SaveSummary) -> str:
    """`3 checkpoints, 2.10 s each (median), for which training waited 0.12 s`."""
    each = f"{seconds_text(saves['seconds'])}{' each (median)' * (saves['count'] > 1)}"
    waited = seconds_text(saves["stall_seconds"])
    return f"{plural(saves['count'], 'checkpoint')}, {each}; training waited {waited}"


def _agreement(compared: Sequence[RankComparison]) -> str:
    differing = [str(rank["rank"]) for rank in compared if not rank["agrees"]]
    if differing:
        several = f"ranks {', '.join(differing)} differ"
        who = several if len(differing) > 1 else f"rank {differing[0]} differs"
        return f"{who} from the plan: see summary.json"
    sent = sum(entry["bytes"] for entry in compared[0]["step_traffic"]["measured"].values())
    return (
        f"parameters and collectives of {plural(len(compared), 'rank')} are as planned, "
        f"byte by byte (messages of {bytes_text(sent)} a step on rank 0)"
    )


def _memory(ranks: Sequence[RankComparison]) -> Iterator[tuple[str, str]]:
    """The measured step of the fullest rank and its plan, where a step was measured."""
    watched = [rank for rank in ranks if rank.get("memory")]
    if not watched:
        return
    fullest = max(watched, key=lambda rank: rank["memory"]["peak"]["measured"])
    planned, measured = (fullest["memory"]["peak"][key] for key in ("planned", "measured"))
    states = sum(fullest["memory"][kind]["measured"] for kind in STATES)
    peak = f"{bytes_text(measured)} at the peak of a step of rank {fullest['rank']}"
    plan = f"planned {bytes_text(planned)} ({planned / measured - 1:+.1%})"
    yield "step memory", f"{peak}, {plan}; {bytes_text(states)} of states"


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def print_failure(failure: Failure, *, run: str, step: int, is_program: bool = False) -> None:
    """Print on stderr the rank that failed first, with its host, coordinates, error and the last
    lines of its log, then what other ranks said and how to go on.

    run: the run directory; step: of its newest checkpoint, 0 without one; is_program: the ranks ran
    a program, whose checkpoints are not known.
    """
    console = get_console(stderr=True, soft_wrap=True)
    console.print(marked("✗", str(failure)))
    for line in failure.last_lines:
        console.print(Text(f"  │ {line}", style="dim"))
    for other in failure.others:
        console.print(Text(f"  and {other}"))
    console.print(Text.assemble(("  → ", "cyan"), f"full log: {failure.log}"))
    again = f"mpctl launch --resume --run-dir {shlex.quote(run)}"
    lost = "no checkpoint was saved; checkpoint.interval N saves one every N steps"
    go_on = f"go on from step {step}: {again}" if step else lost
    if is_program:
        go_on = f"start the program again: {again}"
    console.print(Text.assemble(("  → ", "cyan"), go_on))


def print_commands(plan: LaunchPlan, commands: Sequence[HostCommand], *, as_json: bool) -> None:
    """Print the commands of a launch, those of each host under its name where there are several."""
    if as_json:
        print_json(plan.document(commands))
        return
    files = ", ".join(plan.files)
    say(f"# writes {files} and the records of the run into {plan.run.path}/")
    _print_program(plan)
    for host in commands:
        if len(commands) > 1:
            say(f"# node {host.node}, {host.host}:")
        say(host.text)


class SubmissionDocument(TypedDict):
    """Output of `mpctl launch --submit --json`. Of a dry run: document, the script or manifest; files, what would be
    written into the run directory; program, what every rank runs. runs: the run directories of an array."""

    schema: Literal["mpctl.submission/1"]
    scheduler: str
    job_id: str | None
    run_dir: str
    document: NotRequired[str]
    files: NotRequired[Mapping[str, str]]
    program: NotRequired[Sequence[str]]
    runs: NotRequired[list[str]]


def submission_document(scheduler: str, job_id: str | None, run_dir: str) -> SubmissionDocument:
    """Return what was or would be submitted."""
    return {"schema": "mpctl.submission/1", "scheduler": scheduler, "job_id": job_id, "run_dir": run_dir}


def _print_program(plan: LaunchPlan) -> None:
    """Print what each rank runs as comments, if that is a program."""
    if plan.runs_program:
        say(f"# each rank runs, in {plan.job.launch.program_dir}:")
        say(f"#   {shlex.join(plan.job.launch.program_argv)}")


def print_document(
    scheduler: str, text: str, run: Path, files: Mapping[str, str], launch: LaunchPlan, *, as_json: bool
) -> None:
    """Print the batch script or manifest that a dry run would submit. run: the run directory; files: what would be
    written there; launch: of the first run."""
    if as_json:
        found = submission_document(scheduler, None, str(run))
        program = launch.job.launch.program_argv or []
        print_json({**found, "document": text, "files": files, "program": program})
    else:
        say(text)
        _print_program(launch)


def print_submission(scheduler: str, job_id: str, run: RunDir, *, via: str | None = None, as_json: bool) -> None:
    """Print what was submitted and how to follow it. via: the login host that this is, for a
    command from another machine."""
    if as_json:
        print_json(submission_document(scheduler, job_id, str(run.path)))
        return
    say(f"submitted to {scheduler} as job {job_id}; its run is {run.path}")
    there = "" if via is None else f"--via {shlex.quote(via)} "
    for command in ("status", "logs --follow", "stop"):
        say(f"  mpctl {command} {there}{shlex.quote(str(run.path))}")
