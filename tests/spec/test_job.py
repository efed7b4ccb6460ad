"""`complete` fills what follows from the rest and changes nothing that was given."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from mpctl.spec.job import JobSpec, changed_job, complete
from mpctl.spec.load import load_job, parse
from mpctl.spec.model import ModelSpec
from mpctl.spec.training import TrainingSpec

size = st.integers(1, 8)
OLD_DEVICE = {"name": "old", "kind": "cuda", "memory_bytes": 2**34, "peak_flops": {"fp32": 1e12}, "source": "made up"}


@given(tp=size, pp=size, cp=size, dp=size, micro=size, data=st.data())
def test_dp_fills_the_world_when_the_rest_divides_it(
    tp: int, pp: int, cp: int, dp: int, micro: int, data: st.DataObject
) -> None:
    world = tp * pp * cp * dp
    nodes = data.draw(st.sampled_from([n for n in range(1, world + 1) if world % n == 0]))
    raw = {
        "cluster": {"nodes": nodes, "gpus_per_node": world // nodes},
        "parallel": {"tp": tp, "pp": pp, "cp": cp},
        "training": {"micro_batch_size": micro},
    }
    job = complete(parse(raw))
    assert job.parallel.dp == dp
    assert prod(job.sizes.values()) == job.world_size == world
    assert job.training.global_batch_size == micro * dp
    assert job.num_microbatches == 1
    assert complete(job) == job


@given(tp=size, pp=size, cp=size, dp=st.none() | size, nodes=size)
def test_ranks_a_node_hold_the_layout_when_left_open(tp: int, pp: int, cp: int, dp: int | None, nodes: int) -> None:
    parallel = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    job = complete(parse({"cluster": {"nodes": nodes}, "parallel": parallel}))
    assert job.cluster.gpus_per_node is not None
    needed = tp * pp * cp * (dp or 1)
    assert job.world_size - nodes < needed <= job.world_size
    if dp is not None:
        assert job.parallel.dp == dp


@given(micro=size, dp=size, count=st.integers(1, 64))
def test_microbatches_are_what_the_global_batch_needs(micro: int, dp: int, count: int) -> None:
    training = {"micro_batch_size": micro, "global_batch_size": micro * dp * count}
    assert parse({"parallel": {"dp": dp}, "training": training}).num_microbatches == count


def test_what_was_given_stays() -> None:
    given_job = parse(
        {
            "cluster": {"nodes": 2, "gpus_per_node": 8},
            "parallel": {"tp": 2, "dp": 4},
            "training": {"global_batch_size": 12, "dtype": "bf16"},
        }
    )
    assert complete(given_job) == given_job  # 4 replicas on 16 ranks: for validate.py to refuse


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"cluster": "dgx-h100"}, "bf16"),
        ({"cluster": "dgx-h100", "cluster.device.kind": "rocm"}, "bf16"),
        ({"cluster": "dgx2-v100"}, "fp16"),
        ({"cluster.device": OLD_DEVICE}, "fp32"),
        ({"cluster": "this-machine"}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_the_data_type_follows_from_the_device(settings: dict[str, object], dtype: str) -> None:
    job = load_job(None, settings)
    assert (job.training.dtype, job.training.is_dtype_auto) == (dtype, True)
    assert load_job(None, {**settings, "training.dtype": "auto"}) == job
    named = load_job(None, {**settings, "training.dtype": "fp32"}).training
    assert (named.dtype, named.is_dtype_auto) == ("fp32", False)


def test_a_run_keeps_the_data_type_that_was_chosen(tmp_path: Path) -> None:
    """What a run directory holds names it, so that another machine does not choose again."""
    job = load_job(None, {"cluster": "dgx-h100"})
    kept = tmp_path / "job.json"
    kept.write_text(job.model_dump_json(), "utf-8")
    elsewhere = load_job(str(kept), {"cluster": "this-machine"}).training
    assert (elsewhere.dtype, elsewhere.is_dtype_auto) == ("bf16", False)


def test_a_changed_job_chooses_the_data_type_anew() -> None:
    job = load_job(None, {"cluster": "dgx-h100"})
    device = {**job.cluster.model_dump()["device"], "peak_flops": {"fp16": 1e12}}
    old = changed_job(job, {"cluster.device": device}, frozenset({"training.dtype"}))
    assert old is not None
    assert (old.training.dtype, old.training.is_dtype_auto) == ("fp16", True)


def test_a_job_is_frozen() -> None:
    with pytest.raises(ValidationError):
        JobSpec().name = "other"  # type: ignore[misc]


SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "vocab": 100, "seq_length": 16}


def test_a_model_derives_what_is_absent() -> None:
    model = ModelSpec.model_validate(SHAPE)
    assert (model.ffn, model.kv_heads, model.head_dim, model.max_positions) == (256, 4, 16, 16)


def test_a_model_keeps_what_is_given() -> None:
    own = {"ffn": 100, "kv_heads": 2, "head_dim": 32, "max_positions": 64}
    model = ModelSpec.model_validate({**SHAPE, **own})
    assert {key: getattr(model, key) for key in own} == own


@pytest.mark.parametrize(
    ("dtype", "given_dtype", "reduced"), [("bf16", None, "fp32"), ("fp64", None, "fp64"), ("fp16", "fp16", "fp16")]
)
def test_gradients_are_reduced_in_fp32_unless_told(dtype: str, given_dtype: str | None, reduced: str) -> None:
    training = TrainingSpec.model_validate({"dtype": dtype, "gradient_dtype": given_dtype})
    assert training.reduced_dtype == reduced
