"""Training steps of two replicas, ours against torch's DistributedDataParallel and fully_shard:
`python -m benchmarks.data_speed [gpt|llama] [ROUNDS]`.

The model of model_speed.py, float32, one thread a rank, 4 samples a rank and step, no dropout;
forward, loss, backward, clipping by the global norm and fused AdamW.

    alone            plain torch, one replica on each rank, nothing exchanged
    ddp, fully_shard the same, wrapped by torch: a bucketed all-reduce; every block and the whole
    ours alone       runtime/ as build.py makes it, one replica on each rank, nothing exchanged
    ours             two replicas, over gloo: overlapped, and the reduction after backward
    memory           the same through shared memory; zero 1 and 3: over gloo

In every round each contender takes one step, in turn, in the same two processes; a step ends with
its last rank. Medians; CPU of the busier rank. Twice the time of `alone` over a contender's is the
speed-up of two ranks over one. Hidden: the part of our exchange's cost, measured when training
waits for it, that overlap saves. Memory: each contender alone in fresh processes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks import model_speed
from benchmarks.model_speed import BATCH, SEQ, VOCAB, PlainModel
from benchmarks.turns import MIB, Spent, Step, growth, in_turns, to_the_last_rank
from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.load import load_job
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from tests.ranks import run_ranks
from tests.train.runtime.tiny import make_data

GLOO = {"launch.shared_memory": False}
OURS: dict[str, dict[str, Any]] = {
    "ours alone": {"parallel.dp": 1},
    "ours": GLOO,
    "ours, waiting": {**GLOO, "parallel.overlap_gradients": False},
    "ours, memory": {},
    "ours, zero 1": {**GLOO, "parallel.zero": 1},
    "ours, zero 3": {**GLOO, "parallel.zero": 3},
    "ours, zero 3 memory": {"parallel.zero": 3},
}
PEERS = ("alone", "ddp", "fully_shard")


def peer(name: str, shape: str, rank: int) -> Step:
    torch.manual_seed(0)
    model: nn.Module = PlainModel(shape)
    if name == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif name == "fully_shard":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    draw = torch.Generator().manual_seed(rank)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH, SEQ), generator=draw) for _ in range(2))
    adam = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=False)

    return step


def ours(name: str, shape: str, rank: int, data: str) -> Step:
    settings = {"parallel.dp": 2, **OURS[name]}
    dp = settings["parallel.dp"]
    job = load_job(
        None,
        {
            "cluster.gpus_per_node": dp,
            "data.path": data,
            "launch.device": "cpu",
            "launch.threads_per_rank": 1,
            "training.micro_batch_size": BATCH,
            "training.global_batch_size": BATCH * dp,
            "training.learning_rate": 1e-4,
            **{f"model.{key}": value for key, value in model_speed.settings(shape).items()},
            **settings,
        },
    )
    environment = RuntimeEnvironment.of_machine(job, Path(data), local_rank=rank)
    trainer = build_trainer(Path(data), JobLayout.of(job), rank % dp, environment)
    return trainer.one_step


def build(name: str, shape: str, rank: int, data: str) -> Step:
    return ours(name, shape, rank, data) if name in OURS else peer(name, shape, rank)


def speed(rank: int, size: int, shape: str, rounds: int, data: str) -> Spent:
    return in_turns({name: build(name, shape, rank, data) for name in (*PEERS, *OURS)}, rounds)


def memory(rank: int, size: int, shape: str, name: str, data: str) -> int:
    """Bytes by which this rank's resident peak grew."""
    return growth(lambda: build(name, shape, rank, data))


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "gpt"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    with tempfile.TemporaryDirectory() as folder:
        data = str(make_data(Path(folder)))
        ranks = run_ranks(speed, 2, shape, rounds, data, timeout=3000)
        peaks = {name: max(run_ranks(memory, 2, shape, name, data, timeout=300)) for name in (*PEERS, *OURS)}
    found = {name: to_the_last_rank(ranks, name) for name in peaks}
    alone = found["alone"]
    print(f"{shape}, torch {torch.__version__}, medians of {rounds} alternating rounds")
    print(f"{'':20} {'wall ms':>8} {'cpu ms':>8} {'2 x alone':>10} {'/ cpu':>6} {'MiB':>6}")
    for name, (wall, cpu) in found.items():
        gains = f"{2 * alone[0] / wall:10.2f} {2 * alone[1] / cpu:6.2f}"
        print(f"{name:20} {wall * 1e3:8.0f} {cpu * 1e3:8.0f} {gains} {peaks[name] / MIB:6.0f}")
    waiting, overlapped, without = (found[name][0] for name in ("ours, waiting", "ours", "ours alone"))
    hidden = (waiting - overlapped) / (waiting - without)
    print(f"hidden behind backward: {hidden:.0%} of {(waiting - without) * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
