"""Rotary against complex rotation, its relative property, and Llama 3's stretch by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mpctl.train.kernels.rotary import Rotary, rotated
from mpctl.train.layers.context_parallel import NO_CP, RotaryTables
from tests.train.layers.oracle import close, numbers, saved_bytes

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}


def _interleaved(x: Tensor, positions: Tensor, base: float = 10000.0) -> Tensor:
    """The paper's pairs of neighbours, turned as complex numbers (equation 14)."""
    d = x.shape[-1]
    theta = torch.tensor([base ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    turn = torch.exp(1j * positions[:, None] * theta)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], d // 2, 2).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@pytest.mark.parametrize("positions", [range(3, 9), torch.tensor([0, 1, 6, 7, 100000, 5])])
def test_it_is_the_papers_rotation_up_to_a_permutation(positions: range | Tensor) -> None:
    x = numbers(2, 3, 6, 8)
    halves = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    turned = Rotary(8).turn(x[..., halves], positions)
    place = torch.tensor(list(positions)) if isinstance(positions, range) else positions
    close(turned, _interleaved(x, place)[..., halves], 1e-9)


def test_products_depend_on_the_distance_alone() -> None:
    rotary, q, k = Rotary(16, base=500.0), numbers(1, 1, 1, 16), numbers(1, 1, 1, 16, seed=1)

    def product(m: int, n: int) -> Tensor:
        return (rotary.turn(q, range(m, m + 1)) * rotary.turn(k, range(n, n + 1))).sum()

    close(product(3, 1), product(4099, 4097))
    close(product(0, 5), product(995, 1000))
    assert (product(3, 1) - product(3, 2)).abs() > 1e-2
    close(product(7, 7), (q * k).sum())


def test_lengths_are_kept_and_the_gradient_is_the_turn_back() -> None:
    x = numbers(2, 2, 5, 8).requires_grad_()
    y = Rotary(8).turn(x, range(10, 15))
    close(y.detach().norm(dim=-1), x.detach().norm(dim=-1))
    y.backward(y.detach())
    close(x.grad, x.detach())


def test_query_and_key_share_a_table_and_samples_may_differ() -> None:
    rotary, q, k = Rotary(8), numbers(2, 4, 3, 8), numbers(2, 2, 3, 8, seed=1)
    positions = torch.tensor([[0, 1, 2], [9, 4, 2]])
    turned = [rotary.turn(x, positions) for x in (q, k)]
    for one, x in zip(turned, (q, k), strict=True):
        for row in range(2):
            close(one[row], rotary.turn(x[row : row + 1], positions[row])[0])


def test_far_positions_of_16_bit_heads_keep_their_angle() -> None:
    x = torch.ones(1, 1, 1, 64, dtype=torch.bfloat16)
    near = Rotary(64).turn(x, range(131071, 131072))
    exact = Rotary(64).turn(x.double(), range(131071, 131072))
    assert near.dtype == torch.bfloat16
    assert (near.double() - exact).abs().max() < 2**-7


def test_it_saves_the_table_alone() -> None:
    x = torch.ones(2, 8, 64, 32, requires_grad=True)
    assert saved_bytes(lambda: Rotary(32).turn(x, range(64))) <= 2 * 64 * 16 * 4


def test_llama3_stretch_by_its_published_branches() -> None:
    plain, stretched = Rotary(128, 500000.0), Rotary(128, 500000.0, LLAMA3)
    for slow, fast in zip(stretched.frequencies(), plain.frequencies(), strict=True):
        wave = 2 * math.pi / fast.item()
        if wave < 8192 / 4:
            expected = fast.item()
        elif wave > 8192 / 1:
            expected = fast.item() / 8
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            expected = (1 - smooth) * fast.item() / 8 + smooth * fast.item()
        assert slow.item() == pytest.approx(expected, rel=1e-12)
    assert stretched.frequencies()[0] == 1.0
    assert (stretched.frequencies() < plain.frequencies()).sum() in range(30, 40)


def test_bad_heads_and_scalings_are_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 7 is odd"):
        Rotary(7)
    with pytest.raises(ValueError, match="lacks low_freq_factor, high_freq_factor"):
        Rotary(8, scaling={"factor": 2.0, "original_max_position": 10})


def test_layers_share_a_table_until_another_length_is_asked_for() -> None:
    tables, like = RotaryTables(), torch.zeros(1)
    first = tables.rows(Rotary(8), 6, NO_CP, like)
    assert tables.rows(Rotary(8), 6, NO_CP, like) is first
    other = tables.rows(Rotary(8, base=500.0), 6, NO_CP, like)
    assert tables.rows(Rotary(8), 6, NO_CP, like) is first
    assert not torch.equal(first[0], other[0])
    longer = tables.rows(Rotary(8), 9, NO_CP, like)
    assert torch.equal(longer[0][:6], first[0])
    assert tables.rows(Rotary(8), 6, NO_CP, like) is not first
    assert tables.rows(Rotary(8), 6, NO_CP, like.double())[0].dtype == torch.float64


def test_a_table_that_a_validation_asked_for_first_serves_a_training() -> None:
    tables = RotaryTables()
    with torch.inference_mode():
        turns = tables.rows(Rotary(8), 6, NO_CP, torch.zeros(1))
    x = torch.zeros((1, 2, 6, 8), requires_grad=True)
    rotated(x, *turns).sum().backward()
    assert x.grad is not None
