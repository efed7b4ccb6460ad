"""Rules about optimizers: settings that one does not have, states in host memory, and which of them
mpctl's layers train.

By hand, optimizer_dtype bf16 with adamw-8bit: moments of 8 bits have no other data type. A block of
256 elements of a rank's slice has other elements on another number of ranks, and so another scale:
8-bit optimizers are planned and not launched.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.core.errors import Offer
from mpctl.model.layout.draft import LayoutDraft
from mpctl.plan.estimate.optimizers import RULES
from mpctl.plan.rules.check import Check, listed, refusal
from mpctl.spec.training import TrainingSpec

TRAINED = ("adamw", "sgd", "lion")
"""The optimizers of mpctl's layers (train/kernels/update.py)."""
OPTIMIZER, ADAMW = "training.optimizer", Offer("training.optimizer", ("adamw",), "optimizer")


def optimizer_rules(draft: LayoutDraft) -> Iterator[Check]:
    """The optimizer has what its settings ask for, and its parameters have the bits that it needs."""
    job = draft.job
    t = job.training
    rule = RULES[t.optimizer]
    if t.optimizer_dtype and not (rule.moments and not rule.bits) and not (t.optimizer == "sgd" and t.momentum):
        kept = f"its moments are {rule.bits} bits wide" if rule.bits else "it keeps no moments like the parameters"
        message = f"{t.optimizer_dtype} has no effect on {t.optimizer}: {kept}"
        yield refusal("optimizer-dtype", "training.optimizer_dtype", message, ADAMW, more="no optimizer_dtype")
    if t.momentum and t.optimizer != "sgd":
        message = f"{t.momentum:g} is of optimizer sgd, and the optimizer is {t.optimizer}"
        sgd = Offer(OPTIMIZER, ("sgd",), "optimizer")
        yield refusal("momentum-optimizer", "training.momentum", message, sgd, more="momentum 0")
    if t.master_weights is False and t.dtype == "fp16":
        message = "false: fp16 rounds updates below 1/2048 of a parameter away, and its gradients are scaled"
        yield refusal("masters-dtype", "training.master_weights", message, Offer("training.dtype", ("bf16",), "dtype"))
    if rule.is_paged and job.device_kind == "cpu":
        plain = Offer(OPTIMIZER, (t.optimizer.removeprefix("paged-"),), "optimizer")
        message = f"{t.optimizer} moves states between a GPU and its host, and ranks run on CPU cores"
        yield refusal("paged-device", OPTIMIZER, message, plain, more="a cluster of GPUs")


def offload_rules(draft: LayoutDraft) -> Iterator[Check]:
    """States in host memory are updated there, and parameters come from it layer by layer."""
    t, zero = draft.job.training, draft.job.parallel.zero
    rule = RULES[t.optimizer]
    if t.offload_optimizer and rule.bits:
        paged, without = f"paged-{t.optimizer}", ("training.offload_optimizer", False)
        offers = [ADAMW]
        if paged in RULES:
            offers += [Offer(OPTIMIZER, (paged,), also=(without,), suffix=" without offload_optimizer")]
        message = f"true with {t.optimizer}: hosts update states of 32 or 16 bits, those of {rule.bits} bits GPUs alone"
        yield refusal("offload-optimizer", "training.offload_optimizer", message, *offers)
    if t.offload_parameters and zero < 3:
        message = f"true needs parameters that are gathered layer by layer (zero 3), and zero is {zero}"
        more = "offload_optimizer alone" if not t.offload_optimizer else "offload_parameters false"
        offer = Offer("parallel.zero", (3,), "zero")
        yield refusal("offload-parameters", "training.offload_parameters", message, offer, more=more)


def states_not_launched(training: TrainingSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the key, message and hint of each setting of the optimizer that mpctl's layers do not run."""
    if training.optimizer not in TRAINED:
        rule = RULES[training.optimizer]
        if rule.bits:
            why = f"blocks of {rule.block} elements with one scale would be cut otherwise by every layout"
        else:
            why = "its rows and columns are of whole matrices, which ranks cut"
        message = f"{training.optimizer} is planned, not run by `mpctl launch`: {why}"
        yield OPTIMIZER, message, f"use optimizer {listed(TRAINED)}; optimizer_dtype bf16 halves its moments"
    for key, kept in (("offload_optimizer", "moments and masters"), ("offload_parameters", "parameters")):
        if getattr(training, key):
            message = f"true is planned, not run by `mpctl launch`: {kept} stay on the device"
            yield f"training.{key}", message, "use false, with more replicas and parallel.zero 3 to share them"
