"""`--gpus any`, and ways out: what is offered fits, and nothing smaller does."""

from __future__ import annotations

from dataclasses import replace

from mpctl.plan.fit.devices import REFERENCE, any_gpus, best_on, known_devices
from mpctl.plan.fit.document import answer_fit
from mpctl.plan.fit.request import FitData, FitRequest, named_gpus, read_request
from mpctl.plan.fit.rows import FitEvaluator
from mpctl.plan.fit.ways_out import ways_out
from mpctl.plan.planning.plan import load_plan

SAMPLES = FitData(samples=1000)


def asked(model: str, gpus: str = "any", **more: object) -> FitRequest:
    return read_request(model, gpus, data=SAMPLES, settings={}, **more)  # type: ignore[arg-type]


def test_the_fewest_gpus_fit_and_half_of_them_do_not() -> None:
    request = asked("llama-3-8b", methods=["full"])
    rows = any_gpus(request).rows
    assert rows and all(one.row.fits for one in rows)
    counts = [one.gpus for one in rows]
    assert counts == sorted(counts)
    many = best_on(request, "full", "rtx-4090", 64)
    assert many is not None
    least = FitEvaluator(request.on(named_gpus("rtx-4090", 1) or many.request.gpus).job, {}).least_bytes("full")
    assert (least or 0) > many.row.job.cluster.usable_bytes  # type: ignore[operator]


def test_prices_choose_the_devices_and_the_cheapest_number() -> None:
    request = asked("llama-3-8b", prices=["a100-80gb=1.8", "h100=2.5"], methods=["full"])
    found = any_gpus(request)
    assert {one.device for one in found.rows} == {"A100-SXM4-80GB", "H100-SXM5-80GB"} and found.others == []
    for device in ("A100-SXM4-80GB", "H100-SXM5-80GB"):
        fewest, *cheapest = [one for one in found.rows if one.device == device]
        assert all(one.gpus > fewest.gpus and (one.price or 0) < (fewest.price or 0) for one in cheapest)
        after = best_on(request, "full", fewest.gpus_text.partition("x")[2], 2 * [fewest, *cheapest][-1].gpus)
        assert after is None or (after.price or 0) >= ([fewest, *cheapest][-1].price or 0)


def test_memory_of_the_reference_is_that_of_other_devices() -> None:
    """Which rules devices in or out before they are planned."""
    request = asked("llama-3-8b")
    sizes = set()
    for device in (REFERENCE, "rtx-4090", "t4", "mi300x", "gb200"):
        gpus = named_gpus(device, 4)
        assert gpus is not None
        sizes.add(FitEvaluator(request.on(gpus).job, {}).least_bytes("lora"))
    assert len(sizes) == 1


def test_each_device_is_known_once() -> None:
    names = [device.name for device in known_devices()]
    assert len(names) == len(set(names)) > 20 and {"a100-80gb", "rtx-4090", "t4"} <= set(names)


def test_ways_out_fit_when_planned() -> None:
    request = asked("llama-3-70b", "1xrtx-4090", prices=["rtx-4090=0.4"])
    found = answer_fit(replace(request, is_said=lambda _: False))  # software without states on the host
    assert found.answer is None and not any(one.row.fits for one in found.rows)
    assert found.ways
    for way in found.ways:
        assert way.change
        plan = load_plan(None, way.choice.settings)
        assert plan.fits and plan.estimate is not None
        assert plan.estimate.device_bytes == way.choice.row.bytes
    more = next(way for way in found.ways if "GPUs instead" in way.change)
    assert more.choice.price is not None and more.choice.device == "RTX 4090"


def test_the_least_change_comes_first() -> None:
    changes = [way.change for way in ways_out(asked("llama-3-8b", "1xl40s", methods=["full"]))]
    assert changes[0] == "LoRA instead of full" and "GPUs instead of 1" in changes[1]
    assert changes[2].endswith(" as the GPU")
    long = ways_out(asked("llama-3.2-1b", "1xt4", methods=["lora", "qlora"], seq_length=65536))
    assert long[0].change.startswith("rows of ") and long[0].choice.request.seq_length < 65536
