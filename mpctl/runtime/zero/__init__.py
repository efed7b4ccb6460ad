"""ZeRO (arXiv 1910.02054): gradients and parameters in buckets that the replicas share out."""
