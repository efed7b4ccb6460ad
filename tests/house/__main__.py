"""`python -m tests.house [FOLDER]`: figures of the code in FOLDER/mpctl, by default this one."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

from tests.house import measures
from tests.house.source import Source, find_cycle


def figures(source: Source) -> dict[str, str]:
    """What is measured, by name, in the order in which it is printed."""
    lengths = [lines for lines, _ in measures.function_lengths(source)]
    files = sorted(module.text.count("\n") for module in source.modules.values())
    constructors = measures.parameter_counts(source)[::-1][:6]
    rooms, wings = source.arrows(lambda m: m.room), source.arrows(lambda m: m.wing)
    cycle = find_cycle(rooms)
    largest = ", ".join(f"{name.rsplit('.', 1)[1]} {n}" for n, name in constructors)
    typed = measures.occurrences(source, r"\(TypedDict")
    return {
        "files": f"{len(files)}, {sum(files)} lines, at most {files[-1]}",
        "small, with one importer": str(len(measures.lone_shards(source))),
        "wings": f"{len(wings)}, {sum(map(len, wings.values()))} arrows",
        "rooms": f"{len(rooms)}, {sum(map(len, rooms.values()))} arrows",
        "cycle between rooms": " -> ".join(cycle) or "none",
        "class names defined twice": str(len(measures.repeated_classes(source))),
        "functions": f"{len(lengths)}, lines: median {median(lengths):.0f}, "
        f"p95 {lengths[int(0.95 * len(lengths))]}, max {lengths[-1]}",
        "largest constructors": largest,
        "TypedDicts": str(typed),
        "dict[str, Any]": str(measures.occurrences(source, r"dict\[str, Any\]")),
        "fmt: skip": str(measures.occurrences(source, r"# fmt: skip")),
        "assert ... is not None": str(measures.occurrences(source, r"assert [^\n]* is not None")),
        "uses of mock": str(sum(len(measures.patches(m)) for m in source.modules.values())),
    }


def main(arguments: list[str]) -> None:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[2]
    source = Source(root / "mpctl")
    for name, figure in figures(source).items():
        print(f"{name:32}{figure}")


if __name__ == "__main__":
    main(sys.argv[1:])
