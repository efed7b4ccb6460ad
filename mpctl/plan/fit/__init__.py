"""Whether a fine-tuning fits: full, LoRA and QLoRA by sharding, on given GPUs or on any."""
