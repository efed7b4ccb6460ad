"""Rules about what a decoder's shape may say, and which of it `mpctl launch` runs.

What the operator table counts and our own kernels do not compute is planned and not launched: the
plan says so as a warning, `mpctl launch` as an error. By hand: a Gemma 2 plans, and is not launched
because of attention_softcap and logit_softcap.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mpctl.families import all_builtin, get_family
from mpctl.families.description import VARIANTS, is_set
from mpctl.rules.check import Check, listed
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec
from mpctl.spec.runtime import is_launched

RULE = "model-launched"
ONLY_PLANNED = {
    "attention_softcap": "bounded attention scores",
    "logit_softcap": "bounded logits",
    "mtp_layers": "multi-token prediction",
    "head_bias": "a bias of the output layer",
}
IN_1D = (
    "qk_norm", "parallel_residual", "embedding_norm", "attention_window", "embedding_multiplier"
)  # fmt: skip
OTHERS = "plan it as another software runs it: training.runtime megatron-core"


def variant_rules(job: JobSpec) -> Iterator[Check]:
    """The family takes the keys by which decoders differ, and they agree with each other."""
    model = job.model
    if model is None:
        return
    family = get_family(model.family)
    others = [other.name for other in all_builtin() if other.variants]
    for key in VARIANTS:
        if key not in family.variants and is_set(model, key):
            yield Check("family-variants", "error", f"model.{key}",
                        f"family {family.name} has no {key}",
                        f"leave it out, or use family {listed(others)}")  # fmt: skip
    if not family.variants and not isinstance(model.bias, bool):
        yield Check("family-variants", "error", "model.bias",
                    f"family {family.name} has biases in all linear layers or in none",
                    "use true or false")  # fmt: skip
    yield from _agreement(model)


def _agreement(model: ModelSpec) -> Iterator[Check]:
    rule = "variants-agree"
    for key in ("attention_window_every", "full_attention_every", "window_rotary_base"):
        if is_set(model, key) and model.attention_window is None:
            yield Check(rule, "error", f"model.{key}", "there is no attention_window",
                        "give model.attention_window, or leave it out")  # fmt: skip
    if is_set(model, "attention_window_every") and is_set(model, "full_attention_every"):
        yield Check(rule, "error", "model.full_attention_every",
                    "is given beside attention_window_every", "leave one of them out")  # fmt: skip
    if model.shared_norm and not model.parallel_residual:
        yield Check(rule, "error", "model.shared_norm",
                    "attention and MLP share a norm where both read the layer's input",
                    "use parallel_residual true")  # fmt: skip
    if model.parallel_residual and model.norm_order != "pre":
        yield Check(rule, "error", "model.norm_order",
                    f"{model.norm_order} is not planned with parallel_residual",
                    "use norm_order pre")  # fmt: skip
    turned = model.rotary_fraction * (model.head_dim or 2)
    if model.position == "rotary" and int(turned) % 2:
        yield Check(rule, "error", "model.rotary_fraction",
                    f"{model.rotary_fraction:g} of {model.head_dim} columns are {int(turned)}, "
                    "and rotary positions turn pairs", "use a part that is even")  # fmt: skip


def launched_rules(job: JobSpec) -> Iterator[Check]:
    """Whether `mpctl launch` runs the model; of a config.json's shape it is said either way."""
    model = job.model
    if model is None or not is_launched(job.training.runtime):
        return
    reasons = list(not_launched(job))
    yield from reasons
    if not reasons and Path(model.source or "").name == "config.json":
        yield Check(RULE, "ok", "model", "`mpctl launch` runs this shape")


def not_launched(job: JobSpec) -> Iterator[Check]:
    """What of a job's model our own workers do not run: a warning for each."""
    model = job.model
    if model is None:
        return
    for key, what in ONLY_PLANNED.items():
        if is_set(model, key):
            yield _planned(key, getattr(model, key), f"{what}: planned, not run by `mpctl launch`")
    if model.qk_norm == "width":
        yield _planned("qk_norm", "width", "one norm over all heads: planned, not run by `mpctl "
                       "launch`, which has norms of each head")  # fmt: skip
    if (mode := job.parallel.tensor_mode) != "1d":
        for key in (*IN_1D, *_not_on_a_grid(model)):
            if is_set(model, key):
                yield _planned(key, getattr(model, key), f"planned, not run in tensor_mode {mode}")
    if model.parallel_residual and job.training.freeze:
        message = "planned, not run with frozen parameters by `mpctl launch`"
        yield _planned("parallel_residual", "true", message)


def _not_on_a_grid(model: ModelSpec) -> Iterator[str]:
    if model.position == "alibi":
        yield "position"
    if model.norm == "nonparametric":
        yield "norm"
    if model.norm_order in ("output", "sandwich"):
        yield "norm_order"


def _planned(key: str, value: object, message: str) -> Check:
    shown = str(value).lower() if isinstance(value, bool) else value
    return Check(RULE, "warning", f"model.{key}", f"{shown}: {message}", OTHERS)
