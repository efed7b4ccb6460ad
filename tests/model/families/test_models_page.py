"""docs/models.md says what every variant of a model can do today."""

from __future__ import annotations

import pytest

from mpctl.spec.hf import config_readers
from tests.model.families import ids_page
from tests.model.families.hf_configs import CONFIGS, EXPERTS, OTHERS, REFUSED
from tests.model.families.models_page import PAGE, page, variant
from tests.model.families.test_hub import ONLY_PLANNED


def test_the_page_has_the_table_of_today() -> None:
    text = PAGE.read_text("utf-8")
    assert page(text) == text
    assert ids_page.page(text) == text


def test_every_config_that_is_read_has_a_variant_that_plans() -> None:
    assert {kind for kind, _ in {**CONFIGS, **EXPERTS, **OTHERS}.values()} == config_readers().keys()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused(name: str) -> None:
    assert variant(name).refused


@pytest.mark.parametrize("name", [*CONFIGS, *EXPERTS, *OTHERS])
def test_a_variant_trains_where_a_test_compares_its_logits(name: str) -> None:
    """test_hf_runs.py, and for BERT and T5 tests/train/weights/test_round_trip.py."""
    assert (variant(name).trains == "yes") == (name not in ONLY_PLANNED)
