"""Estimates of many jobs, one JSON object a line in and one out: `mpctl plan --batch`.

A line is a job (the keys of a job file, and `id`), or a row that holds one under `job`. Nothing on
a line can end the others: what is wrong with it becomes its issues, and its figures are null.

lines.py       a stream as lines of bounded length, and a line as JSON
rows.py        a job from what a line holds, and how what others ran is taken
answers.py     the answers, one at a time
"""
