"""The cases of every rule, by the subject of the rule."""

from tests.plan.rules.cases import (
    adapters,
    chat,
    context,
    experts,
    family,
    layout,
    loss,
    model,
    optimizers,
    runtime,
    tensor_mode,
    training,
)

CASES = (
    *layout.CASES,
    *model.CASES,
    *family.CASES,
    *training.CASES,
    *optimizers.CASES,
    *tensor_mode.CASES,
    *runtime.CASES,
    *experts.CASES,
    *adapters.CASES,
    *chat.CASES,
    *context.CASES,
    *loss.CASES,
)
