"""Workers that read a model and do not train it: started, listened to, and always ended.

One process a rank, `python -m mpctl.runtime.task FOLDER`, all on this machine; FOLDER is temporary,
so nothing is written where the model lies. Each worker is killed by the kernel with this process,
and ends with it however it ends. Answers come through a file, as they are written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mpctl.errors import InputError, Issue, RunFailed
from mpctl.launch.machine import Machine
from mpctl.launch.port import HOST, free_port
from mpctl.launch.preflight import check_launch, chosen_device
from mpctl.launch.supervise import StopRequests
from mpctl.planning.plan import make_plan
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.parallel import ParallelSpec

POLL_SECONDS = 0.02
ENDING_SECONDS = 1.0  # that the ranks get to leave records after the first of them has failed
# Of what would stop a launch, what also stops workers that only read the model.
CHECKED = ("world-fits-machine", "not-run-yet")
Answer = dict[str, Any]


def task_job(
    job: JobSpec, machine: Machine, sizes: dict[str, int], *, device: str, dtype: str | None
) -> JobSpec:
    """The job as its workers run it: this layout on this machine, nothing recomputed or dropped.

    sizes: of the axes, 1 where absent. Raises InputError with every reason why that cannot be.
    """
    parallel = ParallelSpec(
        tp=sizes.get("tp", 1), pp=sizes.get("pp", 1), cp=sizes.get("cp", 1), dp=sizes.get("dp", 1)
    )
    training = job.training.model_copy(update={
        "dropout": 0.0, "attention_dropout": 0.0, "recompute": "none", "init_from": None,
        "partition_activations": False, "offload_activations": False, "freeze": [],
        "runtime": "mpctl", "dtype": dtype or job.training.dtype, "global_batch_size": None,
    })  # fmt: skip
    launch = job.launch.model_copy(update={"device": device, "compile": False})
    job = complete(job.model_copy(update={
        "parallel": parallel, "training": training, "launch": launch, "cluster": ClusterSpec(),
    }))  # fmt: skip
    plan = make_plan(job)
    plan.require_legal()
    if issues := [issue for issue in check_launch(plan, machine) if issue.rule in CHECKED]:
        raise InputError(issues)
    threads = max(1, machine.cores // job.world_size)
    chosen = {"device": chosen_device(job, machine), "threads_per_rank": threads}
    return job.model_copy(update={"launch": job.launch.model_copy(update=chosen)})


@contextmanager
def task_answers(job: JobSpec, request: Answer) -> Iterator[Iterator[Answer]]:
    """The workers' answers as they come; leaving the block ends the workers.

    Raises InputError where a worker refused its input, RunFailed where one failed, SystemExit after
    Ctrl-C, SIGTERM or SIGHUP.
    """
    with (
        StopRequests().listening() as stops,
        tempfile.TemporaryDirectory(prefix="mpctl-") as folder,
        _workers(job, request, Path(folder)) as processes,
    ):
        yield _listen(Path(folder), processes, stops)


@contextmanager
def _workers(
    job: JobSpec, request: Answer, folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    (folder / "job.json").write_text(job.model_dump_json(), "utf-8")
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "starting.log").open("ab") as log:
            for environment in _environments(job):
                processes.append(subprocess.Popen(
                    [sys.executable, "-m", "mpctl.runtime.task", str(folder), str(os.getpid())],
                    env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=log,
                    stderr=log, start_new_session=True,
                ))  # fmt: skip
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def _environments(job: JobSpec) -> Iterator[dict[str, str]]:
    """The environment of each rank: what torchrun would set, and the number of threads."""
    world, port = job.world_size, str(free_port(job.world_size))
    common = {
        "WORLD_SIZE": str(world), "MASTER_ADDR": HOST, "MASTER_PORT": port,
        "OMP_NUM_THREADS": str(job.launch.threads_per_rank), "PYTHONUNBUFFERED": "1",
        "PYTHONSAFEPATH": "1",
    }  # fmt: skip
    if job.launch.device == "cpu":
        common |= {"CUDA_VISIBLE_DEVICES": "",
                   "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}  # fmt: skip
    for rank in range(world):
        yield {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}


def _listen(
    folder: Path, processes: list[subprocess.Popen[bytes]], stops: StopRequests
) -> Iterator[Answer]:
    """Each complete line of the answers once, until every worker has ended well.

    A signal ends this process here (128 + its number), never between a worker's start and the note
    of it, so that all are ended and the folder goes.
    """
    path, offset = folder / "answers.jsonl", 0
    while True:
        if stops.received:
            raise SystemExit(128 + stops.received[0])
        codes = [process.poll() for process in processes]
        with suppress(FileNotFoundError), path.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield json.loads(line)
        if any(codes):
            _wait(processes, ENDING_SECONDS)
            raise _ending(folder, codes)
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_SECONDS)


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        time.sleep(POLL_SECONDS)


def _ending(folder: Path, codes: list[int | None]) -> InputError | RunFailed:
    """Why a worker ended: what it refused, what it recorded, or else its exit code."""
    refused = folder / "refused.json"
    if refused.exists():
        return InputError(Issue(**issue) for issue in json.loads(refused.read_text("utf-8")))
    found = [json.loads(path.read_text("utf-8")) for path in (folder / "failures").glob("*.json")]
    if found:
        first = min(found, key=lambda record: (record["is_echo"], record["time"]))
        return RunFailed(f"rank {first['rank']}: {first['error']}")
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    log = folder / "logs" / f"rank-{rank}.log"
    log = log if log.exists() else folder / "starting.log"
    last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
    return RunFailed(f"rank {rank} {_ended(code)}{': ' if last else ''}{''.join(last)}")


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = ", often the kernel short of memory" if -code == signal.SIGKILL else ""
    return f"was killed by signal {-code}{hint}"
