"""The cases of every rule, by the subject of the rule."""

from tests.rules.cases import family, layout, model, training

CASES = (*layout.CASES, *model.CASES, *family.CASES, *training.CASES)
