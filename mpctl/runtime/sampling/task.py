"""What a worker does for `mpctl sample`: load the model, write the texts batch by batch.

Request and answers: rundir/requests.py, SampleRequest and SampleAnswer.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from mpctl.families import get_prompt_form
from mpctl.rundir.requests import ChosenToken, SampleAnswer, SampleRequest
from mpctl.runtime.build import build_chunks
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.model_weights import load_chunks
from mpctl.runtime.partition import PipelinePartition
from mpctl.runtime.sampling.draw import TokenSampler
from mpctl.runtime.sampling.loop import LoadedModel, SampledToken, fill_masks, generate
from mpctl.runtime.sampling.texts import make_text_states
from mpctl.spec.families import PromptKind
from mpctl.spec.job import JobSpec


def sample(request: SampleRequest, job: JobSpec, mesh: Mesh) -> Iterator[SampleAnswer]:
    """Answer a SampleRequest; every rank of the mesh runs it. Raises InputError where the weights
    cannot be read, FloatingPointError where the model gives NaN."""
    began = time.perf_counter()
    partition = PipelinePartition.of(job, 0)
    (module,) = chunks = build_chunks(partition, mesh)
    load_chunks(chunks, partition.model, Path(request["origin"]))
    loaded = LoadedModel(module, partition.model, mesh.tp, mesh.device)
    yield {"event": "loaded", "seconds": time.perf_counter() - began}
    form = get_prompt_form(partition.model)
    write = fill_masks if form.kind is PromptKind.FILL_WORDS else generate
    sampler, size = TokenSampler(**request["draw"]), request["batch_size"]
    for start in range(0, len(request["texts"]), size):
        texts = make_text_states(form, request["texts"][start : start + size])
        yield {"event": "begin", "texts": [text.number for text in texts]}
        began = time.perf_counter()
        for tokens in write(loaded, texts, sampler):
            chosen, seconds = list(map(_as_chosen, tokens)), time.perf_counter() - began
            yield {"event": "tokens", "chosen": chosen, "seconds": seconds}


def _as_chosen(t: SampledToken) -> ChosenToken:
    return t.text, t.blank, t.token, t.log_probability, t.is_end, t.finish
