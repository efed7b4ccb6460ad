"""A worker that reads a model and does not train it: `python -m mpctl.runtime.task FOLDER PID`,
of the process that starts it.

launch/task.py starts one process a rank and says in FOLDER what to do: job.json, the layout and the
model, and request.json, what is asked. Rank 0 adds its answers to FOLDER/answers.jsonl, one JSON
object a line. A rank that finds the input bad writes its issues to FOLDER/refused.json; one that
fails leaves a record in FOLDER/failures. Nothing else is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpctl.errors import InputError
from mpctl.runtime.process import die_with_process, record_failure, redirect_output, write_json
from mpctl.runtime.worker import RankEnv

if TYPE_CHECKING:
    from mpctl.runtime.mesh import Mesh
    from mpctl.spec.job import JobSpec

Answers = Iterator[dict[str, Any]]


def main(folder: Path, parent: int) -> None:
    die_with_process(parent)
    place = RankEnv.from_environment()
    redirect_output(folder / "logs" / f"rank-{place.rank}.log")
    try:
        _work(folder, place)
    except InputError as error:
        write_json(folder / "refused.json", [issue.as_dict() for issue in error.issues])
        sys.exit(error.exit_code)
    except BaseException as error:
        path = folder / "failures" / f"rank-{place.rank}.json"
        record_failure(path, error, rank=place.rank, coords={}, doing="its task")
        raise


def _work(folder: Path, place: RankEnv) -> None:
    from mpctl.spec.load import parse

    job = parse(json.loads((folder / "job.json").read_text("utf-8")))
    request = json.loads((folder / "request.json").read_text("utf-8"))
    mesh = _mesh(job, place)
    with (folder / "answers.jsonl").open("a", encoding="utf-8", buffering=1) as stream:
        for answer in _answers(request, job, mesh):
            if place.rank == 0:
                stream.write(json.dumps(answer) + "\n")
    if place.world_size > 1:
        import torch.distributed as dist

        dist.destroy_process_group()


def _answers(request: dict[str, Any], job: JobSpec, mesh: Mesh) -> Answers:
    from mpctl.runtime.evaluation import evaluate
    from mpctl.runtime.sampling.task import sample

    return {"sample": sample, "evaluate": evaluate}[request["task"]](request, job, mesh)


def _mesh(job: JobSpec, place: RankEnv) -> Mesh:
    import torch

    from mpctl.runtime.build import init_process_group, select_device
    from mpctl.runtime.mesh import build_mesh
    from mpctl.topology import Topology

    torch.set_num_threads(job.launch.threads_per_rank or 1)
    init_process_group(
        job, rank=place.rank, local_rank=place.local_rank, world_size=place.world_size
    )
    topology = Topology.of(
        job.sizes, order=job.parallel.order, gpus_per_node=job.cluster.gpus_per_node
    )
    device = select_device(job.launch.device, place.local_rank)
    return build_mesh(topology, place.rank, device, launch=job.launch)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
