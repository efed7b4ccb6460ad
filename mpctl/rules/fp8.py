"""What training in fp8 asks of a job that our own workers are to run (kernels/fp8_product.py).

Tensor cores take fp8 operands whose rows are a multiple of 16 elements, which of the three products
of a linear layer are: its inputs, its outputs, and the tokens of a micro batch. By hand, hidden 768
and ffn 3072 over tp 64: 48 columns of the MLP a rank, a multiple of 16; over tp 96, 32; over 128,
24, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.families import get_family
from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

RULE, MULTIPLE = "job-launched", 16
WIDER = "or --dtype bf16"


def fp8_not_launched(job: JobSpec) -> Iterator[Check]:
    """Why no worker of ours trains the job in fp8, a warning for each reason; nothing for other
    dtypes."""
    if job.training.dtype != "fp8":
        return
    yield from _device(job)
    p, model = job.parallel, job.model
    if p.tensor_mode != "1d":
        yield _refused("parallel.tensor_mode", f"{p.tensor_mode} is not run in fp8",
                       "use tensor_mode 1d")  # fmt: skip
    if model is not None and p.tensor_mode == "1d":
        yield from _family(model)
        yield from _sides(job, model)


def _device(job: JobSpec) -> Iterator[Check]:
    device = job.cluster.device
    if device is None or device.is_cpu or job.device_kind == "cpu":
        return
    if "fp8" not in device.peak_flops:
        yield _refused("cluster.device", f"{device.name} does not multiply in fp8: its preset has "
                       "no such rate", "use a device of compute capability 8.9 or more, such as "
                       "h100-sxm or l40s,")  # fmt: skip
    elif job.device_kind == "rocm":
        yield _refused("cluster.device.kind", f"{device.name}: fp8 was not tried on AMD, whose "
                       "MI300 has formats of its own", "use a device of kind cuda")  # fmt: skip


def _family(model: ModelSpec) -> Iterator[Check]:
    if get_family(model.family).has_decoder:
        yield _refused("model.family", f"{model.family}: the layers of a decoder that read an "
                       "encoder are not run in fp8", "use another family")  # fmt: skip


def _sides(job: JobSpec, model: ModelSpec) -> Iterator[Check]:
    """Each side of a rank's matrices is a multiple of 16."""
    p, training = job.parallel, job.training
    d = model.head_size
    qkv, heads = (model.heads + 2 * model.kv_heads) * d, model.heads * d
    tokens = training.micro_batch_size * model.seq_length
    sides = (
        ("model.hidden", "hidden", model.hidden, 1, "hidden"),
        ("parallel.tp", "columns of queries, keys and values", qkv, p.tp, "tp or other heads"),
        ("parallel.tp", "columns of the heads", heads, p.tp, "tp or other heads"),
        ("parallel.tp", "columns of the MLP", model.ffn, p.tp, "tp or ffn"),
        ("training.micro_batch_size", "tokens of a micro batch", tokens, p.cp,
         "micro_batch_size, seq_length or cp"),
    )  # fmt: skip
    for where, what, size, ranks, setting in sides:
        if size % ranks == 0 and size // ranks % MULTIPLE:
            each = f"{size // ranks} {what}" + (f" a rank ({size} over {ranks})" * (ranks > 1))
            yield _refused(where, f"{each}: fp8 multiplies multiples of {MULTIPLE}",
                           f"use another {setting}")  # fmt: skip


def _refused(where: str, message: str, way: str) -> Check:
    return Check(RULE, "warning", where, message, f"{way} {WIDER}")
