"""Many issues of one rule are shown as a few and a count."""

from __future__ import annotations

from mpctl.core.errors import MOST_OF_A_RULE, InputError, Issue


def test_issues_of_one_rule_are_capped_and_the_rest_is_counted() -> None:
    many = (Issue("weights-missing", "model.safetensors", f"tensor {n}") for n in range(1_000))
    issues = InputError([Issue("first", "a", "one"), *many, Issue("last", "b", "one")]).issues
    assert [issue.rule for issue in issues].count("weights-missing") == MOST_OF_A_RULE
    assert (issues[0].rule, issues[-1].rule) == ("first", "last")
    words = f"tensor {MOST_OF_A_RULE - 1} (and {1_000 - MOST_OF_A_RULE} more like this)"
    assert issues[-2].message == words


def test_as_many_as_the_cap_are_shown_as_they_are() -> None:
    issues = [Issue("rule", "a", str(n)) for n in range(MOST_OF_A_RULE)]
    assert InputError(issues).issues == tuple(issues)
