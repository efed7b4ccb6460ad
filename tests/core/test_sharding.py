"""Local sizes, padded vocabularies and ring bytes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.core.sharding import (
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
def test_padded_vocab_is_the_least_multiple_that_holds_it(vocab: int, tp: int, divisor: int) -> None:
    padded, multiple = padded_vocab(vocab, tp=tp, divisor=divisor), divisor * tp
    assert padded % multiple == 0
    assert padded - multiple < vocab <= padded


# Megatron-LM, tokenizer.py, _vocab_size_with_padding: GPT-2's 50257 by tensor-parallel size.
@pytest.mark.parametrize(("tp", "padded"), [(1, 50304), (2, 50432), (4, 50688), (8, 51200)])
def test_padding_of_gpt2s_vocabulary(tp: int, padded: int) -> None:
    assert padded_vocab(50257, tp=tp) == padded


def test_contraction_names_each_axis_once_and_only_for_split_dimensions() -> None:
    assert reduced_axes(["hidden", "heads", "ffn"]) == ("tp",)
    assert reduced_axes(["hidden"]) == ()
    assert reduced_axes(["batch", "seq"]) == ("dp", "cp")


@given(st.integers(1, 200), st.integers(1, 9), st.integers(1, 9))
def test_replicas_validate_every_sample_once_in_as_many_micro_batches(
    samples: int, micro_batch: int, parts: int
) -> None:
    shares = [validation_batches(samples, micro_batch=micro_batch, parts=parts, index=i) for i in range(parts)]
    assert len({len(share) for share in shares}) == 1
    assert sorted(n for share in shares for own in share for n in own) == list(range(samples))
    assert all(len(own) <= micro_batch for share in shares for own in share)
    assert all(len(own) > 0 for share in shares for own in share[:-1])
    for index, share in enumerate(shares):
        counted = validation_sizes(samples, micro_batch=micro_batch, parts=parts, index=index)
        assert counted == Counter(len(own) or 1 for own in share)
