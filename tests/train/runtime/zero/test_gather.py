"""ZeRO 3's gathers: one layer ahead, and in backward before the reduction that would delay them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpctl.spec.load import parse
from mpctl.train.runtime.zero.param_store import Zero3ParamStore
from tests.ranks import run_ranks
from tests.train.runtime.test_pipeline import layout, pipeline_job
from tests.train.runtime.tiny import make_trainer

ZERO_3 = {"parallel__zero": 3, "training__steps": 1, "training__eval_samples": 0}
Event = tuple[str, int]


def _messages(rank: int, size: int, raw: dict[str, Any], folder: str) -> list[Event]:
    """The gathers and reductions of one step that are those of a layer, with its unit."""
    trainer, events = make_trainer(parse(raw), Path(folder), rank), list[Event]()
    for store, gradients in zip(trainer.optimizer.stores, trainer.gradients.stores, strict=True):
        assert isinstance(store, Zero3ParamStore)
        if store.shard.bucket.layer:
            store.start = _logged("gather", store, events)  # type: ignore[method-assign]
            gradients.start = _logged("reduce", gradients, events)  # type: ignore[method-assign]
    trainer.one_step()
    return events


def _logged(kind: str, store: Any, events: list[Event]) -> Any:
    start = store.start

    def starting() -> Any:
        if getattr(store, "pending", None) is None:  # else it is under way
            events.append((kind, store.shard.bucket.unit))
        return start()

    return starting


def test_backward_starts_the_next_gather_before_the_reduction(data: Path, tmp_path: Path) -> None:
    """4 layers, units 1 to 4. By hand, of the backward of one micro batch: gather 4 and, when it is
    reached, 3; at layer 3: gather 2, reduce 4; at layer 2: gather 1, reduce 3."""
    changes = {**ZERO_3, "training__global_batch_size": 4, "training__micro_batch_size": 2}
    job = pipeline_job(data, "gpt", layout(1, dp=2), changes)
    for events in run_ranks(_messages, 2, job.model_dump(mode="json"), str(tmp_path)):
        assert [tuple(event) for event in events] == [
            *(("gather", unit) for unit in (1, 2, 3, 4)),
            ("gather", 4),
            ("gather", 3),
            ("gather", 2),
            ("reduce", 4),
            ("gather", 1),
            ("reduce", 3),
            ("reduce", 2),
            ("reduce", 1),
        ]
