"""Stages that are filled one after the other, as nanotron fills them."""

from __future__ import annotations

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.pipeline.filled import filled_cut
from mpctl.plan.estimate.communication import transfers
from tests.jobs import job_of
from tests.nanotron import nanotron_rows

LLAMA_1B = {
    "model.layers": 16,
    "model.hidden": 2048,
    "model.ffn": 8192,
    "model.heads": 32,
    "model.vocab": 131072,
    "model.seq_length": 4096,
    "model.activation": "swiglu",
    "training.runtime": "nanotron",
    "training.global_batch_size": 8,
    "cluster.gpus_per_node": 8,
}


@pytest.mark.parametrize(
    ("pp", "counts", "head", "loss"), [(2, (11, 5), 1, 1), (4, (6, 5, 5, 0), 3, 3), (8, (3, 3, 2, 3, 2, 3, 0, 0), 6, 7)]
)
def test_the_cut_by_hand(pp: int, counts: tuple[int, ...], head: int, loss: int) -> None:
    """A head of 4 layers behind 16: shares of 10, 5 and 2.5 layers."""
    assert filled_cut(16, layer=1, head=4, pp=pp) == (counts, head, loss)
    layout = JobLayout.of(job_of({**LLAMA_1B, "parallel.pp": pp, "parallel.dp": 8 // pp}))
    assert tuple(stop - start for ((start, stop),) in layout.stages) == counts
    assert (layout.head_stage, layout.loss_stage) == (head, loss)


def test_logits_go_to_the_stage_of_the_loss() -> None:
    """131,072 words of 4,096 bf16 tokens are 1 GiB; hidden states are 16 MiB."""
    job = job_of({**LLAMA_1B, "parallel.pp": 8, "training.dtype": "bf16"})
    sizes = [transfer.sizes for transfer in transfers(JobLayout.of(job))]
    assert sizes == [(2**24,)] * 12 + [(2**30,)] * 2


def test_pipelines_with_a_stage_left_over_failed() -> None:
    """Of the published sweep no run with replicas had a stage behind that of the loss's, and of the
    layouts with one all failed: so the cut is nanotron's."""

    def has_idle_stage(row: dict[str, object]) -> bool:
        job = row["job"]
        assert isinstance(job, dict)
        model, pp = job["model"], job["parallel"]["pp"]
        layer = 4 * model["hidden"] ** 2 + 3 * model["hidden"] * model["ffn"]
        cut = filled_cut(model["layers"], layer=layer, head=model["vocab"] * model["hidden"], pp=pp)
        return cut.loss_stage < pp - 1 and job["parallel"]["dp"] > 1

    ran = [*nanotron_rows("ran"), *nanotron_rows("soft")]
    assert not any(map(has_idle_stage, ran))
    assert sum(map(has_idle_stage, nanotron_rows("failed"))) > 40
