"""A worker that uses a model and does not train it: `python -m mpctl.train.runtime.task FOLDER PID`, PID
being the process that starts it.

run/inference/task.py starts one process per rank and writes its input to FOLDER: job.json, with the
layout and the model, and request.json. Rank 0 appends its answers to FOLDER/answers.jsonl, one JSON
object a line. A rank that refuses its input writes the issues to FOLDER/refused.json; one that
fails writes a record to FOLDER/failures. Nothing else is written.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError
from mpctl.records.rundir.requests import EvalAnswer, EvalRequest, SampleAnswer, SampleRequest
from mpctl.train.runtime.process import die_with_parent, failure_record, redirect_output, write_json
from mpctl.train.runtime.worker import RankEnv

if TYPE_CHECKING:
    from mpctl.spec.job import JobSpec
    from mpctl.train.runtime.mesh import Mesh

Answers = Iterator[EvalAnswer] | Iterator[SampleAnswer]


def main(folder: Path, parent: int) -> None:
    """Do one rank's part of the request in `folder`."""
    die_with_parent(parent)
    rank_env = RankEnv.from_environment()
    redirect_output(folder / "logs" / f"rank-{rank_env.rank}.log")
    try:
        _work(folder, rank_env)
    except InputError as error:
        write_json(folder / "refused.json", [issue.as_dict() for issue in error.issues])
        sys.exit(error.exit_code)
    except BaseException as error:
        path = folder / "failures" / f"rank-{rank_env.rank}.json"
        record = failure_record(error, rank=rank_env.rank, coords={}, doing="its task")
        write_json(path, record)
        raise


def _work(folder: Path, rank_env: RankEnv) -> None:
    from mpctl.spec.load import parse

    job = parse(json.loads((folder / "job.json").read_text("utf-8")))
    request = json.loads((folder / "request.json").read_text("utf-8"))
    mesh = _mesh(job, rank_env)
    with (folder / "answers.jsonl").open("a", encoding="utf-8", buffering=1) as stream:
        for answer in _answers(request, job, mesh):
            if rank_env.rank == 0:
                stream.write(json.dumps(answer) + "\n")
    from mpctl.train.runtime.process_group import leave_process_group

    leave_process_group(rank_env.rank, rank_env.world_size)


def _answers(request: EvalRequest | SampleRequest, job: JobSpec, mesh: Mesh) -> Answers:
    from mpctl.train.runtime.evaluation import evaluate
    from mpctl.train.runtime.sampling import sample

    if request["task"] == "sample":
        return sample(request, job, mesh)
    return evaluate(request, job, mesh)


def _mesh(job: JobSpec, rank_env: RankEnv) -> Mesh:
    import torch

    from mpctl.model.layout.topology import dense_view, job_topology, other_views
    from mpctl.model.pipeline.placement import StagePlacement
    from mpctl.train.runtime.device import prepare_device
    from mpctl.train.runtime.mesh import build_mesh
    from mpctl.train.runtime.process_group import init_process_group

    torch.set_num_threads(job.launch.threads_per_rank or 1)
    device = prepare_device(job, rank_env.local_rank)
    init_process_group(job, rank=rank_env.rank, local_rank=rank_env.local_rank, world_size=rank_env.world_size)
    views = {view.name: view for view in (dense_view(job), *other_views(job))}
    last = StagePlacement.of(job.parallel).last
    return build_mesh(job_topology(job), rank_env.rank, device, launch=job.launch, views=views, loss_stage=last.stage)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
