"""A NaN that the sums carry to all ranks is traced to the rank and the parameter it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mpctl.runtime import nonfinite
from mpctl.runtime.nonfinite import NotFinite
from mpctl.runtime.process import is_echo
from mpctl.runtime.train import Trainer
from mpctl.spec.load import parse
from tests.ranks import run_ranks
from tests.runtime.test_tensor_modes import grid
from tests.runtime.tiny import make_trainer, tiny_job


def _poison_loss(trainer: Trainer) -> None:
    chunk = trainer.pipeline.chunks[-1]
    advance = chunk.advance

    def poisoned(*args: Any) -> Any:
        (loss,) = advance(*args)
        return (loss * float("nan"),)

    chunk.advance = poisoned  # type: ignore[method-assign]


def _poison_gradient(trainer: Trainer) -> None:
    weight = dict(trainer.model.named_parameters())["final_norm.weight"]
    weight.register_hook(lambda gradient: gradient * float("inf"))


def _poison_parameter(trainer: Trainer) -> None:
    with torch.no_grad():
        next(iter(trainer.model.parameters()))[0] = float("nan")


POISONS = {"loss": _poison_loss, "gradient": _poison_gradient, "parameter": _poison_parameter}


def _train_rank(
    rank: int, size: int, raw: dict[str, Any], run_dir: str, poison: str, at: int
) -> dict[str, Any]:
    nonfinite.ECHO_SECONDS = 0.0
    trainer = make_trainer(parse(raw), Path(run_dir), rank)
    records = trainer.run()
    next(records)
    if rank == at:
        POISONS[poison](trainer)
    try:
        next(records)
    except NotFinite as error:
        return {"words": str(error), "is_echo": is_echo(error)}
    raise AssertionError("nothing was found")


SLOW = pytest.mark.slow
CASES = [
    ("loss", 2, {"parallel__pp": 2, "cluster__gpus_per_node": 4},
     "the gradient norm of step 2 is nan: first on rank 2, its loss is nan, and its gradient of "),
    ("gradient", 1, {}, "first on rank 1, its gradient of final_norm.weight is not finite"),
    ("gradient", 1, {"parallel__zero": 3},
     "first on rank 1, its gradient of final_norm.weight is not finite"),
    ("parameter", 1, {}, "first on rank 1, its parameter "),
    # a rank of a square whose loss is not the one that is counted
    pytest.param("loss", 1, grid("2d", 4), "first on rank 1, its loss is nan", marks=SLOW),
    pytest.param("gradient", 6, grid("3d", 8, training__micro_batch_size=4),
                 "first on rank 6, its gradient of final_norm.weight", marks=SLOW),
]  # fmt: skip


@pytest.mark.parametrize(("poison", "rank", "changes", "words"), CASES)
def test_the_rank_it_came_from_is_named(
    runs: Any, tmp_path: Path, poison: str, rank: int, changes: dict[str, Any], words: str
) -> None:
    job = tiny_job(runs.data, **{"dp": 2, "training__steps": 3, **changes})
    raw = job.model_dump(mode="json")
    found = run_ranks(_train_rank, job.world_size, raw, str(tmp_path), poison, rank)
    assert all(words in told["words"] for told in found), found
    assert [told["is_echo"] for told in found] == [other != rank for other in range(len(found))]
