"""Random small jobs of two to four ranks: every kind of model in layouts and precisions that a
worker runs.

A job follows from (seed, number). Every part of the memory can be the largest: word tables of up to
3,000 words over samples of 16 tokens, and samples of 64 tokens with few words.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from mpctl.core.errors import InputError
from mpctl.plan.planning.plan import Plan
from mpctl.spec.job import JobSpec
from mpctl.spec.load import load_job
from tests.train.runtime.test_axes import SHAPES
from tests.train.runtime.tiny import settings, tiny_plan

KINDS = ("gpt", "llama", "moe", "latent", "latent-moe", "bert")
STEPS = 3
SMALL = {"model__layers": 2}
_DRAWS = 200  # of a job, until one is legal


class RandomJob(NamedTuple):
    """A legal job, the settings that it was loaded from, and its plan."""

    settings: dict[str, Any]
    job: JobSpec
    plan: Plan


def random_job(seed: str, number: int, data: str | None = None, *, is_small: bool = False) -> RandomJob:
    """The job of a number, whose kind is KINDS in turn. data: prepared text. is_small: of two
    layers and few micro batches, on at most two ranks of cp."""
    draw = random.Random(f"{seed}/{number}")
    kind = KINDS[number % len(KINDS)]
    for _ in range(_DRAWS):
        changes = _draw(draw, kind)
        if is_small:
            changes |= SMALL
            replicas = changes["dp"] * changes["training__micro_batch_size"]
            changes["training__global_batch_size"] = replicas * draw.choice((1, 2))
            if changes["parallel__cp"] > 2:
                continue
        path = {} if data is None else {"data__path": data}
        try:
            found = settings(**changes, **path)
            job = load_job(None, found)
            return RandomJob(found, job, tiny_plan(job))
        except InputError:
            continue
    raise AssertionError(f"{kind}: none of {_DRAWS} jobs of {seed}/{number} is legal")


def _draw(draw: random.Random, kind: str) -> dict[str, Any]:
    sizes = _sizes(draw)
    tp, cp, dp, pp = (sizes[axis] for axis in ("tp", "cp", "dp", "pp"))
    micro = draw.choice((1, 1, 2))
    schedule = draw.choice(("1f1b", "gpipe", "interleaved", "zero-bubble")) if pp > 1 else "1f1b"
    replicas = dp * micro * draw.choice((1, 2, 3))
    return {
        "tp": tp,
        "dp": dp,
        "parallel__cp": cp,
        "parallel__pp": pp,
        "cluster__gpus_per_node": tp * cp * dp * pp,
        "parallel__schedule": schedule,
        "parallel__vpp": 2 if schedule == "interleaved" else 1,
        "parallel__zero": draw.randrange(4),
        "parallel__bucket_bytes": draw.choice((1000, 1 << 22)),
        "parallel__sequence_parallel": tp > 1 and draw.random() < 0.5,
        "training__micro_batch_size": micro,
        "training__global_batch_size": replicas * (pp if schedule == "interleaved" else 1),
        "training__recompute": draw.choice(("none", "none", "selective", "full")),
        "training__dtype": draw.choice(("fp64", "fp64", "fp32", "bf16")),
        "training__dropout": draw.choice((0.0, 0.1)),
        "training__attention_dropout": 0.0,
        "training__steps": STEPS,
        "training__eval_samples": 0,
        "training__warmup_steps": 1,
        "checkpoint__interval": 0,
        "checkpoint__at_end": False,
        **_model(draw, kind),
        **_experts(draw, kind, sizes),
    }


def _sizes(draw: random.Random) -> dict[str, int]:
    """Two to four ranks along one or two axes."""
    ranks, sizes = draw.choice((2, 2, 3, 4, 4)), dict.fromkeys(("tp", "cp", "dp", "pp"), 1)
    for factor in (2, 2) if ranks == 4 and draw.random() < 0.7 else (ranks,):
        sizes[draw.choice(("tp", "tp", "cp", "dp", "dp", "pp"))] *= factor
    return sizes


def _model(draw: random.Random, kind: str) -> dict[str, Any]:
    shape = {"gpt": "gpt", "bert": "bert", "moe": "llama", "latent-moe": "latent"}.get(kind, kind)
    seq = draw.choice((16, 16, 32, 64))
    own = {
        "model__layers": draw.choice((2, 4)),
        "model__hidden": draw.choice((32, 48, 64)),
        "model__heads": 4,
        "model__ffn": draw.choice((64, 96, 192)),
        "model__seq_length": seq,
        "model__tied_embeddings": draw.random() < 0.5,
    }
    return {**SHAPES[shape], **own, "model__vocab": draw.choice((310, 1000, 3000))}


def _experts(draw: random.Random, kind: str, sizes: dict[str, int]) -> dict[str, Any]:
    if not kind.endswith("moe"):
        return {}
    return {
        "model__experts": 4,
        "model__experts_per_token": draw.choice((1, 2)),
        "model__expert_ffn": draw.choice((32, 64)),
        "model__shared_expert_ffn": draw.choice((None, 48)),
        "model__dense_layers": draw.choice((0, 1)),
        "parallel__ep": draw.choice((1, 2)) if sizes["dp"] * sizes["cp"] * sizes["tp"] > 1 else 1,
        "parallel__etp": draw.choice((1, 1, 2)) if sizes["tp"] > 1 else 1,
    }
