"""AdamW and its learning rate in torchtitan's words.

Spelling and formulas: torchtitan 0.3.0, components/optimizer/. Its scheduler warms up, holds the
peak and decays up to total_steps; the rate of every step is that of runtime/lr_schedule.py.

By hand, wsd over 100 steps with a decay of 20: total_steps 100, decay_ratio 0.2.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpctl.errors import Issue
from mpctl.interop.sayable import refused
from mpctl.interop.texts import Value, python_call
from mpctl.planning.plan import Plan
from mpctl.rules.check import listed
from mpctl.spec.training import TrainingSpec

DECAY_TYPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
NORMS_AND_BIASES, ALL = r"(norm\.weight|bias)$", ".*"


def rate_refusals(training: TrainingSpec) -> Iterator[Issue]:
    """The schedules of the learning rate that torchtitan does not have."""
    t, end = training, training.lr_decay_steps
    if t.lr_schedule == "wsd" and t.lr_wsd_decay_style not in DECAY_TYPES:
        message = f"torchtitan decays {listed([*DECAY_TYPES])}"
        yield refused("lr_wsd_decay_style", t.lr_wsd_decay_style, message, "use minus_sqrt")
    if end is not None and end < t.steps:
        message = f"torchtitan has no rate for the steps from there to {t.steps}"
        yield refused("lr_decay_steps", end, message, f"use {t.steps} or more, or fewer steps")


def leaves_norms(plan: Plan) -> bool:
    """Whether norms have a group of their own. Each group needs a parameter on each stage, and a
    first stage without layers has the word table alone."""
    start, stop = plan.stages[0][0] if plan.stages else (0, 1)
    return plan.job.training.weight_decay == 0 or stop > start


def optimizer_lines(plan: Plan) -> Iterator[str]:
    """The body of a function that sets optimizer and scheduler of `config`."""
    t = plan.job.training
    rates = f'"lr": {t.learning_rate}, "betas": ({t.beta1}, {t.beta2}), "eps": {t.epsilon}'
    groups = {NORMS_AND_BIASES: 0.0} if t.weight_decay and leaves_norms(plan) else {}
    yield f"    adamw = {{{rates}}}"
    yield "    config.optimizer = OptimizersContainer.Config(param_groups=["
    for pattern, decay in {**groups, ALL: t.weight_decay}.items():
        yield f'        ParamGroupConfig(pattern=r"{pattern}", optimizer_name="AdamW",'
        yield f'                         optimizer_kwargs={{**adamw, "weight_decay": {decay}}}),'
    yield "    ])"
    rate = python_call("LRSchedulersContainer.Config", dict(_rates(t)), "    ")
    yield f"    config.lr_scheduler = {rate}"


def _rates(training: TrainingSpec) -> Iterator[tuple[str, Value]]:
    t = training
    end = max(t.lr_decay_steps or t.steps, t.warmup_steps)
    yield "warmup_steps", t.warmup_steps
    yield "total_steps", end
    if t.lr_schedule == "constant":
        yield "decay_ratio", 0.0
        return
    if t.lr_schedule == "wsd":
        yield "decay_ratio", (t.lr_wsd_decay_steps or 0) / end
    style = t.lr_wsd_decay_style if t.lr_schedule == "wsd" else t.lr_schedule
    yield "decay_type", DECAY_TYPES[style]
    yield "min_lr_factor", float(f"{t.lowest_rate / t.learning_rate:.12g}")
