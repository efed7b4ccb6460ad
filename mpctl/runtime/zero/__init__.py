"""Gradient buckets of data parallelism, as torch's DDP has them, and what ZeRO 1 to 3 (arXiv
1910.02054) share out of them."""
