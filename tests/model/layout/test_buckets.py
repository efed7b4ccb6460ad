"""Buckets: every parameter in one, slices that cover them, and an example by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.sharding import View
from mpctl.model.layout.buckets import SLICE_ALIGNMENT, Bucket, BucketShape, slice_numel
from mpctl.model.layout.job_layout import JobLayout
from mpctl.spec.load import load_job

GPT = {
    "model.layers": 4,
    "model.hidden": 8,
    "model.heads": 2,
    "model.seq_length": 4,
    "model.vocab": 64,
    "model.vocab_divisor": 64,
}


def buckets_of(freeze: tuple[str, ...] = (), pp: int = 1, vpp: int = 1, **parallel: Any):
    settings = {f"parallel.{k}": v for k, v in {"dp": 2, "pp": pp, "vpp": vpp, **parallel}.items()}
    layout = JobLayout.of(load_job(None, {**GPT, **settings, "training.freeze": list(freeze)}))
    return layout, [layout.buckets(stage) for stage in range(pp)]


def bucket(*sizes: int, parts: int) -> Bucket:
    return Bucket(tuple(map(str, range(len(sizes)))), sizes, View(replicas=parts, zero=1))


MODELS: list[dict[str, Any]] = [
    {},
    {"model.tied_embeddings": False, "model.kv_heads": 1},
    {"model.family": "bert"},
    {"model.family": "glm"},
    {
        "model.family": "t5",
        "model.position": "relative",
        "model.norm": "rmsnorm",
        "model.bias": False,
        "model.layers": 2,
        "model.decoder_layers": 2,
        "model.decoder_seq_length": 4,
    },
]
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tp": 2, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 2, "vpp": 2, "schedule": "interleaved"},
]


def test_slices_by_hand() -> None:
    """600 elements over 4: 192 a slice, of which the last has 24 and 168 of padding."""
    held = [bucket(*sizes, parts=4) for sizes in ((300, 300), (400,), (5,))]
    assert [b.part for b in held] == [192, 128, 64]
    assert [b.padded for b in held] == [768, 512, 256]
    assert list(held[0].pieces(1)) == [(0, 192, 0, 108), (1, 0, 108, 84)]
    assert list(held[0].pieces(3)) == [(1, 276, 0, 24)]
    assert list(held[2].pieces(1)) == []  # padding
    whole = held[0]._replace(view=View(replicas=4))
    assert (whole.part, whole.padded) == (600, 600)  # below ZeRO 1


@given(st.integers(1, 10**12), st.integers(1, 10**5), st.sampled_from([2, 4, 8]))
def test_slices_begin_on_lines_of_memory(numel: int, parts: int, width: int) -> None:
    """NCCL and the fused AdamW take their widest words where every slice begins at 128 bytes."""
    own = slice_numel(numel, parts)
    assert own * width % 128 == 0 and own * parts >= numel
    assert (own - SLICE_ALIGNMENT) * parts < numel


def test_odd_sizes_come_last_in_their_bucket() -> None:
    """BERT's next-sentence head has a bias of 2 elements, which would put all after it off."""
    settings = {**GPT, "model.family": "bert", "model.hidden": 64, "model.heads": 4}
    layout = JobLayout.of(load_job(None, {**settings, "parallel.dp": 2, "parallel.zero": 1}))
    first = layout.buckets(0)[0]
    odd = [size % SLICE_ALIGNMENT > 0 for size in first.sizes]
    assert first.sizes[-1] == 2 and odd.count(True) == 1 and odd == sorted(odd)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6), st.integers(1, 7))
def test_slices_cover_every_element_once(sizes: list[int], parts: int) -> None:
    held, seen = bucket(*sizes, parts=parts), []
    for index in range(parts):
        for number, start, at, length in held.pieces(index):
            assert at >= 0 and at + length <= held.part
            seen += [(number, start + i) for i in range(length)]
    assert seen == [(number, i) for number, size in enumerate(sizes) for i in range(size)]


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("freeze", [(), ("layers.0.*", "embedding.position.*")])
def test_every_parameter_is_in_one(zero: int, how: dict[str, Any], freeze: tuple[str, ...]) -> None:
    layout, found = buckets_of(freeze, zero=zero, bucket_bytes=1000, **how)
    for stage, buckets in enumerate(found):
        names = [name for held in buckets for name in held.names]
        weights = {w.name for w in layout.stage_parameters(stage)}
        frozen = {n for n in weights if n.startswith(("layers.0.", "embedding.position."))}
        assert sorted(names) == sorted(weights - frozen if freeze and zero < 3 else weights)
        units = [
            held.unit
            for held in buckets
            if len(held.chunks) == 1 and not held.partial and not held.is_shared and len(layout.stages[stage]) == 1
        ]
        assert units == sorted(units, reverse=True)  # the order in which backward ends them


@pytest.mark.parametrize("how", [*LAYOUTS, {"zero": 3}], ids=str)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.get("model.family", "gpt")))
def test_the_vectors_of_these_families_are_what_does_not_decay(how: dict[str, Any], model: dict[str, Any]) -> None:
    parallel = {f"parallel.{k}": v for k, v in {"dp": 2, **how}.items()}
    layout = JobLayout.of(load_job(None, {**GPT, **model, **parallel}))
    for stage in range(len(layout.stages)):
        undecayed = {name for held in layout.buckets(stage) for name in held.undecayed}
        shapes = {w.name: w.shape for w in layout.stage_parameters(stage)}
        assert undecayed == {name for name, shape in shapes.items() if len(shape) == 1}
        assert undecayed


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("how", LAYOUTS, ids=str)
@pytest.mark.parametrize("freeze", [(), ("layers.[01].*norm*", "embedding.position.*")])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: str(model.get("model.family", "gpt")))
def test_shapes_are_those_of_the_named_buckets(
    zero: int, how: dict[str, Any], freeze: tuple[str, ...], model: dict[str, Any]
) -> None:
    parallel = {f"parallel.{k}": v for k, v in {"dp": 2, "zero": zero, **how}.items()}
    settings = {**GPT, **model, **parallel, "parallel.bucket_bytes": 1000}
    layout = JobLayout.of(load_job(None, {**settings, "training.freeze": list(freeze)}))
    for stage in range(len(layout.stages)):
        shapes: dict[BucketShape, int] = {}
        for own in layout.buckets(stage):
            holders = layout.shared_parameters[own.names[0]] if own.is_shared else ()
            shape = BucketShape(own.numel, own.chunks, own.goes_back, own.is_trained, own.partial, holders)
            shapes[shape] = shapes.get(shape, 0) + 1
        found = layout.bucket_shapes(stage)
        assert list(found.items()) == list(shapes.items())


def test_a_bucket_is_filled_to_its_size_from_the_last_layer_on() -> None:
    """A layer: norms 4 x 8, qkv 216, output 72, up 288, down 264 elements; 4 bytes each."""
    _, (buckets,) = buckets_of(bucket_bytes=4 * 600)
    assert set(buckets[0].names) == {
        "final_norm.bias",
        "final_norm.weight",
        "layers.3.mlp.down.bias",
        "layers.3.mlp.down.weight",
        "layers.3.mlp.up.bias",
        "layers.3.mlp.up.weight",
        "layers.3.mlp_norm.bias",
        "layers.3.mlp_norm.weight",
        "layers.3.attention.output.bias",
    }
    assert buckets[0].numel == 16 + 264 + 288 + 16 + 8 and buckets[0].unit == 4
    assert all(held.numel <= 600 for held in buckets)


def test_shared_and_partial_parameters_have_separate_buckets() -> None:
    _, found = buckets_of(pp=2, tp=2, sequence_parallel=True)
    for buckets in found:
        assert [held.names for held in buckets if held.is_shared] == [("embedding.word.weight",)]
        assert [held.partial for held in buckets] == ["", "tp", ""]


def test_zero_3_has_a_bucket_a_layer_and_kind() -> None:
    _, (buckets,) = buckets_of(("layers.0.*",), zero=3)
    told = [(held.layer, held.is_trained, held.goes_back) for held in buckets]
    ends, layer = ("", True, True), "layers.{}".format
    trained = [(layer(n), True, True) for n in (3, 2, 1)]
    assert told == [ends, *trained, (layer(0), False, True), ends]
