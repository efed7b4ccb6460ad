"""Weights from and to Hugging Face directories, in safetensors only: a pickle is never opened."""
