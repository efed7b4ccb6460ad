"""Layers over stages: which stack they are of."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.pipeline.stages import Span, stack_spans


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 18), min_size=2, max_size=6).map(sorted),
)
def test_every_layer_is_found_in_its_stack(sizes: list[int], cuts: list[int]) -> None:
    names = [(stack, layer) for stack, size in enumerate(sizes) for layer in range(size)]
    spans: list[Span] = list(zip(cuts[::2], cuts[1::2], strict=False))
    found = [
        (stack, layer) for stack, own in enumerate(stack_spans(spans, sizes)) for span in own for layer in range(*span)
    ]
    held = [names[layer] for span in spans for layer in range(*span) if layer < len(names)]
    assert sorted(found) == sorted(held)
