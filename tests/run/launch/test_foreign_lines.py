"""A poll's work on what programs print is bounded by bytes and finds, not by what is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mpctl.records.rundir.directory import RunDir
from mpctl.records.rundir.rank_files import StepRecord
from mpctl.run.launch.foreign_lines import PIECE_BYTES, ForeignLines, read_in_turn
from mpctl.run.launch.program_records import (
    BAR_LINES,
    END_BYTES,
    FINISH_SECONDS,
    POLL_BYTES,
    POLL_REPORTS,
    PrintedSteps,
    ProgramRecords,
)
from tests.run.launch.test_program_checks import planned

Grown = Callable[[bytes], None]


def followed(path: Path, text: bytes = b"") -> tuple[ForeignLines[bytes], Grown]:
    """A file that is followed from before this text on, and what appends more."""

    def grow(more: bytes) -> None:
        with path.open("ab") as stream:
            stream.write(more)

    path.touch()
    lines: ForeignLines[bytes] = ForeignLines(path, lambda line: line)
    grow(text)
    return lines, grow


def read(*files: ForeignLines[bytes], most: int = 1 << 30) -> list[bytes]:
    found: list[bytes] = []
    read_in_turn(files, found.append, most_bytes=most, most_finds=1 << 30, seconds=60.0)
    return found


def test_a_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    lines, grow = followed(tmp_path / "log", b"one\ntw")
    assert read(lines) == [b"one"]
    grow(b"o\n\n 10%\r 20%\r\nthr")
    assert read(lines) == [b"two", b" 10%", b" 20%"]
    (tmp_path / "log").write_bytes(b"anew\n")  # cut, and shorter than before
    assert read(lines) == [b"anew"]
    (tmp_path / "log").unlink()
    assert read(lines) == []


def test_of_a_long_line_the_beginning_counts(tmp_path: Path) -> None:
    """In pieces: a line that never ends takes the memory of one."""
    lines, grow = followed(tmp_path / "log", b"head" + b"x" * 10 * PIECE_BYTES)
    (head,) = read(lines)
    assert head.startswith(b"head") and len(head) == PIECE_BYTES
    assert lines.offset == 4 + 10 * PIECE_BYTES
    grow(b"x" * 100)
    assert read(lines) == []
    grow(b"end\nnext\n")
    assert read(lines) == [b"next"]


@pytest.mark.parametrize("length", [PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1])
def test_lines_that_end_where_a_piece_does(tmp_path: Path, length: int) -> None:
    lines, _ = followed(tmp_path / "log", b"x" * length + b"\n" + b"y" * length + b"\nz\n")
    assert [found[:1] for found in read(lines)] == [b"x", b"y", b"z"]


def test_a_poll_is_bounded_by_bytes_and_takes_files_in_turn(tmp_path: Path) -> None:
    files = [followed(tmp_path / name, b"x" * 99 + b"\n")[0] for name in "ab"]
    for file in files:
        with file.path.open("ab") as stream:
            stream.truncate(10**9)  # a sparse file: a line of a gigabyte that does not end
    read(*files, most=10 * PIECE_BYTES)
    offsets = [file.offset for file in files]
    assert sum(offsets) <= 11 * PIECE_BYTES and max(offsets) - min(offsets) <= PIECE_BYTES


@pytest.mark.parametrize(("finds", "seconds"), [(5, 60.0), (10**9, 0.0)])
def test_a_poll_ends_after_finds_or_seconds(tmp_path: Path, finds: int, seconds: float) -> None:
    """But each file gets one piece, however little time there is."""
    files = [followed(tmp_path / name, b"line\n" * 10**5)[0] for name in "abc"]
    found: list[bytes] = []
    bounds = {"most_bytes": 10**9, "most_finds": finds, "seconds": seconds}
    assert read_in_turn(files, found.append, **bounds)  # type: ignore[arg-type]
    assert all(0 < file.offset <= PIECE_BYTES for file in files)


def test_what_says_nothing_is_not_parsed(tmp_path: Path) -> None:
    parsed: list[bytes] = []
    steps = PrintedSteps(2)
    lines = ForeignLines(tmp_path / "log", parsed.append, steps.may_say)
    text = b"building\n" * 1000 + b"loss 2.0\n" * 1000 + b"elapsed time per iteration (ms): 2\n"
    (tmp_path / "log").write_bytes(text + b"step: 3 loss: 2.5 tps: 1,000\n")
    read_in_turn([lines], lambda _: None, most_bytes=10**9, most_finds=10**9, seconds=60.0)
    assert parsed == [b"step: 3 loss: 2.5 tps: 1,000"]


class Timer:
    """A clock that goes on by a second whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def records_of(run: RunDir) -> ProgramRecords:
    run.log(0).parent.mkdir(parents=True, exist_ok=True)
    run.begin_program()
    return ProgramRecords(run, planned(["python", "-m", "this"]).job, timer=Timer())


LINE = b'{"step": %d, "loss": 2.5}\n'


def test_a_flood_of_reports_is_recorded_by_and_by(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    records, seen = records_of(run), []
    run.heartbeat(0).write_bytes(b"".join(LINE % n for n in range(1, 50_001)))
    assert records.deliver(seen.append)
    assert 0 < len(seen) <= POLL_REPORTS + PIECE_BYTES // len(LINE)


def test_the_end_is_not_held_up_by_what_was_printed(tmp_path: Path) -> None:
    """The last lines are read, and what is left out is said."""
    run = RunDir(tmp_path)
    records = records_of(run)
    seen: list[StepRecord] = []
    line = b" iteration %8d/ 999 | elapsed time per iteration (ms): 2.0 | lm loss: 2.5E+00 |\n"
    with run.log(0).open("wb") as stream:
        stream.write(line % 1)
        stream.truncate(40 * POLL_BYTES)
        stream.seek(0, 2)
        stream.write(b"\n" + line % 7)
    left_out = records.finish(seen.append)
    assert [record["step"] for record in seen] == [1, 7]
    assert f"was not searched for steps within {FINISH_SECONDS:g} s after its end" in left_out
    assert records.logs[0].offset == run.log(0).stat().st_size > 10 * END_BYTES
    assert records_of(RunDir(tmp_path / "quiet")).finish(seen.append) == ""


BAR = "\r{n:3d}%|##   | {n}/40 [00:01<00:09, {rate}]"
VERSION_5 = "{{'loss': '{loss}', 'grad_norm': '1.37', 'learning_rate': '4.5e-05', 'epoch': '0.15'}}"
VERSION_4 = "{{'loss': {loss}, 'grad_norm': 1.37, 'learning_rate': 4.5e-05, 'epoch': 0.15}}"


@pytest.mark.parametrize("form", [VERSION_5, VERSION_4])
def test_steps_of_transformers_trainer(tmp_path: Path, form: str) -> None:
    """A bar is drawn at most ten times a second, but again below the figures of a step."""
    run, seen = RunDir(tmp_path), []
    records = records_of(run)
    with run.log(0).open("w") as log:
        log.write(BAR.format(n=0, rate="?it/s"))
        for step, loss in ((1, 1.5), (5, 1.25), (10, 1.0)):
            rate = "?it/s" if step == 1 else "27.52it/s"
            log.write(BAR.format(n=max(0, step - 2), rate=rate) + "\r        \r")
            log.write(form.format(loss=loss) + "\n\n" + BAR.format(n=step, rate=rate))
        log.write("\r  0%|     | 0/1 [00:00<?, ?it/s]\n{'eval_loss': '0.75', 'epoch': '0.6'}\n")
        log.write("{'train_runtime': '9.0', 'train_loss': '1.2', 'epoch': '1'}\n")
    records.finish(seen.append)
    assert [(r["step"], r["loss"]) for r in seen] == [(1, 1.5), (5, 1.25), (10, 1.0)]
    assert seen[0]["grad_norm"] == 1.37 and seen[0]["learning_rate"] == 4.5e-5


def test_figures_without_a_bar_do_not_wait_for_another(tmp_path: Path) -> None:
    steps = PrintedSteps(2)
    assert steps.parse(VERSION_5.format(loss=1.0).encode()) is None
    assert all(steps.parse(b"a/b") is None for _ in range(BAR_LINES))
    assert steps.parse(b" 12%|#  | 12/100 [01:20<02:20,  2.00it/s]") is None
