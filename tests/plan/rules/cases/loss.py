"""Cases of the rules of losses in chunks and MLPs in tiles."""

from tests.plan.rules.cases.case import Case

LINEAR = {"training.cross_entropy": "linear"}
CHUNKS = "training.cross_entropy_chunks"
CASES = (
    Case(
        "loss-way",
        {**LINEAR, CHUNKS: 4},
        {CHUNKS: 4},
        CHUNKS,
        ("4 has no effect", "cross_entropy fused"),
        r"use cross_entropy linear; or no chunks",
    ),
    Case(
        "loss-parts",
        {**LINEAR, CHUNKS: 1024},
        {**LINEAR, CHUNKS: 100_000, "training.micro_batch_size": 1},
        CHUNKS,
        ("100000 chunks of 1024 tokens",),
        r"use cross_entropy_chunks 1024",
    ),
    Case(
        "loss-parts",
        {"training.runtime": "deepspeed", "training.tiled_mlp": 4},
        {"training.runtime": "deepspeed", "training.tiled_mlp": 4, "parallel.tp": 2},
        "training.tiled_mlp",
        ("4 with tp 2",),
        r"use tp 1; or no tiled_mlp",
    ),
)
