"""`mpctl checkpoint reshard`: a run directory with one checkpoint, rewritten for another layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import gcd
from pathlib import Path

from mpctl.core.errors import InputError
from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.document import plan_document
from mpctl.plan.planning.plan import Plan, load_plan
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.verify import Progress, checkpoint_bytes, counted
from mpctl.records.rundir.marker import write_marker
from mpctl.spec.load import load_job, parse_settings


def reshard_checkpoint(
    source: Path, out: Path, *, tp: int | None, pp: int | None, on_progress: Progress, settings: Sequence[str] = ()
) -> None:
    """Write the run directory `out` with the checkpoint `source` for another layout, and with the
    job and the plan of that layout.

    tp, pp: as saved where they are None. settings: others of the job, such as `tensor_mode=2d`.
    on_progress: called with ("reshard", bytes done, bytes in all). Raises
    InputError when the layout is not legal for the model, `source` is damaged or `out` is occupied.
    """
    from mpctl.records.checkpoint.folder import staged_folder
    from mpctl.train.checkpoint.reshard import reshard

    plan, step = plan_of_layout(source, tp, pp, settings), read_manifest(source).step
    document = plan_document(plan, plan.require_legal(), kinds=None, ranks=False)
    texts = {"job.json": plan.job.model_dump_json(indent=1) + "\n", "plan.json": json.dumps(document) + "\n"}
    on_bytes = counted("reshard", checkpoint_bytes(source), on_progress)
    with staged_folder(out, mode=0o700) as work:  # as RunDir.make
        folder = work / "checkpoints" / f"step-{step}"
        folder.mkdir(parents=True)
        write_marker(work)
        for name, text in texts.items():
            for place in (work, folder):
                (place / name).write_text(text, "utf-8")
        reshard(source, JobLayout.of(plan.job), folder, on_bytes)


def plan_of_layout(source: Path, tp: int | None, pp: int | None, settings: Sequence[str] = ()) -> Plan:
    """The plan of the checkpoint's job with other sizes of tp and pp and other settings, with cp 1
    and the least dp, which is 1 without experts. Raises InputError when it is not legal."""
    own = source / "job.json"
    job_file = own if own.is_file() else source.parent.parent / "job.json"
    if not job_file.is_file():
        raise InputError.of(
            "no-job", str(source), "has no job.json, so its model is not known", "name a checkpoint of a run"
        )
    job, changed = load_job(str(job_file)), parse_settings(settings)
    saved, has_experts = job.parallel, job.has_experts
    ranks, stages = tp or saved.tp, pp or saved.pp
    mode = changed.get("parallel.tensor_mode", saved.tensor_mode)
    is_same_grid = (mode, ranks) == (saved.tensor_mode, saved.tp)
    is_split = saved.sequence_parallel or has_experts
    holders = changed.get("parallel.ep", saved.ep) * changed.get("parallel.etp", saved.etp)
    layout = {
        "parallel.tp": ranks,
        "parallel.pp": stages,
        "parallel.tensor_depth": saved.tensor_depth if is_same_grid else None,
        "parallel.sequence_parallel": is_split and mode == "1d" and ranks > 1,
        "parallel.cp": 1,
        "parallel.dp": holders // gcd(holders, ranks),
        "parallel.vpp": saved.vpp if stages > 1 else 1,
        "cluster.nodes": 1,
        "cluster.gpus_per_node": None,
        "launch.threads_per_rank": None,
        **changed,
    }
    return load_plan(str(job_file), layout)
