"""The tests of a GPU, then the cases, on the first CUDA device, within ten minutes:
`python -m benchmarks.gpu [--tiny] [--seconds 600] [--no-tests] [--json FILE]`.

Writes the tables of docs/gpu.md. Without a device it reports this and writes nothing. `--tiny` runs
all of it on small models, on a CPU too, and prints the tables instead of writing them: this only
shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.cases import CASES, Case, Outcome
from benchmarks.gpu.ours import launch, prepare_data
from benchmarks.gpu.report import PAGE, goals, training_table
from benchmarks.gpu.shapes import SHAPES, Shape, tiny
from benchmarks.measured import write_part

STEPS, WARM, SIDE = 30, 10, 8192
TINY_STEPS, TINY_WARM, TINY_SIDE = 6, 3, 256
EAGER = {"launch.compile": False}
TESTS_SHARE = 0.4  # of the budget, for the tests
TESTS = (
    ("-m", "gpu", "tests/gpu", "tests/kernels", "tests/layers", "tests/transport"),
    ("tests/kernels/triton",),
)


@dataclass
class Budget:
    """Seconds until `end` of time.monotonic, and the longest that a case has taken."""

    end: float
    longest: float = 30.0

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    @property
    def is_spent(self) -> bool:
        """Whether another case would probably not finish."""
        return self.left < self.longest


@dataclass(frozen=True)
class Bench:
    """The settings of all cases: shapes by name, kind of device, number of steps and of warm-up
    steps; compiles: whether torch.compile is used at all."""

    shapes: dict[str, Shape]
    device: str
    steps: int
    warm: int
    compiles: bool = True

    def run(self, case: Case, folder: Path, data: Path, budget: Budget) -> Outcome:
        """The figures of a case, or the reason for having none."""
        if budget.is_spent:
            return Outcome(case, reason="left out: no time")
        began = time.monotonic()
        try:
            found = self._figures(case, folder, data, budget.left)
        except subprocess.TimeoutExpired:
            return Outcome(case, reason="given up: no time")
        except subprocess.CalledProcessError as error:
            return Outcome(case, reason=f"failed: {_last_line(error)}")
        budget.longest = max(budget.longest, time.monotonic() - began)
        return Outcome(case, found)

    def _figures(self, case: Case, folder: Path, data: Path, seconds: float) -> dict[str, float]:
        shape = self.shapes[case.shape]
        if case.settings is not None:
            settings = dict(case.settings) if self.compiles else {**case.settings, **EAGER}
            if case.saves:
                settings["checkpoint.interval"] = 2 * self.warm
            return launch(shape, folder / "run", data, settings, device=self.device,
                          steps=self.steps, warm=self.warm, seconds=seconds)  # fmt: skip
        run = {"shape": shape.as_dict(), "device": self.device, "steps": self.steps,
               "warm": self.warm, "compiles": self.compiles, **(case.peer or {})}  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.gpu.peer", json.dumps(run)]
        reported = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=seconds
        )
        found: dict[str, float] = json.loads(reported.stdout.splitlines()[-1])
        return found


def _last_line(error: subprocess.CalledProcessError) -> str:
    lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
    return (lines or [f"exit code {error.returncode}"])[-1][:160].replace("|", "/")


def outcomes(bench: Bench, cases: Sequence[Case], budget: Budget) -> Iterator[Outcome]:
    """Run the cases one after the other, reporting each on stderr."""
    with tempfile.TemporaryDirectory() as name:
        vocab = min(shape.vocab for shape in bench.shapes.values())
        data = prepare_data(Path(name), vocab, 120)
        for case in cases:
            outcome = bench.run(case, Path(name), data, budget)
            reported = outcome.reason or f"{outcome.figures['seconds'] * 1e3:.1f} ms a step"
            print(f"{case.shape}, {case.who}, {case.name}: {reported}", file=sys.stderr, flush=True)
            yield outcome


def matmul_peak(device: torch.device, side: int) -> float:
    """FLOP/s of the best of 20 bf16 products of side x side matrices, after 5 that warm up."""
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for turn in range(25):
        began = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if turn >= 5:
            best = min(best, time.perf_counter() - began)
    return 2 * side**3 / best


def run_tests(budget: Budget) -> str:
    """The results of the tests marked gpu and of the kernels' tests, in words; the rest of the
    output on stderr."""
    return "; ".join(_run_pytest(arguments, budget) for arguments in TESTS)


def _run_pytest(arguments: tuple[str, ...], budget: Budget) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    what = " ".join(arguments)
    try:
        done = subprocess.run(command, capture_output=True, text=True,
                              timeout=max(1.0, TESTS_SHARE * budget.left))  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"pytest {what}: given up, no time"
    print(done.stdout, file=sys.stderr)
    lines = [line for line in done.stdout.splitlines() if " in " in line] or [
        f"code {done.returncode}"
    ]
    return f"pytest {what}: {lines[-1].strip('= ')}"


def main() -> None:
    """Measure, then write docs/gpu.md, or print with --tiny."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small models, also on a CPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="budget of time")
    parser.add_argument("--no-tests", action="store_true", help="benchmark alone")
    parser.add_argument(
        "--only", help="cases whose model or name has this text, without the tests, printed: "
        + ", ".join(f"{c.shape} {c.name}" for c in CASES),
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    chosen = [c for c in CASES if (given.only or "") in f"{c.shape} {c.name}"]
    if not chosen:
        parser.error(f"no case has {given.only!r} in its name (--help lists them)")
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not given.tiny:
        sys.exit(
            "no CUDA device: nothing was measured, docs/gpu.md is as it was (--tiny runs on CPU)"
        )
    budget = Budget(time.monotonic() + given.seconds)
    device = torch.device("cuda" if has_gpu else "cpu")
    tested = "" if given.no_tests or given.only else run_tests(budget)
    shapes = {name: tiny(shape) for name, shape in SHAPES.items()} if given.tiny else SHAPES
    steps, warm, side = (TINY_STEPS, TINY_WARM, TINY_SIDE) if given.tiny else (STEPS, WARM, SIDE)
    peak = matmul_peak(device, side)
    bench = Bench(shapes, device.type, steps, warm, compiles=has_gpu)
    found = list(outcomes(bench, chosen, budget))
    name = torch.cuda.get_device_name(device) if has_gpu else "CPU"
    head = f"{name}, torch {torch.__version__}, measured matmul peak {peak / 1e12:.1f} TFLOP/s."
    parts = {"machine": f"{head}\n\n{tested}", "training": training_table(found, shapes, peak),
             "goals": goals(found, shapes, peak)}  # fmt: skip
    if given.json:
        given.json.write_text(
            json.dumps([{**vars(o), "case": vars(o.case)} for o in found], indent=1)
        )
    for part, text in parts.items():
        if given.tiny or given.only:
            print(f"{text}\n")
        else:
            write_part(part, text, PAGE)


if __name__ == "__main__":
    main()
