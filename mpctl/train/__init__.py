"""Code that ranks run: kernels, layers, families, data, training, checkpoints. The wing with torch."""
