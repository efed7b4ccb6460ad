"""GPT: a causal decoder, pre-norm (GPT-2, GPT-3 and Megatron's shapes)."""
