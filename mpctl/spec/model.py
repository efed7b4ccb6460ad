"""The shape of a transformer; parallel.py has its layout over ranks."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, Field, model_validator

from mpctl.spec.base import Experts, Heads, Hidden, Layers, LayersOrZero, Rows, StrictModel, Width
from mpctl.spec.families import DEFAULT_FAMILY, NormOrder, check_family, default_norm_order, list_families

FamilyName = Annotated[str, AfterValidator(check_family)]
Ratio = Annotated[float, Ge(1e-6), Le(1e12)]
Multiplier = Annotated[float, Ge(1e-9), Le(1e9)]
BIASED: dict[bool | str, tuple[str, ...]] = {
    True: ("qkv", "output", "mlp"),
    False: (),
    "qkv": ("qkv",),
    "attention": ("qkv", "output"),
    "mlp": ("mlp",),
}
DERIVED = ("ffn", "kv_heads", "head_dim", "max_positions", "norm_order")  # see derived_values


class RotaryScaling(StrictModel):
    """Scaling of rotary positions as in Llama 3.1 (Hugging Face: rope_type llama3)."""

    factor: Ratio = Field(description="by how much low frequencies are slowed down")
    low_freq_factor: Ratio = Field(
        description="frequencies with fewer turns than this in the original length are slowed down"
    )
    high_freq_factor: Ratio = Field(
        description="frequencies with more turns than this in the original length are unchanged"
    )
    original_max_position: Ratio = Field(description="the original length, tokens")


class YarnScaling(StrictModel):
    """Scaling of rotary positions by YaRN (arXiv 2309.00071; Hugging Face: rope_type yarn)."""

    factor: Ratio = Field(description="by how much low frequencies are slowed down")
    original_max_position: Ratio = Field(description="the original length, tokens")
    beta_fast: Ratio = Field(32.0, description="frequencies with more turns than this in the original length stay")
    beta_slow: Ratio = Field(1.0, description="those with fewer turns than this are slowed down by the full factor")
    attention_factor: Ratio | None = Field(
        None, description="factor of queries and keys; 0.1 ln(factor) + 1 when absent"
    )
    truncate: bool = Field(True, description="whether the columns at which the two regions end are rounded outwards")


class ModelSpec(StrictModel):
    """A model of one of the families.

    `layers` counts a decoder's (gpt), an encoder's (bert) or blank-filling blocks (glm); for t5 it
    counts the encoder's, and `decoder_layers` the decoder's.
    """

    name: str | None = Field(None, description="the model's name; a preset fills it in")
    family: FamilyName = Field(
        DEFAULT_FAMILY,
        description="gpt (GPT and Llama shapes), bert, t5 or glm; or a family that a package adds",
        json_schema_extra=list_families,
    )
    layers: Layers = Field(description="transformer layers; t5: of the encoder")
    decoder_layers: Layers | None = Field(None, description="t5 only: layers of the decoder")
    hidden: Hidden = Field(description="hidden size")
    ffn: Width = Field(description="inner width of the MLP; 4 x hidden when absent")
    heads: Heads = Field(description="attention heads")
    kv_heads: Heads = Field(
        description="heads of keys and values (grouped-query attention); equal to heads when absent"
    )
    head_dim: Width | None = Field(None, description="width of a head; hidden / heads when absent")
    vocab: Rows = Field(description="tokens of the vocabulary, without padding")
    vocab_divisor: Width = Field(128, description="the word table is padded to a multiple of this x tp")
    seq_length: Rows = Field(description="tokens of a sample; t5: of the encoder's input")
    decoder_seq_length: Rows | None = Field(None, description="t5 only: tokens of the decoder's input")
    max_positions: Rows = Field(
        description="rows of a learned position table; rotary: longest sequence that the model "
        "supports; seq_length when absent"
    )
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "swiglu", "geglu", "geglu_tanh"] = Field(
        "gelu", description="activation of the MLP; relu2 is the square of relu; swiglu and geglu are gated"
    )
    norm: Literal["layernorm", "rmsnorm", "nonparametric"] = Field(
        "layernorm", description="kind of norm; nonparametric: layernorm without weights (OLMo)"
    )
    norm_order: NormOrder = Field(
        "pre",
        description="where norms are: before attention and MLP (pre), after the residual sums (post, bert), "
        "on their outputs (output, OLMo 2), or before and on outputs (sandwich, Gemma 2)",
    )
    embedding_norm: bool = Field(False, description="whether embeddings are normed (BLOOM)")
    embedding_multiplier: Multiplier | None = Field(
        None, description="factor of the embeddings (Gemma: sqrt(hidden)); 1 when absent"
    )
    parallel_residual: bool = Field(
        False, description="whether attention and MLP both read the layer's input (GPT-NeoX)"
    )
    shared_norm: bool = Field(False, description="whether they read it through one norm; with parallel_residual (Phi)")
    norm_epsilon: Annotated[float, Ge(1e-20), Le(1)] = Field(1e-5, description="epsilon of the norms")
    position: Literal["learned", "rotary", "alibi", "relative", "none"] = Field(
        "learned", description="positions; gpt: learned, rotary, alibi (BLOOM) or none; t5: relative"
    )
    rotary_base: Annotated[float, Ge(1), Le(1e12)] = Field(
        10000.0, description="base of rotary positions (Hugging Face: rope_theta)"
    )
    rotary_scaling: RotaryScaling | None = Field(
        None, description="scaling of rotary positions for longer sequences; none when absent"
    )
    yarn_scaling: YarnScaling | None = Field(None, description="scaling of rotary positions by YaRN; none when absent")
    rotary_scaling_type: Literal["linear", "dynamic", "yarn", "longrope"] | None = Field(
        None,
        description="scaling of another kind than these two (Hugging Face: rope_type): "
        "planned, not launched; it adds no cost",
    )
    rotary_fraction: Annotated[float, Gt(0), Le(1)] = Field(
        1.0, description="fraction of a head's columns that rotary positions turn (GPT-NeoX: 0.25)"
    )
    window_rotary_base: Annotated[float, Ge(1), Le(1e12)] | None = Field(
        None, description="rotary_base of layers with a window (Gemma 3); rotary_base when absent"
    )
    relative_buckets: Width = Field(32, description="t5: buckets of relative positions, rows of their table")
    relative_max_distance: Rows = Field(
        128, description="t5: distance in tokens from which on all share the last bucket"
    )
    token_types: Width = Field(2, description="bert: rows of the segment table")
    attention: Literal["flash", "unfused"] = Field(
        "flash", description="unfused attention holds the score matrix in memory, flash does not"
    )
    attention_window: Rows | None = Field(
        None, description="keys that a query sees, including its own (sliding window); all that came before when absent"
    )
    attention_window_every: Layers | None = Field(
        None, description="N: the first layer of every N has the window; all when absent"
    )
    full_attention_every: Layers | None = Field(
        None, description="N: the last layer of every N has no window (Gemma 3: 6)"
    )
    attention_scale: Multiplier | None = Field(
        None, description="factor of the attention scores; 1 / sqrt(head_dim) when absent"
    )
    attention_softcap: Multiplier | None = Field(
        None, description="bound of the attention scores, c tanh(score / c) (Gemma 2)"
    )
    logit_softcap: Multiplier | None = Field(None, description="bound of the logits, c tanh(logit / c) (Gemma 2)")
    qk_norm: bool | Literal["width"] = Field(
        False,
        description="norms of queries and keys: over each head (true, Qwen3), or over all heads "
        "together (width, OLMo 2)",
    )
    bias: bool | Literal["qkv", "attention", "mlp"] = Field(
        True,
        description="which linear layers have biases: all (true), none (false), q, k and v (qkv, Qwen2), "
        "those of attention or of the MLP",
    )
    attention_sinks: bool = Field(
        False,
        description="whether each head has a learned score beside those of its keys (gpt-oss): planned, not launched",
    )
    expert_bias: bool = Field(
        False, description="whether router and experts have biases (gpt-oss): planned, not launched"
    )
    activation_limit: Multiplier | None = Field(
        None, description="bound of a gated activation's input (gpt-oss: 7): planned, not launched"
    )
    head_bias: bool = Field(False, description="whether the output layer has a bias (Phi)")
    tied_embeddings: bool = Field(True, description="whether the output layer shares the word table")
    experts: Experts | None = Field(
        None, description="experts of each layer that has them; dense layers only when absent"
    )
    experts_per_token: Experts = Field(1, description="experts that each token passes (top-k)")
    expert_ffn: Width | None = Field(None, description="inner width of an expert; ffn when absent")
    shared_expert_ffn: Annotated[int, Ge(0), Le(2**24)] = Field(
        0, description="inner width of the shared experts together, which all tokens pass; 0: none"
    )
    shared_expert_gate: bool = Field(
        False,
        description="whether the shared experts' result is multiplied by the sigmoid of a learned gate (Qwen2-MoE)",
    )
    dense_layers: LayersOrZero = Field(
        0, description="with experts: number of first layers that have a dense MLP instead"
    )
    moe_layer_every: Layers = Field(
        1, description="N: of every N layers only the last has experts (Hugging Face: decoder_sparse_step)"
    )
    router_score: Literal["softmax", "sigmoid"] = Field(
        "softmax", description="scores of the experts: softmax over all of them, or the sigmoid of each (DeepSeek-V3)"
    )
    router_renormalize: bool = Field(
        True,
        description="whether the weights of a token's experts are divided by their sum (Hugging Face: norm_topk_prob)",
    )
    router_bias: bool = Field(
        False,
        description="whether experts are chosen by score plus a bias that balances load, without gradient "
        "(DeepSeek-V3); needs router_score sigmoid",
    )
    router_groups: Experts = Field(
        1, description="groups of experts, of which each token chooses some first (DeepSeek)"
    )
    router_groups_per_token: Experts = Field(
        1,
        description="groups that a token's experts come from: those with the highest score, with sigmoid the "
        "highest sum of two",
    )
    router_scale: Multiplier = Field(
        1.0, description="factor of the weights of a token's experts (routed_scaling_factor)"
    )
    attention_kind: Literal["mha", "mla"] = Field(
        "mha",
        description="multi-head attention (kv_heads below heads: grouped-query), or multi-head "
        "latent attention (DeepSeek-V2, arXiv 2405.04434)",
    )
    q_lora_rank: Width | None = Field(
        None, description="mla: width of the queries' latent; queries come from the hidden states when absent"
    )
    kv_lora_rank: Width | None = Field(None, description="mla: width of the latent of keys and values")
    qk_nope_head_dim: Width | None = Field(None, description="mla: columns of a head's query and key without positions")
    qk_rope_head_dim: Width | None = Field(
        None, description="mla: columns of them with rotary positions; all heads share the keys'"
    )
    v_head_dim: Width | None = Field(None, description="mla: columns of a head's value")
    mtp_layers: Annotated[int, Ge(0), Le(64)] = Field(
        0,
        description="layers of multi-token prediction, each with a projection from 2 x hidden and a pass "
        "through the output layer (DeepSeek-V3)",
    )
    source: str | None = Field(None, description="where the shape comes from")
    hub_id: str | None = Field(None, description="the model's id on Hugging Face's hub, as emitted files name it")

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        given = {key: v for key, v in raw.items() if key not in DERIVED or v is not None}
        return {**derived_values(raw), **given}

    @property
    def head_size(self) -> int:
        """Columns of one head; requires that heads divide hidden (plan/rules/model.py checks it)."""
        if self.head_dim is None:
            assert self.hidden % self.heads == 0, "heads-divide-hidden was not asked"
            return self.hidden // self.heads
        return self.head_dim

    @property
    def is_mla(self) -> bool:
        """Whether it has latent attention, with every width that this needs (plan/rules/experts.py
        checks it)."""
        return self.attention_kind == "mla"

    @property
    def qk_size(self) -> int:
        """Columns of a head's query and key."""
        if not self.is_mla:
            return self.head_size
        return (self.qk_nope_head_dim or 0) + (self.qk_rope_head_dim or 0)

    @property
    def v_size(self) -> int:
        """Columns of a head's value."""
        return (self.v_head_dim or 0) if self.is_mla else self.head_size

    @property
    def expert_width(self) -> int:
        """Inner width of one expert."""
        return self.expert_ffn or self.ffn

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts in place of a dense MLP.

        By hand, dense_layers 1 and moe_layer_every 2: layers 1, 3, 5, ..
        """
        is_chosen = layer >= self.dense_layers and (layer + 1) % self.moe_layer_every == 0
        return self.experts is not None and is_chosen

    @property
    def layers_with_experts(self) -> int:
        """How many layers have experts."""
        return sum(map(self.has_experts, range(self.layers))) if self.experts else 0

    @property
    def gated(self) -> bool:
        """Whether the MLP has two first matrices, one of which gates the other."""
        return self.activation in ("swiglu", "geglu", "geglu_tanh")

    @property
    def biased(self) -> frozenset[str]:
        """Linear layers of a block with biases: `qkv`, `output` (of attention), `mlp`. If bias is true,
        latent attention still has none, and neither have experts."""
        found = frozenset(BIASED[self.bias])
        return found & {"mlp"} if self.is_mla and self.bias is True else found

    def window_of(self, layer: int) -> int | None:
        """Most keys that a query of this layer sees; None where it sees all before it.

        By hand, a window of 128 in every second layer: 128 in layers 0 and 2, None in 1 and 3.
        """
        window, full = self.attention_window, self.full_attention_every
        if window is None or window >= self.seq_length:
            return None
        is_full = full is not None and (layer + 1) % full == 0
        return None if is_full or layer % (self.attention_window_every or 1) else window

    @property
    def all_layers(self) -> int:
        """All layers: the encoder's and, where there is one, the decoder's."""
        return self.layers + (self.decoder_layers or 0)

    @property
    def tokens_per_sample(self) -> int:
        """Positions computed for one sample, encoder's and decoder's."""
        return self.seq_length + (self.decoder_seq_length or 0)


def derived_values(raw: dict[str, Any]) -> dict[str, int | str]:
    """The DERIVED keys of a raw model table, as they follow from family, hidden, heads and
    seq_length; without those that follow from a key that is absent or illegal.

    By hand: hidden 64, heads 4 and seq_length 16 give ffn 256, kv_heads 4, head_dim 16 and
    max_positions 16; heads 5 gives no head_dim, and the rules say why.
    """
    hidden, heads, seq_length = (_count(raw.get(key)) for key in ("hidden", "heads", "seq_length"))
    values = {
        "ffn": hidden and 4 * hidden,
        "kv_heads": heads,
        "head_dim": hidden and heads and hidden % heads == 0 and hidden // heads,
        "max_positions": seq_length,
        "norm_order": default_norm_order(raw.get("family", DEFAULT_FAMILY)),
    }
    return {key: value for key, value in values.items() if value}


def without_derived(raw: dict[str, Any]) -> dict[str, Any]:
    """A raw model table without the values that merely follow from the rest of it, so that they
    are derived anew from keys that are laid over it.

    By hand: with hidden 64, ffn 256 is left out and ffn 170 stays, since somebody chose it.
    max_positions of a model with learned or rotary positions stays as well: the sequence length
    does not change its weights.
    """
    follows = derived_values(raw)
    if raw.get("position", "learned") in ("learned", "rotary"):
        follows.pop("max_positions", None)
    return {k: v for k, v in raw.items() if k not in follows or v != follows[k]}


def with_positions(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw table of a model that others start from, with max_positions set, by default to its
    seq_length. Keys merged over it then change the sequence length alone."""
    length = raw.get("seq_length")
    is_learned = raw.get("position", "learned") == "learned"
    return {"max_positions": length, **raw} if length is not None and is_learned else raw


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


# Keys by which decoders differ from the shape that all families share.
VARIANTS = (
    "embedding_norm",
    "embedding_multiplier",
    "parallel_residual",
    "shared_norm",
    "yarn_scaling",
    "rotary_scaling_type",
    "rotary_fraction",
    "window_rotary_base",
    "attention_window",
    "attention_window_every",
    "full_attention_every",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "qk_norm",
    "head_bias",
    "mtp_layers",
    "experts",
    "attention_kind",
    "attention_sinks",
    "expert_bias",
    "activation_limit",
)


def is_set(model: ModelSpec, key: str) -> bool:
    """Whether a key of a model differs from its default."""
    return bool(getattr(model, key) != ModelSpec.model_fields[key].default)
