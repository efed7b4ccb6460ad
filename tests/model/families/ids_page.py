"""The list of ids in docs/models.md: models of Hugging Face's hub that have a preset.

`python -m tests.model.families.ids_page` writes it anew.
"""

from __future__ import annotations

import re

from mpctl.core.sharding import padded_vocab
from mpctl.model.families import get_table
from mpctl.plan.rules.launched import keys_not_launched
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec
from mpctl.spec.presets import hub_ids
from tests.model.families.models_page import PAGE

START, END = "<!-- ids: python -m tests.model.families.ids_page -->\n", "<!-- end of ids -->"


def model_of(name: str) -> ModelSpec:
    model = load_job(None, {"model": name}).model
    assert model is not None
    return model


def parameters(model: ModelSpec) -> int:
    """Of the operator table, without what pads the vocabulary."""
    tables = (1 if model.tied_embeddings else 2) * model.hidden + model.head_bias
    padding = padded_vocab(model.vocab, tp=1, divisor=model.vocab_divisor) - model.vocab
    return get_table(model, tp=1).numel - padding * tables


def ids() -> str:
    """A line for each preset that has ids, and whether it is planned only."""
    named: dict[str, list[str]] = {}
    for name, preset in hub_ids().items():
        named.setdefault(preset, []).append(name)
    return "".join(f"- {_line(preset, names)}\n" for preset, names in sorted(named.items()))


def _line(preset: str, names: list[str]) -> str:
    planned = " (planned only)" if keys_not_launched(model_of(preset)) else ""
    return f"`{preset}`{planned}: {', '.join(f'`{name}`' for name in names)}"


def page(text: str) -> str:
    """The page with the table of today."""
    whole = f"{START}\n{ids()}\n{END}"
    return re.sub(f"{START}.*?{END}", lambda _: whole, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
