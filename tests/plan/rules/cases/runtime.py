"""Cases of the rules of the software that runs a job."""

from tests.plan.rules.cases.case import Case

EIGHT = {
    "cluster.gpus_per_node": 8,
    "parallel.pp": 8,
    "model.layers": 16,
    "training.dtype": "bf16",
    "training.runtime": "nanotron",
}
SIXTEEN = {**EIGHT, "cluster.gpus_per_node": 32, "parallel.pp": 16, "model.vocab": 65536}

CASES = (
    Case(
        "runtime-runs",
        {"training.runtime": "megatron-2022", "training.recompute": "selective"},
        {"training.runtime": "megatron-2021", "training.recompute": "selective"},
        "training.recompute",
        ("Megatron-LM of 2021", "recompute selective", "as if it did"),
        r"`mpctl presets runtimes megatron-2021` lists under \[runs\] what it runs$",
        status="warning",
    ),
    Case(
        "runtime-runs",
        {**EIGHT, "training.dtype": "bf16", "parallel.order": "tp-pp-cp-dp", "parallel.pp": 1},
        {**EIGHT, "training.dtype": "bf16", "parallel.order": "tp-cp-pp-dp", "parallel.dp": 2},
        "parallel.order",
        ("nanotron", "order tp-cp-pp-dp", "as if it did"),
        r"`mpctl presets runtimes nanotron` lists under \[runs\] what it runs$",
        status="warning",
    ),
    Case(
        "pipeline-is-full",
        {**EIGHT, "training.global_batch_size": 7},
        {**EIGHT, "training.global_batch_size": 2},
        "parallel.pp",
        ("2 micro batches on 8 stages", "fewer than 7"),
        r"training.global_batch_size 7",
    ),
    Case(
        "stages-hold-something",
        {**EIGHT, "training.global_batch_size": 7},
        {**SIXTEEN, "training.global_batch_size": 64},
        "parallel.pp",
        ("of 16 stages", "DDP"),
        r"use pp \d+ or less",
    ),
)
