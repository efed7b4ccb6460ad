"""Cases of the rules of optimizers and of states in host memory."""

from tests.plan.rules.cases.case import Case

OPTIMIZER, GPU = "training.optimizer", {"launch.device": "cuda"}
CASES = (
    Case(
        "optimizer-dtype",
        {OPTIMIZER: "lion", "training.optimizer_dtype": "bf16"},
        {OPTIMIZER: "adamw-8bit", "training.optimizer_dtype": "bf16"},
        "training.optimizer_dtype",
        ("bf16 has no effect on adamw-8bit", "8 bits wide"),
        r"use optimizer adamw; or no optimizer_dtype",
    ),
    Case(
        "optimizer-dtype",
        {OPTIMIZER: "sgd", "training.momentum": 0.9, "training.optimizer_dtype": "bf16"},
        {OPTIMIZER: "sgd", "training.optimizer_dtype": "bf16"},
        "training.optimizer_dtype",
        ("bf16 has no effect on sgd", "no moments"),
        r"no optimizer_dtype",
    ),
    Case(
        "momentum-optimizer",
        {OPTIMIZER: "sgd", "training.momentum": 0.9},
        {"training.momentum": 0.9},
        "training.momentum",
        ("0.9 is of optimizer sgd", "is adamw"),
        r"use optimizer sgd; or momentum 0",
    ),
    Case(
        "masters-dtype",
        {"training.master_weights": False, "training.dtype": "bf16"},
        {"training.master_weights": False, "training.dtype": "fp16"},
        "training.master_weights",
        ("false", "1/2048"),
        r"use dtype bf16",
    ),
    Case(
        "paged-device",
        {OPTIMIZER: "paged-adamw-8bit", **GPU},
        {OPTIMIZER: "paged-adamw-8bit", "launch.device": "cpu"},
        OPTIMIZER,
        ("paged-adamw-8bit", "CPU cores"),
        r"use optimizer adamw-8bit; or a cluster of GPUs",
    ),
    Case(
        "offload-optimizer",
        {"training.offload_optimizer": True},
        {"training.offload_optimizer": True, OPTIMIZER: "adamw-8bit"},
        "training.offload_optimizer",
        ("true with adamw-8bit", "8 bits"),
        r"use optimizer adamw; or paged-adamw-8bit without offload_optimizer",
    ),
    Case(
        "offload-parameters",
        {"training.offload_parameters": True, "parallel.zero": 3},
        {"training.offload_parameters": True, "parallel.zero": 1},
        "training.offload_parameters",
        ("true", "zero 3", "zero is 1"),
        r"use zero 3; or offload_optimizer alone",
    ),
)
