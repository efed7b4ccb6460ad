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
from mpctl.spec.job import JobSpec
from mpctl.spec.muon import MuonSpec
from mpctl.spec.training import TrainingSpec

TRAINED = ("adamw", "sgd", "lion", "muon")
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
    yield from _muon_rules(draft)
    if t.optimizer_dtype in ("fp16", "fp8") and t.optimizer != "adamw":
        message = f"{t.optimizer_dtype} with {t.optimizer}: moments with scales are AdamW's alone"
        yield refusal("optimizer-dtype", "training.optimizer_dtype", message, ADAMW, more="optimizer_dtype bf16")
    if rule.is_paged and job.device_kind == "cpu":
        plain = Offer(OPTIMIZER, (t.optimizer.removeprefix("paged-"),), "optimizer")
        message = f"{t.optimizer} moves states between a GPU and its host, and ranks run on CPU cores"
        yield refusal("paged-device", OPTIMIZER, message, plain, more="a cluster of GPUs")


def _muon_rules(draft: LayoutDraft) -> Iterator[Check]:
    """Muon's settings belong to it, and its Newton-Schulz steps are those of their polynomials."""
    t, muon = draft.job.training, draft.job.training.muon
    if t.optimizer != "muon":
        if changed := sorted(key for key in muon.model_fields_set if getattr(muon, key) != getattr(MuonSpec(), key)):
            key, offer = changed[0], Offer(OPTIMIZER, ("muon",), "optimizer")
            message = f"{getattr(muon, key)} is of optimizer muon, and the optimizer is {t.optimizer}"
            yield refusal("muon-settings", f"training.muon.{key}", message, offer, more="leave training.muon out")
        return
    steps, where = muon.steps, "training.muon.steps"
    if muon.coefficients == "quintic" and steps % 5:
        message = f"{steps} is no multiple of 5: quintic is a cycle of 5 polynomials"
        yield refusal("muon-steps", where, message, Offer(where, (5,), "steps"))
    if muon.coefficients == "polar_express" and steps < 8:
        message = f"{steps} is below 8: polar_express is a series of 8 polynomials"
        yield refusal("muon-steps", where, message, Offer(where, (8,), "steps"))
    if t.optimizer_dtype and not draft.profile.runs.launched:
        message = f"{t.optimizer_dtype} with muon: {t.runtime} has narrower moments of AdamW alone"
        yield refusal("muon-states", "training.optimizer_dtype", message, ADAMW, more="no optimizer_dtype")
    if t.offload_optimizer:
        message = "true with muon: hosts update AdamW's states, and Newton-Schulz steps need the device"
        yield refusal("muon-offload", "training.offload_optimizer", message, ADAMW, more="offload_optimizer false")


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
    for key in ("offload_fraction", "offload_overlap"):
        if not t.offload_optimizer and getattr(t, key) != TrainingSpec.model_fields[key].default:
            message = f"{getattr(t, key)} is of offloaded optimizer states, and offload_optimizer is false"
            yield refusal(
                "offload-settings", f"training.{key}", message, more=f"use offload_optimizer true, or leave {key} out"
            )
    if t.offload_parameters and zero < 3:
        message = f"true needs parameters that are gathered layer by layer (zero 3), and zero is {zero}"
        more = "offload_optimizer alone" if not t.offload_optimizer else "offload_parameters false"
        offer = Offer("parallel.zero", (3,), "zero")
        yield refusal("offload-parameters", "training.offload_parameters", message, offer, more=more)


def states_not_launched(job: JobSpec) -> Iterator[tuple[str, str, str]]:
    """Yield the key, message and hint of each setting of the optimizer that mpctl's layers do not run."""
    training, p, is_muon = job.training, job.parallel, job.training.optimizer == "muon"
    if training.optimizer_dtype in ("fp16", "fp8"):
        message = f"{training.optimizer_dtype} is planned, not run by `mpctl launch`: its moments would need scales"
        yield "training.optimizer_dtype", message, "use bf16"
    if is_muon and p.tensor_mode != "1d":
        message = f"muon is not run in tensor_mode {p.tensor_mode}: matrices are put together from tp in a row"
        yield OPTIMIZER, message, "use tensor_mode 1d, or optimizer adamw"
    if is_muon and training.adapter is not None:
        yield OPTIMIZER, "muon with adapters is planned, not run by `mpctl launch`", "use optimizer adamw"
    if is_muon and p.tp * p.etp > 1 and training.muon.tp_mode != "duplicated":
        mode, where = training.muon.tp_mode, "training.muon.tp_mode"
        yield where, f"{mode} over tp {p.tp} is planned, not run by `mpctl launch`", "use duplicated, or tp 1 and etp 1"
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
