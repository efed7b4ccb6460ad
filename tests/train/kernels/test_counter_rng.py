"""Noise: exact slices, and statistics with bounds that a bad hash fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from mpctl.train.kernels.counter_rng import (
    CounterRNG,
    StepKeys,
    as_int32,
    dropout_key,
    fold,
    fold_all,
    keep_mask,
    normal,
    site_key,
    uniform,
)
from tests.train.layers.oracle import dropped, saved_bytes

ROWS, COLUMNS = torch.arange(301)[:, None], torch.arange(1037)


def _grid(seed: int, rows: int = 1024, columns: int = 1024) -> Tensor:
    return fold_all(site_key(seed), (torch.arange(rows)[:, None], torch.arange(columns)))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.999])
def test_a_mask_is_the_folds_at_least_as_large_as_p(p: float) -> None:
    """`keep_mask` takes a shorter way, also where the high half alone does not decide."""
    least, rows, columns = round(p * 2**32) - 2**31, torch.arange(512)[:, None], torch.arange(2048)
    bits = fold_all(5, (rows, columns))
    assert ((bits >> 16) == (least >> 16)).sum() > 4
    assert torch.equal(keep_mask(5, p, (rows, columns)), bits >= least)


def test_site_keys_are_golden_and_told_apart() -> None:
    assert site_key(1, "weights", "layers.0.mlp.up.weight") == 823307637
    assert len({site_key(1), site_key(1, ""), site_key(1, 1), site_key(1, "1"), site_key(11)}) == 5
    assert site_key(1, "a", "b") != site_key(1, "ab")


def _mixed(x: int) -> int:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x


def test_fold_is_its_definition_in_plain_integers() -> None:
    def folded(key: int, coordinate: int) -> int:
        return _mixed(_mixed((coordinate * 0x9E3779B1 + 0x7FEB352D) % 2**32) ^ key)

    rows, columns = [0, 1, 50256], [0, 3, 2**31 - 1, 2**31, 2**32 - 1]
    bits = fold_all(7, (torch.tensor(rows)[:, None], torch.tensor(columns)))
    expected = [[folded(folded(7, i), j) for j in columns] for i in rows]
    assert (bits.long() % 2**32).tolist() == expected
    assert fold_all(7, (torch.tensor([0]), torch.tensor([2**31 - 1]))).item() == -1542618768
    assert torch.equal(fold(-1, torch.arange(9)), fold(2**32 - 1, torch.arange(9)))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.integers(0, 300),
    height=st.integers(1, 40),
    start=st.integers(0, 1000),
    width=st.integers(1, 1037),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_slice_is_the_slice_of_the_whole(
    rows: int, height: int, start: int, width: int, dtype: torch.dtype
) -> None:
    cut = (slice(rows, rows + height), slice(start, start + width))
    coordinates = (ROWS[cut[0]], COLUMNS[cut[1]])
    for draw in (normal, uniform):
        assert torch.equal(draw(5, coordinates, dtype=dtype), whole(draw, dtype)[cut])
    assert torch.equal(keep_mask(5, 0.3, coordinates), whole_mask()[cut])


@cache
def whole(draw: Callable[..., Tensor], dtype: torch.dtype) -> Tensor:
    return draw(5, (ROWS, COLUMNS), dtype=dtype)


@cache
def whole_mask() -> Tensor:
    return keep_mask(5, 0.3, (ROWS, COLUMNS))


def test_a_fold_of_one_key_is_a_bijection() -> None:
    assert len(fold(99, torch.arange(1 << 20)).unique()) == 1 << 20


def test_avalanche_of_coordinates_and_keys() -> None:
    x = torch.arange(1 << 14)
    base = fold(123, x)
    for bit in range(32):
        for other in (fold(123, x ^ (1 << bit)), fold(123 ^ (1 << bit), x)):
            flipped = torch.stack([((base ^ other) >> k) & 1 for k in range(32)]).double().mean(1)
            # a fair coin over 2^14 draws: 0.5 +- 0.0039; six of those
            assert (flipped - 0.5).abs().max() < 0.0235, bit


def test_bits_are_fair_and_bytes_uniform_by_chi_square() -> None:
    for seed in range(4):
        bits = _grid(seed)
        for k in range(32):
            ones = ((bits >> k) & 1).float()
            assert abs(ones.mean() - 0.5) < 5 * 0.5 / 1024
            # a row or a column holds 1024 fair bits: the worst of 65536 stays within 5.5 sigma
            for dim in (0, 1):
                assert (ones.mean(dim) - 0.5).abs().max() < 5.5 * 0.5 / 32
        for shift in (0, 8, 16, 24):
            counts = torch.bincount((bits.flatten() >> shift) & 255, minlength=256).double()
            chi = ((counts - 4096) ** 2 / 4096).sum().item()
            # 255 degrees of freedom: mean 255, sigma 22.6; too even is as suspicious as too odd
            assert 255 - 4.5 * 22.6 < chi < 255 + 5 * 22.6


@pytest.mark.parametrize("step", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (2, 0), (0, 512), (512, 0)])
def test_pairs_of_neighbours_are_uniform_by_chi_square(step: tuple[int, int]) -> None:
    top = (_grid(2) >> 28) & 15
    other = top.roll(step, (0, 1))
    counts = torch.bincount((top * 16 + other).flatten(), minlength=256).double()
    assert ((counts - 4096) ** 2 / 4096).sum() < 255 + 5 * 22.6


def test_normal_moments_and_tails() -> None:
    z = normal(site_key(4), (torch.arange(2048)[:, None], torch.arange(2048)))
    n = z.numel()
    assert abs(z.double().mean()) < 5 / n**0.5
    assert abs(z.double().var() - 1) < 5 * (2 / n) ** 0.5
    assert abs((z.double() ** 4).mean() - 3) < 5 * (96 / n) ** 0.5
    for bound, share in ((1.0, 0.317311), (2.0, 0.0455003), (3.0, 0.0026998), (4.0, 6.334e-5)):
        assert abs((z.abs() > bound).double().mean() - share) < 5 * (share / n) ** 0.5
    assert 4.9 < z.abs().max() < 6.4


def test_uniform_is_open_even_at_the_ends() -> None:
    for dtype in (torch.float32, torch.float64):
        u = uniform(3, (torch.arange(1 << 22),), dtype=dtype)
        assert 0 < u.min() < 1e-5
        assert 1 - 1e-5 < u.max() < 1
        assert abs(u.double().mean() - 0.5) < 5 * 0.289 / 2048


def test_masks_of_neighbouring_steps_sites_seeds_and_samples_do_not_correlate() -> None:
    x = torch.ones(2, 256, 1024)

    def mask(seed: int = 1, step: int = 10, rng_site: str = "a", sample: int = 40) -> Tensor:
        rng = CounterRNG(seed, step, torch.tensor([sample, sample + 1]))
        return (dropped(x, rng, 0.5, rng_site=rng_site) > 0).double() - 0.5

    base = mask()
    others = [mask(seed=2), mask(step=11), mask(rng_site="b"), mask(sample=42)]
    shifted = [base.roll(1, dim) for dim in range(3)] + [base.roll((1, 1), (1, 2))]
    for other in others + shifted:
        assert abs((base * other).mean() * 4) < 5 / x.numel() ** 0.5


def test_no_two_rows_share_their_numbers() -> None:
    bits = fold_all(site_key(0), (torch.arange(50304)[:, None], torch.arange(4)))
    assert len(bits.unique(dim=0)) == 50304
    assert len(bits[:, 0].unique()) > 50304 - 5


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_dropout_keeps_its_share_and_scales(p: float) -> None:
    rng = CounterRNG(1, 2, torch.arange(4))
    y = dropped(torch.ones(4, 128, 1024), rng, p, rng_site="x")
    kept, n = (y > 0).double().mean().item(), y.numel()
    assert abs(kept - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert set(y.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - p)).item()}


def test_dropout_of_nothing_is_the_tensor_itself() -> None:
    x, samples = torch.ones(1, 2, 3), torch.arange(1)
    assert dropped(x, CounterRNG(1, 2, samples), 0.0, rng_site="x") is x
    assert dropped(x, CounterRNG(1, 2, samples, training=False), 0.5, rng_site="x") is x


def test_dropout_knows_its_global_place() -> None:
    whole = CounterRNG(1, 2, torch.arange(6))
    x = torch.rand(6, 33, 70) + 0.5
    y = dropped(x, whole, 0.4, rng_site="x")
    pick = torch.tensor([5, 0, 3])
    part = CounterRNG(1, 2, pick)
    z = dropped(x[pick, 7:20, 11:52], part, 0.4, rng_site="x", rows=range(7, 20), columns=range(11, 52))
    assert torch.equal(z, y[pick, 7:20, 11:52])


def test_attention_dropout_knows_its_heads() -> None:
    whole, x = CounterRNG(1, 2, torch.arange(3)), torch.rand(3, 8, 17, 17) + 0.5
    y = dropped(x, whole, 0.4, rng_site="x", heads=range(8))
    z = dropped(x[:, 2:5], whole, 0.4, rng_site="x", heads=range(2, 5))
    assert torch.equal(z, y[:, 2:5])
    rows = dropped(x[:, :, 5:9], whole, 0.4, rng_site="x", heads=range(8), rows=range(5, 9))
    assert torch.equal(rows, y[:, :, 5:9])


def test_the_gradient_passes_the_same_mask() -> None:
    x = torch.rand(2, 5, 9, dtype=torch.float64).add(0.5).requires_grad_()
    y = dropped(x, CounterRNG(1, 2, torch.arange(2)), 0.4, rng_site="x")
    y.sum().backward()
    assert torch.allclose(x.grad * x.detach(), y.detach())


def test_dropout_saves_one_byte_an_element() -> None:
    x, rng = torch.ones(2, 64, 128, requires_grad=True), CounterRNG(1, 2, torch.arange(2))
    assert saved_bytes(lambda: dropped(x, rng, 0.5, rng_site="x")) == x.numel()


def test_bad_input_is_refused_in_words() -> None:
    rng, x = CounterRNG(1, 2, torch.arange(2)), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match=r"1\.0 is not in 0 <= p < 1"):
        dropped(x, rng, 1.0, rng_site="x")
    with pytest.raises(ValueError, match="names 3 places, the tensor has 4"):
        dropped(x, rng, 0.5, rng_site="x", columns=range(3))
    with pytest.raises(ValueError, match="samples for a batch of 3"):
        dropped(torch.ones(3, 3, 4), rng, 0.5, rng_site="x")


SITES = {"": ("embedding",), "layers.0": ("attention", "mlp"), "layers.10": ("attention", "mlp")}


def test_the_table_holds_the_keys_of_the_step_that_it_was_filled_for() -> None:
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    for step in (3, 4, 5):
        keys.fill(step)
        assert int(keys[""]["embedding"]) == as_int32(dropout_key(7, step, "embedding"))
        assert int(keys["layers.10"]["mlp"]) == as_int32(dropout_key(7, step, "layers.10.mlp"))
    assert tuple(keys) == tuple(SITES) and len(keys) == 3
    assert len({int(key) for own in keys.values() for key in own.values()}) == 5


def test_dropout_by_keys_on_the_device_is_dropout_by_keys_of_the_host() -> None:
    keys = StepKeys(SITES, 7, torch.device("cpu"))
    keys.fill(9)
    x, samples = torch.randn(2, 6, 16), torch.tensor([5, 11])
    host, device = CounterRNG(7, 9, samples), keys.rng(samples)
    for scope, own in SITES.items():
        for site in own:
            expected = dropped(x, host.within(scope), 0.3, rng_site=site)
            assert torch.equal(expected, dropped(x, device.within(scope), 0.3, rng_site=site))
            name = f"{scope}.{site}".lstrip(".")
            assert torch.equal(expected, dropped(x, host, 0.3, rng_site=name))
            assert 0 < int((expected == 0).sum()) < x.numel()
