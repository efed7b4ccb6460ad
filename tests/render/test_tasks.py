"""Progress of several stages where there is no terminal: lines on stderr."""

from mpctl.render.progress import TaskBar


def test_a_note_is_a_line_where_lines_are_wanted(capsys):
    with TaskBar(lines=True) as bar:
        bar.update("train", 0, 10)
        bar.note("strong tp2, round 1 of 3")
        bar.update("train", 10, 10)
    assert capsys.readouterr().err.splitlines() == ["train", "strong tp2, round 1 of 3"]


def test_a_note_stands_beside_the_stage_that_goes_on():
    bar = TaskBar()
    bar.update("read", 4, 4)
    bar.update("train", 3, 10)
    bar.note("strong tp2")
    assert [task.fields["parts"] for task in bar.bar.tasks] == [[], ["strong tp2"]]
    bar.stop()


def test_nothing_is_said_without_lines(capsys):
    with TaskBar() as bar:
        bar.update("train", 0, 10)
        bar.note("strong tp2")
    assert capsys.readouterr().err == ""
