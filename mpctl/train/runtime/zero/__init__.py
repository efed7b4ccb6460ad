"""Gradient buckets of data parallelism, as in torch's DDP, and their sharding by ZeRO 1 to 3 (arXiv
1910.02054)."""
