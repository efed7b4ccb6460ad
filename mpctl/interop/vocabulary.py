"""The vocabulary of a model that flags give without one: that of the presets with exactly its shape.

Megatron-LM asks its tokenizer for the vocabulary, so that real scripts leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping

from mpctl.core.errors import InputError
from mpctl.spec.load import job_from_raw
from mpctl.spec.model import ModelSpec
from mpctl.spec.presets import preset_files

SHAPE = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "experts", "expert_ffn", "attention_kind")


def vocabularies(settings: Mapping[str, object]) -> dict[str, int]:
    """The presets with the shape that these settings give a model, and their vocabularies."""
    given = {key: value for key, value in settings.items() if key.startswith("model.")}
    wanted = _model({"model.seq_length": 1024, **given, "model.vocab": 1024})
    if wanted is None:
        return {}
    found: dict[str, ModelSpec] = {}
    for file in preset_files("models").values():
        table = file.table() if file.is_bundled else {}
        if (table.get("layers"), table.get("hidden")) != (wanted.layers, wanted.hidden):
            continue
        model = _model({"model": file.name})
        if model is not None and _shape(model) == _shape(wanted):
            found[file.name] = model
    every = {name: model.vocab for name, model in found.items()}
    alike = {name: every[name] for name, model in found.items() if model.rotary_base == wanted.rotary_base}
    return alike if len({*alike.values()}) == 1 else every


def _shape(model: ModelSpec) -> tuple[object, ...]:
    """What tells models apart; GELU's two forms count as one, and Llama 2 and 3 differ by the base
    of their positions."""
    return (*(getattr(model, key) for key in SHAPE), model.activation.removesuffix("_tanh"), model.position)


def _model(settings: Mapping[str, object]) -> ModelSpec | None:
    try:
        return job_from_raw({}, settings).model
    except InputError:
        return None
