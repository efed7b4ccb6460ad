"""A device and a link: fits recover the figures behind kernels and collectives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.errors import InputError
from mpctl.measure.bench.collectives import CollectiveRow
from mpctl.measure.bench.kernels import KernelRow
from mpctl.measure.bench.machine_fit import (
    ALONE,
    DeviceFit,
    LinkFit,
    busy_rows,
    fit_device,
    fit_link,
    training_rows,
    undisturbed,
)
from mpctl.plan.estimate.kernels import device_speed, product_seconds
from mpctl.plan.estimate.network import Route
from mpctl.spec.cluster import ClusterSpec, DeviceSpec, InnerLinkSpec

SHAPES = ((512, 256, 1024), (512, 1024, 256), (512, 256, 256), (2048, 2048, 2048))
BASE = DeviceSpec.model_validate(
    {
        "name": "base",
        "kind": "cpu",
        "memory_bytes": 2**30,
        "memory_bandwidth": 10e9,
        "peak_flops": {"fp32": 100e9},
        "kernels": {"products": 1.0, "memory": 0.8, "flash": 0.4, "flash_backward": 0.4, "source": "-"},
        "source": "-",
    }
)


def row(
    kernel: str,
    seconds: float,
    *,
    part: str = "update",
    site: str = "layers",
    ranks: int = 2,
    flops: float = 0.0,
    moved: float = 0.0,
    predicted: float | None = None,
    shape: Mapping[str, int] | None = None,
    is_rehearsal: bool = False,
) -> KernelRow:
    return cast(
        KernelRow,
        {
            "kernel": kernel,
            "site": site,
            "part": part,
            "shape": dict(shape or {}),
            "dtype": "fp32",
            "ranks": ranks,
            "is_rehearsal": is_rehearsal,
            "seconds": seconds,
            "cpu_seconds": seconds,
            "flops_per_second": flops / seconds,
            "bytes_per_second": moved / seconds,
            "predicted_seconds": predicted,
        },
    )


def product_row(device: DeviceSpec, m: int, k: int, n: int, part: str) -> KernelRow:
    """A product's pass, in the time that the planner's function has for this device."""
    rates = device_speed(ClusterSpec(device=device), "fp32").other
    sides = {"forward": (m, k, n), "backward_input": (m, n, k), "backward_weight": (k, m, n)}[part]
    seconds = product_seconds(rates, *sides, 4, 4)
    shape = {"m": m, "k": k, "n": n}
    return row("matmul", seconds, part=part, flops=2 * m * k * n, shape=shape)


def rows_of(device: DeviceSpec) -> list[KernelRow]:
    """Products as of this device, streams of 12 and 11 GB/s."""
    parts = ("forward", "backward_input", "backward_weight")
    products = [product_row(device, *shape, part) for shape in SHAPES for part in parts]
    streams = [row("triad", 1.0, moved=12e9), row("copy", 1.0, moved=11e9)]
    return [*products, *streams]


def fit(rows: list[KernelRow], base: DeviceSpec = BASE) -> DeviceFit:
    return fit_device(rows, base, dtype="fp32", name="mine", memory_bytes=2**31, source="measured")


def truth(**kernels: float) -> DeviceSpec:
    """A device of 200 GFLOP/s with fast memory, so that products are bound by nothing else."""
    assert BASE.kernels is not None
    return BASE.model_copy(
        update={
            "peak_flops": {"fp32": 200e9},
            "memory_bandwidth": 1e12,
            "kernels": BASE.kernels.model_copy(update=kernels),
        }
    )


def test_rate_and_depth_of_products_are_found() -> None:
    found = fit(rows_of(truth(depth=128.0))).device
    assert found.kernels is not None
    assert found.peak_flops["fp32"] * found.kernels.products == pytest.approx(200e9, rel=1e-3)
    assert found.kernels.depth == pytest.approx(128, rel=1e-2)
    assert (found.name, found.memory_bytes, found.memory_bandwidth) == ("mine", 2**31, 12e9)


def test_a_product_of_the_fit_takes_what_was_measured() -> None:
    rows = rows_of(truth(depth=128.0))
    found = fit(rows).device
    for measured in rows[:12]:
        shape, part = measured["shape"], measured["part"]
        again = product_row(found, shape["m"], shape["k"], shape["n"], part)
        assert again["seconds"] == pytest.approx(measured["seconds"], rel=0.02)


def test_a_machine_like_that_of_the_profile_keeps_its_memory_and_host() -> None:
    """Kernels alone that took as much less than their estimates as on that machine."""
    rows = [*rows_of(BASE)[:12], row("triad", 1.0, moved=10e9)]
    rows += [row("optimizer", ALONE["memory"], predicted=1.0)]
    rows += [row("layer", ALONE["host"], site="tiny", predicted=1.0)]
    found = fit(rows).device.kernels
    assert found is not None and BASE.kernels is not None
    assert (found.memory, found.host) == pytest.approx((BASE.kernels.memory, BASE.kernels.host))


def test_memory_and_host_are_those_of_the_base_times_how_much_faster_they_were() -> None:
    """Twice as fast as 0.8 of 10 GB/s is 16 GB/s, more than the stream's 12: all of it. Half as
    fast is 4 GB/s, a third of it. A layer that took three times as long: a host of 3."""
    tiny = row("layer", 3 * ALONE["host"], site="tiny", predicted=1.0)
    for times, part in ((0.5, 1.0), (2.0, 4 / 12)):
        bound = row("optimizer", times * ALONE["memory"], predicted=1.0)
        found = fit([*rows_of(truth()), tiny, bound]).device.kernels
        assert found is not None
        assert (found.memory, found.host) == pytest.approx((part, 3.0))


def test_attention_is_a_share_of_the_peak() -> None:
    rows = [*rows_of(truth()), row("attention", 1.0, part="forward", flops=50e9)]
    found = fit(rows).device
    assert found.kernels is not None
    assert found.kernels.flash == pytest.approx(50e9 / found.peak_flops["fp32"])
    assert found.kernels.flash_backward == 0.4  # not measured: as the base has it


def test_an_accelerator_keeps_its_data_sheet() -> None:
    base = BASE.model_copy(update={"kind": "cuda"})
    slow = [{**r, "predicted_seconds": r["seconds"] * 0.5} for r in rows_of(truth())]
    found = fit(slow, base).device  # type: ignore[arg-type]
    assert found.kernels is not None
    assert (found.peak_flops, found.memory_bandwidth) == ({"fp32": 100e9}, 10e9)
    assert found.kernels.products == 0.5


def test_only_what_all_cores_did_at_once_counts() -> None:
    alone, beside, crowded = (row("triad", 1.0, ranks=n, is_rehearsal=n > 2) for n in (1, 2, 4))
    assert busy_rows([alone, beside, crowded]) == [beside]


def test_time_that_other_programs_took_is_not_the_kernels() -> None:
    quiet = rows_of(truth())
    busy = [
        cast(
            KernelRow,
            {
                **one,
                "seconds": 3 * one["seconds"],
                "flops_per_second": one["flops_per_second"] / 3,
                "bytes_per_second": one["bytes_per_second"] / 3,
            },
        )
        for one in quiet
    ]
    found, truly = fit(busy).device, fit(quiet).device
    assert found.peak_flops["fp32"] == pytest.approx(truly.peak_flops["fp32"])
    assert found.memory_bandwidth == pytest.approx(truly.memory_bandwidth)
    several = {**quiet[0], "cpu_seconds": 4 * quiet[0]["seconds"]}  # of four threads
    assert undisturbed(cast(KernelRow, several)) == several


def test_what_no_device_goes_without_is_asked_for() -> None:
    with pytest.raises(InputError, match=r"no product of fp32 was measured .*--budget"):
        fit([row("triad", 1.0, moved=1e9)])
    with pytest.raises(InputError, match="no stream"):
        fit([product_row(truth(), *SHAPES[0], "forward")])
    with pytest.raises(InputError):
        fit([])


def test_comments_say_what_was_measured() -> None:
    comments = fit(rows_of(truth())).comments
    assert comments["memory_bandwidth"] == "triad and copy, 2 ranks at once: 11 to 12 GB/s"
    assert comments["peak_flops.fp32"].startswith("12 products, 2 ranks at once: ")


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
SIZES = (2**10, 2**16, 2**22, 2**26)


def measured(kind: str, ranks: int, size: int, link: InnerLinkSpec) -> CollectiveRow:
    """A collective that took the seconds of the planner's network over this link."""
    pace = 1 / (link.bandwidth * link.efficiency)
    route = Route(ranks, 1, pace, link.start, link.latency, 0.0, link.all_reduce)
    seconds = size * pace + link.start + link.latency if kind == "sendrecv" else route.collective(kind, size)
    row = {"kind": kind, "ranks": ranks, "transport": "shared", "bytes": size, "seconds": seconds}
    return cast(CollectiveRow, row)


def fit_of(link: InnerLinkSpec, ranks: tuple[int, ...] = (2, 4)) -> LinkFit:
    rows = [measured(kind, n, size, link) for kind in KINDS for n in ranks for size in SIZES]
    return fit_link(rows, name="a link")


def test_by_hand() -> None:
    """Two ranks at 2 GB/s and 50 us, as in the module's docstring."""
    link = fit_of(InnerLinkSpec(bandwidth=2e9, latency=50e-6), ranks=(2,)).link
    assert link.bandwidth * link.efficiency == pytest.approx(2e9)
    assert (link.latency, link.start) == pytest.approx((50e-6, 0.0), abs=1e-9)
    assert measured("all_gather", 2, 8_000_000, link)["seconds"] == pytest.approx(2.05e-3)
    assert measured("all_reduce", 2, 8_000_000, link)["seconds"] == pytest.approx(4.1e-3)


@given(st.floats(1e8, 1e12), st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3), st.floats(0.2, 5))
def test_what_was_put_in_is_found(bandwidth: float, latency: float, start: float, reducing: float) -> None:
    truth = InnerLinkSpec(bandwidth=bandwidth, latency=latency, start=start, all_reduce=reducing)
    fit = fit_of(truth)
    assert fit.error < 1e-3
    assert fit.link.bandwidth * fit.link.efficiency == pytest.approx(bandwidth, rel=1e-2)
    assert 0 < fit.link.efficiency <= 1
    for kind in KINDS:
        for size in SIZES:
            told, found = (measured(kind, 8, size, link)["seconds"] for link in (truth, fit.link))
            assert found == pytest.approx(told, rel=1e-2)


def test_the_fit_is_of_the_way_in_which_runs_send() -> None:
    fast, slow = InnerLinkSpec(bandwidth=1e10), InnerLinkSpec(bandwidth=1e9)
    shared = measured("all_reduce", 2, 2**20, fast)
    rows = [
        shared,
        *(
            {**measured(kind, 2, 2**20, slow), "transport": "gloo"}  # type: ignore[misc]
            for kind in ("all_reduce", "broadcast")
        ),
    ]
    assert training_rows(rows) == [shared, rows[2]]


def test_messages_between_two_ranks_count_where_they_go_the_same_way() -> None:
    link = InnerLinkSpec(bandwidth=1e9)
    rows = [measured("all_reduce", 2, 2**20, link), measured("broadcast", 2, 2**20, link)]
    rows[1]["kind"] = "sendrecv"
    assert training_rows(rows) == rows
    rows[1]["transport"] = "gloo"
    assert training_rows(rows) == rows[:1]


def test_one_size_shows_no_latency_and_the_link_is_still_valid() -> None:
    link = fit_link([measured("all_reduce", 2, 2**20, InnerLinkSpec(bandwidth=1e9))], name="x").link
    assert link.bandwidth == pytest.approx(1e9)
