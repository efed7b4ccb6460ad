"""The operator tables: its parameters are those of the published models."""

from __future__ import annotations

import pytest

from mpctl.core.sharding import padded_vocab
from mpctl.model.families import get_table
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from tests.jobs import shape_of


def built(preset: str, *, tp: int = 1) -> tuple[ModelSpec, OperatorTable]:
    model = shape_of(load_job(None, {"model": preset}))
    return model, get_table(model, tp=tp)


GPT2_SHAPED = [
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "gpt3-175b",
    "megatron-1.2b",
    "megatron-2.5b",
    "megatron-4.2b",
    "megatron-8.3b",
]


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("preset", GPT2_SHAPED)
def test_parameters_follow_the_published_formula(preset: str, tp: int) -> None:
    """arXiv 2104.04473, eq. 2: P = 12 L h^2 (1 + 13/(12 h) + (v + s)/(12 L h)), whose v is the
    padded vocabulary; it leaves out the final norm's 2 h. Multiplied out, in integers."""
    model, table = built(preset, tp=tp)
    layers, h, s = model.layers, model.hidden, model.max_positions
    v = padded_vocab(model.vocab, tp=tp)
    assert table.numel == 12 * layers * h * h + 13 * layers * h + (v + s) * h + 2 * h


# Released checkpoints, to the parameter; padding of the vocabulary is not in them.
@pytest.mark.parametrize(
    ("preset", "released"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
    ],
)
def test_parameters_are_those_of_the_released_model(preset: str, released: int) -> None:
    model, table = built(preset)
    padding = (padded_vocab(model.vocab, tp=1) - model.vocab) * model.hidden
    tables = 1 if model.tied_embeddings else 2
    assert table.numel - padding * tables == released


@pytest.mark.parametrize("preset", [*GPT2_SHAPED, "llama-3-8b", "demo-gpt"])
def test_weights_have_their_own_names_and_add_up(preset: str) -> None:
    _, table = built(preset)
    weights = list(table.weights())
    assert len({weight.name for weight in weights}) == len(weights)
    assert sum(weight.numel for weight in weights) == table.numel
    assert all(len(weight.shape) == len(weight.dims) for weight in weights)


def test_a_tied_table_is_copied_to_the_last_stage_only_when_it_is_another() -> None:
    _, table = built("gpt2")
    word = "embedding.word.weight"
    alone = [w.name for w in table.stage_weights([(0, 12)], is_first=True, is_last=True)]
    last = [w.name for w in table.stage_weights([(6, 12)], is_first=False, is_last=True)]
    middle = [w.name for w in table.stage_weights([(6, 9)], is_first=False, is_last=False)]
    assert alone.count(word) == last.count(word) == 1
    assert {name.split(".")[1] for name in middle} == {"6", "7", "8"}


def test_an_untied_head_belongs_to_the_last_stage() -> None:
    _, table = built("llama-3-8b")
    last = [w.name for w in table.stage_weights([(16, 32)], is_first=False, is_last=True)]
    assert "head.weight" in last
    assert "embedding.word.weight" not in last
