"""Rules about what is not trained: every pattern names something, and something is left to train.

Names are global and the same for every layout, so the table of one rank answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpctl.families import get_table
from mpctl.rules.check import Check
from mpctl.spec.job import JobSpec
from mpctl.spec.model import ModelSpec

WHERE = "training.freeze"


def freeze_rules(job: JobSpec) -> Iterator[Check]:
    """Every pattern of training.freeze matches a parameter, and not all parameters are frozen."""
    patterns = job.training.freeze
    if job.model is None or not patterns:
        return
    from mpctl.operators.grad_flow import frozen_by

    sizes = {weight.name: weight.numel for weight in get_table(job.model, tp=1).weights()}
    for pattern in patterns:
        if not any(map(frozen_by([pattern]), sizes)):
            yield _matches_nothing(pattern, job.model, list(sizes))
    is_frozen = frozen_by(patterns)
    frozen = [name for name in sizes if is_frozen(name)]
    count = f"{len(frozen)} of {len(sizes)} parameters"
    if len(frozen) == len(sizes):
        yield Check("freeze-leaves-some", "error", WHERE,
                    f"{' with '.join(map(repr, patterns))} freezes {count}, so nothing is trained",
                    "leave out a pattern, or narrow one: layers.[0-5].* is 6 layers")  # fmt: skip
    elif frozen:
        share = sum(sizes[name] for name in frozen) / sum(sizes.values())
        message = f"{count} are frozen, {share:.1%} of the model's elements"
        yield Check("freeze-leaves-some", "ok", WHERE, message)


def _matches_nothing(pattern: str, model: ModelSpec, names: list[str]) -> Check:
    """The nearest names are looked for without the pattern's outer wildcards, in layer 0."""
    from difflib import get_close_matches  # only where something is wrong

    of_one = [name for name in names if re.search(r"\.[1-9]\d*\.", name) is None]
    near = get_close_matches(pattern.strip("*.") or "*", of_one, n=3, cutoff=0.0)
    last = max(model.layers, model.decoder_layers or 0) - 1
    return Check("freeze-matches", "error", WHERE,
                 f"{pattern!r} matches none of {len(names)} parameters, with layers 0 to {last}",
                 f"a pattern must match a whole name, such as {', '.join(near)}")  # fmt: skip
