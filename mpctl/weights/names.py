"""Our parameters by Hugging Face's names and layouts: one table a shape, no torch.

A parameter of ours is one tensor of theirs, or several stacked on dim 0 (Llama's q, k and v; gate
and up). GPT-2's linear layers are Conv1D, stored [in, out], so their tensors are transposed; its
c_attn holds q, k and v as thirds of the columns, which transposed is our fused [q | k | v].
By hand, hidden 8 and ffn 32: mlp.up.weight, ours [32, 8], is h.0.mlp.c_fc.weight, theirs [8, 32].

Sources: modeling_gpt2.py and modeling_llama.py of transformers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mpctl.errors import InputError, Issue
from mpctl.families import get_table
from mpctl.families.table import Weight
from mpctl.spec.model import Model


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs: its name, its shape as stored, and whether that is turned round."""

    name: str
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def rows(self) -> int:
        """Its height in our parameter."""
        return self.shape[-1] if self.transposed else self.shape[0]


@dataclass(frozen=True)
class Row:
    """A parameter of ours, without padding: full shape, and the pieces stacked on dim 0."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Scheme:
    """How one of their classes names and stores things.

    prefix: of every name but the head's; models saved without their head lack it. extra: tensors
    that hold no weight and may lie there too.
    """

    model_type: str
    architecture: str
    prefix: str
    layer: str
    conv1d: bool
    outside: Mapping[str, str]
    block: Mapping[str, tuple[str, ...]]
    extra: str


HEAD = "lm_head"
GPT2 = Scheme(
    "gpt2", "GPT2LMHeadModel", "transformer.", "h", True,
    outside={"embedding.word": "wte", "embedding.position": "wpe", "final_norm": "ln_f"},
    block={
        "attention_norm": ("ln_1",),
        "attention.qkv": ("attn.c_attn",),
        "attention.output": ("attn.c_proj",),
        "mlp_norm": ("ln_2",),
        "mlp.up": ("mlp.c_fc",),
        "mlp.down": ("mlp.c_proj",),
    },
    extra=r"h\.\d+\.attn\.(bias|masked_bias)",
)  # fmt: skip
LLAMA = Scheme(
    "llama", "LlamaForCausalLM", "model.", "layers", False,
    outside={"embedding.word": "embed_tokens", "final_norm": "norm"},
    block={
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    },
    extra=r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)  # fmt: skip
SCHEMES = {scheme.model_type: scheme for scheme in (GPT2, LLAMA)}
# What each class can be told, by key of a Model.
EXPRESSIBLE: dict[str, dict[str, tuple[object, ...]]] = {
    "gpt2": {
        "family": ("gpt",), "norm": ("layernorm",), "bias": (True,),
        "activation": ("gelu_tanh", "gelu", "relu"),
    },
    "llama": {"family": ("gpt",), "norm": ("rmsnorm",), "activation": ("swiglu", "geglu")},
}  # fmt: skip
BY_POSITION = {"learned": GPT2, "rotary": LLAMA}


def get_scheme(model: Model) -> Scheme:
    """The class that can express the model; InputError names everything that none can."""
    scheme = BY_POSITION.get(model.position)
    if scheme is None:
        raise InputError.of("no-hub-class", "model.position", f"{model.position!r} is neither "
                            "GPT-2's nor Llama's", f"use {' or '.join(BY_POSITION)}")  # fmt: skip
    issues = list(_inexpressible(model, scheme))
    if issues:
        raise InputError(issues)
    return scheme


def _inexpressible(model: Model, scheme: Scheme) -> Iterator[Issue]:
    for key, legal in EXPRESSIBLE[scheme.model_type].items():
        value = getattr(model, key)
        if value not in legal:
            yield Issue("no-hub-class", f"model.{key}", f"{value!r} cannot be said to "
                        f"{scheme.architecture}", f"use {', '.join(map(str, legal))}")  # fmt: skip
    if model.head_dim is None:
        yield Issue("no-hub-class", "model.heads", f"{model.heads} heads do not divide hidden "
                    f"{model.hidden}", "give model.head_dim")  # fmt: skip
        return
    if scheme is GPT2 and model.heads * model.head_size != model.hidden:
        yield Issue("no-hub-class", "model.head_dim", f"{model.heads} heads of {model.head_size} "
                    f"are not hidden {model.hidden}, as {scheme.architecture} has it")  # fmt: skip
    if scheme is GPT2 and model.kv_heads != model.heads:
        yield Issue("no-hub-class", "model.kv_heads", f"{model.kv_heads}, but {scheme.architecture}"
                    f" has as many as heads ({model.heads})")  # fmt: skip


def rows_of(model: Model) -> dict[str, Row]:
    """Every parameter of the model by its name, with where it lies in a directory of theirs."""
    scheme, table = get_scheme(model), get_table(model, tp=1)
    return {weight.name: _row(weight, model, scheme) for weight in table.weights()}


def _row(weight: Weight, model: Model, scheme: Scheme) -> Row:
    shape = weight.shape
    if weight.dims[0] == "vocab":
        shape = (model.vocab, *shape[1:])
    owner, _, kind = weight.name.rpartition(".")
    names, is_linear = _their_names(owner, scheme)
    turned = is_linear and scheme.conv1d and len(shape) == 2
    heights = _parts(owner, model) if len(names) > 1 else (shape[0],)
    stored = [(height, *shape[1:]) for height in heights]
    return Row(weight.name, shape, tuple(
        Piece(f"{name}.{kind}", piece[::-1] if turned else piece, turned)
        for name, piece in zip(names, stored, strict=True)
    ))  # fmt: skip


def _their_names(owner: str, scheme: Scheme) -> tuple[tuple[str, ...], bool]:
    """By a module of ours: theirs, and whether it is a linear layer of a block."""
    if owner == "head":
        return (HEAD,), False
    if owner in scheme.outside:
        return (scheme.prefix + scheme.outside[owner],), False
    _, number, part = owner.split(".", 2)
    place = f"{scheme.prefix}{scheme.layer}.{number}."
    return tuple(place + name for name in scheme.block[part]), not part.endswith("_norm")


def _parts(owner: str, model: Model) -> tuple[int, ...]:
    if owner.endswith("attention.qkv"):
        return (model.heads * model.head_size, *[model.kv_heads * model.head_size] * 2)
    return (model.ffn, model.ffn)


def is_extra(name: str, scheme: Scheme) -> bool:
    """Whether a tensor holds no weight: a mask, or frequencies that the shape gives."""
    return re.fullmatch(scheme.extra, name.removeprefix(scheme.prefix)) is not None
