"""A Hugging Face config.json gives the shape; the job's own keys still win."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mpctl.core.errors import InputError, Issue
from mpctl.model.families.gpt.hub_dense import BIAS_NAMES
from mpctl.model.families.t5.family import target_length
from mpctl.spec.hf import config_readers
from mpctl.spec.load import load_job
from mpctl.spec.model import ModelSpec

# As published for openai-community/gpt2 and meta-llama/Llama-3.1-8B, keys of generation left out.
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_ctx": 1024,
    "n_positions": 1024,
    "vocab_size": 50257,
    "layer_norm_epsilon": 1e-05,
    "n_inner": None,
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "head_dim": None,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


MISTRAL = {**LLAMA, "model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": None}


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), "utf-8")
    return path


def model_of(path: Path, **keys: Any) -> ModelSpec:
    overrides = {"model.hf_config": str(path), **{f"model.{k}": v for k, v in keys.items()}}
    model = load_job(None, overrides).model
    assert model is not None
    return model


def test_gpt2_config_is_the_gpt2_preset(tmp_path: Path) -> None:
    ours = load_job(None, {"model": "gpt2"}).model
    assert ours is not None
    nameless = ours.model_dump(exclude={"name", "source"})
    assert model_of(write(tmp_path, GPT2)).model_dump(exclude={"name", "source"}) == nameless


def test_llama_config(tmp_path: Path) -> None:
    model = model_of(write(tmp_path, LLAMA))
    assert (model.family, model.activation, model.norm) == ("gpt", "swiglu", "rmsnorm")
    assert (model.position, model.bias, model.tied_embeddings) == ("rotary", False, False)
    assert (model.layers, model.hidden, model.ffn) == (32, 4096, 14336)
    assert (model.heads, model.kv_heads, model.head_size) == (32, 8, 128)
    assert (model.vocab, model.seq_length) == (128256, 131072)


def test_own_keys_beat_the_config_and_a_folder_will_do(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    model = model_of(tmp_path, seq_length=8192, layers=4)
    assert (model.seq_length, model.layers, model.hidden) == (8192, 4, 4096)


T5 = {
    "model_type": "t5",
    "num_layers": 6,
    "d_model": 512,
    "d_ff": 1024,
    "num_heads": 6,
    "d_kv": 64,
    "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-06,
}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 512,
    "vocab_size": 30522,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}


# As published for google-t5/t5-base.
T5_BASE = {
    "model_type": "t5",
    "num_layers": 12,
    "d_model": 768,
    "d_ff": 3072,
    "num_heads": 12,
    "d_kv": 64,
    "vocab_size": 32128,
    "layer_norm_epsilon": 1e-06,
    "n_positions": 512,
    "relative_attention_num_buckets": 32,
    "is_encoder_decoder": True,
}


def issues_of(path: Path, **more: Any) -> list[Issue]:
    with pytest.raises(InputError) as caught:
        load_job(None, {"model.hf_config": str(path), **more})
    return list(caught.value.issues)


def test_a_t5_has_as_many_decoder_layers_unless_told(tmp_path: Path) -> None:
    model = model_of(write(tmp_path, T5))
    assert (model.layers, model.decoder_layers, model.head_size) == (6, 6, 64)
    assert (model.activation, model.tied_embeddings) == ("geglu_tanh", False)
    assert (model.seq_length, model.decoder_seq_length) == (512, target_length(512))
    assert model_of(write(tmp_path, {**T5, "num_decoder_layers": 2})).decoder_layers == 2


@pytest.mark.parametrize(
    ("config", "name", "value", "activation"),
    [
        (GPT2, "activation_function", "gelu_new", "gelu_tanh"),
        (GPT2, "activation_function", "gelu", "gelu"),
        (GPT2, "activation_function", "relu", "relu"),
        (GPT2, "activation_function", None, "gelu_tanh"),
        (LLAMA, "hidden_act", "silu", "swiglu"),
        (LLAMA, "hidden_act", "gelu_pytorch_tanh", "geglu_tanh"),
        (LLAMA, "hidden_act", "gelu", "geglu"),
        (LLAMA, "hidden_act", None, "swiglu"),
        (BERT, "hidden_act", "gelu", "gelu"),
        (BERT, "hidden_act", "gelu_new", "gelu_tanh"),
        (T5, "feed_forward_proj", "relu", "relu"),
        (T5, "feed_forward_proj", "gated-gelu", "geglu_tanh"),
        (T5, "feed_forward_proj", "gated-gelu_new", "geglu_tanh"),
        (T5, "feed_forward_proj", "gated-gelu_python", "geglu"),
        (T5, "feed_forward_proj", "gelu", "gelu"),
        (T5, "feed_forward_proj", "gated-silu", "swiglu"),
        (T5, "feed_forward_proj", None, "relu"),
    ],
)
def test_activation(tmp_path: Path, config: dict[str, Any], name: str, value: Any, activation: str) -> None:
    assert model_of(write(tmp_path, {**config, name: value})).activation == activation


@pytest.mark.parametrize(
    ("keys", "tied"),
    [
        ({}, True),  # t5-small's
        ({"tie_word_embeddings": False}, False),  # version 4 of transformers, T5 1.1
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, False),  # version 5, 1.1
        ({"tie_word_embeddings": False, "scale_decoder_outputs": False}, False),
    ],
)
def test_a_t5_has_a_head_of_its_own_where_logits_are_not_scaled(
    tmp_path: Path, keys: dict[str, bool], tied: bool
) -> None:
    config = {key: value for key, value in T5.items() if key != "tie_word_embeddings"}
    assert model_of(write(tmp_path, {**config, **keys})).tied_embeddings is tied


@pytest.mark.parametrize(("config", "name"), [(BERT, "bert-base"), (T5_BASE, "t5-base")])
def test_a_published_config_is_the_preset(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    """T5's preset counts the tokenizer's pieces and sentinels, the config the table's rows."""
    preset = load_job(None, {"model": name}).model
    assert preset is not None
    said = model_of(write(tmp_path, config), vocab=preset.vocab)
    left_out = {"name", "source"}
    assert said.model_dump(exclude=left_out) == preset.model_dump(exclude=left_out)


@pytest.mark.parametrize(
    ("config", "keys"),
    [(BERT, {"token_types": 1}), (T5, {"relative_buckets": 16, "relative_max_distance": 64, "norm_epsilon": 1e-5})],
)
def test_what_only_one_family_has(tmp_path: Path, config: dict[str, Any], keys: dict[str, float]) -> None:
    names = {
        "token_types": "type_vocab_size",
        "norm_epsilon": "layer_norm_epsilon",
        "relative_buckets": "relative_attention_num_buckets",
        "relative_max_distance": "relative_attention_max_distance",
    }
    path = write(tmp_path, {**config, **{names[key]: value for key, value in keys.items()}})
    assert keys.items() <= model_of(path).model_dump().items()


@pytest.mark.parametrize("bias", [True, False, None])
def test_biases_everywhere_or_nowhere(tmp_path: Path, bias: bool | None) -> None:
    config = {**LLAMA, "attention_bias": bias, "mlp_bias": bias}
    assert model_of(write(tmp_path, config)).bias is bool(bias)


@pytest.mark.parametrize(
    ("config", "keys", "words"),
    [
        (GPT2, {"activation_function": "tanh"}, "activation_function is 'tanh'"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act is 'relu', which is none of"),
        (T5, {"feed_forward_proj": "gated-relu"}, "feed_forward_proj is 'gated-relu'"),
        (T5, {"scale_decoder_outputs": True}, "scale_decoder_outputs true"),
        (BERT, {"hidden_act": ["gelu"]}, "hidden_act is ['gelu']"),
        (BERT, {"hidden_size": {"x": 1}}, "hidden_size is {'x': 1}, which is no number"),
        (BERT, {"vocab_size": "x" * 9999}, "which is no number"),
        (MISTRAL, {"sliding_window": "long"}, "sliding_window is 'long', which is no number"),
        (
            MISTRAL,
            {
                "sliding_window": 64,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            },
            "no pattern of windows",
        ),
        (LLAMA, {"partial_rotary_factor": "half"}, "partial_rotary_factor is 'half'"),
        (LLAMA, {"rope_scaling": {"rope_type": "mrope"}}, "rope_type is 'mrope'"),
        (LLAMA, {"rope_scaling": {"rope_type": ["x"]}}, "rope_type is"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights False cannot be expressed"),
        (GPT2, {"scale_attn_weights": None}, "scale_attn_weights None cannot be expressed"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention True cannot be expressed"),
        (BERT, {"is_decoder": True}, "is_decoder True cannot be expressed"),
        (BERT, {"add_cross_attention": True}, "add_cross_attention True cannot be expressed"),
        (BERT, {"position_embedding_type": "relative_key"}, 'only "absolute"'),
        (T5, {"is_encoder_decoder": False}, "is_encoder_decoder False cannot be expressed"),
    ],
)
def test_what_a_model_cannot_express_is_said(
    tmp_path: Path, config: dict[str, Any], keys: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, config | keys)
    (issue,) = issues_of(path)
    assert (issue.rule, issue.where) == ("hf-config", "model.hf_config")
    assert words in issue.message and str(path) in issue.message and issue.hint
    assert len(issue.message) < len(str(path)) + 200


def test_a_mistral_that_names_no_window_has_that_of_its_class(tmp_path: Path) -> None:
    """MistralConfig's default is 4096 tokens, as transformers would run it."""
    config = {key: value for key, value in MISTRAL.items() if key != "sliding_window"}
    assert model_of(write(tmp_path, config)).attention_window == 4096
    assert model_of(write(tmp_path, {**config, "sliding_window": None})).attention_window is None


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    ("kinds", "windows"),
    [
        ([SLIDING, FULL] * 2, [64, None, 64, None]),
        ([SLIDING, SLIDING, FULL, SLIDING], [64, 64, None, 64]),
        ([SLIDING, FULL, FULL, SLIDING], [64, None, None, 64]),
        ([SLIDING] * 4, [64] * 4),
        ([FULL] * 4, [None] * 4),
    ],
)
def test_which_layers_have_windows(tmp_path: Path, kinds: list[str], windows: list[int | None]) -> None:
    config = {**MISTRAL, "num_hidden_layers": 4, "sliding_window": 64, "layer_types": kinds}
    model = model_of(write(tmp_path, config))
    assert [model.window_of(layer) for layer in range(4)] == windows


@pytest.mark.parametrize(
    ("attention", "mlp", "biased"),
    [(True, False, {"qkv", "output"}), (False, True, {"mlp"}), (True, True, {"qkv", "output", "mlp"})],
)
def test_biases_of_some_layers(tmp_path: Path, attention: bool, mlp: bool, biased: set[str]) -> None:
    config = {**LLAMA, "attention_bias": attention, "mlp_bias": mlp}
    assert model_of(write(tmp_path, config)).biased == biased


@pytest.mark.parametrize("layers", [100_000, 10**9])
def test_more_layers_than_any_model_has_are_one_issue(tmp_path: Path, layers: int) -> None:
    (issue,) = issues_of(write(tmp_path, {**GPT2, "n_layer": layers}))
    assert (issue.rule, issue.where) == ("bad-value", "model.layers")
    assert str(layers) in issue.message and "10000" in issue.message


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (MISTRAL, {"sliding_window": None}),
        (MISTRAL, {"sliding_window": 32768}),  # as long as the sequence
        (LLAMA, {"sliding_window": 4096}),  # no key of a LlamaConfig
        (LLAMA, {"partial_rotary_factor": 1.0}),
        (GPT2, {"scale_attn_weights": True, "add_cross_attention": None}),
        (BERT, {"is_decoder": False, "position_embedding_type": "absolute"}),
        (T5, {"is_encoder_decoder": True}),
    ],
)
def test_what_changes_nothing_is_accepted(tmp_path: Path, config: dict[str, Any], keys: dict[str, Any]) -> None:
    plain = model_of(write(tmp_path, config))
    assert model_of(write(tmp_path, config | keys)) == plain


WEIRD = [None, True, -1, 0.5, 1e999, "", "x", [], ["x"], {}, {"x": [1]}]


@pytest.mark.parametrize("config", [GPT2, LLAMA, BERT, T5])
def test_no_json_value_ends_in_a_traceback(tmp_path: Path, config: dict[str, Any]) -> None:
    keys = [*config, *BIAS_NAMES, "num_decoder_layers", "num_key_value_heads"]
    keys += ["scale_decoder_outputs", "sliding_window", "partial_rotary_factor"]
    keys += config_readers()[config["model_type"]].fixed
    for key, value in product(keys, WEIRD):
        path = write(tmp_path, {**config, key: value})
        try:
            load_job(None, {"model.hf_config": str(path)})
        except InputError as error:
            assert all(issue.where.startswith("model.") for issue in error.issues), (key, value)


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ({"rope_type": "linear", "factor": 8.0}, "linear"),
        ({"rope_type": "dynamic", "factor": 4.0}, "dynamic"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
        ({"type": "su", "short_factor": [1.0], "long_factor": [2.0]}, "longrope"),
    ],
)
def test_a_scaling_that_costs_nothing_is_planned(tmp_path: Path, table: dict[str, Any], name: str) -> None:
    """The estimate is that of the same config without it; launch refuses it (test_launched)."""
    scaled = model_of(write(tmp_path, {**LLAMA, "rope_scaling": table}))
    plain = model_of(write(tmp_path, LLAMA))
    assert scaled == plain.model_copy(update={"rotary_scaling_type": name})


def test_yarn_is_read_with_its_magnitude(tmp_path: Path) -> None:
    """DeepSeek's mscale over mscale_all_dim is the factor of cos and sin: at 40 and 1 over 0.5,
    (0.1 ln 40 + 1) / (0.05 ln 40 + 1) = 1.3689 / 1.1844."""
    table = {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    scaling = model_of(write(tmp_path, {**LLAMA, "rope_scaling": table})).yarn_scaling
    assert scaling is not None and (scaling.beta_fast, scaling.beta_slow) == (16.0, 1.0)
    assert scaling.attention_factor == pytest.approx(1.3689 / 1.1844, rel=1e-4)
    (issue,) = issues_of(write(tmp_path, {**LLAMA, "rope_scaling": {"rope_type": "yarn"}}))
    assert "factor, original_max_position_embeddings" in issue.message


def test_a_multimodal_config_points_at_its_text_config(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it: the rest of its text_config is the class's defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    (issue,) = issues_of(write(tmp_path, {"model_type": "gemma3", "text_config": text}))
    assert issue.rule == "unknown-model-type" and "text_config is a gemma3_text" in issue.hint
    model = model_of(write(tmp_path, text))
    assert (model.heads, model.kv_heads, model.vocab) == (8, 4, 262208)
    assert model.rotary_scaling_type == "linear"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "jamba"}, "mixtures of experts of this class cannot be read: model_type j"),
        ({"model_type": "phimoe", "num_local_experts": 16}, "model_type phimoe, num_local_experts"),
        ({**LLAMA, "num_local_experts": 8}, "of this class cannot be read: num_local_experts in"),
        ({**LLAMA, "kv_lora_rank": 512}, "(MLA) of this class cannot be read: kv_lora_rank"),
        ({"model_type": "deepseek_v32"}, "mixtures of experts and multi-head latent attention"),
        ({"model_type": "new", "text_config": {"n_routed_experts": 64}}, "n_routed_experts"),
    ],
)
def test_experts_and_latent_attention_of_other_classes_are_one_issue(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    path = write(tmp_path, config)
    (issue,) = issues_of(path)
    assert (issue.rule, issue.where) == ("not-planned", "model.hf_config")
    assert words in issue.message and str(path) in issue.message
    assert "known with experts: deepseek_v2, deepseek_v3, " in issue.hint
    dense = {**LLAMA, "num_local_experts": None, "n_routed_experts": 0, "num_experts": 1}
    assert model_of(write(tmp_path, dense)) == model_of(write(tmp_path, LLAMA))


MIXTRAL = {**LLAMA, "model_type": "mixtral"}
QWEN3 = {**LLAMA, "model_type": "qwen3_moe"}
V2 = {**LLAMA, "model_type": "deepseek_v2", "num_experts_per_tok": 6}
V3 = {**LLAMA, "model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**MIXTRAL, "router_jitter_noise": 0.1}, "router_jitter_noise 0.1 cannot be expressed"),
        ({**MIXTRAL, "moe_capacity_factor": 1.25}, "moe_capacity_factor 1.25 cannot be expressed"),
        ({**MIXTRAL, "capacity_factor": 1.0}, "capacity_factor 1.0 cannot be expressed, only null"),
        ({**MIXTRAL, "n_shared_experts": 2}, "n_shared_experts 2 cannot be expressed"),
        ({**MIXTRAL, "num_local_experts": "8"}, "num_local_experts is '8', which is no number"),
        ({**QWEN3, "mlp_only_layers": [1]}, "mlp_only_layers [1] cannot be expressed"),
        ({**QWEN3, "mlp_only_layers": "all"}, "mlp_only_layers is 'all', which is no list"),
        ({**QWEN3, "decoder_sparse_step": 0}, "decoder_sparse_step is 0, which is no number"),
        ({**V2, "topk_method": "noaux_tc"}, "topk_method is 'noaux_tc', which is none of greedy"),
        ({**V2, "topk_method": "group_limited_greedy", "n_group": 8}, "topk_group is missing"),
        ({**V2, "norm_topk_prob": True}, "norm_topk_prob True cannot be expressed, only false"),
        ({**V2, "num_experts_per_tok": None}, "num_experts_per_tok is missing"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func 'softmax' cannot be expressed"),
        ({**V3, "topk_method": "greedy"}, "topk_method 'greedy' cannot be expressed"),
        ({**V3, "moe_layer_freq": 2}, "moe_layer_freq 2 cannot be expressed, only 1"),
        ({**V3, "attention_bias": True}, "attention_bias True cannot be expressed"),
        ({**V3, "n_shared_experts": "one"}, "n_shared_experts is 'one', which is no number"),
        ({**V3, "rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "a number for factor"),
    ],
)
def test_what_a_router_cannot_express_names_key_and_value(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    (issue,) = issues_of(write(tmp_path, config))
    assert (issue.rule, issue.where) == ("hf-config", "model.hf_config")
    assert words in issue.message and issue.hint


def test_every_key_of_a_router_is_read(tmp_path: Path) -> None:
    """By hand: of 6 layers every second has experts, and the first of these is dense."""
    keys = {
        "num_experts": 16,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0, 1],
        "num_hidden_layers": 6,
        "shared_expert_intermediate_size": 24,
    }
    model = model_of(write(tmp_path, {**LLAMA, "model_type": "qwen2_moe", **keys}))
    assert [layer for layer in range(6) if model.has_experts(layer)] == [3, 5]
    assert (model.experts, model.experts_per_token, model.expert_width) == (16, 3, 20)
    assert (model.shared_expert_ffn, model.shared_expert_gate) == (24, True)
    assert model.router_renormalize and model.router_score == "softmax"
    keys = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 20,
        "norm_topk_prob": False,
        "first_k_dense_replace": 1,
        "n_shared_experts": 3,
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 1.75,
        "q_lora_rank": None,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 40,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    model = model_of(write(tmp_path, {**V3, **keys}))
    assert (model.router_score, model.router_bias, model.router_renormalize) == ("sigmoid", True, False)
    assert (model.router_groups, model.router_groups_per_token, model.router_scale) == (8, 3, 1.75)
    assert (model.dense_layers, model.shared_expert_ffn, model.expert_width) == (1, 60, 20)
    assert (model.attention_kind, model.q_lora_rank, model.kv_lora_rank) == ("mla", None, 48)
    assert (model.qk_size, model.v_size) == (32, 40)


def test_yarn_s_mscale_is_the_scale_of_the_scores(tmp_path: Path) -> None:
    """DeepSeek-V3: 192^-1/2 (0.1 ln 40 + 1)^2 = 0.0721688 x 1.8738542 = 0.1352338."""
    table = {
        "type": "yarn",
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    }
    model = model_of(write(tmp_path, {**V3, "rope_scaling": table}))
    assert model.yarn_scaling is not None and model.yarn_scaling.attention_factor == 1.0
    assert model.attention_scale == pytest.approx(0.1352338, rel=1e-6)
    plain = model_of(write(tmp_path, V3))
    assert plain.attention_scale is None and plain.q_lora_rank == 1536


@pytest.mark.parametrize(
    "config", [{"model_type": "mamba"}, {"model_type": ["x"]}, {"model_type": {}}, {}, [1], "x", 3]
)
def test_an_unknown_model_type_is_reported_with_the_rest(tmp_path: Path, config: Any) -> None:
    issues = issues_of(write(tmp_path, config), **{"parallel.tpp": 1})
    assert [(issue.rule, issue.where) for issue in issues] == [
        ("unknown-model-type", "model.hf_config"),
        ("unknown-key", "parallel.tpp"),
    ]


@pytest.mark.parametrize(
    ("content", "rule"),
    [(None, "no-such-file"), (b"{", "bad-syntax"), (b"\xff", "bad-syntax"), (b"[" * 100_000, "bad-syntax")],
)
def test_a_config_that_cannot_be_read_is_reported_with_the_rest(
    tmp_path: Path, content: bytes | None, rule: str
) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    issues = issues_of(tmp_path, **{"training.steps": 0})
    assert [(issue.rule, issue.where) for issue in issues] == [
        (rule, "model.hf_config"),
        ("bad-value", "training.steps"),
    ]
    assert str(path) in issues[0].message


@pytest.mark.parametrize("spelling", ["file", "folder", "with keys"])
def test_a_model_may_be_named_by_its_config(tmp_path: Path, spelling: str) -> None:
    path = write(tmp_path, LLAMA)
    keys = {"model.layers": 4} if spelling == "with keys" else {}
    named = {"model": str(tmp_path if spelling == "folder" else path), **keys}
    model = load_job(None, named).model
    assert model is not None
    assert (model.hidden, model.layers) == (4096, 4 if keys else 32)


def test_a_job_file_names_a_config_beside_it(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "job.toml").write_text('model = "config.json"\n', "utf-8")
    model = load_job(str(tmp_path / "job.toml")).model
    assert model is not None and model.hidden == 4096


@pytest.mark.parametrize("name", [5, ["config.json"], True])
def test_a_config_is_named_by_a_string(name: Any) -> None:
    with pytest.raises(InputError) as caught:
        load_job(None, {"model.hf_config": name})
    assert [issue.where for issue in caught.value.issues] == ["model.hf_config"]


@pytest.mark.parametrize(
    ("place", "keys", "name"),
    [
        ("mine/config.json", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "mine"),
        ("mine/llama-31.json", {}, "llama-31"),
        (f"{'0a' * 20}/config.json", {"_name_or_path": "meta-llama/Llama-3.1-8B"}, "Llama-3.1-8B"),
        (f"{'0a' * 20}/config.json", {}, "llama"),
    ],
)
def test_a_config_names_its_model(tmp_path: Path, place: str, keys: dict[str, str], name: str) -> None:
    """By its folder or file; of a hub's snapshot, whose folder is a hash, by what it says."""
    path = tmp_path / place
    path.parent.mkdir()
    path.write_text(json.dumps({**LLAMA, **keys}), "utf-8")
    assert model_of(path).name == name
    assert model_of(path, name="ours").name == "ours"


def test_a_bare_folder_name_is_told_how_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c1").mkdir()
    write(Path("c1"), LLAMA)
    with pytest.raises(InputError) as caught:
        load_job(None, {"model": "c1"})
    assert "write ./c1" in caught.value.issues[0].hint
    model = load_job(None, {"model": "./c1"}).model
    assert model is not None and model.name == "c1"
