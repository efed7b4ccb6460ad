"""How long a checkpoint stops training, saved by a thread against saved between two steps:
`python -m benchmarks.save_speed [ROUNDS] [HIDDEN]`.

One process trains a GPT of 4 layers on one thread. In each round one checkpoint is saved between
two steps and one by a thread, in turn, by the same trainer; two steps follow each. Wall and
processor time of the stall, and the time until the checkpoint was published: medians, minimum and
maximum. The step during a save shows the cost of the writing thread. The disk is that of TMPDIR.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from mpctl.core.durable import remove
from mpctl.core.units import bytes_text
from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.load import load_job
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.train import Trainer
from tests.train.runtime.tiny import SETTINGS, make_data

Times = dict[str, list[float]]


def make_trainer(folder: Path, hidden: int) -> Trainer:
    """A trainer that has taken two steps, so that its moments exist."""
    job = load_job(
        None,
        {
            **SETTINGS,
            "data.path": str(make_data(folder)),
            "model.layers": 4,
            "model.hidden": hidden,
            "model.heads": 8,
            "parallel.tp": 1,
            "parallel.dp": 1,
            "cluster.gpus_per_node": 1,
            "training.steps": 10_000,
            "launch.track_memory": False,
        },
    )
    environment = RuntimeEnvironment.of_machine(job, folder, local_rank=0)
    trainer = build_trainer(folder, JobLayout.of(job), 0, environment)
    for _ in range(2):
        trainer.one_step()
    return trainer


def save_once(trainer: Trainer, times: dict[str, Times], kind: str) -> None:
    """One save of this kind and two steps after it; the checkpoint is removed again."""
    trainer.one_step()
    saver, copies = trainer.saver, trainer.saver.copies
    saver.copies = copies if kind == "thread" else None
    began, cpu = time.perf_counter(), time.process_time()
    trainer.begin_save()
    times[kind]["stall"].append(time.perf_counter() - began)
    times[kind]["stall, CPU"].append(time.process_time() - cpu)
    began_step = time.perf_counter()
    trainer.one_step()
    times[kind]["step after"].append(time.perf_counter() - began_step)
    saver.finish()
    saver.copies = copies
    times[kind]["published"].append(trainer.saver.times[-1]["seconds"])
    remove(trainer.saver.root / f"step-{trainer.saver.times[-1]['step']}")


def main(rounds: int, hidden: int) -> None:
    """Print the table."""
    names = ("stall", "stall, CPU", "published", "step after")
    times: dict[str, Times] = {k: {name: [] for name in names} for k in ("between", "thread")}
    with tempfile.TemporaryDirectory(prefix="mpctl-") as folder:
        trainer = make_trainer(Path(folder), hidden)
        size = trainer.saver.writer.total_bytes
        for number in range(rounds + 1):
            for kind in times:
                save_once(trainer, times, kind)
            if not number:  # files, caches and the memory of the copies exist after one round
                for table in times.values():
                    for column in table.values():
                        column.clear()
    load = os.getloadavg()[0]
    print(f"{bytes_text(size)} a checkpoint, {rounds} rounds, torch {torch.__version__}, load {load:.1f}")
    for kind, table in times.items():
        for name, values in table.items():
            spread = f"({1e3 * min(values):.0f} to {1e3 * max(values):.0f})"
            print(f"{kind:8} {name:11} {1e3 * median(values):8.1f} ms  {spread}")
    share = median(times["thread"]["stall"]) / median(times["between"]["stall"])
    cpu = median(times["thread"]["stall, CPU"]) / median(times["between"]["stall, CPU"])
    print(f"stall of a thread's save against one between two steps: {share:.1%}, goal 15%; CPU {cpu:.1%}")


if __name__ == "__main__":
    main(*(int(word) for word in (sys.argv[1:] + ["9", "768"][len(sys.argv) - 1 :])))
