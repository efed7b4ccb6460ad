"""Model families: a folder each, with a description that needs no torch and a module that does.

`get_family(name)` gives the description of a built-in family or of an installed package's
(spec/families.py says where both are found). CONTRIBUTING.md shows how to add one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpctl.core.errors import InputError
from mpctl.spec.families import ENTRY_POINT_GROUP, PromptForm, builtin_families, family_names, load_family
from mpctl.spec.model import ModelSpec

if TYPE_CHECKING:  # a plan without a model never pays for these
    from mpctl.model.families.description import BatchArray, ModelFamily
    from mpctl.model.operators.table import OperatorTable
    from mpctl.spec.adapter import AdapterSpec
    from mpctl.spec.chat import ChatSpec, PackedAttention


def get_family(name: str) -> ModelFamily:
    """The description of a family; InputError where there is none of this name."""
    from mpctl.model.families.description import ModelFamily

    description = load_family(name)
    if isinstance(description, ModelFamily):
        return description
    if description is None:
        raise InputError.of(
            "no-such-family", "model.family", f"there is no family {name!r}", f"use {' or '.join(family_names())}"
        )
    raise InputError.of(
        "family-import",
        "model.family",
        f"the entry point {name!r} of group {ENTRY_POINT_GROUP} gives a "
        f"{type(description).__name__}, not an mpctl.model.families.description.ModelFamily",
        "repair the package that it comes from",
    )


def all_builtin() -> list[ModelFamily]:
    """The descriptions of all families that come with mpctl."""
    return [get_family(name) for name in builtin_families()]


def get_table(
    model: ModelSpec,
    *,
    tp: int,
    freeze: Sequence[str] = (),
    adapter: AdapterSpec | None = None,
    packed: PackedAttention | None = None,
    apart: bool = False,
) -> OperatorTable:
    """The operator table of the model's family.

    tp: tensor-parallel size, to a multiple of which vocabularies are padded. freeze: patterns of
    the parameters that are not trained (`training.freeze`). adapter: by which it is trained. packed: how attention
    keeps apart the samples of a row of several. apart: whether layers of multi-token prediction run in another
    stage than the loss.
    """
    table = get_family(model.family).operator_table(model, tp=tp)
    if apart:
        from mpctl.model.operators.layer import predictions_apart

        table = replace(table, stacks=predictions_apart(table.stacks))
    if packed is not None:
        from mpctl.model.operators.layer import with_packed_rows

        table = replace(table, stacks=with_packed_rows(table.stacks, packed))
    if adapter is not None:
        from mpctl.model.operators.adapters import adapted

        table = replace(table, stacks=adapted(table.stacks, model, adapter), adapter=adapter)
    return replace(table, freeze=tuple(freeze)) if freeze else table


def batch_arrays(model: ModelSpec, chat: ChatSpec | None) -> dict[str, BatchArray]:
    """The arrays of a batch by name; chat: of a job that trains on conversations."""
    family = get_family(model.family)
    further = dict(family.chat_arrays if chat is not None else {})
    if chat is not None and not chat.is_packed:
        further.pop("places", None)
    return {**family.batch_arrays, **further}


def special_tokens(model: ModelSpec) -> tuple[str, ...]:
    """Names of the tokens that samples of this model contain in addition to text."""
    return get_family(model.family).special_tokens(model)


def least_tokens(model: ModelSpec) -> int:
    """Tokens of text that a split of prepared data must hold for the family's samples."""
    return get_family(model.family).least_tokens(model)


def seq_length_for(model: ModelSpec, tokens: int) -> int | None:
    """The largest power of two that may be the model's seq_length where a split has so many tokens;
    None where none is short enough."""
    shortest = get_family(model.family).shortest_sequence
    powers = range(tokens.bit_length(), (shortest - 1).bit_length() - 1, -1)
    sizes = (1 << power for power in powers if power > 0)
    models = (model.model_copy(update={"seq_length": size}) for size in sizes)
    return next((one.seq_length for one in models if least_tokens(one) <= tokens), None)


def get_prompt_form(model: ModelSpec) -> PromptForm:
    """How the model's family reads a prompt; InputError where it offers no sampling."""
    form = get_family(model.family).prompt
    if form is None:
        raise InputError.of(
            "no-sampling",
            "model.family",
            f"family {model.family!r} does not say how it reads a prompt",
            "use `mpctl eval` to look at its loss",
        )
    return form
