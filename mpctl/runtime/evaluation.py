"""What a worker does for `mpctl eval`: load the model, take the mean loss over each corpus.

The samples and their micro batches are those of a validation in training (batches.py), so that at
the layout and micro batch size of the training the loss is the same number. With several pipeline
stages its last digits may differ: losses are summed here over groups of micro batches.

Answers, one JSON object each: {"event": "loaded", "seconds"} once; {"event": "progress", "corpus",
"done", "total"} in micro batches of rank 0; {"event": "corpus", "corpus", "loss", "samples",
"tokens", "seconds"} at the end of each, tokens being those whose prediction counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mpctl.data.indexed import IndexedDataset
from mpctl.data.special import added_tokens
from mpctl.families.batch import Batch, Objective
from mpctl.runtime.batches import make_objective, read_batch
from mpctl.runtime.build import build_chunks
from mpctl.runtime.checkpointing.model_weights import load_chunks
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.optimizer import TORCH_DTYPES
from mpctl.runtime.partition import PipelinePartition
from mpctl.runtime.pipeline import PipelineRunner
from mpctl.runtime.status import StepStatus, reduce_status
from mpctl.sharding import validation_batches
from mpctl.spec.job import JobSpec

Answers = Iterator[dict[str, Any]]


def evaluate(request: dict[str, Any], job: JobSpec, mesh: Mesh) -> Answers:
    """request: `origin`; `corpora`, each with the `prefix` of an indexed dataset, the `tokenizer`
    that made it and the number of `words` that its text may use; `samples`, None for all."""
    began = time.perf_counter()
    cut = PipelinePartition.of(job, mesh.pp.rank)
    chunks = build_chunks(cut, mesh)
    load_chunks(chunks, cut.model, Path(request["origin"]))
    pipeline = PipelineRunner(
        cut, chunks, mesh.pp, dtype=TORCH_DTYPES[job.training.dtype], device=mesh.device
    )
    evaluation = _Evaluation(job, mesh, pipeline, request["samples"])
    yield {"event": "loaded", "seconds": time.perf_counter() - began}
    for number, corpus in enumerate(request["corpora"]):
        dataset, added = (
            IndexedDataset(Path(corpus["prefix"])),
            added_tokens(Path(corpus["tokenizer"])),
        )
        held = make_objective(dataset, job, added, words=corpus["words"], shuffle=False)
        for answer in evaluation.of(held):
            yield {"corpus": number, **answer}


@dataclass(frozen=True)
class _Evaluation:
    """samples: the most to take of each corpus."""

    job: JobSpec
    mesh: Mesh
    pipeline: PipelineRunner
    samples: int | None

    @torch.inference_mode()
    def of(self, held: Objective) -> Answers:
        began, mesh = time.perf_counter(), self.mesh
        samples = min(self.samples or held.samples_per_epoch, held.samples_per_epoch)
        numbers = validation_batches(
            samples, micro_batch=self.job.training.micro_batch_size, parts=mesh.dp.size,
            index=mesh.dp.rank,
        )  # fmt: skip
        loss, tokens, size = 0.0, 0, mesh.pp.size  # one micro batch a stage keeps all stages busy
        for start in range(0, len(numbers), size):
            group = numbers[start : start + size]
            batches = [self._batch(held, list(own) or [0]) for own in group]
            counted = sum(len(own) > 0 for own in group)
            loss += self.pipeline.evaluate(batches, counted=counted)
            tokens += sum(map(_tokens, batches[:counted]))
            yield {"event": "progress", "done": start + len(group), "total": len(numbers)}
        yield {
            "event": "corpus", "loss": reduce_status(StepStatus(loss / samples), mesh).loss,
            "samples": samples, "tokens": int(reduce_status(StepStatus(float(tokens)), mesh).loss),
            "seconds": time.perf_counter() - began,
        }  # fmt: skip

    def _batch(self, held: Objective, numbers: list[int]) -> Batch:
        model = self.job.model
        assert model is not None
        return read_batch(held, numbers, model=model, cp=self.mesh.cp, device=self.mesh.device)


def _tokens(batch: Batch) -> int:
    """Predictions that the loss is made of."""
    weights = batch.fields.get("weights")
    return batch["targets"].numel() if weights is None else int((weights > 0).sum())
