"""Cases of the rules of the modes of tensor parallelism."""

from tests.rules.cases.case import T5, Case

TWO = {"parallel.tensor_mode": "2d", "parallel.tp": 4, "training.micro_batch_size": 2}
DEEP = {"parallel.tensor_mode": "2.5d", "parallel.tp": 8, "training.micro_batch_size": 4}
CUBE = {"parallel.tensor_mode": "3d", "parallel.tp": 8, "training.micro_batch_size": 4}
PIPE = {"parallel.pp": 2, "training.global_batch_size": 8}

CASES = (
    Case(
        "tensor-mode",
        TWO,
        {**TWO, "parallel.tp": 6, "training.micro_batch_size": 12},
        "parallel.tp",
        ("2d needs q x q ranks", "at least 2", "not 6"),
        r"use tp 4, 9 or 16; or tensor_mode 1d$",
    ),
    Case(
        "tensor-mode",
        DEEP,
        {**DEEP, "parallel.tp": 6, "training.micro_batch_size": 12},
        "parallel.tp",
        ("2.5d needs d x q x q ranks", "not 6"),
        r"use tp 4, 8 or 9; or tensor_mode 1d$",
    ),
    Case(
        "tensor-mode",
        {**DEEP, "parallel.tensor_depth": 2},
        {**DEEP, "parallel.tensor_depth": 3},
        "parallel.tp",
        ("2.5d needs 3 x q x q ranks", "not 8"),
        r"use tp 12 with micro batch 6; or tp 27 with micro batch 9; .*; "
        r"or tensor_depth 2; or tensor_mode 1d or 3d without tensor_depth$",
    ),
    Case(
        "tensor-mode",
        CUBE,
        {**CUBE, "parallel.tp": 4},
        "parallel.tp",
        ("3d needs l x l x l ranks", "not 4"),
        r"use tp 8; or tp 27 with micro batch 9; .*; or tensor_mode 1d, 2d or 2.5d$",
    ),
    Case(
        "tensor-mode",
        {},
        {"parallel.tensor_mode": "2d"},
        "parallel.tp",
        ("not 1",),
        r"use tp 4 with micro batch 2; or tp 9 with micro batch 3; .*; or tensor_mode 1d$",
    ),
    Case(
        "tensor-depth",
        {**DEEP, "parallel.tensor_depth": 2},
        {**TWO, "parallel.tensor_depth": 1},
        "parallel.tensor_depth",
        ("1 is a number of layers of 2.5d", "2d"),
        r"use tensor_mode 2.5d; or leave tensor_depth out$",
    ),
    Case(
        "tensor-mode-samples",
        {**TWO, "training.micro_batch_size": 6},
        {**TWO, "training.micro_batch_size": 3, "training.global_batch_size": 12},
        "training.micro_batch_size",
        ("cuts the samples", "into 2", "does not divide 3"),
        r"use micro batch 2, 4 or 6; or tensor_mode 1d$",
    ),
    Case(
        "tensor-mode-samples",
        {**DEEP, "training.micro_batch_size": 4},
        {**DEEP, "training.micro_batch_size": 2, "training.global_batch_size": 6},
        "training.micro_batch_size",
        ("into 4", "does not divide 2"),
        r"micro batch 4 with a global batch that is a multiple of 4$",
    ),
    Case(
        "tp-divides-heads",
        {**TWO, "model.heads": 6},  # of which a rank of 4 would have one and a half
        {**TWO, "parallel.tp": 25, "training.micro_batch_size": 720, "model.hidden": 720},
        "parallel.tp",
        ("tp 25 in 2d cuts attention heads into 5", "5 does not divide 12"),
        r"use tp 9, 16 or 36; or tensor_mode 1d$",
    ),
    Case(
        "tp-divides-kv-heads",
        {**TWO, "model.kv_heads": 2},
        {**TWO, "parallel.tp": 16, "model.kv_heads": 2, "training.micro_batch_size": 4},
        "parallel.tp",
        ("cuts kv heads into 4", "does not divide 2"),
        r"use tp 4; or tensor_mode 1d$",
    ),
    Case(
        "tp-divides-hidden",
        {**CUBE, "model.hidden": 36, "model.head_dim": 8},
        {**CUBE, "model.hidden": 38, "model.head_dim": 8, "model.ffn": 64},
        "parallel.tp",
        ("tp 8 in 3d cuts hidden features into 4", "does not divide 38"),
        r"use tensor_mode 1d or 2.5d$",
    ),
    Case(
        "tp-divides-head-columns",
        {**CUBE, "model.heads": 2, "model.head_dim": 6},
        {**CUBE, "model.heads": 2, "model.head_dim": 7},
        "parallel.tp",
        ("cuts columns of attention heads into 4", "does not divide 14"),
        r"use tensor_mode 1d or 2.5d$",
    ),
    Case(
        "tp-divides-ffn",
        {**CUBE, "model.ffn": 36},
        {**CUBE, "model.ffn": 38},
        "parallel.tp",
        ("cuts ffn columns into 4", "does not divide 38"),
        r"use tensor_mode 1d or 2.5d$",
    ),
    Case(
        "tensor-mode-sequence",
        TWO,
        {**TWO, "parallel.sequence_parallel": True},
        "parallel.sequence_parallel",
        ("true is for tensor_mode 1d", "2d"),
        r"use tensor_mode 1d; or --no-sequence-parallel$",
    ),
    Case(
        "tensor-mode-context",
        TWO,
        {**TWO, "parallel.cp": 2},
        "parallel.cp",
        ("2 ranks", "2d"),
        r"use cp 1; or tensor_mode 1d$",
    ),
    Case(
        "tensor-mode-schedule",
        {**TWO, **PIPE, "parallel.schedule": "gpipe"},
        {**TWO, **PIPE, "parallel.schedule": "zero-bubble"},
        "parallel.schedule",
        ("zero-bubble", "2d does not"),
        r"use 1f1b or gpipe; or tensor_mode 1d$",
    ),
    Case(
        "tensor-mode-partition",
        {**TWO, "training.recompute": "full", "training.offload_activations": True},
        {**TWO, "training.recompute": "full", "training.partition_activations": True},
        "training.partition_activations",
        ("true is for tensor_mode 1d", "2d cuts"),
        r"use tensor_mode 1d; or training.partition_activations false$",
    ),
    Case(
        "tensor-mode-freeze",
        TWO,
        {**TWO, "training.freeze": ["embedding.*"]},
        "training.freeze",
        ("frozen", "2d"),
        r"use tensor_mode 1d; or no training.freeze$",
    ),
    Case(
        "tensor-mode-family",
        TWO,
        {**TWO, **T5},
        "parallel.tensor_mode",
        ("family t5", "2d"),
        r"use tensor_mode 1d; or a model of family gpt$",
    ),
)
