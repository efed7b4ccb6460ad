"""Hints are legal: whoever does what an error proposes is rid of that error."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mpctl.plan.rules.check import Check
from mpctl.plan.rules.validate import NO_VALUE, check_job, with_tried_hints
from mpctl.spec.load import load_job, load_partial
from tests.jobs import GPT, answers, statuses

small = st.integers(1, 12)


def numbers(text: str) -> list[int]:
    """`use 1, 2 or 1,000` -> 1, 2 and 1000."""
    return [int(number.replace(",", "")) for number in re.findall(r"\d+(?:,\d{3})*", text)]


def way_out(rule: str, job: dict[str, Any], *, model: bool = True) -> str | None:
    """The hint of the one error of this rule, None when the rule is kept."""
    errors = [c for c in answers(rule, job, model=model) if c.status == "error"]
    assert len(errors) <= 1
    return errors[0].hint if errors else None


def assert_kept(rule: str, job: dict[str, Any], *, model: bool = True) -> None:
    assert statuses(rule, job, model=model) <= {"ok", "warning"}, job


@given(tp=small, pp=small, cp=small, nodes=small, gpus=small)
def test_world_size(tp: int, pp: int, cp: int, nodes: int, gpus: int) -> None:
    job = {
        "cluster.nodes": nodes,
        "cluster.gpus_per_node": gpus,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.cp": cp,
    }
    hint = way_out("world-size", job, model=False)
    if hint is None:
        return
    ways = hint.removeprefix("use ").split("; or ")
    assert len(ways) >= 2, hint
    for way in ways:
        axis = way.split()[0]
        if way.startswith("tp x cp x pp"):
            changes = [{"parallel.tp": number, "parallel.cp": 1, "parallel.pp": 1} for number in numbers(way)]
        elif axis in ("tp", "pp", "cp"):
            changes = [{f"parallel.{axis}": number} for number in numbers(way)]
        else:
            (multiple,) = numbers(way)
            changes = [{"cluster.nodes": k * multiple} for k in (1, 2, 3)]
        for change in changes:
            assert_kept("world-size", {**job, **change}, model=False)


@given(tp=small, dp=st.integers(1, 40), nodes=small, gpus=small)
def test_world_size_with_a_wrong_dp(tp: int, dp: int, nodes: int, gpus: int) -> None:
    job = {"cluster.nodes": nodes, "cluster.gpus_per_node": gpus, "parallel.tp": tp}
    hint = way_out("world-size", {**job, "parallel.dp": dp}, model=False)
    if hint is not None and hint.startswith("use dp"):
        way, *larger = hint.split("; or ")
        (right,) = numbers(way)
        assert_kept("world-size", {**job, "parallel.dp": right}, model=False)
        for ranks in numbers(" ".join(larger)):  # a node with a GPU for each rank
            wide = {**job, "parallel.dp": dp, "cluster.gpus_per_node": ranks}
            assert_kept("world-size", wide, model=False)


@given(
    tp=st.sampled_from([2, 3, 4, 6, 8, 16]),
    pp=st.integers(1, 3),
    cp=st.integers(1, 3),
    dp=st.integers(1, 4),
    gpus=st.sampled_from([2, 4, 6, 8]),
    order=st.permutations(["tp", "cp", "dp", "pp"]).map("-".join),
)
def test_tp_within_node(tp: int, pp: int, cp: int, dp: int, gpus: int, order: str) -> None:
    world = tp * pp * cp * dp
    if world % gpus:
        return
    job = {
        "cluster.nodes": world // gpus,
        "cluster.gpus_per_node": gpus,
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.cp": cp,
        "parallel.order": order,
    }
    hint = way_out("tp-within-nvlink-domain", job, model=False)
    if hint is None:
        return
    rest = [axis for axis in order.split("-") if axis != "tp"]
    legal = numbers(hint.split(" with ")[0])
    assert legal
    for size in legal:
        mended = {**job, "parallel.tp": size, "parallel.order": "-".join(["tp", *rest])}
        assert_kept("world-size", mended, model=False)
        assert_kept("tp-within-nvlink-domain", mended, model=False)
    allowed = {**job, "parallel.allow_tp_across_nodes": True}
    assert statuses("tp-within-nvlink-domain", allowed, model=False) == {"warning"}


@given(micro=small, dp=small, batch=st.integers(1, 200))
def test_batch_divides(micro: int, dp: int, batch: int) -> None:
    job = {"parallel.dp": dp, "training.micro_batch_size": micro}
    hint = way_out("batch-divides", {**job, "training.global_batch_size": batch}, model=False)
    assert (hint is None) == (batch % (micro * dp) == 0)
    if hint is None:
        return
    batches, *micros = hint.split("; or ")
    for legal in numbers(batches):
        assert_kept("batch-divides", {**job, "training.global_batch_size": legal}, model=False)
    for legal in numbers("".join(micros)):
        changed = {"training.global_batch_size": batch, "training.micro_batch_size": legal}
        assert_kept("batch-divides", {**job, **changed}, model=False)


@given(tp=st.integers(1, 40), heads=st.integers(1, 40))
def test_tp_divides_heads(tp: int, heads: int) -> None:
    job = {"model.heads": heads, "model.head_dim": 64}
    hint = way_out("tp-divides-heads", {**job, "parallel.tp": tp})
    assert (hint is None) == (heads % tp == 0)
    for legal in numbers(hint or ""):
        assert_kept("tp-divides-heads", {**job, "parallel.tp": legal})


@given(tp=st.integers(1, 40), ffn=st.integers(1, 5000))
def test_tp_divides_ffn(tp: int, ffn: int) -> None:
    hint = way_out("tp-divides-ffn", {"parallel.tp": tp, "model.ffn": ffn})
    assert (hint is None) == (ffn % tp == 0)
    for legal in numbers(hint or ""):
        assert_kept("tp-divides-ffn", {"parallel.tp": legal, "model.ffn": ffn})


@given(tp=st.integers(1, 16), heads=st.integers(1, 32), kv=st.integers(1, 32), width=st.sampled_from([1, 6, 64]))
def test_kv_heads(tp: int, heads: int, kv: int, width: int) -> None:
    job = {"model.heads": heads, "model.kv_heads": kv, "model.head_dim": width, "parallel.tp": tp}
    hint = way_out("kv-heads-divide-heads", job)
    assert (hint is None) == (heads % kv == 0)
    for legal in numbers(hint or ""):
        assert_kept("kv-heads-divide-heads", {**job, "model.kv_heads": legal})
    hint = way_out("tp-divides-kv-heads", job)
    assert (hint is None) == (kv % tp == 0 or (tp % kv == 0 and kv * width % tp == 0))
    for legal in numbers(hint or ""):
        assert_kept("tp-divides-kv-heads", {**job, "parallel.tp": legal})
        assert_kept("tp-divides-heads", {**job, "parallel.tp": legal})


@given(hidden=st.integers(1, 512), heads=st.integers(1, 64))
def test_heads_divide_hidden(hidden: int, heads: int) -> None:
    job = {"model.hidden": hidden, "model.heads": heads}
    hint = way_out("heads-divide-hidden", job)
    if hint is not None:
        for legal in numbers(hint.partition(";")[0]):
            assert_kept("heads-divide-hidden", {**job, "model.heads": legal})
        assert_kept("heads-divide-hidden", {**job, "model.head_dim": 8})


@given(seq=st.integers(1, 600), tp=st.integers(2, 8), cp=st.integers(1, 6), times=small)
def test_sequence(seq: int, tp: int, cp: int, times: int) -> None:
    job = {"parallel.tp": tp, "parallel.cp": cp, "parallel.sequence_parallel": True}
    for rule in ("cp-divides-sequence", "tp-divides-sequence"):
        hint = way_out(rule, {**job, "model.seq_length": seq})
        if hint is not None:
            legal = numbers(hint)[0] * times
            assert_kept(rule, {**job, "model.seq_length": legal})


@given(tp=st.integers(1, 300), mode=st.sampled_from(["2d", "2.5d", "3d"]))
def test_tensor_mode(tp: int, mode: str) -> None:
    job = {"parallel.tensor_mode": mode}
    hint = way_out("tensor-mode", {**job, "parallel.tp": tp}, model=False)
    if hint is None:
        return
    for way in hint.removeprefix("use ").split("; or "):
        values, _, micro = way.partition(" with micro batch ")
        setting = values.split()[0]
        more = {"training.micro_batch_size": int(micro or 1)}
        for value in re.findall(r"[\d.]+d?", values.removeprefix(setting)):
            changed = {**job, "parallel.tp": tp, **more, f"parallel.{setting}": value}
            changed |= {"parallel.tp": int(value)} if setting == "tp" else {}
            for rule in ("tensor-mode", "tensor-mode-samples"):
                assert_kept(rule, changed, model=False)


@given(pp=st.integers(2, 6), vpp=st.integers(2, 4), count=small, times=small)
def test_micro_batches_fill_an_interleaved_pipeline(pp: int, vpp: int, count: int, times: int) -> None:
    rule = "microbatches-fill-pipeline"
    job = {"parallel.pp": pp, "parallel.vpp": vpp, "training.micro_batch_size": 3}
    hint = way_out(rule, {**job, "training.global_batch_size": 3 * count}, model=False)
    assert (hint is None) == (count % pp == 0)
    if hint is not None:
        (multiple,) = numbers(hint)
        assert_kept(rule, {**job, "training.global_batch_size": 3 * multiple * times}, model=False)


@given(seq=st.integers(2, 4096), fewer=st.integers(1, 4096))
@settings(max_examples=30)
def test_max_positions(seq: int, fewer: int) -> None:
    job = {"model.seq_length": seq}
    hint = way_out("max-positions", {**job, "model.max_positions": fewer})
    assert (hint is None) == (fewer >= seq)
    if hint is not None:
        assert_kept("max-positions", {**job, "model.max_positions": numbers(hint)[0]})


def test_decoder_layers_of_a_t5() -> None:
    hint = way_out("decoder-layers", {"model.family": "t5"})
    assert hint is not None
    (layers,) = numbers(hint)
    assert_kept("decoder-layers", {"model.family": "t5", "model.decoder_layers": layers})
    assert_kept("layers-per-stage", {"model.family": "t5", "model.decoder_layers": layers})


SIZES = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])
JOBS = st.fixed_dictionaries(
    {"model.layers": st.integers(1, 30), "model.heads": st.integers(1, 30)},
    optional={
        "cluster.nodes": SIZES,
        "cluster.gpus_per_node": SIZES,
        "parallel.tp": SIZES,
        "parallel.pp": SIZES,
        "parallel.cp": SIZES,
        "parallel.dp": SIZES,
        "parallel.vpp": SIZES,
        "parallel.order": st.permutations(["tp", "cp", "dp", "pp"]).map("-".join),
        "parallel.sequence_parallel": st.booleans(),
        "parallel.embedding_is_layer": st.booleans(),
        "parallel.tensor_mode": st.sampled_from(["1d", "1d", "2d", "2.5d", "3d"]),
        "parallel.tensor_depth": st.integers(1, 3),
        "model.kv_heads": SIZES,
        "model.ffn": st.integers(1, 600),
        "training.micro_batch_size": SIZES,
        "training.global_batch_size": st.integers(1, 60),
    },
)


def errors_of(settings: dict[str, Any]) -> list[Check]:
    """The errors of a job as the rules find them."""
    job = load_job(None, settings)
    return [check for check in check_job(job) if check.status == "error"]


def told(settings: dict[str, Any]) -> list[Check]:
    """The same with the hints that are told."""
    loaded = load_partial(None, settings)
    assert loaded.job is not None and not loaded.issues
    return with_tried_hints(loaded.job, errors_of(settings), loaded.open_settings)


@given(JOBS)
@settings(max_examples=60, deadline=None)
def test_every_offered_value_is_accepted_by_every_rule(job: dict[str, Any]) -> None:
    """What is typed instead mends its error, brings no new one and leaves none of the same
    setting; what was left open follows anew."""
    job = {**GPT, "model.hidden": 720, **job}
    errors = told(job)
    for check in errors:
        assert check.hint
        for offer in check.offers:
            for value in offer.values:
                left = errors_of({**job, **dict(offer.also), offer.setting: value})
                assert check.rule not in {other.rule for other in left}, (check, offer, value)
                assert offer.setting not in {other.where for other in left}, (check, offer, value)
                assert {other.rule for other in left} <= {other.rule for other in errors}


def test_chunks_are_told_first_and_all_that_is_told_is_legal() -> None:
    """Once "use 72 or 84 layers" for vpp 3 alone."""
    job = {
        "cluster.gpus_per_node": 8,
        "parallel.pp": 8,
        "model.layers": 32,
        "parallel.vpp": 3,
        "training.global_batch_size": 8,
    }
    (check,) = (check for check in told({**GPT, **job}) if check.rule == "layers-per-stage")
    assert check.hint.startswith("use vpp 1, 2 or 4; or ")


def test_where_no_value_alone_is_legal_the_hint_says_so() -> None:
    """tp 1 is not for sequence parallelism, others do not divide 5 ranks or 12 heads."""
    job = {"cluster.gpus_per_node": 5, "parallel.tp": 5, "parallel.sequence_parallel": True}
    hints = {check.rule: check.hint for check in told({**GPT, **job})}
    assert hints["tp-divides-heads"] == NO_VALUE
