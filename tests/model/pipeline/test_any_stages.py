"""Cuts of a pipeline: every layer once, in the order in which a sample meets the chunks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpctl.model.pipeline.balance import LayerCosts, balanced_counts
from mpctl.model.pipeline.stages import Span, UnevenLayersError, stage_layers

small = st.integers(1, 6)


def path(stages: list[list[Span]]) -> list[int]:
    """Layers as a sample meets them: chunk 0 of every stage, then chunk 1, ..."""
    return [layer for chunk in zip(*stages, strict=True) for span in chunk for layer in range(*span)]


def counts(stages: list[list[Span]]) -> list[int]:
    return [sum(stop - start for start, stop in spans) for spans in stages]


@given(
    layers=st.integers(1, 64),
    pp=small,
    vpp=small,
    first=st.none() | st.integers(1, 12),
    last=st.none() | st.integers(1, 12),
    embedding=st.booleans(),
    loss=st.booleans(),
)
def test_any_cut_covers_every_layer_once_or_is_refused(
    layers: int, pp: int, vpp: int, first: int | None, last: int | None, embedding: bool, loss: bool
) -> None:
    try:
        stages = stage_layers(
            layers, pp=pp, vpp=vpp, first=first, last=last, embedding_is_layer=embedding, loss_is_layer=loss
        )
    except UnevenLayersError as error:
        assert re.search(r"\d", str(error)) or "counts as a layer" in str(error)
        assert error.hint or error.offers
        return
    assert len(stages) == pp
    assert all(len(spans) == vpp for spans in stages)
    assert path(stages) == list(range(layers))


@given(per=small, pp=small, vpp=small)
def test_equal_stages_when_the_layers_divide(per: int, pp: int, vpp: int) -> None:
    stages = stage_layers(per * pp * vpp, pp=pp, vpp=vpp)
    assert {stop - start for spans in stages for start, stop in spans} == {per}


@given(per=st.integers(2, 6), pp=st.integers(2, 6), vpp=small, embedding=st.booleans(), loss=st.booleans())
def test_what_counts_as_a_layer_takes_one_from_its_end(
    per: int, pp: int, vpp: int, embedding: bool, loss: bool
) -> None:
    layers = per * pp * vpp - embedding - loss
    stages = stage_layers(layers, pp=pp, vpp=vpp, embedding_is_layer=embedding, loss_is_layer=loss)
    middle = [per * vpp] * (pp - 2)
    assert counts(stages) == [per * vpp - embedding, *middle, per * vpp - loss]
    first, last = stages[0][0], stages[-1][-1]
    assert (first[1] - first[0], last[1] - last[0]) == (per - embedding, per - loss)


@given(per=small, pp=st.integers(3, 6), vpp=small, first=st.none() | small, last=st.none() | small)
def test_given_end_stages_have_their_counts_and_the_rest_is_equal(
    per: int, pp: int, vpp: int, first: int | None, last: int | None
) -> None:
    ends = (per if first is None else first) + (per if last is None else last)
    stages = stage_layers(
        (ends + per * (pp - 2)) * vpp,
        pp=pp,
        vpp=vpp,
        first=None if first is None else first * vpp,
        last=None if last is None else last * vpp,
    )
    found = [count // vpp for count in counts(stages)]
    assert found == [per if first is None else first, *[per] * (pp - 2), per if last is None else last]


@pytest.mark.parametrize(("first", "last", "layers"), [(4, 4, 12), (4, 4, 8), (1, 1, 2)])
def test_one_stage_cannot_be_first_and_last_with_counts_of_their_own(first: int, last: int, layers: int) -> None:
    with pytest.raises(UnevenLayersError, match="pp is 1"):  # once: 8 of 12 layers, silently
        stage_layers(layers, pp=1, first=first, last=last)


@pytest.mark.parametrize("which", ["embedding_is_layer", "loss_is_layer"])
def test_given_counts_and_counting_as_a_layer_exclude_each_other(which: str) -> None:
    with pytest.raises(UnevenLayersError, match="counts as a layer"):
        stage_layers(24, pp=4, first=6, **{which: True})


@given(
    layers=st.integers(1, 96), pp=st.integers(2, 12), vpp=st.integers(1, 4), embedding=st.booleans(), loss=st.booleans()
)
def test_hints_of_an_uneven_cut_are_legal(layers: int, pp: int, vpp: int, embedding: bool, loss: bool) -> None:
    def cut(layers: int, pp: int) -> list[list[Span]]:
        return stage_layers(layers, pp=pp, vpp=vpp, embedding_is_layer=embedding, loss_is_layer=loss)

    try:
        cut(layers, pp)
    except UnevenLayersError as error:
        offers = {offer.setting: offer.values for offer in error.offers}
    else:
        return
    assert offers["model.layers"]
    for count in offers["model.layers"]:
        assert min(counts(cut(int(count), pp))) >= 1, offers
    if "parallel.stage_balance" in offers:
        assert min(balanced_counts(LayerCosts([1] * layers), pp=pp, vpp=vpp)) >= 1
    for size in offers["parallel.pp"]:
        assert min(counts(cut(layers, int(size)))) >= 1, offers
        assert int(size) > 1 or vpp == 1, offers
    for chunks in offers.get("parallel.vpp", ()):
        ends = {"embedding_is_layer": embedding, "loss_is_layer": loss}
        assert min(counts(stage_layers(layers, pp=pp, vpp=int(chunks), **ends))) >= 1, offers
