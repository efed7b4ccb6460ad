"""Local sizes, padded vocabularies and ring bytes."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.estimate.communication import ring_bytes
from mpctl.sharding import (
    divisors,
    local_range,
    local_size,
    padded_vocab,
    reduced_axes,
    split_parts,
    validation_batches,
    validation_sizes,
)

size = st.integers(1, 64)


@given(st.integers(1, 5000))
def test_divisors_are_all_of_them_ascending(number: int) -> None:
    assert divisors(number) == [k for k in range(1, number + 1) if number % k == 0]


@given(per=size, parts=size)
def test_ranges_of_all_parts_are_the_dimension(per: int, parts: int) -> None:
    held = [local_range(per * parts, parts=parts, index=i) for i in range(parts)]
    assert [row for block in held for row in block] == list(range(per * parts))
    assert {len(block) for block in held} == {local_size(per * parts, parts=parts)}


@given(whole=size, parts=size)
def test_a_size_that_does_not_divide_is_refused_with_the_legal_ways(whole: int, parts: int) -> None:
    if whole % parts == 0:
        return
    with pytest.raises(ValueError, match=f"{whole} is not divisible by {parts}") as caught:
        local_size(whole, parts=parts)
    ways = str(caught.value).split("one of ")[1].rstrip(")").split(", ")
    assert all(local_size(whole, parts=int(way)) for way in ways)


@given(per=st.lists(st.integers(1, 8), min_size=1, max_size=4), parts=st.integers(1, 8))
def test_fused_parts_are_each_split_by_themselves(per: list[int], parts: int) -> None:
    whole = [count * parts for count in per]
    held = [split_parts(whole, parts=parts, index=i) for i in range(parts)]
    assert all([len(block) for block in blocks] == per for blocks in held)
    rows = [row for fused in zip(*held, strict=True) for block in fused for row in block]
    assert rows == list(range(sum(whole)))


@given(vocab=st.integers(1, 300_000), tp=st.integers(1, 64), divisor=st.sampled_from([1, 64, 128]))
def test_padded_vocab_is_the_least_multiple_that_holds_it(
    vocab: int, tp: int, divisor: int
) -> None:
    padded, multiple = padded_vocab(vocab, tp=tp, divisor=divisor), divisor * tp
    assert padded % multiple == 0
    assert padded - multiple < vocab <= padded


# Megatron-LM, tokenizer.py, _vocab_size_with_padding: GPT-2's 50257 by tensor-parallel size.
@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_padding_of_gpt2s_vocabulary(tp: int, padded: int) -> None:
    assert padded_vocab(50257, tp=tp) == padded


@given(message=st.integers(0, 2**40), ranks=st.integers(1, 1024))
def test_ring_bytes_are_exact(message: int, ranks: int) -> None:
    exact = Fraction(2 * (ranks - 1) * message, ranks)
    sent = ring_bytes(message, ranks)
    assert isinstance(sent, int) == (exact.denominator == 1)
    assert sent == (exact if isinstance(sent, int) else pytest.approx(float(exact), rel=1e-12))


@given(ranks=st.integers(1, 9), chunk=st.integers(1, 5))
def test_ring_bytes_are_what_a_ring_sends(ranks: int, chunk: int) -> None:
    """A reduce-scatter and an all-gather by hand, chunk after chunk around the ring."""
    held = [[{(rank, c)} for c in range(ranks)] for rank in range(ranks)]
    sent = [0] * ranks
    for step in range(2 * (ranks - 1)):
        moving = [(rank, (rank - step) % ranks) for rank in range(ranks)]
        copies = [(rank, c, set(held[rank][c])) for rank, c in moving]
        for rank, c, terms in copies:
            held[(rank + 1) % ranks][c] |= terms
            sent[rank] += chunk
    whole = [{(rank, c) for rank in range(ranks)} for c in range(ranks)]
    assert all(own == whole for own in held)
    assert sent == [ring_bytes(chunk * ranks, ranks)] * ranks


def test_contraction_names_each_axis_once_and_only_for_split_dimensions() -> None:
    assert reduced_axes(["hidden", "heads", "ffn"]) == ("tp",)
    assert reduced_axes(["hidden"]) == ()
    assert reduced_axes(["batch", "seq"]) == ("dp", "cp")


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_replicas_validate_every_sample_once_in_as_many_micro_batches(
    samples: int, micro_batch: int, parts: int
) -> None:
    shares = [
        validation_batches(samples, micro_batch=micro_batch, parts=parts, index=i)
        for i in range(parts)
    ]
    assert len({len(share) for share in shares}) == 1
    assert sorted(n for share in shares for own in share for n in own) == list(range(samples))
    assert all(len(own) <= micro_batch for share in shares for own in share)
    assert all(len(own) > 0 for share in shares for own in share[:-1])
    for index, share in enumerate(shares):
        counted = validation_sizes(samples, micro_batch=micro_batch, parts=parts, index=index)
        assert counted == Counter(len(own) or 1 for own in share)
