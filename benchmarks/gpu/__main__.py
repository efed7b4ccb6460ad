"""The cases on the first CUDA device, within a budget of time:
`python -m benchmarks.gpu [--budget 6m] [--json FILE] [--tests] [--tiny] [--only TEXT]`.

Six minutes compare with plain torch and show the first kinds of cases, an hour shows all of them
(cases.py); `--list` prints which, without a device. FILE is written after each case, so that a call
that is cut keeps what it has; a later call with the same FILE measures what it lacks. Writes the
tables of benchmarks/results/gpu.md. Without a device it reports this and writes nothing. Exit code 1: nothing was
measured, or what offload frees is less than half of what is planned.
`--tiny` runs all of it on small models, on a CPU too, and prints the tables instead of writing
them: this only shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.cases import CASES, LONG, Case, Outcome, fitting, in_order, next_case, steps_within
from benchmarks.gpu.data import write_data
from benchmarks.gpu.ours import launch
from benchmarks.gpu.processes import run as run_whole
from benchmarks.gpu.report import PAGE, Peaks, goals, offload_falls_short, training_table
from benchmarks.gpu.shapes import SHAPES, Shape, tiny
from benchmarks.measured import write_part
from mpctl.core.durable import write_whole
from mpctl.core.errors import MpctlError
from mpctl.plan.estimate.flops import find_device_preset

SIDE, TINY_SIDE = 8192, 256
PEAK_SECONDS, TINY_PEAK_SECONDS = 4.0, 0.1
TINY_STEPS = 6
TESTS_SHARE = 0.3  # of the budget, for the tests
TESTS = (
    ("-m", "gpu and not slow", "tests/gpu", "tests/train/kernels", "tests/train/layers", "tests/train/transport"),
    ("-m", "not slow", "tests/train/kernels/triton"),
)
UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float:
    """`10m`, `1h`, `600s` or `600` -> seconds. Raises ValueError for other text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise ValueError(f"{text!r} is no time: give minutes, hours or seconds, such as 60m")
    return float(found[1]) * UNITS[found[2]]


@dataclass
class Budget:
    """Seconds until `end` of time.monotonic; what finished cases took, and were expected to."""

    end: float
    taken: float = 0.0
    expected: float = 0.0

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def pace(self) -> float:
        """What cases take here, relative to what was expected."""
        return self.taken / self.expected if self.expected else 1.0

    def note(self, began: float, expected: float) -> None:
        """A case that began at this time has ended."""
        self.taken += time.monotonic() - began
        self.expected += expected


@dataclass(frozen=True)
class Bench:
    """The settings of all cases: shapes by name, kind of device, number of steps; compiles: whether
    torch.compile is used at all; preset: the device's, by which memory is planned."""

    shapes: dict[str, Shape]
    device: str
    steps: int
    compiles: bool = True
    preset: str | None = None

    @property
    def warm(self) -> int:
        """Steps that are not measured."""
        return self.steps // 3

    def cost(self, case: Case) -> float:
        """Seconds that a case probably takes."""
        return case.seconds(self.shapes[case.shape], self.steps)

    def run(self, case: Case, folder: Path, data: Path | str, budget: Budget) -> Outcome:
        """The figures of a case, or the reason for having none. data: token files, or why there
        are none."""
        began = time.monotonic()
        if isinstance(data, str) and case.settings is not None:
            return Outcome(case, reason=data)
        try:
            return Outcome(case, self._figures(case, folder, Path(data), budget.left))
        except subprocess.TimeoutExpired:
            return Outcome(case, reason="given up: no time")
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
            return Outcome(case, reason=f"failed: {_last_line(error)}")
        except (OSError, ValueError, LookupError) as error:  # files that a run did not write whole
            return Outcome(case, reason=f"no figures: {type(error).__name__}: {error}")
        finally:
            budget.note(began, self.cost(case))

    def _figures(self, case: Case, folder: Path, data: Path, seconds: float) -> dict[str, float]:
        shape = self.shapes[case.shape]
        if case.settings is not None:
            settings = dict(case.settings)
            if not self.compiles:
                settings["launch.compile"] = False
            if case.saves:
                settings["checkpoint.interval"] = self.warm
            return launch(
                shape,
                folder / "run",
                data,
                settings,
                device=self.device,
                steps=self.steps,
                warm=self.warm,
                seconds=seconds,
                preset=self.preset,
            )
        run = {
            "shape": shape.as_dict(),
            "device": self.device,
            "steps": self.steps,
            "warm": self.warm,
            "compiles": self.compiles,
            **(case.peer or {}),
        }
        command = [sys.executable, "-m", "benchmarks.gpu.peer", json.dumps(run)]
        reported = run_whole(command, seconds)
        found: dict[str, float] = json.loads(reported.stdout.splitlines()[-1])
        return found


def _last_line(error: subprocess.CalledProcessError) -> str:
    lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
    return (lines or [f"exit code {error.returncode}"])[-1][:160].replace("|", "/")


def outcomes(bench: Bench, cases: Sequence[Case], budget: Budget) -> Iterator[Outcome]:
    """Run the cases that fit the budget one after the other, reporting each on stderr; then those
    that did not, with that as the reason."""
    left = in_order(cases)
    with tempfile.TemporaryDirectory() as name:
        data = _data(Path(name), min(shape.vocab for shape in bench.shapes.values()))
        while case := next_case(left, budget.left, lambda c: budget.pace * bench.cost(c)):
            left.remove(case)
            outcome = bench.run(case, Path(name), data, budget)
            reported = outcome.reason or f"{outcome.figures['seconds'] * 1e3:.1f} ms a step"
            print(f"{case.title}: {reported}", file=sys.stderr, flush=True)
            yield outcome
    yield from (Outcome(case, reason="left out: no time") for case in left)


def _data(folder: Path, vocab: int) -> Path | str:
    """Token files for all cases, or why there are none."""
    try:
        return write_data(folder, vocab)
    except (MpctlError, OSError, ImportError) as error:
        return f"no data: {type(error).__name__}: {error}"


def matmul_rate(kind: str, side: int, seconds: float) -> float:
    """FLOP/s of bf16 products of side x side matrices, one after the other for `seconds`, after
    half as long that is not measured: the clock that the device keeps under load, which is lower
    than that of a few products."""
    import torch

    device = torch.device(kind)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)

    def products(within: float) -> float:
        began, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < within or not count:
            for _ in range(10):
                torch.mm(a, b, out=out)
            if kind == "cuda":
                torch.cuda.synchronize(device)
            count += 10
        spent = time.perf_counter() - began
        return 2 * side**3 * count / spent

    products(seconds / 2)
    return products(seconds)


def run_tests(budget: Budget) -> str:
    """The results of the tests marked gpu and of the kernels' tests, in words; the rest of the
    output on stderr."""
    seconds = TESTS_SHARE * budget.left / len(TESTS)
    return "; ".join(_run_pytest(arguments, seconds) for arguments in TESTS)


def _run_pytest(arguments: tuple[str, ...], seconds: float) -> str:
    """pytest ends itself after `seconds`, with what has passed by then, and a test after a third of
    it; if it hangs all the same, it is ended with all that it started."""
    limits = (f"--session-timeout={seconds:.0f}", f"--timeout={max(10, seconds / 3):.0f}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *limits, *arguments]
    what, reason = " ".join(arguments), ""
    try:
        done = run_whole(command, 2 * seconds, check=False)
        text = done.stdout
    except subprocess.TimeoutExpired as late:
        text, reason = str(late.output), " (given up: it hung)"
    print(text, file=sys.stderr)
    lines = [line.strip("= ") for line in text.splitlines() if re.search(r"\d \w+.* in [\d.]+s", line)]
    passed = sum(line.count(".") for line in text.splitlines() if re.match(r"[.sFExX]+( |$)", line))
    return f"pytest {what}: {lines[-1] if lines else f'{passed} passed'}{reason}"


def listing(seconds: float) -> str:
    """The cases that a budget probably has room for, as JSON: steps of each, and by case its title,
    kind, and the seconds that it takes."""
    within = seconds
    steps = steps_within(CASES, within, lambda c, steps: c.seconds(SHAPES[c.shape], steps))
    cost = Bench(SHAPES, "cuda", steps).cost
    chosen = [{"case": c.title, "kind": c.kind, "seconds": round(cost(c))} for c in fitting(CASES, within, cost)]
    return json.dumps({"steps": steps, "of": len(CASES), "cases": chosen}, indent=1)


def main() -> None:
    """Measure, then write benchmarks/results/gpu.md, or print with --tiny."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--budget", default="6m", help="time for all of it: 6m, 1h, 360")
    parser.add_argument(
        "--tests", action="store_true", help=f"the tests of a GPU too, first, in {TESTS_SHARE:.0%}% of the time"
    )
    parser.add_argument("--list", action="store_true", help="print what the budget has room for")
    parser.add_argument(
        "--only",
        help="cases whose model or name has this text, without the tests, printed: "
        + ", ".join(f"{c.shape} {c.name}" for c in CASES),
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file for the figures, written after each case; cases that it has are not measured again",
    )
    parser.add_argument("--figures", type=Path, help="print the tables of such a file, no more")
    parser.add_argument("--page", action="store_true", help="with --figures: write benchmarks/results/gpu.md")
    given = parser.parse_args()
    chosen = [c for c in CASES if (given.only or "") in f"{c.shape} {c.name}"]
    if not chosen:
        parser.error(f"no case has {given.only!r} in its name (--help lists them)")
    try:
        seconds = seconds_of(given.budget)
    except ValueError as error:
        parser.error(f"--budget: {error}")
    if given.list:
        print(listing(seconds))
        return
    if given.figures:
        figures = Figures.read(given.figures)
        figures.publish(SHAPES, is_page=given.page)
    else:
        figures = measure(chosen, seconds, given)
    if short := offload_falls_short(figures.outcomes):
        sys.exit(short)


@dataclass(frozen=True)
class Figures:
    """All that was measured. machine: the device, in words, and the results of tests."""

    machine: str
    peaks: Peaks
    outcomes: list[Outcome] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Figures:
        """What `write` wrote; cases that there are no more are left out."""
        held = json.loads(path.read_text("utf-8"))
        known = {case.title: case for case in CASES}
        rows = [
            Outcome(known[row["case"]], row["figures"], row["reason"]) for row in held["cases"] if row["case"] in known
        ]
        return cls(held["machine"], Peaks(**held["peaks"]), rows)

    def write(self, path: Path) -> None:
        """As JSON; a process that is killed meanwhile leaves the file as it was."""
        rows = [{**vars(one), "case": one.case.title} for one in self.outcomes]
        held = {"machine": self.machine, "peaks": vars(self.peaks), "cases": rows}
        write_whole(path, json.dumps(held, indent=1))

    def publish(self, shapes: dict[str, Shape], *, is_page: bool) -> None:
        """Write the tables to benchmarks/results/gpu.md, or print them."""
        for part, text in self.parts(shapes).items():
            if is_page:
                write_part(part, text, PAGE)
            else:
                print(f"{text}\n")

    def parts(self, shapes: dict[str, Shape]) -> dict[str, str]:
        """The text of each part of benchmarks/results/gpu.md."""
        return {
            "machine": self.machine,
            "training": training_table(self.outcomes, shapes, self.peaks),
            "goals": goals(self.outcomes, shapes, self.peaks),
        }


def measure(cases: Sequence[Case], seconds: float, given: argparse.Namespace) -> Figures:
    """Run tests and cases, and write or print the tables."""
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not given.tiny:
        sys.exit("no CUDA device: nothing was measured, benchmarks/results/gpu.md is as it was (--tiny runs on CPU)")
    budget, kind = Budget(time.monotonic() + seconds), "cuda" if has_gpu else "cpu"
    known = Figures.read(given.json).outcomes if given.json and given.json.exists() else []
    known = [outcome for outcome in known if outcome.figures]
    measured = {outcome.case.title for outcome in known}
    cases = [case for case in cases if case.title not in measured]
    tested = run_tests(budget) if given.tests else ""
    shapes, steps = SHAPES, LONG
    if given.tiny:
        shapes, steps = {name: tiny(shape) for name, shape in SHAPES.items()}, TINY_STEPS
    elif not given.only:
        steps = steps_within(cases, budget.left, lambda c, n: c.seconds(SHAPES[c.shape], n))
    name = torch.cuda.get_device_name(0) if has_gpu else "CPU"
    size = (TINY_SIDE, TINY_PEAK_SECONDS) if given.tiny else (SIDE, PEAK_SECONDS)
    peaks = Peaks.of(name, matmul_rate(kind, *size))
    preset = find_device_preset(name) if has_gpu else None
    bench = Bench(shapes, kind, steps, compiles=has_gpu, preset=preset)
    head = f"{name}, torch {torch.__version__}, {peaks}; {steps} steps, the first third warm-up."
    figures = Figures("\n\n".join(filter(None, [head, tested])), peaks, known)
    for outcome in outcomes(bench, cases, budget):
        figures.outcomes.append(outcome)
        if given.json:
            figures.write(given.json)
    figures.publish(shapes, is_page=not (given.tiny or given.only))
    return figures


if __name__ == "__main__":
    main()
