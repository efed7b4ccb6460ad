"""`python -m tests.house [FOLDER]`: the figures of the code in FOLDER/mpctl (this one's otherwise).

`python -m tests.house --lower` writes debt.json anew where less is owed, and prints what remains.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from tests.house import measures
from tests.house.debt import DEBTS, count_debts, lower
from tests.house.source import Source, find_cycle


def figures(source: Source) -> dict[str, str]:
    """What is measured, by name, in the order in which it is printed."""
    lengths = [lines for lines, _ in measures.function_lengths(source)]
    files = sorted(module.text.count("\n") for module in source.modules.values())
    constructors = measures.parameter_counts(source)[::-1][:6]
    public = sum(1 for module in source.modules.values() for _ in measures.public(module))
    cycle = find_cycle(source.arrows)
    largest = ", ".join(f"{name.rsplit('.', 1)[1]} {n}" for n, name in constructors)
    owed = {kind: sum(map(len, count_debts(source, kind).values())) for kind in DEBTS}
    return {
        "files": f"{len(files)}, at most {files[-1]} lines",
        "rooms": f"{len(source.arrows)}, {sum(map(len, source.arrows.values()))} arrows",
        "cycle between rooms": " -> ".join(cycle) or "none",
        "class names defined twice": str(len(measures.repeated_classes(source))),
        "functions": f"{len(lengths)}, lines: median {median(lengths):.0f}, "
        f"p95 {lengths[int(0.95 * len(lengths))]}, max {lengths[-1]}",
        "largest constructors": largest,
        "dict[str, Any]": str(measures.occurrences(source, r"dict\[str, Any\]")),
        "fmt: skip": str(measures.occurrences(source, r"# fmt: skip")),
        "assert ... is not None": str(measures.occurrences(source, r"assert [^\n]* is not None")),
        "uses of mock": str(sum(len(measures.patches(m)) for m in source.modules.values())),
        "public, without a docstring": f"{owed['undocumented']} of {public}",
        "docstrings without a subject": str(owed["riddles"]),
        "dict[str, Any] between rooms": str(owed["loose_signatures"]),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    folders = [argument for argument in arguments if not argument.startswith("--")]
    root = Path(folders[0]) if folders else Path(__file__).parents[2]
    source = Source(root / "mpctl")
    if "--lower" in arguments:
        lower(source)
    for name, figure in figures(source).items():
        print(f"{name:32}{figure}")
    if "--lower" in arguments:
        for kind in DEBTS:
            for owed in count_debts(source, kind).values():
                print(*(f"{kind}: {place}" for place in owed), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
