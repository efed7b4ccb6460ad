"""What a worker does for `mpctl sample`: load the model, write the texts batch by batch.

Answers, one JSON object each: {"event": "loaded", "seconds"} once; {"event": "begin", "texts"} at
each batch; {"event": "tokens", "chosen": [[text, blank, token, log probability, is_end, finish],
..], "seconds"} at each place, seconds from the batch's begin.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

from mpctl.families import get_prompt_form
from mpctl.runtime.build import build_chunks
from mpctl.runtime.checkpointing.model_weights import load_chunks
from mpctl.runtime.mesh import Mesh
from mpctl.runtime.partition import PipelinePartition
from mpctl.runtime.sampling.draw import TokenSampler
from mpctl.runtime.sampling.loop import fill_masks, generate
from mpctl.runtime.sampling.texts import make_text_states
from mpctl.spec.job import JobSpec
from mpctl.spec.prompt import PromptKind


def sample(request: dict[str, Any], job: JobSpec, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """request: `origin`, `texts`, `batch_size` and the settings of Draw under `draw`."""
    began = time.perf_counter()
    cut = PipelinePartition.of(job, 0)
    (module,) = chunks = build_chunks(cut, mesh)
    load_chunks(chunks, cut.model, Path(request["origin"]))
    yield {"event": "loaded", "seconds": time.perf_counter() - began}
    form = get_prompt_form(cut.model)
    work = fill_masks if form.kind is PromptKind.FILL_WORDS else generate
    draw, size, asked = TokenSampler(**request["draw"]), request["batch_size"], request["texts"]
    for start in range(0, len(asked), size):
        texts = make_text_states(form, asked[start : start + size])
        yield {"event": "begin", "texts": [text.number for text in texts]}
        began = time.perf_counter()
        for chosen in work(module, cut.model, mesh.tp, texts, draw, device=mesh.device):
            seconds = time.perf_counter() - began
            yield {"event": "tokens", "chosen": [list(astuple(one)) for one in chosen],
                   "seconds": seconds}  # fmt: skip
