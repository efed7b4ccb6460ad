"""What other software calls the settings of a job: for hints only, never accepted as names.

Megatron-LM's and DeepSpeed's arguments, torchtitan's config keys, `transformers` configs and
TrainingArguments, and plain words. Keys are compared in lower case with underscores.
"""

from __future__ import annotations

from mpctl.spec.hf import NAMES

BY_SETTING: dict[str, tuple[str, ...]] = {
    "cluster.nodes": ("nnodes", "num_nodes", "n_nodes", "hosts", "world_size"),
    "cluster.gpus_per_node": (
        "gpus", "num_gpus", "ngpus", "n_gpus", "devices", "devices_per_node", "nproc_per_node",
        "ranks_per_node", "gpu_per_node",
    ),
    "model": ("model_name", "model_type"),
    "model.layers": ("n_layers", "num_encoder_layers", "encoder_layers", "depth"),
    "model.hidden": ("dim", "embed_dim", "model_dim", "hidden_dim", "width"),
    "model.ffn": ("ffn_hidden_size", "ffn_dim", "ffn_size", "mlp_size"),
    "model.heads": ("n_heads",),
    "model.kv_heads": ("n_kv_heads", "num_query_groups", "query_groups", "group_query_attention"),
    "model.head_dim": ("kv_channels", "head_size"),
    "model.vocab": ("n_vocab", "vocabulary", "padded_vocab_size"),
    "model.vocab_divisor": ("make_vocab_size_divisible_by",),
    "model.seq_length": (
        "seq", "seq_len", "seqlen", "sequence_length", "sequence", "encoder_seq_length",
        "max_seq_len", "max_seq_length", "context_length", "block_size",
    ),
    "model.activation": ("hidden_act", "activation_function", "hidden_activation"),
    "model.norm": ("normalization", "norm_type"),
    "model.norm_epsilon": ("norm_eps", "eps"),
    "model.position": ("position_embedding_type", "position_embedding", "positions", "pos_emb"),
    "model.rotary_base": ("rope_theta", "rope_base", "rope"),
    "model.rotary_scaling": ("rope_scaling",),
    "model.attention": ("attn_implementation", "use_flash_attn", "flash_attention", "flash_attn"),
    "model.bias": ("attention_bias", "mlp_bias", "add_bias_linear", "disable_bias_linear"),
    "model.tied_embeddings": ("untie_embeddings_and_output_weights", "tie_embeddings"),
    "model.experts": (
        "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_experts",
        "num_moe_experts",
    ),
    "model.experts_per_token": (
        "num_experts_per_tok", "num_experts_per_token", "moe_router_topk", "router_topk", "top_k",
        "moe_top_k", "moe_k", "experts_per_tok", "num_selected_experts",
    ),
    "model.expert_ffn": (
        "moe_intermediate_size", "moe_ffn_hidden_size", "expert_intermediate_size", "moe_inter_dim",
    ),
    "model.shared_expert_ffn": (
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "n_shared_experts", "num_shared_experts",
    ),
    "model.shared_expert_gate": ("moe_shared_expert_gate",),
    "model.dense_layers": (
        "first_k_dense_replace", "mlp_only_layers", "n_dense_layers", "num_dense_layers",
    ),
    "model.moe_layer_every": (
        "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "moe_layer_frequency",
    ),
    "model.router_score": (
        "scoring_func", "score_func", "moe_router_score_function", "score_function",
    ),
    "model.router_renormalize": (
        "norm_topk_prob", "route_norm", "moe_router_pre_softmax", "moe_renormalize",
    ),
    "model.router_bias": (
        "moe_router_enable_expert_bias", "e_score_correction_bias", "topk_method",
    ),
    "model.router_groups": ("n_group", "moe_router_num_groups", "num_expert_groups"),
    "model.router_groups_per_token": (
        "topk_group", "moe_router_group_topk", "num_limited_groups", "topk_groups",
    ),
    "model.router_scale": (
        "routed_scaling_factor", "moe_router_topk_scaling_factor", "route_scale",
    ),
    "model.attention_kind": ("multi_latent_attention", "use_mla", "mla", "enable_mla"),
    "model.qk_nope_head_dim": ("qk_head_dim",),
    "model.qk_rope_head_dim": ("qk_pos_emb_head_dim",),
    "model.hf_config": ("config", "config_path", "hf_path"),
    "parallel.tp": (
        "tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp_size",
        "tensor_model_parallel_size", "tensor_model_parallel", "model_parallel_size",
        "model_parallel", "mp", "tp_degree",
    ),
    "parallel.pp": (
        "pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree", "pp_size",
        "pipeline_model_parallel_size", "pipeline_model_parallel", "pipeline", "stages",
        "num_stages", "pipeline_stages", "pp_degree",
    ),
    "parallel.dp": (
        "data_parallel", "data_parallel_size", "data_parallel_degree", "dp_size", "replicas",
        "data_parallel_replicate_degree", "data_parallel_shard_degree", "ddp", "dp_degree",
    ),
    "parallel.cp": (
        "context_parallel", "context_parallel_size", "context_parallel_degree", "cp_size",
        "ring_attention", "cp_degree",
    ),
    "parallel.ep": (
        "expert_parallel", "expert_parallel_size", "expert_model_parallel_size",
        "expert_parallel_degree", "moe_expert_parallel_size", "ep_size", "ep_degree",
    ),
    "parallel.etp": (
        "expert_tensor_parallel", "expert_tensor_parallel_size", "expert_tensor_parallel_degree",
    ),
    "parallel.vpp": (
        "virtual_pipeline", "virtual_pipeline_model_parallel_size", "virtual_stages", "chunks",
        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
        "model_chunks", "interleave",
    ),
    "parallel.order": ("rank_order", "axes", "mesh"),
    "parallel.sequence_parallel": ("sp", "sequence_parallelism", "enable_sequence_parallel"),
    "parallel.zero": (
        "zero_stage", "zero_optimization", "stage", "fsdp", "use_distributed_optimizer",
        "distributed_optimizer",
    ),
    "parallel.bucket_bytes": ("ddp_bucket_size", "bucket_size", "bucket_cap_mb",
                              "reduce_bucket_size"),
    "parallel.overlap_gradients": ("overlap_grad_reduce", "overlap_comm"),
    "parallel.schedule": ("pipeline_schedule", "pipeline_parallel_schedule", "pp_schedule"),
    "parallel.first_stage_layers": ("decoder_first_pipeline_num_layers",),
    "parallel.last_stage_layers": ("decoder_last_pipeline_num_layers",),
    "parallel.embedding_is_layer": ("account_for_embedding_in_pipeline_split",),
    "parallel.loss_is_layer": ("account_for_loss_in_pipeline_split",),
    "training.micro_batch_size": (
        "micro_batch", "microbatch", "microbatch_size", "mbs", "train_micro_batch_size_per_gpu",
        "per_device_train_batch_size", "local_batch_size", "pipeline_parallel_microbatch_size",
    ),
    "training.global_batch_size": (
        "global_batch", "batch_size", "batch", "gbs", "train_batch_size",
        "gradient_accumulation_steps", "gradient_accumulation", "grad_accum",
    ),
    "training.dtype": (
        "precision", "torch_dtype", "data_type", "params_dtype", "mixed_precision", "bf16", "fp16",
        "fp32", "fp8", "amp", "mixed_precision_param",
    ),
    "training.gradient_dtype": ("grad_dtype", "mixed_precision_reduce", "grad_reduce_in_fp32",
                                "accumulate_allreduce_grads_in_fp32"),
    "training.recompute": (
        "recompute_granularity", "recompute_activations", "activation_checkpointing",
        "activation_checkpoint", "gradient_checkpointing", "checkpoint_activations", "remat",
    ),
    "training.partition_activations": ("distribute_saved_activations",),
    "training.offload_activations": ("cpu_checkpointing", "cpu_offloading", "activation_offload"),
    "training.dropout": ("hidden_dropout", "resid_pdrop", "hidden_dropout_prob", "dropout_rate"),
    "training.attention_dropout": ("attn_pdrop", "attention_probs_dropout_prob", "attn_dropout"),
    "training.loss_scale": ("initial_loss_scale",),
    "training.steps": (
        "train_iters", "max_steps", "iterations", "iters", "num_steps", "num_train_steps",
        "train_steps", "epochs", "num_train_epochs", "max_iters",
    ),
    "training.seed": ("random_seed", "manual_seed"),
    "training.learning_rate": ("lr", "max_lr", "peak_lr"),
    "training.min_learning_rate": ("min_lr", "lr_min", "final_lr"),
    "training.lr_schedule": ("lr_decay_style", "lr_scheduler_type", "scheduler"),
    "training.lr_decay_steps": ("lr_decay_iters", "decay_steps"),
    "training.lr_wsd_decay_steps": ("lr_wsd_decay_iters",),
    "training.warmup_steps": ("warmup", "lr_warmup_iters", "lr_warmup_steps", "num_warmup_steps",
                              "warmup_iters"),
    "training.weight_decay": ("wd",),
    "training.beta1": ("adam_beta1",),
    "training.beta2": ("adam_beta2",),
    "training.epsilon": ("adam_eps", "adam_epsilon"),
    "training.clip_norm": ("clip_grad", "grad_clip", "gradient_clipping", "max_grad_norm",
                           "max_norm", "gradient_clip_val"),
    "training.moe_load_balancing": ("moe_router_load_balancing_type", "load_balancing_type"),
    "training.moe_aux_loss_coeff": (
        "router_aux_loss_coef", "moe_aux_loss_coef", "aux_loss_alpha", "load_balance_coeff",
    ),
    "training.moe_z_loss_coeff": ("router_z_loss_coef", "moe_z_loss_coef"),
    "training.moe_bias_update_rate": ("moe_router_bias_update_rate",),
    "training.init_std": ("init_method_std", "initializer_range"),
    "training.eval_interval": ("eval_steps", "eval_every", "validation_interval"),
    "training.eval_samples": ("eval_iters", "validation_samples"),
    "checkpoint.interval": ("save_interval", "save_steps", "save_every",
                            "checkpoint_every", "checkpoint_steps"),
    "training.init_from": ("load", "pretrained_checkpoint", "model_name_or_path",
                           "resume_from_checkpoint", "weights", "pretrained"),
    "training.freeze": ("frozen", "frozen_parameters"),
    "training.runtime": ("framework", "software", "backend"),
    "data.corpus": ("text", "texts", "dataset", "dataset_name", "train_data"),
    "data.path": ("data_path", "dataset_path", "data_dir", "prepared"),
    "data.tokenizer": ("tokenizer_model", "tokenizer_path", "tokenizer_name", "vocab_file"),
    "data.validation_fraction": ("split", "val_fraction", "validation_split"),
    "launch.timeout_seconds": ("timeout", "distributed_timeout_minutes", "ddp_timeout"),
    "launch.compile": ("torch_compile",),
    "launch.threads_per_rank": ("threads", "num_threads", "omp_num_threads"),
    "launch.max_restarts": ("restarts",),
}  # fmt: skip
MEANT = {theirs: f"model.{ours}" for ours, names in NAMES.items() for theirs in names}
MEANT |= {theirs: ours for ours, names in BY_SETTING.items() for theirs in names}
# Settings that no key of a job has on purpose -> what a hint says.
NO_CAPACITY = (
    "leave it out: experts take every token that is sent to them, since which ones a capacity "
    "drops depends on how ranks share the batch"
)
NO_JITTER = "leave it out: noise of each rank's own would change the loss with the layout"
NOT_OFFERED = dict.fromkeys(
    ("capacity_factor", "moe_expert_capacity_factor", "moe_capacity_factor", "expert_capacity",
     "eval_capacity_factor", "train_capacity_factor", "expert_capacity_factor", "min_capacity",
     "drop_tokens", "moe_token_drop_policy", "moe_pad_expert_input_to_capacity"),
    NO_CAPACITY,
) | dict.fromkeys(
    ("router_jitter_noise", "moe_input_jitter_eps", "jitter_eps", "input_jitter_noise"), NO_JITTER
)  # fmt: skip

LLAMA = "use gpt with norm rmsnorm, position rotary, activation swiglu, bias false; or a preset"
VALUES: dict[str, dict[str, tuple[str, ...]]] = {
    "model.activation": {
        "gelu_tanh": ("gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_approximate"),
        "swiglu": ("silu", "swish"),
        "geglu": ("gated_gelu",),
        "relu2": ("squared_relu", "relu_squared", "sqrelu", "relu^2"),
    },
    "model.qk_norm": {
        "true": ("yes", "on", "head", "per_head"), "false": ("no", "off", "none"),
        "width": ("full", "all"),
    },
    "model.bias": {
        "true": ("yes", "on", "all"), "false": ("no", "off", "none"),
        "attention": ("output", "proj", "attn"), "mlp": ("ffn",),
    },
    "model.router_score": {"sigmoid": ("noaux_tc",), "softmax": ("soft_max",)},
    "model.attention_kind": {
        "mla": ("latent", "multi_latent_attention", "true"), "mha": ("gqa", "mqa", "false"),
    },
    "training.moe_load_balancing": {
        "sequence": ("seq_aux_loss",), "global": ("global_aux_loss",),
        "micro_batch": ("aux_loss", "switch"), "none": ("off", "no", "false"),
    },
    "model.norm": {"rmsnorm": ("rms", "rms_norm"), "layernorm": ("ln", "layer_norm")},
    "model.position": {
        "rotary": ("rope", "rotary_embedding"),
        "learned": ("learned_absolute", "absolute", "learned_positions"),
        "none": ("nope", "no"),
    },
    "model.attention": {
        "flash": ("flash_attention", "flash_attention_2", "flash_attention_3", "sdpa", "fused"),
        "unfused": ("eager", "math", "naive"),
    },
    "parallel.schedule": {
        "interleaved": ("interleaved_1f1b", "interleaved1f1b", "vpp"),
        "zero-bubble": ("zb", "zbh1", "zb_h1", "zbv", "zb1p", "zerobubble"),
        "gpipe": ("afab", "f_then_b", "all_forward_all_backward"),
    },
    "parallel.stage_balance": {
        "cost": ("auto", "balanced", "parameters", "time"),
        "even": ("uniform", "equal"),
    },
    "training.dtype": {
        "bf16": ("bfloat16", "torch.bfloat16", "bf16_mixed"),
        "fp16": ("float16", "half", "torch.float16", "16"),
        "fp32": ("float32", "float", "single", "torch.float32", "32"),
        "fp64": ("float64", "double", "torch.float64"),
        "fp8": ("float8", "e4m3", "hybrid"),
        "mxfp8": ("fp8_mx",),
        "nvfp4": ("fp4", "float4", "e2m1"),
    },
    "training.recompute": {
        "full": ("true", "block", "uniform", "layer", "all", "on", "yes"),
        "selective": ("attention", "core", "core_attn"),
        "none": ("false", "off", "no"),
    },
    "training.runtime": {
        "megatron-core": ("megatron", "megatron_lm", "mcore", "nemo", "megatron_bridge"),
        "amd-megatron": ("primus", "rocm_megatron"),
        "maxtext-gpu": ("maxtext",),
        "pax-gpu": ("pax", "paxml"),
    },
    "launch.device": {"cuda": ("gpu", "nvidia", "cuda:0"), "auto": ("any",)},
}  # fmt: skip
VALUES["training.gradient_dtype"] = VALUES["training.dtype"]
LLAMAS = ("llama", "llama2", "llama3", "mistral", "qwen", "qwen2", "gemma")
