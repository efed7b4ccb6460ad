"""The table of ids in docs/models.md: models of Hugging Face's hub that have a preset.

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


def trains(model: ModelSpec) -> str:
    """`yes`, or the settings because of which a model is planned and not launched."""
    keys = keys_not_launched(model)
    return f"no: {', '.join(f'`{key}`' for key in keys)}" if keys else "yes"


def ids() -> str:
    """A row for each preset that has ids."""
    lines = ["| preset | ids | parameters | trains |", "|---|---|---|---|"]
    named: dict[str, list[str]] = {}
    for name, preset in hub_ids().items():
        named.setdefault(preset, []).append(name)
    for preset, names in sorted(named.items()):
        model = model_of(preset)
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| `{preset}` | {shown} | {parameters(model):,} | {trains(model)} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with the table of today."""
    whole = f"{START}\n{ids()}\n{END}"
    return re.sub(f"{START}.*?{END}", lambda _: whole, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
