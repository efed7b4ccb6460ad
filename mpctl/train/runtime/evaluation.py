"""The worker side of `mpctl eval`: load the model and compute the mean loss over each corpus.

The samples and micro batches are those of a validation during training (batches.py), so that the
loss is the same number at the same layout and micro batch size. With several pipeline stages its
last digits may differ, since losses are summed over groups of micro batches here.

Request and answers: records/rundir/requests.py, EvalRequest and EvalAnswer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from mpctl.core.sharding import validation_batches
from mpctl.model.layout.job_layout import JobLayout
from mpctl.records.checkpoint.manifest import read_manifest
from mpctl.records.checkpoint.saved_model import SavedModel
from mpctl.records.rundir.requests import EvalAnswer, EvalRequest
from mpctl.spec.job import JobSpec
from mpctl.train.data.indexed import IndexedDataset
from mpctl.train.data.tokenizer import added_tokens
from mpctl.train.families.implementation import Batch, Objective
from mpctl.train.layers.fp8 import Fp8Scales
from mpctl.train.runtime.batches import make_objective, model_of, read_batch
from mpctl.train.runtime.build import build_chunks, fp8_scales
from mpctl.train.runtime.kernel_choice import machine_kernels
from mpctl.train.runtime.mesh import Mesh
from mpctl.train.runtime.model_weights import load_chunks
from mpctl.train.runtime.optimizer import TORCH_DTYPES
from mpctl.train.runtime.p2p import stage_links
from mpctl.train.runtime.packed_base import pack_base
from mpctl.train.runtime.partition import PipelinePartition, stage_model
from mpctl.train.runtime.pipeline import PipelineRunner
from mpctl.train.runtime.step_record import total_over_ranks
from mpctl.train.weights.origin import open_origin


def evaluate(request: EvalRequest, job: JobSpec, mesh: Mesh) -> Iterator[EvalAnswer]:
    """Answer an EvalRequest; every rank of the mesh runs it. Raises InputError where the weights or
    a corpus cannot be read."""
    began = time.perf_counter()
    partition = PipelinePartition.of(job, mesh.pp.rank)
    chunks = build_chunks(partition, mesh, machine_kernels(mesh.device, mesh.world))
    origin = Path(request["origin"])
    load_chunks(chunks, partition.model, origin)
    pack_base(stage_model(chunks), partition.layout.table, mesh.device)
    restored_scales(partition.layout, chunks, mesh.device, origin)
    links = stage_links(mesh, partition.layout.placement)
    pipeline = PipelineRunner(partition, chunks, links, dtype=TORCH_DTYPES[job.training.dtype], device=mesh.device)
    evaluation = _Evaluation(job, mesh, pipeline, request["samples"])
    yield {"event": "loaded", "seconds": time.perf_counter() - began}
    for number, corpus in enumerate(request["corpora"]):
        dataset = IndexedDataset(Path(corpus["prefix"]))
        added = added_tokens(Path(corpus["tokenizer"]))
        objective = make_objective(
            dataset, job, added, words=corpus["words"], together=request["samples"] or sys.maxsize, shuffle=False
        )
        yield from evaluation.run(number, objective)


@dataclass(frozen=True)
class _Evaluation:
    """max_samples: the limit per corpus, None for all."""

    job: JobSpec
    mesh: Mesh
    pipeline: PipelineRunner
    max_samples: int | None

    @torch.inference_mode()
    def run(self, corpus: int, objective: Objective) -> Iterator[EvalAnswer]:
        began, mesh = time.perf_counter(), self.mesh
        samples = min(self.max_samples or objective.samples_per_epoch, objective.samples_per_epoch)
        numbers = validation_batches(
            samples, micro_batch=self.job.training.micro_batch_size, parts=mesh.dp.size, index=mesh.dp.rank
        )
        loss, tokens, size = 0.0, 0, mesh.pp.size  # one micro batch a stage keeps all stages busy
        for start in range(0, len(numbers), size):
            group = numbers[start : start + size]
            batches = [self._batch(objective, list(samples_of) or [0]) for samples_of in group]
            counted = sum(len(samples_of) > 0 for samples_of in group)
            loss += float(self.pipeline.evaluate(batches, counted=counted))
            tokens += sum(map(_predicted_tokens, batches[:counted]))
            done, total = start + len(group), len(numbers)
            yield {"corpus": corpus, "event": "progress", "done": done, "total": total}
        yield {
            "corpus": corpus,
            "event": "corpus",
            "loss": total_over_ranks(loss / samples, mesh),
            "samples": samples,
            "tokens": int(total_over_ranks(float(tokens), mesh)),
            "seconds": time.perf_counter() - began,
        }

    def _batch(self, objective: Objective, numbers: list[int]) -> Batch:
        mesh, model = self.mesh, model_of(self.job)
        return read_batch(objective, numbers, model=model, cp=mesh.cp, device=mesh.device)


def _predicted_tokens(batch: Batch) -> int:
    """Number of predictions that the loss is made of."""
    weights = batch.fields.get("weights")
    return batch["targets"].numel() if weights is None else int((weights > 0).sum())


def restored_scales(layout: JobLayout, chunks: Iterable[nn.Module], device: torch.device, origin: Path) -> Fp8Scales:
    """As `fp8_scales`, with the scaling history of the run or checkpoint at `origin`, so that a
    model is evaluated with the scales of its training; other origins have no history."""
    scales = fp8_scales(layout, chunks, device)
    saved = open_origin(origin)
    if isinstance(saved, SavedModel):
        scales.load(read_manifest(saved.checkpoint).fp8)
    return scales
