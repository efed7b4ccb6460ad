"""Training steps of two pipeline stages, ours against torch's own pipeline and one rank alone:
`python -m benchmarks.pipeline_speed [gpt|llama] [ROUNDS] [MICRO_BATCHES ...]`.

The model of model_speed.py, float32, one thread a rank, micro batches of 4 samples; forward, loss
and backward of a full step, no dropout, no optimizer. Layers of each stage in brackets:

    plain, one rank   the model in plain torch, its micro batches one after another; rank 1 rests
    torch 4+4, N+M    torch.distributed.pipelining, Schedule1F1B over gloo, stages of plain torch
    ours 4+4, N+M     runtime/ as build.py makes it, 1f1b; N+M is parallel.stage_balance cost

Speed: in every round each contender takes one step, in turn, in the same two processes; a step ends
with its last rank. Medians; CPU of the busier rank. Replay: the step time by
model/pipeline/schedule/replay.py from the medians of our forwards and backwards, without the waits
between them. Memory: each contender alone in fresh processes, the growth of the resident peak of
either rank from before the model is built to after three steps.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import model_speed
from benchmarks.model_speed import BATCH, LAYERS, SEQ, VOCAB, PlainModel
from benchmarks.turns import MIB, Step, growth, in_turns, to_the_last_rank
from mpctl.core.topology import Topology
from mpctl.model.pipeline.schedule.orders import Action, actions
from mpctl.model.pipeline.schedule.replay import replay
from mpctl.spec.load import load_job
from mpctl.train.families.implementation import Batch
from mpctl.train.kernels.backend import TORCH_BACKEND
from mpctl.train.layers.parameters import initialise
from mpctl.train.runtime.build import build_chunks
from mpctl.train.runtime.mesh import build_mesh
from mpctl.train.runtime.p2p import StageLinks
from mpctl.train.runtime.partition import PipelinePartition
from mpctl.train.runtime.pass_listener import PassListener
from mpctl.train.runtime.pipeline import PipelineRunner
from tests.ranks import run_ranks

CPU = torch.device("cpu")
CUTS = {"even": LAYERS // 2, "cost": 6}  # layers of the first stage; asserted for ours


class TorchStage(nn.Module):
    """A part of the plain model: the table and the first layers, or the last ones and the head."""

    def __init__(self, shape: str, rank: int, layers: int) -> None:
        super().__init__()
        self.part = PlainModel(shape, layers=layers, has_table=rank == 0, has_head=rank == 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


class Clock(PassListener):
    """Seconds of each action, from the end of its wait to its send."""

    def __init__(self) -> None:
        self.spent: defaultdict[str, list[float]] = defaultdict(list)

    def begin(self, action: Action) -> None:
        self.began = time.perf_counter()

    def end(self, action: Action) -> None:
        self.spent[action.kind].append(time.perf_counter() - self.began)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(shape: str, rank: int, tokens: Tensor, targets: Tensor) -> tuple[nn.Module, Step]:
    if rank:
        return nn.Module(), lambda: None
    model = PlainModel(shape)
    pairs = list(zip(tokens.split(BATCH), targets.split(BATCH), strict=True))

    def step() -> None:
        for x, y in pairs:
            (loss_of(model(x), y) / len(pairs)).backward()

    return model, step


def torch_pipeline(shape: str, rank: int, first: int, tokens: Tensor, targets: Tensor) -> tuple[nn.Module, Step]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    model = TorchStage(shape, rank, first if rank == 0 else LAYERS - first)
    stage = PipelineStage(model, rank, 2, CPU)
    schedule = Schedule1F1B(stage, n_microbatches=len(tokens) // BATCH, loss_fn=loss_of)
    given = ((tokens,), {}) if rank == 0 else ((), {"target": targets})
    return model, lambda: schedule.step(*given[0], **given[1], return_outputs=False)


def our_job(shape: str, how: str, micro_batches: int) -> Any:
    return load_job(
        None,
        {
            "cluster.gpus_per_node": 2,
            "parallel.pp": 2,
            "parallel.stage_balance": how,
            "training.micro_batch_size": BATCH,
            "training.global_batch_size": BATCH * micro_batches,
            **{f"model.{key}": value for key, value in model_speed.settings(shape).items()},
        },
    )


def our_pipeline(
    shape: str, rank: int, how: str, tokens: Tensor, targets: Tensor
) -> tuple[nn.Module, Step, PipelineRunner]:
    job = our_job(shape, how, len(tokens) // BATCH)
    mesh = build_mesh(Topology.of(job.sizes, order=job.parallel.order), rank, CPU, launch=job.launch)
    cut = PipelinePartition.of(job, mesh.pp.rank)
    assert cut.layout.stages[0] == ((0, CUTS[how]),), cut.layout.stages
    (chunk,) = build_chunks(cut, mesh, TORCH_BACKEND)
    initialise(chunk, 1)
    pipeline = PipelineRunner(cut, [chunk], StageLinks(mesh.pp), dtype=torch.float32, device=CPU)
    batches = [
        Batch(torch.arange(BATCH) + BATCH * number, {"tokens": x, "targets": y})
        for number, (x, y) in enumerate(zip(tokens.split(BATCH), targets.split(BATCH), strict=True))
    ]
    return chunk, lambda: pipeline.train(iter(batches), step=0), pipeline


def contenders() -> list[str]:
    cuts = [f"{first}+{LAYERS - first}" for first in CUTS.values()]
    return ["plain, one rank", *(f"{who} {cut}" for who in ("torch", "ours") for cut in cuts)]


def build(name: str, shape: str, rank: int, micro_batches: int) -> tuple[nn.Module, Step, Any]:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    tokens, targets = (torch.randint(0, VOCAB, (BATCH * micro_batches, SEQ), generator=draw) for _ in range(2))
    if name.startswith("plain"):
        return *plain(shape, rank, tokens, targets), None
    first = int(name.split()[1].split("+")[0])
    if name.startswith("torch"):
        return *torch_pipeline(shape, rank, first, tokens, targets), None
    how = next(how for how, layers in CUTS.items() if layers == first)
    return our_pipeline(shape, rank, how, tokens, targets)


def speed(rank: int, size: int, shape: str, rounds: int, counts: Sequence[int]) -> dict[str, Any]:
    """By micro batches and contender: seconds of every round, and of every kind of action in those
    that count."""
    built = {f"{m} {name}": build(name, shape, rank, m) for m in counts for name in contenders()}
    clocks = {name: Clock() for name in built}
    for name, (_, _, pipeline) in built.items():
        if pipeline is not None:
            pipeline.listeners = [clocks[name]]
    models, steps = ({name: parts[at] for name, parts in built.items()} for at in (0, 1))
    spent = in_turns(steps, rounds, warm=1, models=models)
    actions = {
        name: {kind: seconds[int(name.split()[0]) :] for kind, seconds in clock.spent.items()}
        for name, clock in clocks.items()
    }
    return {"spent": spent, "actions": actions}


def memory(rank: int, size: int, shape: str, name: str, micro_batches: int) -> int:
    """Bytes by which this rank's resident peak grew."""
    return growth(lambda: build(name, shape, rank, micro_batches)[1])


def played(ranks: list[dict[str, Any]], name: str, micro_batches: int) -> float:
    """Seconds of a step by the replay of our own actions."""
    times = [{kind: median(found) for kind, found in rank["actions"][name].items()} for rank in ranks]
    orders = [actions("1f1b", stage=stage, stages=2, microbatches=micro_batches) for stage in range(2)]
    return replay(orders, lambda stage, chunk, kind: times[stage][kind]).makespan


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "gpt"
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 7
    counts = [int(count) for count in sys.argv[3:]] or [4, 8]
    ranks = run_ranks(speed, 2, shape, rounds, counts, timeout=3000)
    print(f"{shape}, torch {torch.__version__}, medians of {rounds} alternating rounds")
    for m in counts:
        spent = [rank["spent"] for rank in ranks]
        even = to_the_last_rank(spent, f"{m} {contenders()[1]}")
        print(
            f"\n{f'{m} micro batches':18} {'wall ms':>8} {'cpu ms':>8} {'torch 4+4 / wall':>17} "
            f"{'/ cpu':>6} {'replay ms':>10} {'MiB':>11}"
        )
        for name in contenders():
            wall, cpu = to_the_last_rank(spent, f"{m} {name}")
            peaks = run_ranks(memory, 2, shape, name, m, timeout=300)
            peak = " ".join(f"{peak / MIB:5.0f}" for peak in peaks)
            replayed = f"{played(ranks, f'{m} {name}', m) * 1e3:.0f}" if "ours" in name else ""
            print(
                f"{name:18} {wall * 1e3:8.0f} {cpu * 1e3:8.0f} {even[0] / wall:17.2f} "
                f"{even[1] / cpu:6.2f} {replayed:>10} {peak:>11}"
            )


if __name__ == "__main__":
    main()
