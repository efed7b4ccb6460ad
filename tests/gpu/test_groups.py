"""Process groups of a device: NCCL on CUDA, gloo on a CPU.

One rank is a real communicator, with its streams and its watchdog, of which all results are known.
Two ranks on one GPU are what some versions of NCCL refuse; that is then the reason of the skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.load import parse
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.mesh import new_process_group
from mpctl.train.runtime.process_group import BACKENDS
from mpctl.train.transport.group import _all_gather, _gather_slices, _reduce_scatter, _scatter_slices
from tests.gpu.training import losses, small_job
from tests.ranks import join_gloo, run_ranks

REFUSED = ("Duplicate GPU", "invalid usage", "ncclInvalidUsage")
"""What NCCL says of two ranks on one GPU, where it does not allow them."""


def join_nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """A default group of NCCL, all of whose ranks are on the first GPU."""
    os.environ.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    torch.cuda.set_device(0)
    dist.init_process_group(
        BACKENDS["cuda"], store=store, rank=rank, world_size=size, timeout=timeout, device_id=torch.device("cuda", 0)
    )


def on_ranks(function: Callable[..., Any], n: int, device: torch.device, *args: Any) -> list[Any]:
    """`function(rank, size, device type, *args)` on n ranks, all on this device."""
    join = join_nccl if device.type == "cuda" else join_gloo
    try:
        return run_ranks(function, n, device.type, *args, timeout=120, join=join)
    except AssertionError as error:
        if n > 1 and device.type == "cuda" and any(word in str(error) for word in REFUSED):
            pytest.skip(f"NCCL does not put {n} ranks on one GPU here")
        raise


def test_a_communicator_of_one_rank(device: torch.device) -> None:
    (found,) = on_ranks(_collectives, 1, device)
    expected = torch.arange(12.0).view(3, 4)
    assert set(found) == {
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "broadcast",
        "group",
        "gather in slices",
        "scatter in slices",
    }
    assert all(torch.equal(value, expected) for value in found.values())


def _collectives(rank: int, size: int, kind: str) -> dict[str, torch.Tensor]:
    """Each started, and waited for, as train/transport/group.py does."""
    x = torch.arange(12.0, device=kind).view(3, 4)
    found = {name: x.clone() for name in ("all_reduce", "broadcast", "group")}
    gathered, scattered = (f"{kind} in slices" for kind in ("gather", "scatter"))
    written = ("all_gather", "reduce_scatter", gathered, scattered)
    found |= {name: torch.empty_like(x) for name in written}
    own = dist.new_group([0], backend=BACKENDS[kind], group_desc="tp 0")
    works = [
        dist.all_reduce(found["all_reduce"], async_op=True),
        dist.broadcast(found["broadcast"], 0, async_op=True),
        dist.all_reduce(found["group"], group=own, async_op=True),
        _all_gather(found["all_gather"], x, async_op=True),
        _reduce_scatter(found["reduce_scatter"], x.clone(), async_op=True),
        _gather_slices(found[gathered].unbind(), x.unbind(), group=None, async_op=True),
        _scatter_slices(found[scattered].unbind(), x.unbind(), group=None, async_op=False),
    ]
    for work in works:
        if work is not None:
            work.wait()
    return {name: value.cpu() for name, value in found.items()}


def test_what_a_layer_waits_for_is_urgent(device: torch.device) -> None:
    """NCCL's stream has a high priority; gloo knows none."""
    assert on_ranks(_urgent, 1, device) == [device.type == "cuda"]


def _urgent(rank: int, size: int, kind: str) -> bool:
    device, timeout = torch.device(kind), timedelta(seconds=60)
    group = new_process_group([0], "tp", device, timeout=timeout, is_urgent=True, channels=4)
    x = torch.ones(2, device=device)
    dist.all_reduce(x, group=group, async_op=True).wait()
    assert x.tolist() == [1, 1] and group.group_desc == "tp 0"
    options: Any = group._get_backend(device).options
    assert device.type == "cpu" or options.config.max_ctas == 4
    return bool(getattr(options, "is_high_priority_stream", False))


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "parallel__sequence_parallel": True},
    **{f"zero {stage}": {"dp": 2, "parallel__zero": stage} for stage in range(4)},
    "pp": {"parallel__pp": 2, "cluster__gpus_per_node": 2},
}
QUICK = ("tp", "zero 3")


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in LAYOUTS]
)
@pytest.mark.quick(1)
def test_two_ranks_on_one_device(layout: str, device: torch.device, data: Path, tmp_path: Path) -> None:
    settings = {"launch__shared_memory": False, **LAYOUTS[layout]}
    job = small_job(device, data, **settings)
    found = on_ranks(_train, 2, device, job.model_dump(mode="json"), str(tmp_path / "two"))
    alone = losses(small_job(device, data), tmp_path / "one")
    assert found[0] == pytest.approx(alone, abs=1e-4)


def _train(rank: int, size: int, kind: str, raw: dict[str, Any], run_dir: str) -> list[float]:
    job, path = parse(raw), Path(run_dir)
    environment = RuntimeEnvironment.of_machine(job, path, local_rank=0)
    trainer = build_trainer(path, JobLayout.of(job), rank, environment)
    return [record["loss"] for record in trainer.run()]


def test_torch_reports_the_device(device: torch.device) -> None:
    """What `mpctl doctor` asks of a host, with an all-reduce of NCCL where there is a GPU."""
    done = subprocess.run(
        [sys.executable, "-m", "mpctl.train.runtime.probes.torch_report"],
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    )
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["gloo_error"] is None
    if device.type == "cuda":
        assert facts["gpus"] > 0 and facts["nccl_error"] is None
