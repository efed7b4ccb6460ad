"""A job small enough to train in seconds, its data, and one rank's training as a function.

20 steps of 8 samples of 32 tokens; dropout and attention dropout on; 300 words, which tp 1 pads
to 384 rows and tp 2 and 4 pad to 512.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from mpctl.model.layout.job_layout import JobLayout
from mpctl.plan.planning.plan import Plan, make_plan
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job, parse
from mpctl.train.data.prepare import prepare
from mpctl.train.layers.parameters import assemble, shard_of, stored_of
from mpctl.train.runtime.activity import Activity, nobody_follows
from mpctl.train.runtime.build import build_trainer
from mpctl.train.runtime.environment import RuntimeEnvironment
from mpctl.train.runtime.train import Trainer
from mpctl.train.runtime.zero.param_store import Zero3ParamStore
from tests.ranks import run_ranks
from tests.shards import plain, shard_from

VOCAB, STEPS = 300, 20
SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "cluster.nodes": 1,
    "cluster.device": "cpu",
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 4,
    "model.vocab": VOCAB,
    "model.seq_length": 32,
    "training.micro_batch_size": 2,
    "training.global_batch_size": 8,
    "training.steps": STEPS,
    "training.dropout": 0.1,
    "training.attention_dropout": 0.1,
    "training.warmup_steps": 4,
    "training.learning_rate": 3e-3,
    "training.eval_samples": 6,
    "checkpoint.interval": 10,
    "launch.device": "cpu",
    "launch.threads_per_rank": 1,
}


def make_data(folder: Path) -> Path:
    """Prepared data of some 34,000 tokens; returns its directory."""
    corpus, draw = folder / "corpus", random.Random(1)
    corpus.mkdir()
    for i in range(40):
        words = (f"w{draw.randrange(200)} counts {draw.randrange(50)}" for _ in range(200))
        (corpus / f"{i}.txt").write_text(" ".join(words))
    out = folder / "data"
    prepare(sources=[corpus], out=out, vocab_size=VOCAB, validation_fraction=0.2)
    return out


def settings(tp: int = 1, dp: int = 1, **changes: Any) -> dict[str, Any]:
    """Dotted settings; `training__steps=3` changes `training.steps`."""
    layout = {"parallel.tp": tp, "parallel.dp": dp, "cluster.gpus_per_node": tp * dp}
    return {**SETTINGS, **layout, **{k.replace("__", "."): v for k, v in changes.items()}}


def tiny_job(data: Path, tp: int = 1, dp: int = 1, **changes: Any) -> JobSpec:
    return load_job(None, settings(tp, dp, data__path=str(data), **changes))


def tiny_plan(job: JobSpec) -> Plan:
    plan = make_plan(job)
    plan.require_legal()
    return plan


def make_trainer(job: JobSpec, run_dir: Path, rank: int = 0) -> Trainer:
    layout = JobLayout.of(job)
    activity = Activity.of(job, layout.topology.coords(rank)["pp"], nobody_follows)
    environment = RuntimeEnvironment.of_machine(job, run_dir, local_rank=rank, activity=activity)
    return build_trainer(run_dir, layout, rank, environment)


def train(job: JobSpec, run_dir: Path, *, timeout: float = 60) -> list[dict[str, Any]]:
    """Train on as many ranks as the job has; what every rank recorded and holds at the end."""
    raw = job.model_dump(mode="json")
    return run_ranks(_train_rank, job.world_size, raw, str(run_dir), timeout=timeout)


def _train_rank(rank: int, size: int, raw: dict[str, Any], run_dir: str) -> dict[str, Any]:
    return trained_rank(make_trainer(parse(raw), Path(run_dir), rank))


def trained_rank(trainer: Trainer) -> dict[str, Any]:
    """Train to the end; what the rank recorded and holds then."""
    records = list(trainer.run())
    gradients = whole_gradients(trainer)
    whole_values(trainer)
    return {
        "records": records,
        "coords": trainer.mesh.coords,
        "traffic": trainer.step_traffic,
        "validation": trainer.last_validation,
        "count": sum(p.numel() for p in trainer.model.parameters()),
        "weights": {name: (plain(shard_of(p)), p.data) for name, p in trainer.model.named_parameters()},
        "gradients": {
            name: (plain(shard_of(p)), gradients[p]) for name, p in trainer.model.named_parameters() if p in gradients
        },
    }


def whole_gradients(trainer: Trainer) -> dict[torch.Tensor, torch.Tensor]:
    """Of the last step, gathered from all replicas where each has a slice."""
    gradients = {}
    for store in trainer.buffer.stores:
        shard, full = store.shard, store.local
        if len(full) < shard.bucket.numel:
            full = shard.replicas.all_gather(full, 0)
        gradients |= dict(zip(shard.parameters, shard.views(full), strict=True))
    return gradients


def whole_values(trainer: Trainer) -> None:
    """Gather what is in slices, make what is stored in fewer bits, and let it stay."""
    for parameter in trainer.model.parameters():
        if (stored := stored_of(parameter)) is not None:
            parameter.data = stored.whole()
    for store in (*trainer.optimizer.stores, *trainer.optimizer.frozen):
        if isinstance(store, Zero3ParamStore):
            store.gather()


def column(ranks: list[dict[str, Any]], name: str = "loss") -> list[float]:
    """One figure of every step, as rank 0 recorded it."""
    return [record[name] for record in ranks[0]["records"]]


def whole_weights(
    ranks: list[dict[str, Any]], replica: int = 0, *, what: str = "weights", vocab: int = VOCAB
) -> dict[str, torch.Tensor]:
    """One replica's parameters, or gradients, of all stages, put together again, padding rows left out."""
    place = {"dp": replica, "cp": 0}
    parts = [rank[what] for rank in ranks if rank["coords"].items() >= place.items()]
    whole = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [part[name] for part in parts if name in part]
        shards = [shard_from(shard) for shard, _ in held]
        whole[name] = assemble(shards, [piece for _, piece in held])
    padded = {"embedding.word.weight", "head.weight", "head.bias"} & whole.keys()
    return whole | {name: whole[name][:vocab] for name in padded}
