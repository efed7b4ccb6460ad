"""NCCL's semantics without NCCL: a world in which messages arrive late and every stream's order is
checked (world.py)."""
