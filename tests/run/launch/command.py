"""`mpctl launch` as people type it: a real process, its output in files, its children known."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from mpctl.train.data.manifest import open_prepared
from mpctl.train.data.samples import PackedSamples, sample_numbers
from tests.train.runtime.tiny import SETTINGS

PATIENCE = 150.0  # on a machine that does much else
STARTED: list[Launched] = []  # so that a test that fails leaves nothing running


def arguments(data: Path, run_dir: Path, *more: str) -> list[str]:
    """The arguments of `mpctl`; later settings win."""
    sizes = [int(more[more.index(flag) + 1]) for flag in ("--tp", "--dp") if flag in more]
    given = {**SETTINGS, "data.path": str(data), "cluster.gpus_per_node": math.prod(sizes)}
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    return ["launch", *(part for one in sets for part in ("--set", one)), "--run-dir", str(run_dir), *more]


def wait_for(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """The result of `condition` once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        time.sleep(0.02)
    return found


@dataclass
class Launched:
    """A launch, running or ended."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    family: dict[int, psutil.Process] = field(default_factory=dict)

    @property
    def stdout(self) -> str:
        return self.run_dir.with_suffix(".out").read_text()

    @property
    def stderr(self) -> str:
        return self.run_dir.with_suffix(".err").read_text()

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def records(self) -> list[dict[str, Any]]:
        metrics = self.run_dir / "metrics.jsonl"
        if not metrics.exists():
            return []
        lines = metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    @property
    def losses(self) -> list[float]:
        return [record["loss"] for record in self.records]

    def at_step(self, step: int) -> Launched:
        """Wait until a step is on record; remember every process there is by then."""
        wait_for(lambda: len(self.records) >= step or self.process.poll() is not None)
        assert self.process.poll() is None, self.stderr
        self.remember()
        return self

    def remember(self) -> None:
        for process in psutil.Process(self.process.pid).children(recursive=True):
            self.family[process.pid] = process

    def worker(self, rank: int) -> psutil.Process:
        ranked = [p for p in self.family.values() if p.environ().get("RANK") == str(rank)]
        assert len(ranked) == 1, ranked
        return ranked[0]

    def ended(self, seconds: float = PATIENCE) -> Launched:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.remember()
            for process in self.family.values():
                process.kill()
            self.process.kill()
            raise AssertionError(f"still running after {seconds} s:\n{self.stderr}") from None
        return self

    def left_behind(self, seconds: float = 0.0) -> list[psutil.Process]:
        """Processes of the family that still run `seconds` later."""
        return psutil.wait_procs(list(self.family.values()), timeout=seconds)[1]


def start(argv: list[str], run_dir: Path, *, cwd: Path | None = None) -> Launched:
    """`mpctl ARGV`; its output goes next to the run directory."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR")}
    with run_dir.with_suffix(".out").open("wb") as out, run_dir.with_suffix(".err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "mpctl", *argv],
            stdout=out,
            stderr=err,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            env=environment,
        )
    STARTED.append(Launched(process, run_dir))
    return STARTED[-1]


def end_all() -> None:
    """Kill every launcher that still runs; its ranks end with it."""
    while STARTED:
        run = STARTED.pop()
        run.process.kill()  # does nothing when it has ended
        run.process.wait()
        for process in run.left_behind():
            process.kill()


def launch(data: Path, run_dir: Path, *more: str) -> Launched:
    return start(arguments(data, run_dir, *more), run_dir)


def endless(data: Path, run_dir: Path, *more: str) -> Launched:
    """A launch that runs until a test ends it."""
    keys = ("training.steps=100000", "checkpoint.interval=0", "training.eval_samples=0")
    return launch(data, run_dir, *more, *(part for key in keys for part in ("--set", key)))


def poison(data: Path, out: Path, *, dp_rank: int, dp: int, micro_batch: int = 0) -> int:
    """A copy of the data in which one sample of one replica holds a token that no model has;
    returns the step, from 1, that meets it."""
    shutil.copytree(data, out)
    train = open_prepared(out).train
    samples = PackedSamples(train.open(), 32, 1234)
    tokens = np.fromfile(train.prefix.with_suffix(".bin"), np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, 33)
    for step in itertools.count(2):
        numbers = sample_numbers(
            step=step, micro_batch=micro_batch, micro_batch_size=2, dp_rank=dp_rank, dp_size=dp, global_batch_size=8
        )
        (found,) = np.nonzero((windows == samples.sample(numbers[0])).all(axis=1))
        if len(found) == 1:  # it does not straddle two documents
            tokens[found[0] + 16] = 60_000
            tokens.tofile(train.prefix.with_suffix(".bin"))
            return step + 1
    raise AssertionError
