"""Workers of a task, `mpctl eval` or `mpctl sample`, which use a trained model.

One process a rank, `python -m mpctl.train.runtime.task FOLDER`, all on this machine. FOLDER is temporary
(records/rundir/requests.py has its files), so nothing is written into the directory of the model. The
kernel kills each worker when this process ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import gcd, prod
from pathlib import Path
from typing import Any, overload

from mpctl.core.axes import AXIS_NAMES
from mpctl.core.errors import InputError, Issue, RunFailed
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.records.rundir.rank_files import FailureRecord
from mpctl.records.rundir.requests import EvalAnswer, EvalRequest, SampleAnswer, SampleRequest
from mpctl.run.hosts.machine import Machine
from mpctl.run.launch.node.torchrun import task_environments
from mpctl.run.launch.preflight import check_here, chosen_device
from mpctl.run.launch.supervise import StopRequests
from mpctl.spec.adapter import AdapterSpec
from mpctl.spec.cluster import ClusterSpec
from mpctl.spec.job import JobSpec, complete
from mpctl.spec.parallel import ParallelSpec, TensorMode
from mpctl.spec.runtime import launched_runtime

POLL_SECONDS = 0.02
ENDING_SECONDS = 1.0
"""Time that the ranks get to record their failures after the first of them has failed."""
TASK_RULES = ("world-fits-machine", "not-run-yet")
"""The checks of a launch that also apply to workers that only read the model."""

Workers = list[subprocess.Popen[bytes]]
Request = EvalRequest | SampleRequest


@dataclass(frozen=True)
class TaskOptions:
    """Options common to `mpctl eval` and `mpctl sample`.

    step: of the checkpoint, None for the newest; tokenizer: a tokenizer.json, None for the model's; sizes: of the
    parallel axes, 1 if absent; ep: ranks that share the experts of a layer; raises a dp of 1 to fit; device: auto, cpu
    or cuda; dtype: to compute in, None for that of the training; tensor_mode, tensor_depth: as in [parallel]; nodes:
    hosts that share the ranks evenly.
    """

    step: int | None = None
    tokenizer: Path | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    device: str = "auto"
    dtype: str | None = None
    tensor_mode: TensorMode = "1d"
    tensor_depth: int | None = None
    nodes: int = 1
    ep: int = 1


DEFAULT_OPTIONS = TaskOptions()


def _packs(adapter: AdapterSpec, tp: int) -> bool:
    """Whether the base is packed as it was trained."""
    return adapter.stored_as == "nf4" and tp == 1 and find_spec("bitsandbytes") is not None


def task_plan(job: JobSpec, options: TaskOptions) -> Plan:
    """The plan of what the workers run: the model of `job` with its adapters in this layout, without
    dropout, recomputation and freezing."""
    sizes: dict[str, Any] = {axis: options.sizes.get(axis, 1) for axis in AXIS_NAMES}
    if sizes["dp"] == 1:
        sizes["dp"] = options.ep // gcd(options.ep, sizes["tp"] * sizes["cp"])
    has_experts = job.model is not None and job.model.experts is not None
    per_node = prod(sizes.values()) // options.nodes if options.nodes > 1 else None
    adapter = job.training.adapter
    if adapter is not None and adapter.is_quantized and not _packs(adapter, sizes["tp"]):
        adapter = None  # merged, as they are read
    training = job.training.model_copy(
        update={
            "dropout": 0.0,
            "attention_dropout": 0.0,
            "adapter": None if adapter is None else adapter.model_copy(update={"dropout": 0.0}),
            "recompute": "none",
            "init_from": None,
            "partition_activations": False,
            "offload_activations": False,
            "freeze": [],
            "runtime": launched_runtime(job.training.runtime),
            "dtype": options.dtype or job.training.dtype,
            "global_batch_size": None,
        }
    )
    launch = job.launch.model_copy(update={"device": options.device, "compile": False})
    parts = {
        "parallel": ParallelSpec(
            **sizes,
            ep=options.ep,
            sequence_parallel=has_experts and sizes["tp"] > 1,
            tensor_mode=options.tensor_mode,
            tensor_depth=options.tensor_depth,
            allow_tp_across_nodes=options.nodes > 1,
        ),
        "training": training,
        "launch": launch,
        "cluster": ClusterSpec(nodes=options.nodes, gpus_per_node=per_node),
    }
    return make_plan(complete(job.model_copy(update=parts)))


def task_job(job: JobSpec, machine: Machine, options: TaskOptions) -> JobSpec:
    """The job of `task_plan`, which this machine can run. Raises InputError with every reason why
    it cannot."""
    plan = task_plan(job, options)
    plan.require_legal()
    job = plan.job
    if issues := [issue for issue in check_here(plan, machine) if issue.rule in TASK_RULES]:
        raise InputError(issues)
    threads = max(1, machine.cores // job.world_size)
    chosen = {"device": chosen_device(job, machine), "threads_per_rank": threads}
    return job.model_copy(update={"launch": job.launch.model_copy(update=chosen)})


@overload
def task_answers(job: JobSpec, request: EvalRequest) -> AbstractContextManager[Iterator[EvalAnswer]]: ...


@overload
def task_answers(job: JobSpec, request: SampleRequest) -> AbstractContextManager[Iterator[SampleAnswer]]: ...


def task_answers(job: JobSpec, request: Request) -> AbstractContextManager[Iterator[Any]]:
    """Start the workers; their answers as they come. Leaving the block ends the workers.

    Raises InputError when a worker refused its input, RunFailed when one failed, SystemExit after
    Ctrl-C, SIGTERM or SIGHUP.
    """
    return _answers(job, request)


@contextmanager
def _answers(job: JobSpec, request: Request) -> Iterator[Iterator[Any]]:
    with (
        StopRequests().listening() as stops,
        tempfile.TemporaryDirectory(prefix="mpctl-") as folder,
        _workers(job, request, Path(folder)) as workers,
    ):
        yield _listen(Path(folder), workers, stops)


@contextmanager
def _workers(job: JobSpec, request: Request, folder: Path) -> Iterator[Workers]:
    (folder / "job.json").write_text(job.model_dump_json(), "utf-8")
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    command = [sys.executable, "-m", "mpctl.train.runtime.task", str(folder), str(os.getpid())]
    workers: Workers = []
    try:
        with (folder / "starting.log").open("ab") as log:
            for environment in task_environments(job):
                worker = subprocess.Popen(
                    command,
                    env={**os.environ, **environment},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                workers.append(worker)
        yield workers
    finally:
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def _listen(folder: Path, workers: Workers, stops: StopRequests) -> Iterator[Any]:
    """Each complete line of the answers once, until every worker has exited with code 0.

    A signal ends this process here (exit code 128 + its number), never between the start of a
    worker and its entry in the list, so that all workers are ended and the folder is removed.
    """
    path, offset = folder / "answers.jsonl", 0
    while True:
        if stops.received:
            raise SystemExit(128 + stops.received[0])
        codes = [worker.poll() for worker in workers]
        with suppress(FileNotFoundError), path.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if line.endswith(b"\n"):
                    offset += len(line)
                    yield json.loads(line)
        if any(codes):
            _wait(workers, ENDING_SECONDS)
            raise _error_of(folder, codes)
        if all(code == 0 for code in codes):
            return
        time.sleep(POLL_SECONDS)


def _wait(workers: Workers, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
        time.sleep(POLL_SECONDS)


def _error_of(folder: Path, codes: list[int | None]) -> InputError | RunFailed:
    """Return the reason why a worker ended: the input that it refused, the failure that it recorded, or else its exit
    code and the last line of its log."""
    refused = folder / "refused.json"
    if refused.exists():
        return InputError(Issue(**issue) for issue in json.loads(refused.read_text("utf-8")))
    files = (folder / "failures").glob("*.json")
    records: list[FailureRecord] = [json.loads(path.read_text("utf-8")) for path in files]
    if records:
        first = min(records, key=lambda record: (record["is_echo"], record["time"]))
        return RunFailed(f"rank {first['rank']}: {first['error']}")
    rank, code = next((rank, code) for rank, code in enumerate(codes) if code)
    log = folder / "logs" / f"rank-{rank}.log"
    log = log if log.exists() else folder / "starting.log"
    last = log.read_text("utf-8", errors="replace").strip().splitlines()[-1:]
    return RunFailed(": ".join([f"rank {rank} {_ending(code)}", *last]))


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    is_kill = -code == signal.SIGKILL
    hint = ", often sent by the kernel when memory runs out" if is_kill else ""
    return f"was killed by signal {-code}{hint}"
