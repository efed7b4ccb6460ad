"""Rules about a loss in chunks and MLPs in tiles: settings without effect, more parts than tokens, and which ways
mpctl's layers train.

By hand, micro batch 2 of 4096 tokens over cp 8: 1024 tokens of a rank, so that at most 1024 chunks have any.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Offer
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.estimate.loss import loss_way
from mpctl.plan.rules.check import Check, refusal
from mpctl.spec.job import JobSpec

WAY, CHUNKS, TILES = "training.cross_entropy", "training.cross_entropy_chunks", "training.tiled_mlp"
TRAINED = ("fused", "linear")
"""The ways of mpctl's layers (train/layers/cross_entropy.py, linear_cross_entropy.py)."""


def loss_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Chunks are of a loss that has some, tiles of an MLP, and neither are more than the tokens."""
    job, t = draft.job, draft.job.training
    way = loss_way(t, draft.profile)
    if way == "linear" and (mode := job.parallel.tensor_mode) != "1d":
        message = f"linear needs whole rows of hidden states, and tensor_mode {mode} cuts them"
        yield refusal("loss-way", WAY, message, Offer(WAY, ("fused",), "cross_entropy"), more="tensor_mode 1d")
    if t.cross_entropy_chunks is not None and way != "linear":
        message = f"{t.cross_entropy_chunks} has no effect: cross_entropy {way} computes all logits at once"
        yield refusal("loss-way", CHUNKS, message, Offer(WAY, ("linear",), "cross_entropy"), more="no chunks")
    if t.tiled_mlp is not None and (tp := job.parallel.tp) > 1:
        message = f"{t.tiled_mlp} with tp {tp}: every tile would send as much as the whole MLP, which is not planned"
        yield refusal("loss-parts", TILES, message, Offer("parallel.tp", (1,), "tp"), more="no tiled_mlp")
    model = job.model
    if model is None:
        return
    tokens = t.micro_batch_size * model.seq_length // job.parallel.cp
    for key, parts, what in ((CHUNKS, t.cross_entropy_chunks, "chunks"), (TILES, t.tiled_mlp, "tiles")):
        if parts is not None and parts > tokens:
            message = f"{parts} {what} of {tokens} tokens, which a rank has of a micro batch"
            yield refusal("loss-parts", key, message, Offer(key, (tokens,), key.removeprefix("training.")))
    if t.tiled_mlp is not None and model.experts is not None and not model.dense_layers:
        message = f"{t.tiled_mlp} has no effect: every layer has experts, and tiles are of dense MLPs"
        yield refusal("loss-parts", TILES, message, more="leave it out")


def loss_not_launched(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the key, message and hint of each setting of loss and MLP that mpctl's layers do not run."""
    t, model = job.training, job.model
    if t.cross_entropy not in (None, *TRAINED):
        message = f"{t.cross_entropy} is planned, not run by `mpctl launch`: its kernels are other software's"
        yield WAY, message, "use fused, or linear to hold no logits"
    if t.cross_entropy == "linear" and model is not None:
        if model.family == "bert":
            yield WAY, "linear is not run with a bias of each word, which bert's head has", "use fused"
        if t.adapter is not None and "lm_head" in t.adapter.targets:
            yield WAY, "linear is not run with an adapter of lm_head", "use fused, or leave lm_head out of targets"
    if t.tiled_mlp is not None:
        message = f"{t.tiled_mlp} is planned, not run by `mpctl launch`"
        yield TILES, message, "leave it out; recompute full saves no MLP either"
