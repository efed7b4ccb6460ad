"""Rows of `mpctl fit`: what is chosen, what is monotone, and that `mpctl plan` says the same."""

from __future__ import annotations

from typing import Any

import pytest

from mpctl.plan.fit.choice import FitChoice, advised, choices
from mpctl.plan.fit.methods import EIGHT_BIT, METHODS, NO_MASTERS, PURE, optimizers, shardings
from mpctl.plan.fit.request import FitData, FitRequest, named_gpus, read_request
from mpctl.plan.fit.rows import CLOSE, FitEvaluator, _Point, choose
from mpctl.plan.planning.layout_settings import LayoutSettings, layout_of
from mpctl.plan.planning.plan import load_plan
from mpctl.plan.search.find import find_layouts
from mpctl.spec.runtime import get_profile

ASKED = {
    "one": ("qwen2.5-0.5b", "1xrtx-4090", {}),
    "node": ("llama-3-8b", "4xa100-80gb", {}),
    "experts": ("qwen3-30b-a3b", "8xh100", {}),
    "nodes": ("llama-3-8b", "16xh100", {}),
    "megatron": ("llama-3.2-1b", "2xh100", {"training.runtime": "megatron-core"}),
}


def asked(name: str, **more: Any) -> FitRequest:
    model, gpus, settings = ASKED[name]
    return read_request(model, gpus, data=FitData(samples=1000), settings=settings, **more)


@pytest.fixture(scope="module")
def found() -> dict[str, list[FitChoice]]:
    return {name: choices(asked(name)) for name in ASKED}


@pytest.mark.parametrize("name", ASKED)
def test_a_plan_of_its_settings_says_the_same(found: dict[str, list[FitChoice]], name: str) -> None:
    for one in found[name]:
        assert not one.row.reason
        plan = load_plan(None, one.settings)
        assert plan.estimate is not None
        assert plan.estimate.device_bytes == one.row.bytes
        assert plan.fits == one.row.fits
        if one.row.time is not None:
            assert plan.estimate.step_seconds == pytest.approx(one.row.time.total, rel=1e-9)
            assert one.row.tokens_per_second == pytest.approx(plan.estimate.tokens_per_second)


@pytest.mark.parametrize("name", ASKED)
def test_rows_are_in_the_order_of_methods_and_shardings(found: dict[str, list[FitChoice]], name: str) -> None:
    methods = [METHODS.index(one.row.method) for one in found[name]]
    assert methods == sorted(methods) and set(methods) == {0, 1, 2}
    stages = [
        one.row.job.parallel.zero for one in found[name] if one.row.method == "full" and one.row.job.parallel.tp == 1
    ]
    assert stages == sorted(stages)


@pytest.mark.parametrize("name", ["one", "node", "experts"])
def test_fewer_trained_parameters_need_less_memory(name: str) -> None:
    """QLoRA at most LoRA at most full, in the same layout."""
    request = asked(name)
    evaluator = FitEvaluator(request.job, {})
    sizes = {method: evaluator.least_bytes(method) or 0 for method in METHODS}
    plain = {"training.optimizer": "adamw", "training.master_weights": True}
    sizes["full"] = FitEvaluator(request.job, plain).least_bytes("full") or 0  # no smaller optimizer
    assert 0 < sizes["qlora"] <= sizes["lora"] < sizes["full"]


def test_the_smallest_micro_batch_close_to_the_fastest_is_chosen() -> None:
    def point(seconds: float, micro: int, recompute: str = "none") -> _Point:
        return _Point(seconds, LayoutSettings(micro_batch_size=micro, recompute=recompute))

    points = [point(1.1, 1), point(1.01, 2), point(1.0, 4), point(1.4, 8, "full")]
    assert choose(points).micro_batch_size == 2
    assert choose([point(1.5, 1), point(1.4, 8, "full")]).recompute == "full"
    assert choose([point(1.0, 2, "full"), point(1.0 + CLOSE / 2, 2)]).recompute == "none"


def test_no_other_settings_of_a_row_are_much_faster(found: dict[str, list[FitChoice]]) -> None:
    for one in found["node"]:
        row = one.row
        assert row.time is not None
        for micro in (1, 2, 4, 8):
            for recompute in ("none", "full"):
                settings = {"training.micro_batch_size": micro, "training.recompute": recompute}
                plan = load_plan(None, {**one.settings, **settings})
                assert plan.estimate is not None
                if plan.fits:
                    assert row.time.total <= (1 + CLOSE) * (plan.estimate.step_seconds or 0)


def test_the_batch_is_the_same_in_every_row(found: dict[str, list[FitChoice]]) -> None:
    for one in found["node"]:
        training = one.row.job.training
        assert training.global_batch_size == 64 == training.micro_batch_size * one.row.job.num_microbatches * 4


def test_shardings_are_those_of_the_runtime() -> None:
    assert [one.name for one in shardings(get_profile("fsdp2").runs, 4)][:2] == ["ZeRO 2", "FSDP"]
    assert [one.name for one in shardings(get_profile("nanotron").runs, 4)] == ["DDP"]
    assert shardings(get_profile("nanotron").runs, 1)[0].name == "one GPU"


def test_smaller_optimizers_are_tried_for_full_fine_tuning_alone() -> None:
    assert list(optimizers("full", {})) == [{}, EIGHT_BIT, PURE, {**EIGHT_BIT, **NO_MASTERS}]
    assert list(optimizers("lora", {})) == [{}]
    assert list(optimizers("full", {"training.optimizer": "lion"})) == [{}, PURE]
    two = FitEvaluator(asked("node").on(named_gpus("a100-80gb", 2)).job, {})  # type: ignore[arg-type]
    rows = {row.sharding: row for row in two.rows(["full"])}
    assert all(row.fits for row in rows.values())
    assert rows["FSDP"].optimizer == "" and rows["ZeRO 2"].optimizer == "adamw-8bit"
    (one, *_) = FitEvaluator(asked("node").on(named_gpus("h100-sxm", 1)).job, {}).rows(["full"])  # type: ignore[arg-type]
    assert one.fits and "pure bf16" in one.optimizer


def test_states_wait_on_the_host_only_where_nothing_else_fits(found: dict[str, list[FitChoice]]) -> None:
    assert not any(one.row.offloads for one in found["node"])
    request = read_request("llama-3-405b", "4xa100-80gb", data=FitData(), settings={})
    rows = list(FitEvaluator(request.job, {}).rows(["full"]))
    devices = min(row.bytes for row in rows if not row.offloads)
    assert not any(row.fits for row in rows if not row.offloads)
    assert all(row.bytes < devices and row.sharding.endswith("offload") for row in rows if row.offloads)


def test_a_layout_that_splits_the_model_has_a_row_where_users_of_the_runtime_split() -> None:
    """Megatron's, whose experts on eight ranks are twice as fast; FSDP's users leave tp and pp at 1."""
    settings = {"training.runtime": "megatron-core"}
    request = read_request("qwen3-30b-a3b", "8xh100", data=FitData(), settings=settings)
    *plain, split = FitEvaluator(request.job, {}).rows(["full"])
    assert split.job.parallel.ep > 1 and " ep " in f" {split.sharding}"
    assert split.tokens_per_second > (1 + CLOSE) * max(row.tokens_per_second for row in plain)


def test_a_layout_that_splits_the_model_is_the_suggested_one() -> None:
    """Of Llama 3 70B on 64 H100 the fastest layout has a chunk for each layer, which gains 1.3 %."""
    settings = {"training.runtime": "megatron-core", "training.global_batch_size": 256}
    request = read_request("llama-3-70b", "64xh100", data=FitData(), settings=settings)
    rows = FitEvaluator(request.job, {})
    *_, split = rows.rows(["full"])
    evaluator = rows._evaluator("full", {})
    found = find_layouts(evaluator.space, top=1, budgets=1, evaluator=evaluator)
    assert found.suggested is not None and layout_of(split.job) == found.suggested.layout
    assert split.job.parallel.vpp <= 4 and found.best[0].layout.vpp == 20
    assert found.best[0].seconds < found.suggested.seconds <= found.best[0].seconds * (1 + found.error)


def test_lora_is_advised_where_it_fits(found: dict[str, list[FitChoice]]) -> None:
    answer = advised(found["node"])
    assert answer is not None and answer.row.method == "lora"
    best = max(one.row.tokens_per_second for one in found["node"] if one.row.method == "lora")
    assert answer.row.tokens_per_second >= 0.98 * best
    assert advised([one for one in found["node"] if one.row.method == "qlora"]) is not None
    assert advised([]) is None


def test_packed_samples_attend_to_themselves_alone() -> None:
    short = read_request("llama-3-8b", "1xa100-80gb", data=FitData(samples=1000, mean_length=200), settings={})
    long = read_request("llama-3-8b", "1xa100-80gb", data=FitData(samples=1000), settings={})
    packed, whole = (advised(choices(one)) for one in (short, long))
    assert packed is not None and whole is not None
    assert packed.row.tokens_per_second > whole.row.tokens_per_second
    assert packed.steps < whole.steps and packed.settings["training.steps"] == packed.steps


def test_hours_and_price_follow_from_the_steps(found: dict[str, list[FitChoice]]) -> None:
    request = asked("node", prices=["1.5"])
    one = FitChoice(request, found["node"][0].row)
    assert one.row.time is not None
    assert one.steps == 3 * 16  # 1,000 rows in batches of 64
    assert one.hours == pytest.approx(48 * one.row.time.total / 3600)
    assert one.price == pytest.approx(1.5 * 4 * (one.hours or 0))
    assert found["node"][0].price is None
