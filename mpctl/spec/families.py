"""The model families that exist, where they are found, and the form of their prompts.

A built-in family is a folder of mpctl/model/families with a `family.py` that defines `FAMILY`. Any other
family is an entry point of the group `mpctl.families` of an installed package, whose name is the
family's and whose value is the import path of the same kind of description:

    [project.entry-points."mpctl.families"]
    toy = "toy_family.family:FAMILY"

Descriptions are imported by name and only when a job asks for that family, without torch. Entry
points are looked up only for a name that is not built in, because reading the metadata of all
installed packages takes milliseconds.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic_core import PydanticCustomError

from mpctl.core.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


ENTRY_POINT_GROUP = "mpctl.families"
DEFAULT_FAMILY = "gpt"
NormOrder = Literal["pre", "post", "output", "sandwich"]


class FamilyDefaults(ABC):
    """The part of a family's description that a job file's defaults need."""

    @property
    @abstractmethod
    def norm_orders(self) -> tuple[NormOrder, ...]:
        """The orders of norms that the family accepts, its default first."""

    @abstractmethod
    def config_readers(self) -> Mapping[str, Any]:
        """How config.json files of its classes are read (hf.py's ConfigReader), by model_type."""

    @property
    @abstractmethod
    def synonyms(self) -> tuple[str, ...]:
        """Names of the family, or of models like it, in other software, in lower case: for hints."""


@lru_cache(maxsize=1)
def builtin_families() -> tuple[str, ...]:
    """Names of the families that come with mpctl, sorted."""
    folder = Path(__file__).resolve().parents[1] / "model" / "families"
    return tuple(sorted(path.parent.name for path in folder.glob("*/family.py")))


def family_names() -> tuple[str, ...]:
    """Names of all families: the built-in ones, then those of installed packages."""
    from importlib.metadata import entry_points  # slow to import and to ask

    others = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return (*builtin_families(), *sorted(others - set(builtin_families())))


def family_synonyms() -> dict[str, tuple[str, ...]]:
    """Names of each built-in family in other software; used in hints, not accepted as names."""
    families = ((name, load_family(name)) for name in builtin_families())
    return {name: family.synonyms for name, family in families if family is not None}


@lru_cache(maxsize=64)
def load_family(name: str) -> FamilyDefaults | None:
    """The description of the family of this name, None where there is no such family.

    Raises InputError where an installed package's entry point cannot be imported.
    """
    if name in builtin_families():
        description: FamilyDefaults = pkgutil.resolve_name(f"mpctl.model.families.{name}.family:FAMILY")
        return description
    from importlib.metadata import entry_points

    points = entry_points(group=ENTRY_POINT_GROUP, name=name)
    return next(map(_load, points), None)


def _load(point: EntryPoint) -> FamilyDefaults:
    """The description that an entry point names; InputError where there is none."""
    where = f"the entry point {point.name!r} = {point.value!r} of group {ENTRY_POINT_GROUP}"
    hint = "install or repair the package that it comes from"
    try:
        description = point.load()
    except Exception as error:  # whatever a foreign package raises while it is imported
        message = f"{where} cannot be imported: {type(error).__name__}: {error}"
        raise InputError.of("family-import", "model.family", message, hint) from None
    if isinstance(description, FamilyDefaults):
        return description
    message = f"{where} gives a {type(description).__name__}, not a ModelFamily"
    raise InputError.of("family-import", "model.family", message, hint)


def check_family(name: str) -> str:
    """Validate that `model.family` names a family that exists."""
    if load_family(name) is None:
        names = " or ".join(map(repr, family_names()))
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": names})
    return name


def default_norm_order(name: object) -> NormOrder:
    """The order of norms where the job gives none; `pre` for an unknown family."""
    family = load_family(name) if isinstance(name, str) else None
    return "pre" if family is None else family.norm_orders[0]


def list_families(schema: dict[str, Any]) -> None:
    """List the families installed here in the JSON schema."""
    schema["enum"] = list(family_names())


MASK = "[MASK]"


class PromptKind(Enum):
    """Kinds of text that sampling writes for a prompt.

    For BERT the prompt `a [MASK] c` becomes [CLS] a [MASK] c [SEP], and one word is drawn for the
    [MASK]; for GPT the prompt's tokens are followed by those that are written, up to end-of-text.
    """

    CONTINUE = "continue"
    """Tokens after the prompt; each token sees only those before it (GPT)."""
    FILL_WORDS = "fill words"
    """One token for every [MASK], all from one forward pass (BERT)."""
    FILL_BLANKS = "fill blanks"
    """Several tokens for every [MASK], one blank after another, after the prompt (GLM)."""
    DECODE = "decode"
    """Tokens of a decoder that attends to the encoded prompt, for each sentinel in it (T5)."""


@dataclass(frozen=True)
class PromptForm:
    """How a prompt is framed for a family, by the names of its special tokens.

    before, after: special tokens put around the prompt's own. start: the special token after which
    a blank or a decoder writes. end: the special token that ends what is written; None where the
    tokenizer's end-of-text does (CONTINUE), or where no end is needed (FILL_WORDS).
    """

    kind: PromptKind
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    start: str | None = None
    end: str | None = None

    @property
    def continues(self) -> bool:
        """Whether what is written follows the prompt directly."""
        return self.kind is PromptKind.CONTINUE
