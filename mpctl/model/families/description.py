"""The description of a model family for planning, without torch.

One frozen ModelFamily a family, in the file `family.py` of its folder. Planner, rules, estimates,
weights and workers ask it instead of knowing families by name. What needs torch (the module, the
samples) stays in other files of the folder and is named here by its import path alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

from mpctl.model.operators.matmul import Dims
from mpctl.model.operators.table import OperatorTable
from mpctl.spec.families import FamilyDefaults, NormOrder, PromptForm
from mpctl.spec.model import ModelSpec

if TYPE_CHECKING:
    from mpctl.model.families.scheme import Scheme
    from mpctl.spec.hf import ConfigReader


def no_tokens(model: ModelSpec) -> tuple[str, ...]:
    """No special tokens: the samples hold nothing but text."""
    return ()


class BatchArray(NamedTuple):
    """An array that the family's samples make for a batch.

    dims: its dimensions by name, `batch` first; the sizes of the others are the model's seq_length
    (`seq`) and decoder_seq_length (`decoder_seq`). is_tokens: whether it holds token ids that the
    model looks up, which must lie below its vocabulary. Elements are int64 or float64, 8 bytes.
    """

    dims: Dims
    is_tokens: bool = False


class MakeTable(Protocol):
    """Builds a family's operator table; tp only matters to how far word tables are padded."""

    def __call__(self, model: ModelSpec, *, tp: int) -> OperatorTable:
        """The table of this model."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily(FamilyDefaults):
    """A family of transformer models.

    name: as `model.family` has it. operator_table: matrix products, parameters and attentions of a
    model. implementation: import path `package.module:NAME` of its FamilyImplementation, which
    needs torch and which only workers import.

    positions, norm_orders: the values of `model.position` and `model.norm_order` that it accepts,
    of norm_orders the default first. tensor_modes: the values of `parallel.tensor_mode` in which
    its module runs, 1d alone by default. grouped_queries: whether kv_heads may differ from heads.
    shortest_sequence: the least `model.seq_length` that holds a sample.

    batch_arrays: the arrays of a batch by name, as its samples make them; chat_arrays: those that
    conversations have in addition (`places` where rows are packed), empty for a family that does
    not train on them. special_tokens: names of the tokens that its samples contain in addition to
    text. least_tokens: tokens of text that a split of prepared data must hold for one epoch.

    target_length: for a family with a decoder, the least decoder_seq_length that its samples need
    for a seq_length; such a model must give decoder_layers and decoder_seq_length. None where the
    family has no decoder.

    prompt: how `mpctl sample` reads a prompt; None where sampling is not offered. has_perplexity:
    whether exp(loss) is a perplexity: where the loss is the mean over tokens alone. hub: import
    path of the module with SCHEMES and READERS (`hub_schemes`, `config_readers`), which only those
    who ask for them import. variants: which of spec/model.py's VARIANTS it takes.
    synonyms: what other software calls the family or models like it, lower case with
    underscores; never accepted.
    """

    name: str
    operator_table: MakeTable
    implementation: str
    positions: tuple[str, ...]
    batch_arrays: Mapping[str, BatchArray]
    least_tokens: Callable[[ModelSpec], int]
    chat_arrays: Mapping[str, BatchArray] = field(default_factory=dict)
    norm_orders: tuple[NormOrder, ...] = ("pre",)
    tensor_modes: tuple[str, ...] = ("1d",)
    grouped_queries: bool = True
    shortest_sequence: int = 1
    special_tokens: Callable[[ModelSpec], tuple[str, ...]] = no_tokens
    target_length: Callable[[int], int] | None = None
    prompt: PromptForm | None = None
    has_perplexity: bool = True
    synonyms: tuple[str, ...] = ()
    hub: str | None = None
    variants: tuple[str, ...] = ()

    @property
    def has_decoder(self) -> bool:
        """Whether a model of it has a second stack with a length of its own."""
        return self.target_length is not None

    def hub_schemes(self) -> Mapping[str, tuple[Scheme, ...]]:
        """The classes of Hugging Face's transformers that can hold its models, by kind of
        positions, the plainest first."""
        return {} if self.hub is None else import_module(self.hub).SCHEMES

    def config_readers(self) -> Mapping[str, ConfigReader]:
        """How the config.json files of these classes are read, by model_type."""
        return {} if self.hub is None else import_module(self.hub).READERS
