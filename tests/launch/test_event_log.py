"""What the launcher tells stands in RUN/logs/launcher.log, a line each."""

from __future__ import annotations

from pathlib import Path

from mpctl.launch.event_log import EventLog


def test_a_message_is_a_line_with_its_time(tmp_path: Path) -> None:
    told: list[str] = []
    log = EventLog(tmp_path / "logs" / "launcher.log", told.append, clock=lambda: 0.0)
    log.event("first\nsecond")
    log.write("third")
    assert log.path.read_text().splitlines() == [
        "1970-01-01T00:00:00Z first second", "1970-01-01T00:00:00Z third",
    ]  # fmt: skip
    assert told == ["first\nsecond"]


def test_a_file_that_cannot_be_written_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    told: list[str] = []
    EventLog(tmp_path / "logs" / "launcher.log", told.append).event("told")
    assert told == ["told"]
