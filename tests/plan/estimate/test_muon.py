"""Muon's messages and operations, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.model.layout.job_layout import JobLayout
from mpctl.model.layout.matrices import newton_schulz_flops
from mpctl.plan.estimate.muon import MuonWork
from mpctl.plan.estimate.time import find_step_time
from tests.jobs import job_of

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 512, "seq_length": 32, "bias": False}
BASE = {f"model.{key}": value for key, value in SHAPE.items()}
BASE |= {"launch.device": "cuda", "training.dtype": "bf16", "training.optimizer": "muon", "cluster.device": "h100-sxm"}
LAYER = 4 * newton_schulz_flops(64, 64, steps=5) + 2 * newton_schulz_flops(64, 256, steps=5)


def work(**settings: Any) -> MuonWork:
    return MuonWork(JobLayout.of(job_of({**BASE, **settings})))


def ranks(tp: int, dp: int, zero: int, runtime: str = "megatron-core", **settings: Any) -> MuonWork:
    keys = {"parallel.tp": tp, "parallel.dp": dp, "parallel.zero": zero, "training.runtime": runtime}
    return work(**{**keys, "cluster.gpus_per_node": tp * dp, **settings})


def sent(one: MuonWork) -> list[tuple[str, str, int, int]]:
    return [(m.axis, m.kind, m.bytes, m.count) for m in one.messages(0)]


def test_operations_of_a_layer() -> None:
    """Q, K and V and the output, up and down: 5 x 2 (2 x 64^3 + 64^3) and 5 x 2 (2 x 64^2 x 256 + 64^3)."""
    assert LAYER == 4 * 10 * 3 * 64**3 + 2 * 10 * (2 * 64**2 * 256 + 64**3)
    for runtime in ("mpctl", "megatron-core"):
        assert ranks(1, 1, 0, runtime).flops(0) == 2 * LAYER
    fused = work(**{"training.muon.split_qkv": False, "training.runtime": "mpctl"})
    assert fused.flops(0) == 2 * (
        LAYER + newton_schulz_flops(192, 64, steps=5) - 3 * newton_schulz_flops(64, 64, steps=5)
    )


def test_a_layer_wise_optimizer_deals_complete_matrices() -> None:
    """Of two layers on 4 ranks: six of equal work (qkv, up, down), so that two ranks have two of them; the small output
    projections go to the others. Nothing is gathered over dp."""
    one = ranks(1, 4, 1)
    assert one.flops(0) == 2 * newton_schulz_flops(64, 256, steps=5)
    assert sent(one) == []
    assert ranks(1, 4, 0).flops(0) == 2 * LAYER


def test_tp_completes_matrices_by_the_mode() -> None:
    """Per layer qkv, output, up and down in float32; Grams of 64 x 64 in 16 bits, of down's 64 rows too."""
    numel = [192 * 64, 64 * 64, 256 * 64, 64 * 256]
    assert [size for *_, size, _ in sent(ranks(2, 1, 0))] == [4 * n for n in numel] * 2
    grams = sent(ranks(2, 1, 0, **{"training.muon.tp_mode": "distributed"}))
    assert grams == [("tp", "all_reduce", 2 * 64 * 64, 5)] * 8
    blocks = ranks(2, 1, 0, **{"training.muon.tp_mode": "blockwise"})
    assert sent(blocks) == [] and blocks.flops(0) < 2 * LAYER


def test_mpctl_gathers_buckets_and_then_what_a_slice_touches() -> None:
    layout = ranks(2, 2, 1, "mpctl")
    over = [(axis, kind) for axis, kind, *_ in sent(layout)]
    assert over.count(("dp_cp", "all_gather")) >= 1 and over.count(("tp", "all_gather")) >= 1
    assert layout.flops(0) < 2 * LAYER


def test_the_steps_take_time() -> None:
    muon, adamw = (find_step_time(JobLayout.of(job_of({**BASE, "training.optimizer": o}))) for o in ("muon", "adamw"))
    assert not isinstance(muon, str) and not isinstance(adamw, str)
    assert muon.optimizer > 0 and muon.total > 0
    assert pytest.approx(muon.compute) == adamw.compute
