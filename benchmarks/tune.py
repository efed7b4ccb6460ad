"""`mpctl tune` against an exhaustive sweep: `python -m benchmarks.tune [JOB]`, on a quiet machine.

Three stages in one folder (`--out`, by default runs/benchmark-tune), each of which goes on where it
was stopped:

1. sweep: every layout that `mpctl search JOB` knows for `--ranks` is trained once, with STEPS steps
   after the warm-up, in the order of its plan. Of `demo` on four ranks these are 1,116; by default
   those that recompute, or cut stages by cost, are left out (`--fix`), which leaves 456, since the
   job fits its memory twenty times over; `--whole` sweeps all. Some 15 s a layout on two cores.
   `--fix zero=0 --fix vpp=1` sweeps a part of the space, and tunes in it.
2. tune: `mpctl tune`, with `--budget`, in the whole space where nothing is fixed by hand.
3. final: the FINALISTS fastest of the sweep and the best of the tuning, in turns, ROUNDS times:
   the fastest of a sweep of single runs was lucky, and only runs side by side tell by how much.

Printed at the end: the layouts of the final with their medians over the rounds, by how much the
tuning's is slower than the fastest (the gate is 3 %), how many trials and minutes both took, and
where the tuning's layout stands in the sweep. `--report` prints it from what is there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from mpctl.core.units import plural, seconds_text
from mpctl.measure.tune.pool import Pool
from mpctl.measure.tune.state import LEAST_STEPS, TrialRecord, TuneFolder
from mpctl.measure.tune.target import prepared_data
from mpctl.measure.tune.trial import TrialOrder, TrialWatch, launch_trial
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_text
from mpctl.plan.search.request import SearchRequest, read_request
from mpctl.records.rundir.summary import WARM_UP_STEPS
from mpctl.run.hosts.machine import this_machine
from mpctl.spec.job import JobSpec

STEPS = LEAST_STEPS + 1
FINALISTS, ROUNDS, FINAL_STEPS = 4, 5, 10
FIXED = ("recompute=none", "stage_balance=even")
PATIENCE = 120.0  # seconds after which a trial is ended
GATE = 0.03


def main() -> None:
    """Run the stages that `--stage` names, then print the comparison."""
    options = _options()
    settings = {"cluster.nodes": 1, "cluster.gpus_per_node": options.ranks}
    fixed = [] if options.whole else [*FIXED, *options.fix]
    request = read_request(options.job, settings, fixed, {})
    sweep = TuneFolder(options.out / ("sweep-whole" if options.whole else "sweep"))
    sweep.claim(request.job, request.fixed)
    final = TuneFolder(options.out / "final")
    final.claim(request.job, {})
    tuned = options.out / "tune"
    if options.stage in ("all", "sweep") and not options.report:
        run_sweep(request, sweep)
    if options.stage in ("all", "tune") and not options.report:
        line = [
            sys.executable,
            "-m",
            "mpctl",
            "tune",
            options.job,
            "--ranks",
            str(options.ranks),
            "--budget",
            options.budget,
            "--out",
            str(tuned),
        ]
        subprocess.run([*line, *(part for one in options.fix for part in ("--fix", one))], check=True)
    if options.stage in ("all", "final") and not options.report:
        run_final(request, final, finalists(sweep, TuneFolder(tuned)), options.rounds)
    print("\n".join(report(sweep, TuneFolder(tuned), final)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("job", nargs="?", default="demo")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark-tune"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--fix", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--stage", choices=("all", "sweep", "tune", "final"), default="all")
    parser.add_argument("--report", action="store_true")
    return parser.parse_args()


def run_sweep(request: SearchRequest, folder: TuneFolder) -> None:
    """Train every layout of the space once, the fastest by plan first."""
    pool = Pool(request.space())
    planned = {}
    for layout in request.space().layouts():
        if (seconds := pool.evaluator.step_seconds(layout)) is not None:
            planned[layout] = seconds
    known = {record.settings for record in folder.recovered() if record.status != "interrupted"}
    waiting = [one for one in sorted(planned, key=lambda one: planned[one]) if one not in known]
    began = time.monotonic()
    for done, layout in enumerate(waiting):
        train(request, folder, layout, planned[layout], STEPS)
        left = (time.monotonic() - began) / (done + 1) * (len(waiting) - done - 1)
        print(f"sweep: {len(known) + done + 1} of {len(planned)}, {seconds_text(left)} left", flush=True)


def run_final(request: SearchRequest, folder: TuneFolder, layouts: Sequence[LayoutSettings], rounds: int) -> None:
    """Train the finalists in turns."""
    records = folder.recovered()
    for number in range(rounds):
        for layout in layouts:
            own = [r for r in records if r.settings == layout and r.status == "measured"]
            if len(own) <= number:
                train(request, folder, layout, 0.0, FINAL_STEPS)


def train(request: SearchRequest, folder: TuneFolder, layout: LayoutSettings, planned: float, steps: int) -> None:
    """Train one layout, and record it in the folder."""
    job = _with_data(request.space().job_of(layout), folder)
    number = max((record.number for record in folder.records()), default=0) + 1
    record = TrialRecord(number, layout._asdict(), "a sweep", planned, planned, 0, WARM_UP_STEPS + steps, time.time())
    folder.save(record)
    began = time.monotonic()
    order = TrialOrder(job, record.steps, folder.run(number), PATIENCE, None, "benchmarks.tune")
    result = launch_trial(order, TrialWatch())
    wall = time.monotonic() - began
    ended = record.ended(result.status, wall=wall, seconds=result.seconds, error=result.error)
    folder.save(ended)
    shown = f"{ended.step_seconds:.3f} s" if ended.step_seconds else f"{ended.status} {ended.error}"
    print(f"{shown} ({seconds_text(planned)} planned), {layout_text(layout)}", flush=True)
    if result.is_stopped:
        raise KeyboardInterrupt


def _with_data(job: JobSpec, folder: TuneFolder) -> JobSpec:
    path = prepared_data(job, folder, this_machine(), lambda stage, done, total: None)
    if path is None:
        return job
    return job.model_copy(update={"data": job.data.model_copy(update={"path": path})})


def step_times(folder: TuneFolder) -> dict[LayoutSettings, list[float]]:
    """The step times of each measured layout."""
    found: dict[LayoutSettings, list[float]] = {}
    for record in folder.records():
        if record.status == "measured" and record.step_seconds is not None:
            found.setdefault(record.settings, []).append(record.step_seconds)
    return found


def best_of_tuning(folder: TuneFolder) -> LayoutSettings:
    """The layout that the tuning named."""
    report = json.loads((folder.path / "report.json").read_text("utf-8"))
    return LayoutSettings(**report["best"]["settings"])


def finalists(sweep: TuneFolder, tuned: TuneFolder) -> list[LayoutSettings]:
    """The fastest of the sweep, and the best of the tuning."""
    times = step_times(sweep)
    fastest = sorted(times, key=lambda one: median(times[one]))[:FINALISTS]
    return [*dict.fromkeys([*fastest, best_of_tuning(tuned)])]


def report(sweep: TuneFolder, tuned: TuneFolder, final: TuneFolder) -> Iterator[str]:
    """The comparison, in lines."""
    times, last = step_times(sweep), step_times(final)
    order = sorted(times, key=lambda one: median(times[one]))
    minutes = sum(record.wall for record in sweep.records()) / 60
    yield f"sweep: {plural(len(times), 'layout')} in {minutes:.0f} min"
    if not (tuned.path / "report.json").is_file():
        return
    best, trials = best_of_tuning(tuned), tuned.records()
    minutes = sum(record.wall for record in trials) / 60
    yield f"tune: {plural(len(trials), 'trial')} in {minutes:.1f} min: {layout_text(best)}"
    if best in order:
        share = median(times[best]) / median(times[order[0]]) - 1
        yield f"in the sweep it is no. {order.index(best) + 1}, {share:+.1%} from the first"
    if not last:
        return
    yield "final, medians of runs in turns:"
    ranked = sorted(last, key=lambda one: median(last[one]))
    for one in ranked:
        runs = ", ".join(f"{seconds:.3f}" for seconds in last[one])
        mark = " <- tune" if one == best else ""
        yield f"  {median(last[one]):.3f} s ({runs}) {layout_text(one)}{mark}"
    if best in last:
        regret = median(last[best]) / median(last[ranked[0]]) - 1
        verdict = "within" if regret <= GATE else "NOT within"
        yield f"tune's layout is {regret:.1%} slower than the fastest: {verdict} {GATE:.0%}"


if __name__ == "__main__":
    main()
