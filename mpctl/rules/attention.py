"""Attention that our own GPU kernel does not take, where that costs memory.

By hand, one layer of 8 heads over 2048 positions with attention dropout in fp64: scores, mask and
dropped scores are 17 bytes a pair, 570 MB a sample; the kernel of 32 bits keeps a number a row.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.operators.fused_attention import refusal
from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec
from mpctl.spec.runtime import get_profile


def attention_rules(job: JobSpec) -> Iterator[Check]:
    """Attention dropout on a GPU takes no scores in memory, or a warning says why it does."""
    training, model = job.training, job.model
    is_ours = get_profile(training.runtime).memory.kernels == "mpctl"
    if model is None or not training.attention_dropout or not is_ours or job.device_kind == "cpu":
        return
    refused = refusal(training.value_bytes, model.head_size)
    if refused is not None:
        message = (
            f"{training.attention_dropout:g}: {refused.reason}, so that scores lie in memory, "
            f"{model.heads} x {model.seq_length}^2 a sample and layer"
        )
        hint = f"{refused.hint}, or training.attention_dropout 0"
        yield Check("fused-attention", "warning", "training.attention_dropout", message, hint)
